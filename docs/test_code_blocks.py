"""Every Python block of the documentation runs: one program per Markdown file, in a process of its own.

The blocks of a file share one namespace and run from top to bottom. A line `<!-- not-run: reason -->` right before a
block leaves it out. The program keeps the line numbers of the Markdown file, so a traceback points into it, and is a
real file, so that blocks may start processes.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from each_row import each_row

from flatparam_comm.testing import PATIENCE

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
NOT_RUN = re.compile(r"^ *<!-- *not-run *(?::(?P<reason>.*?))?-->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the number of its first line (from 1) and its lines, without indentation."""

    language: str
    first_line: int
    lines: tuple[str, ...]
    not_run: str | None


class BadMarkdown(ValueError):
    """A fence or a mark that does not say what it means."""


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    blocks: list[Block] = []
    lines = text.splitlines()
    at = 0
    reason: str | None = None
    while at < len(lines):
        mark, opening = NOT_RUN.match(lines[at]), FENCE.match(lines[at])
        if mark:
            reason = (mark["reason"] or "").strip()
            if not reason:
                raise BadMarkdown(f"line {at + 1}: say why: <!-- not-run: reason -->")
        elif opening:
            end = _closing_line(lines, at, opening["fence"])
            language = (opening["info"].split() or [""])[0].strip("{}").lower()
            if language in ("py", "python3"):
                raise BadMarkdown(f"line {at + 1}: write ```python, so that the block is run")
            indent = len(opening["indent"])
            body = tuple(line[indent:] if not line[:indent].strip() else line for line in lines[at + 1 : end])
            blocks.append(Block(language, at + 2, body, reason))
            reason, at = None, end
        elif lines[at].strip() and reason is not None:
            raise BadMarkdown(f"line {at + 1}: a not-run mark must stand right before a block")
        at += 1
    return blocks


def _closing_line(lines: list[str], opening: int, fence: str) -> int:
    for at in range(opening + 1, len(lines)):
        closing = lines[at].strip()
        if closing.startswith(fence) and not closing.strip(fence[0]):
            return at
    raise BadMarkdown(f"line {opening + 1}: this fence is never closed")


def program_of(blocks: list[Block]) -> str:
    """Return the Python blocks that are run, each line where it is in the Markdown."""
    program: list[str] = []
    for block in blocks:
        if block.language == "python" and block.not_run is None:
            program += [""] * (block.first_line - 1 - len(program))
            program += block.lines
    return "\n".join(program) + "\n"


def documents() -> list[Path]:
    """Return the Markdown files whose blocks are run."""
    top = [ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md"))]
    return [path for path in [*top, *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]


# It imports torch, what torch imports when an optimizer is made, and flatparam, and runs each program in a fork.
# The fork leaves the loop, goes on as any Python does with its script, and ends as one. Its ranks are forks of one
# server, too, which is running already.
SERVER = """
import json, os, sys
from multiprocessing import forkserver
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor
import flatparam.fully_sharded_data_parallel, flatparam.in_place.applying
told = os.dup(1)
os.dup2(2, 1)  # the ranks print there
forkserver.set_forkserver_preload(["flatparam_simdev.worlds.child", "torch._dynamo", "flatparam.in_place.applying"])
forkserver.ensure_running()
forkserver._forkserver.ensure_running = lambda: None  # it is no child of the forks, which would start another one
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        break
    os.write(told, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    os._exit(0)
script, output = json.loads(line)
os.chdir(os.path.dirname(script))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
sys.argv, sys.path[0] = [script], os.path.dirname(script)
import runpy
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that runs programs and prints their exit statuses."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    ) as process:
        yield process


every_document = pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())


@every_document
def test_blocks_run(document: Path, tmp_path: Path, server: subprocess.Popen[str]) -> None:
    """Every Python block of the file runs, in order, without an error."""
    script = script_of(document, tmp_path)
    output = tmp_path / "output.txt"
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([str(script), str(output)]) + "\n")
    server.stdin.flush()
    status = int(server.stdout.readline())
    assert status == 0, shown(document, output.read_text(encoding="utf-8"))


@pytest.mark.long
@every_document
def test_blocks_run_in_a_python_of_their_own(document: Path, tmp_path: Path) -> None:
    """They import whatever they need: nothing is imported before."""
    done = subprocess.run(
        [sys.executable, str(script_of(document, tmp_path))],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, shown(document, done.stdout)


#: What these pages do touches the bytes of tensors: in files, in checksums, on the wire.
OF_BYTES = (
    "sleep-and-wake",
    "teachers",
    "publishing",
    "same-bits",
    "checkpoints",
    "is-my-gradient-right",
)


@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=pytest.mark.long if number else ()) for number, name in enumerate(OF_BYTES)]
)
def test_blocks_run_without_numpy(page: str, tmp_path: Path) -> None:
    """torch works without numpy, and so do we."""
    (tmp_path / "hidden" / "numpy").mkdir(parents=True)
    (tmp_path / "hidden" / "numpy" / "__init__.py").write_text('raise ModuleNotFoundError("hidden", name="numpy")\n')
    paths = os.pathsep.join(filter(None, [str(tmp_path / "hidden"), os.environ.get("PYTHONPATH")]))
    document = ROOT / "docs" / "guides" / f"{page}.md"
    done = subprocess.run(
        [sys.executable, str(script_of(document, tmp_path))],
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, shown(document, done.stdout)


def script_of(document: Path, folder: Path) -> Path:
    """Write the file's program into the folder; if it has none, skip the test."""
    blocks = [block for block in blocks_of(document.read_text(encoding="utf-8")) if block.language == "python"]
    left_out = [f"line {block.first_line}: {block.not_run}" for block in blocks if block.not_run]
    if len(left_out) == len(blocks):
        pytest.skip("; ".join(left_out) or "it has no Python blocks")
    script = folder / f"{document.stem}.md.py"
    script.write_text(program_of(blocks), encoding="utf-8")
    # For files that the text names from the root of a checkout.
    (folder / "packages").symlink_to(ROOT / "packages")
    return script


def shown(document: Path, output: str) -> str:
    """What the program of a file has written, for whoever looks for what is wrong."""
    return f"{document.relative_to(ROOT).as_posix()} (line numbers are those of the file):\n{output}"


# The collector itself


def test_line_numbers_are_kept() -> None:
    """A line of the program has the number that it has in the Markdown."""
    text = "# T\n\n```python\na = 1\n```\n\ntext\n\n```python title=x\nb = a\n```\n"
    assert program_of(blocks_of(text)).splitlines()[3] == "a = 1"
    assert program_of(blocks_of(text)).splitlines()[9] == "b = a"


def test_other_languages_and_marked_blocks_are_left_out() -> None:
    """Console blocks are not run, and neither is a block with a reason before it; the next one is run again."""
    text = "```console\n$ x\n```\n<!-- not-run: needs eight GPUs -->\n\n```python\nx\n```\n```python\ny\n```\n"
    assert [block.not_run for block in blocks_of(text)] == [None, "needs eight GPUs", None]
    assert program_of(blocks_of(text)).split() == ["y"]


def test_blocks_in_lists_lose_their_indentation() -> None:
    """A block that belongs to a list item is as good as any other."""
    text = "1. do\n\n   ```python\n   if True:\n       a = 1\n\n   ```\n"
    assert blocks_of(text)[0].lines == ("if True:", "    a = 1", "")


def test_fences_nest() -> None:
    """A fence of four ticks shows a fence of three without running it."""
    text = "````markdown\n```python\n1 / 0\n```\n````\n"
    assert [block.language for block in blocks_of(text)] == ["markdown"]


@each_row(
    ("text", "complaint"),
    [
        ("```python\na\n", "never closed"),
        ("```py\na\n```\n", "write ```python"),
        ("<!-- not-run -->\n```python\na\n```\n", "say why"),
        ("<!-- not-run: x -->\ntext\n```python\na\n```\n", "right before"),
    ],
)
def test_ambiguous_markdown_is_an_error(text: str, complaint: str) -> None:
    """What could silently leave a block out is refused instead."""
    with pytest.raises(BadMarkdown, match=complaint):
        blocks_of(text)
