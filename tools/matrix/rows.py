"""Which versions go together, and what the command line's arguments choose of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["HOME_PYTHON", "HOME_TORCH", "PYTHONS", "TORCHES", "Row", "all_rows", "choose", "next_minor"]

#: The newest release of each minor version in the range of packages/*/pyproject.toml.
TORCHES: Final = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13")
#: Each torch is tested on one Python, and each Python with one torch.
HOME_PYTHON: Final = "3.11"
HOME_TORCH: Final = "2.13.0"


@dataclass(frozen=True, order=True)
class Row:
    """One torch on one Python."""

    torch: str
    python: str

    def __str__(self) -> str:
        """As in `torch 2.15.0, Python 3.11`."""
        return f"torch {self.torch}, Python {self.python}"

    @property
    def name(self) -> str:
        """The name of its environment and of its results."""
        return f"torch-{self.torch}-python-{self.python}"


def all_rows() -> list[Row]:
    """Return each torch on the one Python, and each other Python with the one torch."""
    on_other_pythons = [Row(HOME_TORCH, python) for python in PYTHONS if python != HOME_PYTHON]
    return [*(Row(torch, HOME_PYTHON) for torch in TORCHES), *on_other_pythons]


def choose(arguments: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Split arguments into the rows that their leading versions choose, and the rest, which is for pytest.

    `2.15.0` and `3.12` are a torch and a Python. With torches alone, each is tested on the one Python; with Pythons
    alone, each with the one torch; with both, each torch on each Python; with neither, all rows.
    """
    versions = list(_leading_versions(arguments))
    torches = [version for version in versions if version.count(".") == 2]
    pythons = [version for version in versions if version.count(".") == 1]
    rest = list(arguments[len(versions) :])
    if not versions:
        return all_rows(), rest
    return [
        Row(torch, python) for torch in torches or [HOME_TORCH] for python in pythons or [HOME_PYTHON]
    ], rest


def next_minor(version: str) -> str:
    """Return the minor version after that of `version`: 2.16 after 2.15.0."""
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def _leading_versions(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        if not re.fullmatch(r"\d+\.\d+(\.\d+\w*)?", argument):
            return
        yield argument
