"""The packages of the repository: their names, their versions, and the ranges in which they name each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = [
    "ReleaseError",
    "find_package",
    "ranges_of",
    "read_version",
    "version_file",
    "widened",
    "with_version",
]

_VERSION = re.compile(r'(?m)^__version__ = "(?P<version>[^"]+)"$')


class ReleaseError(Exception):
    """The release is refused: a sentence for the user, which says what to do."""


def find_package(root: Path, name: str) -> Path:
    """Return the folder of the package `flatparam-core`, which may be called `core`."""
    packages = {path.name: path for path in sorted((root / "packages").iterdir()) if path.is_dir()}
    for full in (name, f"flatparam-{name}"):
        if full in packages:
            return packages[full]
    raise ReleaseError(f"there is no package {name!r}: there are {', '.join(packages)}")


def version_file(package: Path) -> Path:
    """Return the one file that says the package's version; hatchling reads it, too."""
    home = package / "src" / package.name.replace("-", "_")
    # A module of its own where other modules of the package need the version too.
    own = home / "version.py"
    return own if own.exists() else home / "__init__.py"


def read_version(package: Path) -> str:
    """Return the package's version."""
    match = _VERSION.search(version_file(package).read_text(encoding="utf-8"))
    if match is None:
        raise ReleaseError(f'{version_file(package)} has no line `__version__ = "..."`')
    return match["version"]


def with_version(text: str, version: str) -> str:
    """Return the text of a version file that says `version`."""
    return _VERSION.sub(f'__version__ = "{version}"', text, count=1)


def ranges_of(name: str, root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each package that depends on `name`, or has an extra that does, with the range, as in `>=0.1,<0.2`."""
    for package in sorted((root / "packages").iterdir()):
        project = package / "pyproject.toml"
        if project.exists():
            match = _requirement(name).search(project.read_text(encoding="utf-8"))
            if match is not None:
                yield package, match["range"]


def widened(project: str, name: str, version: Version) -> str:
    """Return the text of a pyproject.toml whose range of `name` holds `version`: a new upper end, if it is needed."""

    def widen(match: re.Match[str]) -> str:
        found = match["range"]
        if SpecifierSet(found).contains(version, prereleases=True):
            return match.group()
        return f'"{match["name"]}{re.sub("<[^,]+", f"<{_next_breaking(version)}", found)}"'

    return _requirement(name).sub(widen, project)


def _requirement(name: str) -> re.Pattern[str]:
    return re.compile(rf'"(?P<name>{re.escape(name)}(\[[^]]*\])?)(?P<range>[<>=][^"]*)"')


def _next_breaking(version: Version) -> str:
    """Return the first version that may change public names: the next minor one before 1.0, else the next major one."""
    return f"0.{version.minor + 1}" if version.major == 0 else f"{version.major + 1}"
