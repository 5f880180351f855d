"""Training by `fully_shard` and `torch.distributed.checkpoint` alone, as torch's tutorial has it: `fsdp2_dcp.py FOLDER`.

It has four steps, and saves model and AdamW after the first two; with `--resume=2` it goes on from there, and saves one
step later; with `--resume=3` it has the last step. With `--bf16`, `--full` for full states in one file, and `--compile`
to have each block compiled.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

WIDTH = 10


class Block(torch.nn.Module):
    """A norm, two layers, and a way around them; the rows are uneven on two and on three ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 25), torch.nn.Linear(25, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class App(Stateful):
    """Model and optimizer as one."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def save(app: App, path: Path) -> None:
    if "--full" not in sys.argv:
        dcp.save({"app": app}, checkpoint_id=path)
        return
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(app.model, app.optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)


def load(app: App, path: Path) -> None:
    if "--full" not in sys.argv:
        dcp.load({"app": app}, checkpoint_id=path)
        return
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = torch.load(path) if dist.get_rank() == 0 else ({}, {})
    # In one call, ranks that have nothing would load the optimizer alone.
    set_model_state_dict(app.model, model, options=options)
    set_optimizer_state_dict(app.model, app.optimizer, optimizer, options=options)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(2)]
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, WIDTH), *blocks, torch.nn.Linear(WIDTH, 1))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "--bf16" in sys.argv else None
    options = {} if policy is None else {"mp_policy": policy}
    for block in blocks:
        if "--compile" in sys.argv:
            block.compile(backend="aot_eager")
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    app = App(model, optimizer)
    if first:
        load(app, folder / f"saved-{first}")
    for step in range(first, 4):
        if step == max(2, first + 1):
            save(app, folder / f"saved-{step}")
        rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))[rank::ranks]
        loss = model(rows).float().square().mean()
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()
        print(f"\nloss {rank} {step} {loss.item()!r} {total!r}\n", end="", flush=True)
    assert isinstance(model, FSDPModule)
    print(f"\nclass {FSDPModule.__module__}\n", end="", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
