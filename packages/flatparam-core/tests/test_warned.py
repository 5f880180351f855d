"""A warning points at the program's own line."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from each_row import each_row
from torch import nn

from flatparam_core import warn_caller


def inside(package: str | None, source: str) -> Any:
    """The function `deed` of a module of `package`; None stands for code that a library generates."""
    module: dict[str, Any] = {"warn_caller": warn_caller} | ({} if package is None else {"__name__": package})
    exec(source, module)
    return module["deed"]


@each_row("packages", [["flatparam.a"], ["flatparam_core.a", None, "flatparam.b"]])
def test_what_lies_between_does_not_count(packages: list[str | None]) -> None:
    """However many functions of these packages call each other, and torch in between, the caller's line is named."""
    deed = inside(packages[0], "def deed(*args): warn_caller('said', FutureWarning)")
    for package in packages[1:]:
        outer = inside(package, "def deed(*args): call(*args)")
        outer.__globals__["call"] = deed
        deed = outer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        nn.Linear(1, 1).apply(deed)
    (found,) = caught
    assert (found.filename, found.lineno) == (__file__, line)
    assert (str(found.message), found.category) == ("said", FutureWarning)


@each_row("package", ["torchtitan.train", "torch_training", "flatparamless"])
def test_a_program_with_a_similar_name_is_the_program(package: str) -> None:
    """The line of a package whose name only begins as torch's, or as ours, is the program's."""
    deed = inside("flatparam.a", "def deed(*args): warn_caller('said')")
    program = inside(package, "def deed(*args):\n    call(*args)")
    program.__globals__["call"] = deed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    (found,) = caught
    assert (found.filename, found.lineno) == ("<string>", 2)


def test_a_context_names_the_line_that_enters_it() -> None:
    """The standard library's frame between a `with` and the function behind it is not the program's line."""
    source = "import contextlib\n@contextlib.contextmanager\ndef deed():\n    warn_caller('said')\n    yield"
    deed = inside("flatparam.a", source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        with deed():
            pass
    (found,) = caught
    assert (found.filename, found.lineno) == (__file__, line)
