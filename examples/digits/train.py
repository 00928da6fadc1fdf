"""Train a small network on handwritten digits, with each batch divided among MPI ranks.

With any number of ranks it does the same steps as with one, within rounding: every batch is the
same, each rank takes the gradient of its share, and the ranks add their gradients up.
It needs numpy, mpi4py and scikit-learn: ``pip install 'cloudjob[examples]'``.
"""

import argparse
import hashlib
import os
from pathlib import Path

try:
    import numpy as np
    from mpi4py import MPI
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(f"{error}: run pip install 'cloudjob[examples]'") from error

PIXELS, CLASSES = 64, 10


def layers(weights, hidden):
    """Return the layers as views of one flat array, so one message carries all of them."""
    shapes = [(PIXELS, hidden), (hidden,), (hidden, CLASSES), (CLASSES,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    pieces = np.split(weights, ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def initial_weights(hidden, rng):
    """Draw small random weights; the biases start at zero."""
    weights = np.zeros(PIXELS * hidden + hidden + hidden * CLASSES + CLASSES)
    into_hidden, _, into_classes, _ = layers(weights, hidden)
    into_hidden[:] = rng.normal(scale=PIXELS**-0.5, size=into_hidden.shape)
    into_classes[:] = rng.normal(scale=hidden**-0.5, size=into_classes.shape)
    return weights


def forward(weights, hidden, images):
    """Return the hidden layer and the probability of each class."""
    w1, b1, w2, b2 = layers(weights, hidden)
    activity = np.tanh(images @ w1 + b1)
    scores = activity @ w2 + b2
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return activity, scores / scores.sum(axis=1, keepdims=True)


def loss_and_gradient(weights, hidden, images, labels):
    """Return the loss and its gradient, summed over the images so that ranks can add them."""
    activity, chances = forward(weights, hidden, images)
    rows = np.arange(len(labels))
    loss = -np.log(chances[rows, labels]).sum()
    chances[rows, labels] -= 1
    gradient = np.empty_like(weights)
    w1, b1, w2, b2 = layers(gradient, hidden)
    into_classes = layers(weights, hidden)[2]
    error = chances @ into_classes.T * (1 - activity**2)
    w1[:], b1[:] = images.T @ error, error.sum(axis=0)
    w2[:], b2[:] = activity.T @ chances, chances.sum(axis=0)
    return loss, gradient


def arguments():
    """Parse the options of this program and ignore others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_known_args()[0]


def main():
    """Train, compare the ranks' weights, and report."""
    args = arguments()
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(args.seed)  # the same on every rank, and so is every batch
    images, labels = load_digits(return_X_y=True)
    shuffled = rng.permutation(len(images))
    images, labels = images[shuffled] / 16, labels[shuffled]
    held_out, training = np.split(np.arange(len(images)), [len(images) // 5])
    weights = initial_weights(args.hidden, rng)

    for epoch in range(1, args.epochs + 1):
        total = 0.0
        order = rng.permutation(training)
        for start in range(0, len(order), args.batch_size):
            batch = order[start : start + args.batch_size]
            shard = np.array_split(batch, comm.size)[comm.rank]
            loss, gradient = loss_and_gradient(weights, args.hidden, images[shard], labels[shard])
            # Sums, not means: the shares of a batch may differ by one image.
            sums = np.append(gradient, loss)
            comm.Allreduce(MPI.IN_PLACE, sums)
            weights -= args.lr / len(batch) * sums[:-1]
            total += sums[-1]
        if comm.rank == 0:
            print(f"epoch {epoch:3d}  loss {total / len(order):.6f}", flush=True)

    digests = comm.allgather(hashlib.sha256(weights.tobytes()).hexdigest())
    if len(set(digests)) > 1:
        raise SystemExit(f"rank {comm.rank}: the weights differ: {digests}")
    if comm.rank == 0:
        guesses = forward(weights, args.hidden, images[held_out])[1].argmax(axis=1)
        print(f"held-out accuracy {np.mean(guesses == labels[held_out]):.4f}")
        print(f"weights norm {np.linalg.norm(weights):.12f}")
        suffix = f" identical on all {comm.size} ranks" if comm.size > 1 else ""
        print(f"weights sha256 {digests[0]}{suffix}")
        # An output named "model" is a folder in the variable of that name.
        folder = os.environ.get("model")  # noqa: SIM112
        if folder:
            np.savez(Path(folder, "digits.npz"), weights=weights, hidden=args.hidden)


if __name__ == "__main__":
    main()
