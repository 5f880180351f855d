"""torch's own FSDP1 and FSDP2 on the simulated device: what is known to be right is found to be right."""

from __future__ import annotations

import pytest

from integration_tests.simulated.programs import Program, run
from integration_tests.simulated.worlds import on_simulated

pytestmark = pytest.mark.processes

FSDP1 = [
    Program("fsdp1"),
    Program("fsdp1", strategy="grad_op", prefetch="forward"),
    Program("fsdp1", strategy="none", clip=True),
    Program("fsdp1", strategy="hybrid", micro_batches=2),
    Program("fsdp1", strategy="hybrid_of_one", micro_batches=2, no_sync=True),
    Program("fsdp1", precision="bfloat16", optimizer="adam", evaluate=True),
    Program("fsdp1", use_orig_params=True, wrap_everything=True, prefetch="late"),
    Program("fsdp1", offload=True),
    Program("fsdp1", checkpointing="not reentrant"),
    Program("fsdp1", checkpointing="reentrant", optimizer="fused adam"),
]

FSDP2 = [
    Program("fsdp2"),
    Program("fsdp2", strategy="grad_op", clip=True, evaluate=True),
    Program("fsdp2", precision="bfloat16", optimizer="adam"),
    Program("fsdp2", micro_batches=2, no_sync=True, wrap_everything=True),
    Program("fsdp2", offload=True),
    Program("fsdp2", checkpointing="not reentrant"),
    Program("fsdp2", checkpointing="reentrant", optimizer="fused adam"),
]


@pytest.mark.parametrize(
    "programs", [pytest.param(FSDP1, id="FSDP1", marks=pytest.mark.long), pytest.param(FSDP2, id="FSDP2")]
)
def test_controls_have_no_findings(programs: list[Program]) -> None:
    """Nothing is found in torch's own libraries, and they compute on the device what they compute on the CPU."""
    for outcomes in on_simulated(2, run, programs):
        assert {o.program.name: [str(f) for f in o.findings] for o in outcomes if o.findings} == {}
        assert {o.program.name: o.differences for o in outcomes if any(o.differences.values())} == {}
