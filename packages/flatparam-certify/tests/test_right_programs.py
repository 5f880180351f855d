"""Right programs, drawn at random, are not called wrong: a hundred of them, of which eight are short."""

from __future__ import annotations

import drawn
import pytest

from flatparam_certify import certify

SHORT = 3
ALL = 100


def raise_if_wrong(seed: int) -> None:
    program = drawn.Program.of(seed)
    found = certify(program.case, program.engine, program.mesh, wrap=program.wrap, **program.settings)
    assert found.is_right, f"{program}\n{found.table()}"
    assert not any(run.skipped for run in found.runs), f"{program}\n{found.table()}"
    told = {name for run in found.runs for name in run.agreements}
    assert told == set(found.parameters), program


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(SHORT))
def test_a_right_program_is_right(seed: int) -> None:
    """Every parameter of the program agrees, in every setting, and none is skipped."""
    raise_if_wrong(seed)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("seed", range(SHORT, ALL))
def test_a_hundred_right_programs_are_right(seed: int) -> None:
    """No alarm is false: so for other programs, engines, meshes and settings."""
    raise_if_wrong(seed)
