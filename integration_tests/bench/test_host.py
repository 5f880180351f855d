"""The benchmark of what a unit costs the host: a world of one rank and others that are not there."""

from __future__ import annotations

import shutil

import pytest
from bench.absent import CONTENDERS, world
from bench.counts import Operators, calls_of
from bench.growth import optimizer_steps, prepared
from bench.host import CONTENDERS as MEASURED_ON_HOST
from bench.host import PARTS, lines, on_cpu
from bench.instructions import measure
from bench.training import Setting
from bench.workloads import stack

from flatparam_comm import Collectives
from flatparam_comm.testing import PATIENCE, run_processes

pytestmark = pytest.mark.processes

OURS = [
    name if name in ("flatparam", "flatparam, DTensors") else pytest.param(name, marks=pytest.mark.long)
    for name in CONTENDERS
    if name.startswith("flatparam")
]


def counts(group: Collectives, name: str) -> list[tuple[int, int, int]]:
    """Operators, collectives and calls of a step, in a world of 8 and in one of 512."""
    found = []
    for size in (8, 8, 512):
        with world(size) as ranks:
            training = CONTENDERS[name](Setting(stack(3, width=5, depth=1), False, ranks))
            training.step()
            with Operators(ranks) as operators:
                training.step()
            found.append((operators.others, operators.collectives, calls_of(training.step)))
            del training
    return found[1:]


@pytest.mark.parametrize("name", OURS)
def test_a_step_does_not_grow_with_the_world(name: str) -> None:
    """Operators, collectives and calls are as many in a world of 512 as in one of 8; both pad every unit."""
    ((of_8, of_512),) = run_processes(1, counts, name)
    assert of_8 == of_512


def built(group: Collectives, name: str) -> list[int]:
    """Calls of the construction of 4, 8 and 12 units."""
    with world(8) as ranks:
        settings = [Setting(stack(units, width=5, depth=2), False, ranks) for units in (4, 4, 8, 12)]
        return [calls_of(prepared(CONTENDERS[name], setting)) for setting in settings][1:]


@pytest.mark.parametrize("name", OURS)
def test_construction_is_linear(name: str) -> None:
    """Four units more cost as many calls whether there are four already, or eight."""
    ((of_4, of_8, of_12),) = run_processes(1, built, name)
    assert of_8 - of_4 == of_12 - of_8 > 0


def test_optimizers_take_part() -> None:
    """Each contender of the optimizer's table is stepped."""
    (found,) = run_processes(1, optimizer_steps, 8, 2)
    assert {"plain", "one flat tensor", "flatparam, original", "torch FSDP2"} <= set(found)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(4 * PATIENCE)  # under valgrind
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instructions_are_counted() -> None:
    """A unit costs instructions over the plain model, and more with more parameters."""
    found = measure(8, [4, 8], ["flatparam"])["flatparam"]
    assert 0 < found["4"]["pass"] < found["8"]["pass"]


@pytest.mark.long
def test_microseconds() -> None:
    """Everybody takes part, each part of a step takes some time, and the table says how often the reference's."""
    (rows,) = run_processes(1, on_cpu, 4, 0.0)
    assert list(rows) == list(MEASURED_ON_HOST)
    assert all(row[part] > 0 for row in rows.values() for part in PARTS)
    head, *others = lines(rows)
    assert head[-1] == "x torch FSDP1"
    assert [line[0] for line in others] == list(rows)


def test_a_table_of_microseconds_by_hand() -> None:
    """Passes are on top of the plain model's, and an error stands in its row, even the plain model's."""
    plain, twice = ({"forward": f, "backward": f, "update": 9.0} for f in (10.0, 30.0))
    rows = {"plain": plain, "torch FSDP1": twice, "x": plain | {"backward": 30.0}, "y": {"error": "E: a|b"}}
    assert lines(rows)[1:] == [
        ["plain", "10", "10", "9", "0", ""],
        ["torch FSDP1", "30", "30", "9", "40", "1.00"],
        ["x", "10", "30", "9", "20", "0.50"],
        ["y", "failed: E: a\\|b", "", "", "", ""],
    ]
    assert lines({"plain": {"error": "E: no"}, "torch FSDP1": twice})[2][-1] == "1.00"
