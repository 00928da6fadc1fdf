"""Train a small network on handwritten digits with Horovod, while nodes come and go.

It needs torch, horovod (built with that torch and with Gloo) and scikit-learn.
"""

import argparse
import hashlib
import os
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn


def arguments():
    """Parse the options of this program and ignore others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.3)
    return parser.parse_known_args()[0]


def batches(images, labels, args, epoch):
    """Yield the batches of an epoch, the same on every rank whatever their number."""
    generator = torch.Generator().manual_seed(epoch)
    for batch in torch.randperm(len(images), generator=generator).split(args.batch_size):
        yield images[batch], labels[batch]


# Called again on all ranks, with the last committed state, whenever nodes have joined or left.
@hvd.elastic.run
def train(state, images, labels, args):
    """Train the remaining epochs."""
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks go on with epoch {state.epoch}", flush=True)
    while state.epoch <= args.epochs:
        total = 0.0
        for pixels, classes in batches(images, labels, args, state.epoch):
            shard = torch.arange(len(pixels)).tensor_split(hvd.size())[hvd.rank()]
            state.optimizer.zero_grad()
            # Shares differ in size by one at most; the contributions add up to the batch's mean.
            loss = nn.functional.cross_entropy(
                state.model(pixels[shard]), classes[shard], reduction="sum"
            )
            (loss * hvd.size() / len(pixels)).backward()
            state.optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total), op=hvd.Sum, name="loss").item() / len(images)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch:3d}  loss {mean:.6f}", flush=True)
        state.epoch += 1
        # The loss of a node loses the steps since the last commit; each commit costs a copy.
        state.commit()


def main():
    """Train, compare the weights of all ranks, and report."""
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Rank 0 broadcasts its state; afterwards each rank keeps a copy to restore.
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=1)
    train(state, images, labels, args)

    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()
    if any(other != digest for other in hvd.allgather_object(digest)):
        raise SystemExit(f"rank {hvd.rank()}: the weights differ")
    if hvd.rank() == 0:
        suffix = f" identical on all {hvd.size()} ranks" if hvd.size() > 1 else ""
        print(f"weights sha256 {digest}{suffix}")
        # An output named "model" is a folder in the variable of that name.
        folder = os.environ.get("model")  # noqa: SIM112
        if folder:
            torch.save(model.state_dict(), Path(folder, "digits.pt"))


if __name__ == "__main__":
    main()
