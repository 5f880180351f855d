"""One training step to read: as a table of files (docs/concepts/one-step.md), and as one text."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pages
from attrs import frozen

from structure.walk import LIBRARIES, Trace

PAGE: Final = Path("docs/concepts/one-step.md")
PART: Final = ("<!-- written by `python tools/structure --page` -->", "<!-- end -->")


@frozen
class Function:
    """A function of a file: its name, with that of its class, and where it stands, decorators included."""

    name: str
    first: int
    last: int

    @property
    def lines(self) -> int:
        """The number of its lines."""
        return self.last - self.first + 1


def page_of(steps: Mapping[str, Trace], others: Mapping[str, Mapping[str, Trace]], old: str) -> str:
    """The page `old` with the tables of `steps`, by library, and of `others`, by moment, in the place of its own."""
    return pages.between(old, PART, f"{table(steps['flatparam'])}\n{hops(steps)}\n\n{moments(others)}")


def moments(traces: Mapping[str, Mapping[str, Trace]]) -> str:
    """A row for each other moment of a model's life: how many files it goes through, by library."""
    lines = [["the files of", *(library for library in LIBRARIES)]]
    for moment, found in traces.items():
        lines.append([moment, *(f"{len(found[each].files)}" if each in found else "" for each in LIBRARIES)])
    return f"Other moments of the same model, counted the same way:\n\n{pages.table(lines)}"


def hops(traces: Mapping[str, Trace]) -> str:
    """A row for each library: how far a reader of the same step has to go."""
    lines = [["the same step", "files", "functions run", "calls", "file changes", "classes"]]
    for name, trace in traces.items():
        counts = map(len, (trace.files, trace.functions, trace.calls))
        lines.append([name, *(f"{figure:,}" for figure in (*counts, trace.file_changes, len(trace.classes)))])
    return pages.wrapped(
        "The same step of torch's FSDP1 and FSDP2, of which the functions in `torch/distributed/fsdp` count, and "
        "neither `torch.distributed` nor the optimizer; of flatparam those of every layer, what watches the ranks and "
        "looks at the optimizer's step too. A file change is two calls, one after the other, of functions in "
        f"different files.\n\n{pages.table(lines)}"
    )


def table(trace: Trace) -> str:
    """A row for each file: what it is, which of its functions the step runs, and the lines of these and of the file."""
    run = _functions_run(trace)
    rows = [["#", "file", "what it is", "functions that the step runs, in order", "their lines", "of"]]
    read, opened = 0, 0
    for number, (path, functions) in enumerate(run.items(), start=1):
        text = path.read_text(encoding="utf-8")
        lines, own = text.count("\n"), sum(function.lines for function in functions)
        read, opened = read + own, opened + lines
        name = path.relative_to(path.parents[_above_source(path)]).as_posix()
        names = ", ".join(f"`{function.name}`" for function in functions)
        rows.append([f"{number}", f"`{name}`", _first_sentence(text), names, f"{own}", f"{lines}"])
    total = f"{len(run)} files, {opened:,} lines; the step runs functions of {read:,} of them"
    made = pages.table(rows, ("--:", "---", "---", "---", "--:"))
    return f"{made}\n\nTogether: {total}.\n"


def text_of(trace: Trace) -> str:
    """The code of the functions that the step runs, in the order in which it comes to them, each once."""
    known = {path: path.read_text(encoding="utf-8").splitlines() for path in trace.files}
    parts = []
    for path, function in _in_order(trace):
        name = path.relative_to(path.parents[_above_source(path)]).as_posix()
        code = "\n".join(known[path][function.first - 1 : function.last])
        parts.append(f"# {name}:{function.first} {function.name}\n{textwrap.dedent(code)}\n")
    return "\n".join(parts)


def _functions_run(trace: Trace) -> Mapping[Path, list[Function]]:
    found: dict[Path, list[Function]] = {}
    for path, function in _in_order(trace):
        found.setdefault(path, []).append(function)
    return found


def _in_order(trace: Trace) -> Iterator[tuple[Path, Function]]:
    known: dict[Path, dict[int, Function]] = {}
    for path, line in trace.functions:
        if path.name == "__init__.py":
            continue
        if path not in known:
            known[path] = dict(_functions_in(ast.parse(path.read_text(encoding="utf-8"))))
        function = known[path].get(line)
        # A function inside a function is a part of that one.
        if function is not None:
            yield path, function


def _functions_in(tree: ast.Module) -> Iterator[tuple[int, Function]]:
    """The functions at the top of a file and in its classes, by the line that each begins in."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in inside:
            if isinstance(each, ast.FunctionDef):
                start = min([each.lineno, *(decorator.lineno for decorator in each.decorator_list)])
                assert each.end_lineno is not None, "it was parsed"
                yield start, Function(prefix + each.name, start, each.end_lineno)


def _first_sentence(text: str) -> str:
    """The first sentence of a file's docstring, as it fits in a table."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.replace("|", "\\|")


def _above_source(path: Path) -> int:
    """How many folders up the folder `src` is, less one."""
    return next(up for up, folder in enumerate(path.parents) if folder.name == "src")
