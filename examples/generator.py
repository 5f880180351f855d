"""A generator, in a process of its own, follows the weights while two ranks train them.

    python examples/generator.py generate &
    torchrun --standalone --nproc-per-node 2 examples/generator.py

The trainer publishes after each step; after the first version only what has changed is sent.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel, Mailbox, Publisher, Receiver
from flatparam.wrap import ModuleWrapPolicy

BOX, STEPS = Path("weights"), 5


def make() -> nn.Module:
    """Return the model that both sides have."""
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64))


def generate() -> None:
    """Write a few tokens with each version, until the last has come."""
    model = make().bfloat16()
    receiver = Receiver(model, Mailbox(BOX))
    while receiver.version < STEPS:
        before = receiver.version
        receiver.receive()  # at once, if there is nothing new
        if receiver.version == before:
            time.sleep(0.01)
            continue
        tokens = [0]
        for _ in range(6):
            tokens.append(int(model(torch.tensor(tokens[-1:])).argmax(-1)))
        print(f"version {receiver.version}: {tokens}", flush=True)


def train() -> None:
    """Train the next token to be the one after the last, and publish."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank = dist.get_rank()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        make(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    publisher = Publisher(model, Mailbox(BOX), dtype=torch.bfloat16)
    tokens = torch.arange(64, device=device)
    for _ in range(STEPS):
        for _ in range(10):
            nn.functional.cross_entropy(model(tokens), (tokens + 1) % 64).backward()
            optimizer.step()
            optimizer.zero_grad()
        published = publisher.publish()
        if rank == 0:
            print(f"published version {published.version}: {published.nbytes:,} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    generate() if sys.argv[1:] == ["generate"] else train()
