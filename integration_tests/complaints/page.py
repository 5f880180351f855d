"""The page docs/complaints.md, from the rows, their programs, and the verdicts in docs/complaints.json.

`python -m integration_tests.complaints.page` writes it anew when a program's text has changed, and no verdict.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import inspect
import json
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from integration_tests.complaints import shared
from integration_tests.complaints.rows import GROUPS, Row, load_all
from integration_tests.complaints.running import Verdict
from tools.pages import ROOT, between, table

__all__ = ["PAGE", "RESULTS", "page", "write"]

PAGE: Final = ROOT / "docs" / "complaints.md"
RESULTS: Final = ROOT / "docs" / "complaints.json"

_OWNERS: Final = {
    "Automodel": "NVIDIA-NeMo",
    "Fast-LLM": "ServiceNow",
    "Lightning": "Lightning-AI/pytorch-lightning",
    "Megatron": "NVIDIA/Megatron-LM",
    "ISEEKYAN": "ISEEKYAN/Megatron-LM",
    "Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Model-Optimizer": "NVIDIA",
    "SimpleTuner": "bghira",
    "TuFT": "agentscope-ai",
    "VeOmni": "ByteDance-Seed",
    "WeatherGenerator": "ecmwf",
    "cosmos-framework": "NVIDIA",
    "ezpz": "saforem2",
    "hyper-parallel": "mindspore-ai",
    "miles": "radixark",
    "miles-credit": "NCAR",
    "prime-rl": "PrimeIntellect-ai",
    "pytorch": "pytorch",
    "titan": "pytorch/torchtitan",
    "twinkle": "modelscope",
    "verl": "verl-project",
    **dict.fromkeys(("accelerate", "transformers", "trl"), "huggingface"),
}
_COLUMNS: Final = {"torch": "torch", "flatparam": "flatparam", "door": "with `DTensor`s"}


def link(report: str) -> str:
    """The report's number, as a link to it."""
    name, _, number = report.partition("#")
    owner = _OWNERS[name]
    return f"[{report}](https://github.com/{owner if '/' in owner else f'{owner}/{name}'}/issues/{number})"


def cell(side: str, verdict: Verdict | None) -> str:
    """A verdict in the table."""
    if verdict is None:
        return ""
    word = verdict.kind if verdict.kind in ("right", "refused") else f"**{verdict.kind}**"
    detail = f"`{verdict.detail}`" if verdict.detail.isidentifier() else verdict.detail
    prefix = f"{side}: " if side.startswith("FSDP") else ""
    return prefix + (f"{word}, {detail}" if detail else word)


def program_of(row: Row) -> str:
    """The source of a row's program, as the user of one library would have it."""
    source = inspect.getsource(row.program)
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    first = node.decorator_list[1].lineno if len(node.decorator_list) > 1 else node.lineno
    return "\n".join(source.splitlines()[first - 1 :])


def shared_by(group: str) -> str:
    """What the programs of a group have in common: its module without the rows."""
    module = importlib.import_module(f"integration_tests.complaints.{group}")
    lines = inspect.getsource(module).splitlines()
    for node in reversed(ast.parse("\n".join(lines)).body):
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        is_row = isinstance(node, ast.FunctionDef) and lines[first - 1].startswith("@row(")
        is_ours = isinstance(node, ast.ImportFrom) and (node.level or node.module == "__future__")
        if is_row or is_ours or node.lineno == 1:
            del lines[first - 1 : node.end_lineno]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines).strip())


def folded(summary: str, source: str) -> str:
    """A block of code that a reader unfolds."""
    return f"<details markdown>\n<summary>{summary}</summary>\n\n```python\n{source}\n```\n\n</details>"


def parts(rows: Mapping[str, Row], verdicts: Mapping[str, Mapping[str, Verdict]]) -> Iterator[str]:
    """The parts of the page, one after the other."""
    yield folded("What all programs share", inspect.getsource(shared).rstrip())
    for group, title in GROUPS.items():
        mine = [row for row in rows.values() if row.group == group]
        lines = [["report", "complaint", *_COLUMNS.values()]]
        for row in mine:
            found = verdicts[row.report]
            cells = [cell(side, found.get(side)) for side in (row.sides[0], "flatparam", "door")]
            lines.append([link(row.report) + ("" if row.is_own else "*"), row.says, *cells])
        yield f"### {title}\n\n" + table(lines, ("---",))
        yield folded("What these programs share", shared_by(group))
        for row in mine:
            yield folded(row.report, program_of(row))


def counts(verdicts: Mapping[str, Mapping[str, Verdict]]) -> str:
    """How often each verdict was found, by side."""
    found: dict[str, Counter[str]] = {"torch": Counter(), "flatparam": Counter(), "door": Counter()}
    for of_sides in verdicts.values():
        for side, verdict in of_sides.items():
            found["torch" if side.startswith("FSDP") else side][verdict.kind] += 1
    kinds = ("right", "refused", "slow", "leak", "wrong", "hang", "crash")
    lines = [[_COLUMNS[side], *(str(count[kind]) for kind in kinds)] for side, count in found.items()]
    return table([["", *kinds], *lines])


def page(found: Mapping[str, Any], text: str) -> str:
    """The page `text` with what was found."""
    made = found["made"]
    rows = load_all()
    verdicts = {report: {side: Verdict(*each) for side, each in found["rows"][report].items()} for report in rows}
    versions = ", ".join(f"{name} {version}" for name, version in made.items() if name != "date")
    summary = f"{counts(verdicts)}\n\n{len(rows)} reports; {made['date']}, {versions}, on a CPU."
    return between(between(text, "counts", summary), "rows", "\n\n".join(parts(rows, verdicts)))


def write(verdicts: Mapping[str, Mapping[str, Verdict]]) -> None:
    """Write both files."""
    made = {
        "date": f"{datetime.date.today()}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    of_rows = {
        report: {side: attrs.astuple(each) for side, each in of_sides.items()} for report, of_sides in verdicts.items()
    }
    RESULTS.write_text(json.dumps({"made": made, "rows": of_rows}, indent=1) + "\n", encoding="utf-8")
    write_again()


def write_again() -> None:
    """Write the page, from the results as they are."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page(found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_again()
