"""Fit a line with MultiWorkerMirroredStrategy to data that is divided among the nodes.

The shares alone lead to other lines: all nodes have the true one only when they learn together.
It needs tensorflow.
"""

import argparse
import os
from pathlib import Path

import tensorflow as tf

TRUE = [1.0, 2.0, 3.0, 4.0]


def arguments():
    """Parse the options of this program and ignore others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.3)
    return parser.parse_known_args()[0]


def share(index, count):
    """Return the inputs of one node, every ``count``-th, and the expected outputs."""
    inputs = tf.one_hot(range(index, len(TRUE), count), len(TRUE))
    return inputs, tf.reduce_sum(inputs * tf.constant(TRUE), 1, keepdims=True)


def main():
    """Train, print each step, and save the weights."""
    args = arguments()
    # It reads the other workers' addresses from TF_CONFIG.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    count, index = strategy.num_replicas_in_sync, strategy.cluster_resolver.task_id or 0
    with strategy.scope():
        weight = tf.Variable(tf.zeros((len(TRUE), 1)))
        optimizer = tf.keras.optimizers.SGD(args.lr)
        optimizer.build([weight])
    inputs, targets = share(index, count)

    def learn():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(inputs, weight) - targets) ** 2) / count
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    @tf.function
    def step():
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(learn), axis=None)

    for number in range(1, args.steps + 1):
        print(
            f"step {number:3d} of worker {index} of {count}  loss {step().numpy():.5f}", flush=True
        )
    found = [round(float(value), 2) for value in weight.numpy()[:, 0]]
    print(f"worker {index} has {found}", flush=True)
    # An output named "model" is a folder in the variable of that name.
    folder = os.environ.get("model")  # noqa: SIM112
    if folder and index == 0:
        Path(folder, "weights.txt").write_text(" ".join(map(str, found)) + "\n")


if __name__ == "__main__":
    main()
