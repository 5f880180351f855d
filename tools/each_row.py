"""Tables that one test goes through, row by row: `@each_row("given, expected", ROWS)`, where a row takes milliseconds.

It reads like `pytest.mark.parametrize`, and counts as one test. A row that fails is named, and the others run all the
same. Each row has a `tmp_path` of its own; the other fixtures are the test's, so those that change something
(`monkeypatch`) want `parametrize`, which makes a test of each row; so do rows with marks of their own, or that skip.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

__all__ = ["each_row"]

Function = TypeVar("Function", bound=Callable[..., None])


def each_row(
    names: str | Sequence[str],
    rows: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], object] | None = None,
) -> Callable[[Function], Function]:
    """Return a decorator: the test runs once for each row, with its values as the arguments `names`.

    Names, rows and ids are as for `pytest.mark.parametrize`. Each row begins with torch's seed 0, as tests do. If rows
    fail, AssertionError names them, and comes from the error of the first.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    ids = ids if ids is None or callable(ids) else list(ids)
    table = [_row(listed, number, values, ids) for number, values in enumerate(rows)]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        unknown = [name for name in listed if name not in signature.parameters]
        if unknown:
            raise TypeError(f"each_row: expected arguments of {function.__name__}, found {', '.join(unknown)}")

        @functools.wraps(function)
        def run(*given: Any, **fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            for number, (name, values) in enumerate(table):
                if "torch" in sys.modules:
                    sys.modules["torch"].manual_seed(0)
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] = fixtures["tmp_path"] / f"row-{number}"
                    own["tmp_path"].mkdir()
                try:
                    function(*given, **own, **values)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    failed[name] = error
            if failed:
                told = "\n".join(f"  {name}: {type(error).__name__}: {error}" for name, error in failed.items())
                raise AssertionError(
                    f"{len(failed)} of {len(table)} rows of {', '.join(listed)} fail:\n{told}"
                ) from next(iter(failed.values()))

        # What pytest looks at for the fixtures that the test takes.
        kept = [parameter for name, parameter in signature.parameters.items() if name not in listed]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]  # it is called as the test is, without what the rows give

    return decorate


def _row(
    names: Sequence[str], number: int, values: Any, ids: Sequence[str] | Callable[[Any], object] | None
) -> tuple[str, dict[str, Any]]:
    """Return the name of a row, and its values by their names."""
    name = None if ids is None or callable(ids) else ids[number]
    if hasattr(values, "marks"):  # of pytest.param
        if values.marks:
            raise TypeError(f"each_row: expected rows without marks, found {values.marks}: use parametrize")
        name = values.id or name
        values = values.values if len(names) > 1 else values.values[0]
    if len(names) == 1:
        values = (values,)
    if len(values) != len(names):
        raise TypeError(f"each_row: expected {len(names)} values, for {', '.join(names)}, found {values!r}")
    if name is None:
        told = [ids(value) for value in values] if callable(ids) else values
        name = "-".join(_told(value) for value in told)
    return name, dict(zip(names, values, strict=True))


def _told(value: object) -> str:
    name = getattr(value, "__name__", None)
    return str(name) if name is not None else repr(value)[:80]
