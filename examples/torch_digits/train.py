"""Train a small network on handwritten digits with PyTorch's DistributedDataParallel.

With any number of ranks that divides the batch it does the same steps as with one, within rounding.
It needs torch and scikit-learn.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def arguments():
    """Parse the options of this program and ignore others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    # The convention of ModelArts; torchrun sets variables instead, which PyTorch reads by default.
    parser.add_argument("--init_method")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--world_size", type=int, default=-1)
    return parser.parse_known_args()[0]


def data(seed):
    """Return images and labels for training and for validation, the same on every rank."""
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(pixels / 16, dtype=torch.float32)[order]
    labels = torch.tensor(classes)[order]
    held_out = len(images) // 5
    return (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])


def train(model, optimizer, images, labels, args):
    """Return the mean loss of each epoch, over the batches of all ranks."""
    generator = torch.Generator().manual_seed(args.seed)
    curve = []
    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in torch.randperm(len(images), generator=generator).split(args.batch_size):
            if len(batch) < args.batch_size:
                continue
            shard = batch.tensor_split(dist.get_world_size())[dist.get_rank()]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[shard]), labels[shard])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        dist.all_reduce(total)
        curve.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"epoch {epoch:3d}  loss {curve[-1]:.6f}", flush=True)
    return curve


def main():
    """Train, compare the weights of all ranks, and report."""
    args = arguments()
    group = {"rank": args.rank, "world_size": args.world_size}
    dist.init_process_group("gloo", init_method=args.init_method, **group)
    torch.set_num_threads(1)
    # Each rank starts with its own weights; the wrapper broadcasts those of rank 0.
    torch.manual_seed(args.seed + dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    (images, labels), held_out = data(args.seed)
    curve = train(model, optimizer, images, labels, args)
    weights = b"".join(value.numpy().tobytes() for value in model.module.state_dict().values())
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (curve, hashlib.sha256(weights).hexdigest()))
    if any(other != seen[0] for other in seen):
        raise SystemExit(f"rank {dist.get_rank()}: losses or weights differ: {seen}")
    if dist.get_rank() == 0:
        accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
        print(f"held-out accuracy {accuracy:.4f}")
        ranks = dist.get_world_size()
        suffix = f" identical on all {ranks} ranks" if ranks > 1 else ""
        print(f"losses and weights sha256 {seen[0][1]}{suffix}")
        # An output named "model" is a folder in the variable of that name.
        folder = os.environ.get("model")  # noqa: SIM112
        if folder:
            torch.save(model.module.state_dict(), Path(folder, "digits.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
