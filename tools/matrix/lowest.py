"""The lowest versions that the packages' ranges allow."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["lowest_versions"]

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
        project: Mapping[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for line in (*project["dependencies"], *project.get("optional-dependencies", {}).get("test", ())):
            requirement = Requirement(line)
            if not re.match(r"flatparam\b", requirement.name):
                yield requirement


def _with_patch(version: Version) -> str:
    """Return the version in three numbers, as releases are named: `2.11` is 2.11.0."""
    release = (*version.release, 0, 0)[: max(3, len(version.release))]
    return ".".join(map(str, release))
