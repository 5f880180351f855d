"""Log losses, norms and memory by callbacks: to TensorBoard, to a service like Weights and Biases, or to a file.

    torchrun --standalone --nproc-per-node 2 examples/logs.py

Nothing is sent anywhere: TensorBoard writes files (if it is installed), and `Offline` has the two calls of a service's
client that a training loop needs, `log` and `finish`; put `wandb.init(mode="offline")` in its place.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy


class Logger(Protocol):
    """What a training loop tells."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class Offline:
    """Writes a line of JSON for each call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")

    def finish(self) -> None:
        self.file.close()


class TensorBoard:
    """Writes the files that `tensorboard --logdir runs` shows."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def loggers() -> list[Logger]:
    """Return those of rank 0; the others have none."""
    if dist.get_rank():
        return []
    found: list[Logger] = [Offline(Path("runs/logs.jsonl"))]
    try:
        found.append(TensorBoard(Path("runs/tensorboard")))
    except ModuleNotFoundError:
        print("TensorBoard is not installed: there is runs/logs.jsonl alone")
    return found


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    callbacks = loggers()
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        x = torch.randn(32, 16, generator=generator).to(device)
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)  # over all ranks: every rank calls it, and rank 0 tells
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        told = {"loss": mean.item() / world_size, "norm": norm.item()}
        if device.type != "cpu":
            told["peak bytes"] = torch.accelerator.max_memory_allocated()
        for each in callbacks:
            each.log(told, step)
    for each in callbacks:
        each.finish()
    if rank == 0:
        print(f"loss {told['loss']:.4f} after {step + 1} steps; see runs/")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
