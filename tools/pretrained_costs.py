"""What it costs to begin with weights in files: each rank its own bytes, or the ways that do not need flatparam's.

    python tools/pretrained_costs.py --numel 64000000 --ranks 2

With `--page` the table goes into docs/guides/pretrained.md (`nox -s run -- pretrained`).

Each way runs in processes of its own, one after the other, with one safetensors file in the page cache. Printed for
each: the bytes that all ranks together read by calls (a mapped file is not read by calls), the highest peak of a rank's
memory above what it had before, and the time until the slowest rank was done; of `--rounds` rounds, the fastest.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import torch
from pages import fill, table
from safetensors.torch import load_file, save_file
from torch import nn

from flatparam import FullyShardedDataParallel, load_pretrained
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

WIDTH: Final = 1024
PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "guides" / "pretrained.md"
NAMES: Final = {
    "load_pretrained": "`load_pretrained`",
    "rank 0 reads and broadcasts": "the first rank reads and broadcasts",
    "every rank reads all": "every rank reads all",
}
"""What the page calls each way."""


def make(layers: int) -> nn.Module:
    """A stack of `layers` linear layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def own_bytes(path: Path, layers: int, rank: int) -> nn.Module:
    """Each rank reads what it keeps."""
    return load_pretrained(lambda: make(layers), path, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def make_room(module: nn.Module) -> None:
    """Give a module memory without values."""
    module.to_empty(device="cpu", recurse=False)


def broadcast(path: Path, layers: int, rank: int) -> nn.Module:
    """The first rank reads everything and sends it: `sync_module_states=True`, and the others on the meta device."""
    with torch.device("meta"):
        model = make(layers)
    if rank == 0:
        model.load_state_dict(load_file(path), assign=True)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sync_module_states=True,
        param_init_fn=make_room,
    )


def everything(path: Path, layers: int, rank: int) -> nn.Module:
    """Every rank reads everything, and keeps its part."""
    with torch.device("meta"):
        model = make(layers)
    model.load_state_dict(load_file(path), assign=True)
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


WAYS: Final[dict[str, Callable[[Path, int, int], nn.Module]]] = {
    "load_pretrained": own_bytes,
    "rank 0 reads and broadcasts": broadcast,
    "every rank reads all": everything,
}


@attrs.frozen
class Cost:
    """What one way costs a rank."""

    read: int
    peak: int
    seconds: float
    total: float
    """The sum of the shards, to see that all ways load the same."""


def of_kernel(file: str, key: str, unit: int) -> int:
    """A number that the kernel tells about this process."""
    found = re.search(rf"{key}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(encoding="utf-8"))
    return int(found[1]) * unit if found else 0


def measured(world: Collectives, way: str, path: Path, layers: int) -> Cost:
    """One rank, once."""
    torch.set_num_threads(1)
    # What is imported late does not count.
    FullyShardedDataParallel(nn.Linear(2, 2))
    world.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    peak = of_kernel("status", "VmHWM", 1024)
    read, start = mapped_or_read(), time.perf_counter()
    model = WAYS[way](path, layers, world.rank)
    world.barrier()
    seconds = time.perf_counter() - start
    cost = (mapped_or_read() - read, of_kernel("status", "VmHWM", 1024) - peak)
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return Cost(*cost, seconds, total)


def mapped_or_read() -> int:
    """The bytes that were read by calls; those that are read through a mapping are counted by its reader."""
    return of_kernel("io", "rchar", 1)


def main() -> None:
    """Measure all ways, and print a table."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--numel", type=int, default=64_000_000)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--page", action="store_true", help="write the table into the guide")
    chosen = arguments.parse_args()
    layers = max(1, chosen.numel // (WIDTH * WIDTH + WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(make(layers).state_dict(), path)
        nbytes = 4 * layers * (WIDTH * WIDTH + WIDTH)
        print(f"{nbytes / 1e6:.0f} MB in one file, {chosen.ranks} ranks, fastest of {chosen.rounds}")
        print(f"{'':28} {'read by calls':>14} {'peak of a rank':>15} {'seconds':>8}")
        totals: set[float] = set()
        rows = []
        for way in WAYS:
            rounds = [run_processes(chosen.ranks, measured, way, path, layers) for _ in range(chosen.rounds)]
            best = min(rounds, key=lambda costs: max(cost.seconds for cost in costs))
            read = sum(cost.read for cost in best) / nbytes
            peak = max(cost.peak for cost in best) / 1e6
            seconds = max(cost.seconds for cost in best)
            print(f"{way:28} {read:12.2f} x {peak:12.0f} MB {seconds:8.2f}", flush=True)
            rows.append([NAMES[way], f"{peak:.0f} MB", f"{seconds:.2f}"])
            totals.add(round(sum(cost.total for cost in best), 6))
        assert len(totals) == 1, "all ways load the same"
    if chosen.page:
        write_page(chosen.ranks, nbytes, chosen.rounds, rows)


def write_page(ranks: int, nbytes: int, rounds: int, rows: list[list[str]]) -> None:
    """Put the table into the guide, in the place of the one that is there."""
    said = (
        f"A file of {nbytes / 1e6:.0f} MB in the page cache, {ranks} ranks on one host; a rank's part of the model is "
        f"{nbytes / ranks / 1e6:.0f} MB; the fastest of {rounds} rounds:"
    )
    made = table([["", "peak of a rank, above before", "seconds"], *rows], ["---"])
    fill(PAGE, {"table of loading": f"{said}\n\n{made}"}, gap="\n")


if __name__ == "__main__":
    main()
