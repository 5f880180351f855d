"""Which versions go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["HOME_PYTHON", "HOME_TORCH", "PYTHONS", "TORCHES", "Row", "all_rows", "named_row", "next_minor"]

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
        """The name of its results."""
        return f"torch-{self.torch}-python-{self.python}"


def all_rows() -> list[Row]:
    """Return each torch on the one Python, and each other Python with the one torch."""
    on_other_pythons = [Row(HOME_TORCH, python) for python in PYTHONS if python != HOME_PYTHON]
    return [*(Row(torch, HOME_PYTHON) for torch in TORCHES), *on_other_pythons]


def named_row(names: Iterable[str]) -> Row:
    """Return the row of names such as `torch-2.15` and `python-3.12`; what none names is as on the others.

    Raises:
        LookupError: if a name is not that of a version in the table.
    """
    known = {f"torch-{torch.rpartition('.')[0]}": ("torch", torch) for torch in TORCHES}
    known |= {f"python-{python}": ("python", python) for python in PYTHONS}
    chosen = {"torch": HOME_TORCH, "python": HOME_PYTHON}
    for name in names:
        if name not in known:
            raise LookupError(f"expected some of {', '.join(known)}, found {name}")
        kind, version = known[name]
        chosen[kind] = version
    return Row(**chosen)


def next_minor(version: str) -> str:
    """Return the minor version after that of `version`: 2.16 after 2.15.0."""
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"
