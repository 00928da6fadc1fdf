"""MindSpore's quick start: a network with one hidden layer, in the job's parallel mode.

It needs mindspore and numpy: ``pip install mindspore==2.10.0 'numpy<2'``.
"""

import argparse
import os

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset

IN, HIDDEN, OUT = 32, 16, 16
BATCH, STEPS = 2, 4
# Rows of the input in 2 pieces and its columns in 4; the weights' rows in 4: for 8 devices.
STRATEGY = ((2, 4), (4, 1))
# The seed of the document's data. The document has none for the weights, so its losses are similar.
DATA_SEED, WEIGHTS_SEED = 1, 2823
EXPECTED = "losses to expect on every rank: 0.385 in epoch 1, 0.372 in epoch 3, 0.164 at the end"


def apply_parallel_mode():
    """Apply the job file's ``mindspore`` section; return this rank and the number of ranks."""
    mode = os.environ.get("CLOUDJOB_PARALLEL_MODE", "stand_alone")
    target = os.environ.get("CLOUDJOB_DEVICE_TARGET", "CPU")
    ms.set_context(mode=ms.GRAPH_MODE, device_target=target)
    if mode == "stand_alone":
        return 0, 1
    init()
    search = os.environ.get("CLOUDJOB_SEARCH_MODE")
    more = {"search_mode": search} if search else {}
    ms.set_auto_parallel_context(parallel_mode=mode, gradients_mean=True, **more)
    return get_rank(), get_group_size()


class Net(nn.Cell):
    """Two matrices with a ReLU between them."""

    def __init__(self, rng):
        super().__init__()
        # Drawn by numpy, as MindSpore's generator starts with another state on each rank.
        self.into_hidden = ms.Parameter(small(rng, IN, HIDDEN), name="into_hidden")
        self.into_out = ms.Parameter(small(rng, HIDDEN, OUT), name="into_out")
        self.first = ops.MatMul()
        if ms.get_auto_parallel_context("parallel_mode") in ("semi_auto_parallel", "auto_parallel"):
            self.first.shard(STRATEGY)
        self.relu = ops.ReLU()
        self.second = ops.MatMul()

    def construct(self, inputs):
        """Return the outputs of the network for ``inputs``."""
        hidden = self.relu(self.first(inputs, self.into_hidden))
        return self.second(hidden, self.into_out)


def small(rng, rows, columns):
    """Return small random weights."""
    return ms.Tensor(rng.normal(scale=0.01, size=(rows, columns)).astype(np.float32))


class LossPrinter(ms.Callback):
    """Callback that prints the loss of every step."""

    def __init__(self, rank, ranks):
        super().__init__()
        self.name = f"rank {rank} of {ranks}"

    def on_train_step_end(self, run_context):
        """Print the loss."""
        run = run_context.original_args()
        step = (run.cur_step_num - 1) % run.batch_num + 1
        loss = float(run.net_outputs.asnumpy())
        print(f"{self.name} epoch {run.cur_epoch_num} step {step} loss {loss:.6f}", flush=True)


def saving(rank):
    """Return the callbacks that save this rank's checkpoints; also save its graphs.

    They are saved in the folder of ``--output SAVED=``, if the job has it.
    """
    folder = os.environ.get("SAVED")
    if not folder:
        return []
    os.environ.update(
        MS_DEV_SAVE_GRAPHS="1", MS_DEV_SAVE_GRAPHS_PATH=f"{folder}/rank_{rank}/graphs"
    )
    config = ms.CheckpointConfig(save_checkpoint_steps=STEPS, keep_checkpoint_max=2)
    return [ms.ModelCheckpoint("quickstart", f"{folder}/rank_{rank}/checkpoints", config)]


def main():
    """Train for some epochs, by default five."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_known_args()[0].epochs
    rank, ranks = apply_parallel_mode()
    if rank == 0:
        print(EXPECTED, flush=True)
    rng = np.random.RandomState(DATA_SEED)
    batch = [rng.rand(BATCH, size).astype(np.float32) for size in (IN, OUT)]
    data = GeneratorDataset([tuple(batch)] * STEPS, ["inputs", "labels"], shuffle=False)
    net = Net(np.random.RandomState(WEIGHTS_SEED))
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.2, momentum=0.1)
    model = ms.Model(net, loss_fn=nn.MSELoss(), optimizer=optimizer)
    callbacks = [LossPrinter(rank, ranks), *saving(rank)]
    model.train(epochs, data, callbacks=callbacks, dataset_sink_mode=False)


if __name__ == "__main__":
    main()
