"""How long a training step takes: ours, torch FSDP1, torch FSDP2, and one process without communication.

All contenders train the main job's model on the same two ranks, one step of each in turn, so that a busy machine is
busy for all of them. Medians, and ratios to the plain model, whose ranks do not talk.

    python tools/compare_steps.py [--size small] [--steps 30] [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_runtime import units_in

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpt.model import GPT, Block
from gpt.shape import PRESETS, VOCABULARY

ROWS = 2


def plain(model: nn.Module) -> nn.Module:
    """The model as it is: no sharding, no averaging, the floor."""
    return model


def ours(**arguments: object) -> Callable[[nn.Module], nn.Module]:
    """flatparam's wrapper, a unit for each block."""

    def build(model: nn.Module) -> nn.Module:
        from flatparam import FullyShardedDataParallel
        from flatparam.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)  # type: ignore[arg-type]

    return build


def fsdp1(**arguments: object) -> Callable[[nn.Module], nn.Module]:
    """torch's first FSDP, a unit for each block."""

    def build(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Block})
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **arguments)  # type: ignore[arg-type]

    return build


def fsdp2(model: nn.Module) -> nn.Module:
    """torch's second FSDP, a unit for each block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain, no communication": plain,
    "flatparam": ours(forward_prefetch=True),
    "flatparam, no fingerprint": ours(forward_prefetch=True),
    "flatparam, original parameters": ours(forward_prefetch=True, use_orig_params=True),
    "torch FSDP1": fsdp1(),
    "torch FSDP1, forward_prefetch": fsdp1(forward_prefetch=True),
    "torch FSDP1, original parameters": fsdp1(use_orig_params=True),
    "torch FSDP2": fsdp2,
}


def measure(group: Collectives, size: str, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of each contender on this rank, after two steps that do not count."""
    shape = PRESETS[size].shape
    runs = {}
    for name, build in CONTENDERS.items():
        torch.manual_seed(0)
        model = build(GPT(shape))
        runs[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(group.rank)
    tokens = torch.randint(VOCABULARY, (ROWS, shape.context + 1), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(steps + 2):
        for name, (model, optimizer) in runs.items():
            if step == 1 and "no fingerprint" in name:
                for unit in units_in(model):
                    unit.fingerprint = None  # what ranks do is not noted any more, to see what that costs
            group.barrier()
            start = time.perf_counter()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            group.barrier()
            if step >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure and print a table, or JSON with ``--json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", choices=sorted(PRESETS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds = run_processes(
        options.ranks, measure, options.size, options.steps, timeout=1800, pg_timeout=120
    )[0]
    floor = seconds["plain, no communication"]
    rows = {
        name: (
            statistics.median(times),
            statistics.quantiles([t / f for t, f in zip(times, floor, strict=True)], n=4),
        )
        for name, times in seconds.items()
    }
    if options.json:
        json.dump(rows, sys.stdout, indent=2)
        return
    print(f"{options.size} GPT, {options.ranks} ranks, {options.steps} steps of each in turn")
    print(f"{'':34}{'median ms':>10}{'x plain':>9}   quartiles")
    for name, (median, (low, middle, high)) in rows.items():
        print(f"{name:34}{1000 * median:10.1f}{middle:9.2f}   {low:.2f} .. {high:.2f}")


if __name__ == "__main__":
    main()
