"""How many graphs `torch.compile` makes of a sharded model, and where it breaks: ``python -m integration_tests.simulated.compiled``.

This runs on the CPU, over gloo: what is counted does not depend on the device, and no kernel is generated.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn

from flatparam_comm import Collectives
from flatparam_comm.testing import PATIENCE, run_processes
from integration_tests.simulated.models import Block, Model, batch

STEPS: Final = 3
BLOCKS: Final = 3
WAYS: Final = ("the model", "each block, wrapped", "each block, before it is wrapped")
LIBRARIES: Final = ("flatparam", "flatparam, flat", "FSDP1", "FSDP2")
BACKENDS: Final = ("eager", "aot_eager")


@attrs.frozen
class Counts:
    """What torch.compile did in a few steps.

    Attributes:
        graphs: how many it made, with those that it made again.
        breaks: how often it stopped in the middle of a function and went on after it.
        reasons: of these, in torch's words.
        losses: of each step.
    """

    graphs: int
    breaks: int
    reasons: tuple[str, ...]
    losses: tuple[float, ...]


@attrs.frozen
class Row:
    """What is compiled, and how: of `WAYS`, `LIBRARIES`, and one of torch's backends; "" compiles nothing."""

    way: str
    library: str
    backend: str = "eager"
    blocks: int = BLOCKS


def count_all(group: Collectives, rows: Sequence[Row]) -> list[Counts]:
    """Train each; what a rank does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_count(group, row) for row in rows]


def counted(rows: Sequence[Row]) -> list[Counts]:
    """Each row's counts, which are those of both ranks."""
    first, second = run_processes(2, count_all, rows, timeout=PATIENCE, pg_timeout=PATIENCE / 2)
    assert [(c.graphs, c.breaks) for c in first] == [(c.graphs, c.breaks) for c in second]
    return first


def _count(group: Collectives, row: Row) -> Counts:
    dynamo: Any = torch._dynamo
    dynamo.reset()
    counters: Any = dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model: Any = Model(row.blocks)
    if row.way == "each block, before it is wrapped" and row.backend:
        for block in model.blocks:
            block.compile(backend=row.backend)
    model = _wrap(model, row.library)
    if row.way == "each block, wrapped" and row.backend:
        for block in (model if row.library == "FSDP2" else model.module).blocks:
            block.compile(backend=row.backend)
    called = torch.compile(model, backend=row.backend) if row.way == "the model" and row.backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        loss = called(batch(step, group.rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    breaks = {str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    graphs = counters["stats"].get("unique_graphs", 0)
    return Counts(graphs, sum(breaks.values()), tuple(breaks), tuple(losses))


def _wrap(model: Model, library: str) -> nn.Module:
    if library.startswith("flatparam"):
        import flatparam
        from flatparam.wrap import ModuleWrapPolicy

        return flatparam.FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params="flat" not in library
        )
    from torch.distributed import fsdp

    if library == "FSDP1":
        policy = fsdp.wrap.ModuleWrapPolicy({Block})
        return fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=_mesh())
    fsdp.fully_shard(model, mesh=_mesh())
    return model


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def main() -> None:
    """Print the table."""
    rows = [Row(way, library, backend) for way in WAYS for library in LIBRARIES for backend in BACKENDS]
    more = [attrs.evolve(row, blocks=BLOCKS + 1) for row in rows]
    counts = counted([*rows, *more])
    print("| compiled | library | backend | graphs | graph breaks | more of each for one more block |")
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for row, count, other in zip(rows, counts[: len(rows)], counts[len(rows) :], strict=True):
        each = f"{other.graphs - count.graphs}, {other.breaks - count.breaks}"
        print(f"| {row.way} | {row.library} | {row.backend} | {count.graphs} | {count.breaks} | {each} |")
    for reason in dict.fromkeys(reason for count in counts for reason in count.reasons):
        print(f"\n    {reason}")


if __name__ == "__main__":
    main()
