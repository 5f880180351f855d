"""The table of a unit's phases."""

import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatparam_comm import FlatParamError, SingleCollectives, Topology
from flatparam_core import IllegalStepError
from flatparam_runtime import Phase, UnitPlan, shard_module
from flatparam_runtime.unit.phases import PHASES

LEGAL = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.IDLE, Phase.REDUCING),
    (Phase.IDLE, Phase.INSPECTING),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.BACKWARD, Phase.IDLE),
    (Phase.BACKWARD, Phase.REDUCING),
    (Phase.REDUCING, Phase.IDLE),
    (Phase.INSPECTING, Phase.IDLE),
}
ILLEGAL = sorted({(a, b) for a in Phase for b in Phase} - LEGAL, key=lambda step: (step[0].name, step[1].name))


@each_row(("current", "target"), ILLEGAL, ids=[f"{a.name}-{b.name}" for a, b in ILLEGAL])
def test_an_illegal_step_names_both_ends(current: Phase, target: Phase) -> None:
    """Every step that is not in the table raises an error with the unit, both ends, and the legal steps."""
    with pytest.raises(IllegalStepError) as caught:
        PHASES.move(current, target, who="unit 'blocks.3'")
    said = str(caught.value)
    assert "unit 'blocks.3'" in said
    assert f"from {current.name} to {target.name}" in said
    for legal in Phase:
        if (current, legal) in LEGAL:
            assert legal.name in said.split(";")[1]


@given(st.sampled_from(sorted(LEGAL, key=lambda step: (step[0].name, step[1].name))))
def test_a_legal_step_arrives(step: tuple[Phase, Phase]) -> None:
    """A step of the table returns its target."""
    assert PHASES.move(*step, who="unit") is step[1]


def test_the_table_has_a_row_for_every_phase() -> None:
    """No phase is without a row, and from each of them a unit can come back to rest."""
    assert set(PHASES.steps) == set(Phase)
    for phase in set(Phase) - {Phase.IDLE}:
        assert Phase.IDLE in PHASES.steps[phase]


def test_a_unit_moves_by_the_table() -> None:
    """A unit refuses an illegal step with its own name, and stays where it was."""
    unit = shard_module(nn.Linear(2, 2), UnitPlan(Topology(SingleCollectives())))
    unit.move(Phase.FORWARD)
    with pytest.raises(FlatParamError, match="unit 'Linear': phase cannot go from FORWARD to INSPECTING"):
        unit.move(Phase.INSPECTING)
    assert unit.phase is Phase.FORWARD
    assert "FORWARD" in repr(unit)
    unit.move(Phase.IDLE)
    assert torch.isfinite(unit.handles[0].flat_param).all()
