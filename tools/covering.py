"""A plugin of pytest: of a test in many combinations of settings, a few are short, and the others are marked `long`.

A test that takes several fixtures with parameters, or has several marks `parametrize`, is collected once for each
combination. Those that stay short have

* each value of each parameter in each test (what one mark `parametrize` lists is one parameter, however many names),
* each pair of values of two fixtures in each file, spread over its tests,
* each pair of values of the parameters that the test's mark `pairs` names (of all, if it names none).

`-m "not long"` leaves out the others, and `-m long` has them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import pytest

Row: TypeAlias = Mapping[str, Hashable]
"""One combination: the value of each parameter."""

Goal: TypeAlias = tuple[tuple[str, Hashable], ...]
"""What some combination must have: one value of a parameter, or two."""


def covering(
    tests: Sequence[Sequence[Row]],
    *,
    pairs: Sequence[Collection[str]],
    shared: Collection[str],
) -> list[list[int]]:
    """Return, for each test of a file, which of its combinations have everything that the file is to have.

    `pairs[i]` are the parameters of which test `i` must have each pair. Of the parameters in `shared` the tests must
    have each pair together.
    """
    together = {goal for rows in tests for row in rows for goal in _pairs(row, shared)}
    chosen = [_cover(rows, names, shared, together) for rows, names in zip(tests, pairs, strict=True)]
    for rows, kept in zip(tests, chosen, strict=True):
        for number, row in enumerate(rows):
            if together.intersection(_pairs(row, shared)):
                together.difference_update(_pairs(row, shared))
                kept.append(number)
    return [sorted(kept) for kept in chosen]


def _cover(rows: Sequence[Row], pairs: Collection[str], shared: Collection[str], together: set[Goal]) -> list[int]:
    """Choose combinations of one test, and take from `together` what they have of it."""
    goals = [{*((each,) for each in row.items()), *_pairs(row, pairs)} for row in rows]
    missing = set().union(*goals)
    used: Counter[Goal] = Counter()
    chosen = []
    while missing:
        # Of those that add as much, the one whose values were used least: values of one parameter meet others' in turn.
        best = max(
            range(len(rows)),
            key=lambda i: (
                len(goals[i] & missing),
                len(together.intersection(_pairs(rows[i], shared))),
                -sum(used[goal] for goal in _pairs(rows[i], rows[i])),
                -i,
            ),
        )
        chosen.append(best)
        missing -= goals[best]
        together.difference_update(_pairs(rows[best], shared))
        used.update(_pairs(rows[best], rows[best]))
    return chosen


def _pairs(row: Row, names: Collection[str]) -> list[Goal]:
    return list(itertools.combinations(sorted((name, row[name]) for name in row if name in names), 2))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what is not needed; what is long or needs a GPU by itself is left as it is, and counts nothing."""
    files: dict[Any, dict[Any, list[pytest.Function]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not _is_by_itself(item):
            of_file = files.setdefault(item.path, {})
            of_file.setdefault((item.cls, item.originalname), []).append(item)
    for of_file in files.values():
        tests = list(of_file.values())
        rows = [[_row(item) for item in test] for test in tests]
        shared = {name for test in tests for name in _fixtures(test[0])}
        pairs = [_named_pairs(test[0], of_test[0]) for test, of_test in zip(tests, rows, strict=True)]
        chosen = covering(rows, pairs=pairs, shared=shared)
        for test, kept in zip(tests, chosen, strict=True):
            for number in set(range(len(test))).difference(kept):
                test[number].add_marker(pytest.mark.long)


def _is_by_itself(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("long", "gpu", "skip"))


def _row(item: pytest.Function) -> Row:
    values = item.callspec.params
    row: dict[str, Hashable] = {
        ",".join(names): tuple(id(values[name]) for name in names) for names in _listed_together(item)
    }
    row.update({name: item.callspec.indices[name] for name in _fixtures(item)})
    return row


def _listed_together(item: pytest.Item) -> list[list[str]]:
    """Return the names of the parameters of each mark `parametrize`."""
    marks = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in item.iter_markers("parametrize")]
    return [[name.strip() for name in mark.split(",")] if isinstance(mark, str) else [*mark] for mark in marks]


def _fixtures(item: pytest.Function) -> set[str]:
    return set(item.callspec.params).difference(*_listed_together(item))


def _named_pairs(item: pytest.Function, row: Row) -> set[str]:
    """Return the parameters of which the test is to have each pair, as the keys of its rows."""
    mark = item.get_closest_marker("pairs")
    if mark is None:
        return set()
    keys = {name: key for key in row for name in key.split(",")}
    unknown = [name for name in mark.args if name not in keys]
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: `pairs` names {', '.join(unknown)}, which are no parameters of it")
    return {keys[name] for name in mark.args or keys}
