"""The rows: each a public report, and a program that shows what it complains of."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import attrs

__all__ = ["FSDP1", "FSDP2", "GROUPS", "ROWS", "Row", "library", "load_all", "row"]

FSDP1: Final = ("FSDP1", "flatparam")
FSDP2: Final = ("FSDP2", "flatparam", "door")

#: The module of each group, and what its reports complain of.
GROUPS: Final = {
    "leaks": "The host's memory and time",
    "mixing": "Tensors beside DTensors",
    "dtypes": "One dtype per group",
    "ties": "Tied weights",
    "paths": "Ranks that take different paths",
    "gradients": "Silently wrong gradients",
    "averages": "Averages of the weights",
}


@attrs.frozen
class Row:
    """A report, what it complains of in our words, and a program, which is told the library and the rank."""

    report: str
    says: str
    program: Callable[[Any, int], Any]
    sides: tuple[str, ...]
    ranks: int
    is_own: bool
    """Whether the report is known by its own point, and not by that of its group alone."""

    @property
    def group(self) -> str:
        """The module that has it."""
        return self.program.__module__.rpartition(".")[-1]


ROWS: Final[dict[str, Row]] = {}


def row(
    report: str, says: str, sides: tuple[str, ...] = FSDP2, ranks: int = 2, own: bool = False
) -> Callable[[Any], Any]:
    """Have a program be the row of a report."""

    def known(program: Any) -> Any:
        if report in ROWS:
            raise ValueError(f"expected one row for {report}, found a second one: {program.__name__}")
        ROWS[report] = Row(report, says, program, sides, ranks, own)
        return program

    return known


def load_all() -> dict[str, Row]:
    """All rows, group by group."""
    for name in GROUPS:
        importlib.import_module(f"integration_tests.complaints.{name}")
    return ROWS


@contextmanager
def library(side: str) -> Iterator[Any]:
    """Yield the module from which the program of a side takes its names: torch's, flatparam's, or torch's, installed."""
    import flatparam

    theirs = importlib.import_module("torch.distributed.fsdp")
    if side != "door":
        yield flatparam if side == "flatparam" else theirs
        return
    flatparam.install(fsdp1=False)
    try:
        yield theirs
    finally:
        flatparam.uninstall()
