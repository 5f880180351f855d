"""flatparam on the simulated device: no findings, and the numbers of the CPU, bit for bit."""

from __future__ import annotations

from typing import Final

import pytest

from integration_tests.simulated.programs import Program, run
from integration_tests.simulated.worlds import on_simulated

pytestmark = pytest.mark.processes

FAMILIES: Final = {
    "strategies": [
        Program(),
        Program(strategy="grad_op", prefetch="forward", use_orig_params=True),
        Program(strategy="none", clip=True),
        Program(strategy="hybrid", micro_batches=2, prefetch="late"),
        Program(strategy="hybrid_of_one", evaluate=True),
    ],
    "training": [
        Program(precision="bfloat16", optimizer="adam", evaluate=True),
        Program(precision="float16", prefetch="forward", clip=True),
        Program(micro_batches=2, no_sync=True, clip=True, optimizer="fused adam"),
        Program(strategy="grad_op", micro_batches=2, precision="bfloat16", use_orig_params=True),
        Program(checkpointing="reentrant", prefetch="forward"),
        Program(checkpointing="not reentrant", micro_batches=2, twice=True),
    ],
    "offload": [
        Program(offload=True),
        Program(offload=True, prefetch="forward", precision="bfloat16", optimizer="adam"),
        Program(offload=True, strategy="hybrid", use_orig_params=True, evaluate=True),
        Program(offload=True, micro_batches=2, no_sync=True),
    ],
    "streams": [
        Program(scenario="forward_on_side_stream", prefetch="forward"),
        Program(scenario="optimizer_in_backward", use_orig_params=True),
        Program(scenario="gradients_kept"),
    ],
    "looking": [
        Program(scenario="evaluated"),
        Program(scenario="summoned"),
        Program(scenario="summoned", use_orig_params=True),
        Program(scenario="saved"),
        Program(scenario="saved", offload=True, optimizer="adam"),
        Program(scenario="checkpointed_asynchronously", optimizer="adam"),
        Program(scenario="checkpointed_asynchronously", offload=True),
        Program(scenario="scaled"),
    ],
}
"""Programs, each family of which runs in one world."""

KNOWN: Final[dict[Program, str]] = {
    Program(
        wrap_everything=True, evaluate=True
    ): "a root without parameters of its own reduces a tensor of the CPU",
    Program(offload=True, clip=True): "clip_grad_norm_ reduces a tensor of the CPU",
    Program(offload=True, micro_batches=2): "the host adds gradients that have not landed",
    Program(offload=True, scenario="gradients_kept"): "the host adds gradients that have not landed",
    Program(
        offload=True, scenario="optimizer_in_backward", use_orig_params=True
    ): "likewise, in the optimizer",
    Program(offload=True, scenario="scaled"): "the host reads inv_scale and found_inf, which have not landed",
    Program(
        scenario="first_step_on_side_stream", twice=True
    ): "accumulators keep the stream they are made on",
    Program(offload=True, scenario="evaluated", ranks=1): "the host writes parameters that are still copied",
}
"""What fails, and why."""

SOMETIMES: Final[dict[Program, str]] = {
    Program(
        scenario="interrupted"
    ): "a backward pass that has failed can count as alive: then the ranks go apart",
}
"""What fails now and then, and may hang."""


@pytest.mark.parametrize("family", FAMILIES)
def test_flatparam_has_no_findings(family: str) -> None:
    """Each program of the family has no findings, and computes on the device what it computes on the CPU."""
    _check(FAMILIES[family])


@pytest.mark.parametrize("program", KNOWN, ids=lambda program: program.name)
@pytest.mark.xfail(strict=True)
def test_known_failures(program: Program) -> None:
    """What fails for a known reason fails; once it does not, it belongs to a family."""
    _check([program])


@pytest.mark.parametrize("program", SOMETIMES, ids=lambda program: program.name)
@pytest.mark.xfail(run=False)
def test_failures_now_and_then(program: Program) -> None:
    """What fails only sometimes is not tried until it is mended."""
    _check([program])


def _check(programs: list[Program]) -> None:
    for outcomes in on_simulated(programs[0].ranks, run, programs):
        assert {o.program.name: [str(f) for f in o.findings] for o in outcomes if o.findings} == {}
        assert {o.program.name: o.differences for o in outcomes if any(o.differences.values())} == {}
