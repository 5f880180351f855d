"""A changelog in the format of Keep a Changelog: its sections, and what a release and a new item make of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .packages import ReleaseError

__all__ = ["KINDS", "Changelog"]

KINDS: Final = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
UNRELEASED: Final = "## [Unreleased]"
#: `## [0.2.0] - 2026-11-22`
_RELEASED: Final = re.compile(r"(?m)^## \[(?P<version>\d\S*)\] - (?P<date>\d{4}-\d\d-\d\d)$")
_SECTION: Final = re.compile(r"(?m)^## .*$")


@dataclass(frozen=True)
class Changelog:
    """The text of a changelog that has a section for what is not yet released.

    Raises:
        ReleaseError: if that section is not the first one, or if a heading is of no known form.
    """

    text: str

    @staticmethod
    def read(path: Path) -> Changelog:
        """Return the changelog of a file; an error names the file."""
        try:
            return Changelog(path.read_text(encoding="utf-8"))
        except ReleaseError as error:
            raise ReleaseError(f"{path}: {error}") from None

    def __post_init__(self) -> None:
        """Check the headings."""
        headings = [match.group() for match in _SECTION.finditer(self.text)]
        if headings[:1] != [UNRELEASED]:
            raise ReleaseError(f"the first section must be `{UNRELEASED}`, and it is {headings[:1]}")
        for heading in headings[1:]:
            if not _RELEASED.fullmatch(heading):
                raise ReleaseError(f"a section must be headed `## [VERSION] - YYYY-MM-DD`, found `{heading}`")
        for kind in re.findall(r"(?m)^### (.*)$", self.text):
            if kind not in KINDS:
                raise ReleaseError(f"changes are {', '.join(KINDS)}, found `### {kind}`")

    @property
    def versions(self) -> dict[str, str]:
        """The dates of the versions that have a section, newest first."""
        return {match["version"]: match["date"] for match in _RELEASED.finditer(self.text)}

    @property
    def unreleased(self) -> str:
        """What the first section says below its heading; empty if it names no change."""
        body = self._body().strip()
        return body if re.search(r"(?m)^- ", body) else ""

    def released(self, version: str, date: str) -> Changelog:
        """Return the changelog in which what was unreleased is `version`, and nothing is unreleased."""
        return Changelog(self.text.replace(UNRELEASED, f"{UNRELEASED}\n\n## [{version}] - {date}", 1))

    def with_item(self, kind: str, item: str) -> Changelog:
        """Return the changelog with one more unreleased change of this kind."""
        body, heading = self._body(), f"### {kind}\n"
        if heading in body:
            start = body.index(heading) + len(heading)
            section = re.split(r"(?m)^### ", body[start:], maxsplit=1)[0]
            new = body.replace(heading + section, f"{heading}{section.rstrip()}\n- {item}\n\n", 1)
        else:
            new = f"{body.rstrip()}\n\n{heading}\n- {item}\n\n"
        before, after = self.text.split(UNRELEASED + body, 1)
        return Changelog((before + UNRELEASED + new + after).rstrip() + "\n")

    def _body(self) -> str:
        start = self.text.index(UNRELEASED) + len(UNRELEASED)
        following = _SECTION.search(self.text, start)
        return self.text[start : following.start() if following else len(self.text)]
