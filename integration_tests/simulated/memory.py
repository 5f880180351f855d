"""How much memory of the device parameters and gradients take: what a log says, and what a formula says.

The model is a chain of matrices without biases, each a unit, whose activations are of a few rows. So whatever has at least
`LEAST_NBYTES` is a parameter or a gradient, whole or a shard; activations and messages are smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from torch import Tensor, nn

from integration_tests.simulated.log import Kind, Record

WIDTHS: Final = (64, 96, 80, 128, 72, 112)
"""The matrix between two neighbours is a unit; the first and the last belong to the root."""
LEAST_NBYTES: Final = 4096


class Chain(nn.Module):
    """An input layer and an output layer, which are the root's, and a unit for each matrix between them."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(WIDTHS))
        self.first = nn.Linear(*pairs[0], bias=False)
        self.units = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairs[1:-1]))
        self.last = nn.Linear(*pairs[-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.units(self.first(x)))
        return result


def held(log: Iterable[Record], least: int = LEAST_NBYTES) -> Iterator[tuple[str, int]]:
    """After each allocation and each release of the device's memory: the phase, and the bytes of what is large."""
    phase, total = "the beginning", 0
    sizes: dict[int, int] = {}
    for record in log:
        if record.kind is Kind.MARK:
            phase = record.name
        elif record.kind in (Kind.ALLOCATE, Kind.FREE) and record.name == "device":
            if record.kind is Kind.ALLOCATE and record.extra >= least:
                sizes[record.subject] = record.extra
                total += record.extra
            elif record.kind is Kind.FREE:
                total -= sizes.pop(record.subject, 0)
        else:
            continue
        yield phase, total


def peaks(log: Iterable[Record], step: str) -> dict[str, int]:
    """The most bytes of each phase of a step, by the word after its name; what was there when it began counts too."""
    found: dict[str, int] = {}
    before, was = "", 0
    for phase, total in held(log):
        if phase.startswith(f"{step} "):
            word = phase.removeprefix(step).split()[0]
            most = max(total, was) if phase != before else total
            found[word] = max(found.get(word, 0), most)
        before, was = phase, total
    return found
