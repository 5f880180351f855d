"""Which versions go together, and the lowest that the packages' ranges allow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from house import read_toml
from packaging.requirements import Requirement
from packaging.version import Version

__all__ = [
    "HOME_PYTHON",
    "HOME_TORCH",
    "PYTHONS",
    "TORCHES",
    "Row",
    "all_rows",
    "lowest_versions",
    "named_row",
    "next_minor",
]

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


ROOT: Final = Path(__file__).resolve().parents[2]


def lowest_versions(root: Path = ROOT) -> dict[str, str]:
    """Return, for each package that ours depend on, the lowest version that all of our ranges allow.

    The extra `test` counts and the others do not. A neighbour is not named: it is of this checkout.
    """
    lowest: dict[str, Version] = {}
    for requirement in _requirements(root):
        for specifier in requirement.specifier:
            if specifier.operator == ">=":
                version = Version(specifier.version)
                lowest[requirement.name] = max(version, lowest.get(requirement.name, version))
    return {name: _with_patch(version) for name, version in sorted(lowest.items())}


def _requirements(root: Path) -> Iterator[Requirement]:
    for file in sorted(root.glob("packages/*/pyproject.toml")):
        project: Mapping[str, Any] = read_toml(file)["project"]
        for line in (*project["dependencies"], *project.get("optional-dependencies", {}).get("test", ())):
            requirement = Requirement(line)
            if not re.match(r"flatparam\b", requirement.name):
                yield requirement


def _with_patch(version: Version) -> str:
    """Return the version in three numbers, as releases are named: `2.11` is 2.11.0."""
    release = (*version.release, 0, 0)[: max(3, len(version.release))]
    return ".".join(map(str, release))
