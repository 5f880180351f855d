"""What a release changes, and the checks that come before it."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from .changelog import Changelog
from .packages import ReleaseError, find_package, ranges_of, read_version, version_file, widened, with_version

__all__ = ["Plan", "carry_out", "plan_release"]


@dataclass(frozen=True)
class Plan:
    """The new text of each file that changes, and the commit and the tag that hold them."""

    root: Path
    name: str
    version: str
    files: Mapping[Path, str]

    @property
    def tag(self) -> str:
        """The name of the tag."""
        return f"{self.name}-v{self.version}"

    @property
    def message(self) -> str:
        """The message of the commit and of the tag."""
        return f"Release {self.name} {self.version}"

    def diff(self) -> Iterator[str]:
        """Yield the lines of a unified diff of all files."""
        for path, new in self.files.items():
            name = path.relative_to(self.root).as_posix()
            old = path.read_text(encoding="utf-8")
            yield from difflib.unified_diff(old.splitlines(), new.splitlines(), f"a/{name}", f"b/{name}", lineterm="")


def plan_release(root: Path, name: str, version: str, date: str) -> Plan:
    """Return what the release of package `name` as `version` on this day changes.

    Raises:
        ReleaseError: if the package does not exist; if the version is no canonical one, or lower than the package's;
            if it has a tag or a section already; if nothing is unreleased; if the checkout has changes.
    """
    package = find_package(root, name)
    new = _checked_version(version, read_version(package))
    plan = Plan(root, package.name, version, _new_files(root, package, new, date))
    if _git(root, "tag", "--list", plan.tag):
        raise ReleaseError(f"the tag {plan.tag} exists: a version is released once, so choose the next one")
    changes = _git(root, "status", "--porcelain")
    if changes:
        raise ReleaseError(f"the checkout has changes: commit them, or undo them\n{changes}")
    return plan


def carry_out(plan: Plan) -> None:
    """Write the files, commit them and tag the commit."""
    for path, text in plan.files.items():
        path.write_text(text, encoding="utf-8")
    _git(plan.root, "add", "--", *(str(path) for path in plan.files))
    _git(plan.root, "commit", "--quiet", "-m", plan.message)
    _git(plan.root, "tag", "--annotate", plan.tag, "-m", plan.message)


def _checked_version(version: str, current: str) -> Version:
    try:
        new = Version(version)
    except InvalidVersion:
        raise ReleaseError(f"{version!r} is no version: write it as in 0.2.0 or 0.2.0rc1") from None
    if str(new) != version or len(new.release) != 3 or new.local is not None:
        canonical = ".".join(map(str, (*new.release, 0, 0)[:3]))
        raise ReleaseError(f"{version!r} is not how a version is written here: as in {canonical}")
    if new < Version(current):
        raise ReleaseError(f"{version} is lower than the package's version, which is {current}")
    return new


def _new_files(root: Path, package: Path, version: Version, date: str) -> dict[Path, str]:
    file = package / "CHANGELOG.md"
    changelog = Changelog.read(file)
    if str(version) in changelog.versions:
        raise ReleaseError(f"{file.relative_to(root)} has a section for {version} already")
    if not changelog.unreleased:
        raise ReleaseError(f"{file.relative_to(root)} names no change under [Unreleased]: there is nothing to release")
    texts = {file: changelog.released(str(version), date).text}
    file = version_file(package)
    texts[file] = with_version(file.read_text(encoding="utf-8"), str(version))
    for neighbour, _ in ranges_of(package.name, root):
        texts |= _neighbours_files(neighbour, package.name, version)
    return {path: text for path, text in texts.items() if text != path.read_text(encoding="utf-8")}


def _neighbours_files(neighbour: Path, name: str, version: Version) -> dict[Path, str]:
    """The neighbour's range, if it must be wider, and the line of its changelog that says so."""
    project, changelog = neighbour / "pyproject.toml", neighbour / "CHANGELOG.md"
    old = project.read_text(encoding="utf-8")
    new = widened(old, name, version)
    if new == old:
        return {}
    item = f"Takes `{name}` {version.major}.{version.minor}, too."
    return {project: new, changelog: Changelog.read(changelog).with_item("Changed", item).text}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
