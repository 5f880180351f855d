"""The benchmark's account of whose code runs in a step."""

from __future__ import annotations

import pytest
from bench.profiles import ENGINE, OTHERS, profile

from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes


def test_whose_code_runs() -> None:
    """The floor's time is the model's, the engine's and the optimizer's; a sharded model's also that of each layer."""
    found, _ = run_processes(2, profile, "tiny small", ["floor", "flatparam"], 2)
    of_the_floor = {owner for owner, took in found["floor"].items() if took > 0} - {OTHERS}
    assert of_the_floor == {ENGINE, "the optimizer", "modules and kernels of the forward pass"}
    ours = {owner.split(":")[0] for owner, took in found["flatparam"].items() if took > 0}
    assert {"flatparam_core", "flatparam_comm", "flatparam_runtime", "flatparam"} <= ours
