"""How large the models are: as the memory of the device and of the host allows, and no larger than time does."""

from __future__ import annotations

from typing import Final

from attrs import frozen
from bench.workloads import Workload, gpt, stack
from gpt.shape import Shape

from .facts import Facts
from .place import Plan

LAYERS: Final = 10
CONTEXT: Final = 512
ROWS: Final = 16
HEAD: Final = 64
LEAST_WIDTH: Final = 128
MOST_WIDTH: Final = 2048
BYTES_OF_TRAINING: Final = 16
"""For each parameter: itself, its gradient and two moments, in fp32."""
SHARE: Final = 0.4
"""Of the memory that is free. The rest is for activations, full parameters, libraries and fragmentation."""


@frozen
class Size:
    """A GPT and its batch, as numbers, which another process can be told."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int

    @property
    def workload(self) -> Workload:
        """What the benchmark trains."""
        return gpt(self.layers, self.width, self.heads, self.context, self.rows)

    @property
    def numel(self) -> int:
        """The model's parameters."""
        return Shape(self.layers, self.width, self.heads, self.context).numel


TINY: Final = Size(layers=3, width=32, heads=2, context=8, rows=2)
EXACT: Final = Size(layers=4, width=256, heads=4, context=128, rows=2)
"""What the losses are compared of."""
COMPILED: Final = Size(layers=6, width=1024, heads=16, context=128, rows=4)


def size_for(nbytes: int, models: int, ranks: int, bytes_of_each: int = BYTES_OF_TRAINING) -> Size:
    """The widest model of which `models` fit at once into their share of `nbytes` on each of so many ranks."""
    fitting = LEAST_WIDTH
    for width in range(LEAST_WIDTH, MOST_WIDTH + 1, LEAST_WIDTH):
        numel = Shape(LAYERS, width, width // HEAD, CONTEXT).numel
        if models * bytes_of_each * numel <= SHARE * nbytes * ranks:
            fitting = width
    return Size(LAYERS, fitting, fitting // HEAD, CONTEXT, ROWS)


def size_of(plan: Plan, facts: Facts) -> Size:
    """A model that fits."""
    return TINY if plan.tiny else size_for(facts.free_nbytes, 1, plan.ranks)


def one_row_stack(tiny: bool) -> Workload:
    """Layers whose parameters are large beside the activations of a single row."""
    return stack(units=6, width=512 if tiny else 4096, depth=1, rows=1)
