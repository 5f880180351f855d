"""What a step costs under tensor parallelism, by flatparam and by torch's FSDP2: the table of docs/meshes.md.

    python -m integration_tests.meshes.cost             print the table
    python -m integration_tests.meshes.cost --write     and put it into docs/meshes.md

One rank of 2 (data) x 2 (tensor); the others are not there, and collectives do nothing. Instructions are callgrind's,
of the third step; bytes are those of the buffers that collectives are called with.
"""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from integration_tests.meshes.engines import OURS, Setting, made
from integration_tests.meshes.llama import Llama, batch, parallelize
from integration_tests.meshes.page import PAGE
from tools.bench.absent import world
from tools.bench.instructions import begin_to_count, counted, executed
from tools.pages import fill, table

PLAIN = "no sharding"
ENGINES = (PLAIN, *OURS, "FSDP2")
SHAPE = (2, 2)
PARTS = ("forward and backward", "AdamW")


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Counts the collectives inside, and the bytes of their larger side."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Count one."""
        found = function(*args, **(kwargs or {}))
        is_collective = "c10d" in function.namespace and not function._opname.startswith(("wait", "barrier"))
        if is_collective:
            self.calls += 1
            given, made_here = (
                sum(each.nbytes for each in tree_leaves(side) if isinstance(each, Tensor)) for side in (args, found)
            )
            self.nbytes += max(given, made_here)
        return found


def trainings() -> list[tuple[Callable[[], None], Callable[[], None]]]:
    """Return the two parts of a step of each engine, after two steps."""
    from torch.distributed.tensor.parallel import loss_parallel

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[Any] = []
    tokens, targets = batch(0, 0)
    for engine in ENGINES:
        setting = Setting(engine, SHAPE)
        mesh = setting.mesh()
        model = parallelize(Llama(), mesh["tensor"]) if engine == PLAIN else made(setting, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def passes(model: Any = model) -> None:
            with loss_parallel():
                torch.autograd.backward(F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()))

        def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            passes()
            update()
        found.append((passes, update))
    return found


def _under_valgrind() -> None:
    with world(SHAPE[0] * SHAPE[1]):
        everyone = trainings()
        begin_to_count()
        for passes, update in everyone:
            counted(passes)
            counted(update)


def measured() -> str:
    """Return the table."""
    counts = iter(executed("integration_tests.meshes.cost", []))
    lines = [["", *(f"instructions: {part}" for part in PARTS), "beside FSDP2", "collectives", "bytes"]]
    with world(SHAPE[0] * SHAPE[1]):
        everyone = trainings()
        rows = []
        for engine, (passes, update) in zip(ENGINES, everyone, strict=True):
            instructions = [next(counts) for _ in PARTS]
            with Sent() as sent:
                passes()
                update()
            rows.append((engine, instructions, sent.calls, sent.nbytes))
    theirs = sum(rows[-1][1])
    for engine, instructions, calls, nbytes in rows:
        name = f"flatparam: {engine}" if engine in OURS else engine
        told = [f"{each / 1e6:.1f} M" for each in instructions]
        lines.append([name, *told, f"{sum(instructions) / theirs:.2f}", f"{calls}", f"{nbytes:,}"])
    return table(lines)


def main() -> int:
    """Print the table, and write it if asked."""
    if len(sys.argv) > 1 and sys.argv[1] == json.dumps([]):
        _under_valgrind()
        return 0
    text = measured()
    print(text)
    if "--write" in sys.argv:
        fill(PAGE, {"cost": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
