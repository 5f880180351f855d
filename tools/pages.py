"""What the tools write into pages of the documentation: tables of Markdown, and parts between two markers.

    python tools/pages.py           the pages that are written by a tool, and by which command each
    python tools/pages.py NAME ...  write these pages anew

Nothing between the markers is edited by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["PAGES", "ROOT", "between", "fill", "marks", "table", "wrapped"]

ROOT: Final = Path(__file__).resolve().parent.parent
#: The command that writes each page, or the tables of it.
PAGES: Final[Mapping[str, Sequence[str]]] = {
    "compatibility": ("tools/matrix", "--page"),
    "complaints": ("-m", "integration_tests.complaints"),
    "errors": ("docs/test_errors.py",),
    "fsdp2-clients": ("-m", "integration_tests.clients.cells", "build/client-cells.jsonl"),
    "layouts": ("tools/layouts_page.py",),
    "meshes": ("-m", "integration_tests.meshes.page", "--write"),
    "meshes-cost": ("-m", "integration_tests.meshes.cost", "--write"),
    "models": ("tools/models_page.py", "build/models.xml"),
    "one-step": ("tools/structure", "--page"),
    "optimizers": ("tools/matrix_optimizers.py",),
    "optimizers-losses": ("tools/loss_curves.py",),
    "peft": ("-m", "integration_tests.clients.page"),
    "performance": ("tools/bench", "page"),
    "plans": ("tools/plans",),
    "pretrained": ("tools/pretrained_costs.py", "--page"),
    "publishing": ("tools/publishing", "--size", "small", "--pretraining", "60", "costs", "--page"),
    "spec-rows": ("tools/spec_rows.py",),
}

COLUMNS: Final = 120
"""The length of a line of prose at most."""

Marks = tuple[str, str]


def table(lines: Iterable[Sequence[str]], columns: Sequence[str] = ("---", "---:")) -> str:
    """Return the lines, of which the first is the head, as a table of Markdown.

    `columns` is what stands beneath the head, `---:` where numbers go to the right; its last is that of all others.
    """
    head, *rest = lines
    rule = [*columns, *[columns[-1]] * (len(head) - len(columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rest))


def wrapped(text: str) -> str:
    """Return `text` with lines of at most 120 columns, but for tables, pictures, headings and blocks of code."""
    lines, is_code = [], False
    for line in text.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        if is_code or len(line) <= COLUMNS or re.match(r"\s*(\||!\[|<|#)", line):
            lines.append(line)
            continue
        indent = re.match(r"\s*(\* |\d+\. )?", line)[0]  # type: ignore[index]
        lines += textwrap.wrap(
            line,
            COLUMNS,
            subsequent_indent=" " * len(indent),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def marks(name: str) -> Marks:
    """Return the markers of a part of a page."""
    return f"<!-- begin {name} -->", f"<!-- end {name} -->"


def between(text: str, part: str | Marks, body: str, gap: str = "\n\n") -> str:
    """Return the page `text` with `body` between the markers of a part.

    Raises:
        LookupError: if it has no such markers.
    """
    begin, end = marks(part) if isinstance(part, str) else part
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    new, found = re.subn(pattern, lambda _: f"{begin}{gap}{body}{gap}{end}", text, flags=re.DOTALL)
    if not found:
        raise LookupError(f"expected the markers {begin} and {end} in the page, found none")
    return new


def fill(page: Path, parts: Mapping[Any, str], gap: str = "\n\n") -> None:
    """Write these parts of a page anew, each between its markers: see `between`."""
    text = page.read_text(encoding="utf-8")
    for part, body in parts.items():
        text = between(text, part, body, gap)
    page.write_text(text, encoding="utf-8")


def main(names: Sequence[str]) -> int:
    """Run the commands of these pages, one after the other until one fails; without names, print all."""
    if not names:
        print("\n".join(f"{name:<18} python {' '.join(command)}" for name, command in PAGES.items()))
    unknown = [name for name in names if name not in PAGES]
    if unknown:
        print(f"expected names of {', '.join(PAGES)}, found {', '.join(unknown)}")
        return 2
    commands = ([sys.executable, *PAGES[name]] for name in names)
    return next((code for command in commands if (code := subprocess.call(command, cwd=ROOT))), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
