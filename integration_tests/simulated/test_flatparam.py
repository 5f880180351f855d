"""flatparam on the simulated device: no findings, and the numbers of the CPU, bit for bit."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from integration_tests.simulated.programs import Program, run
from integration_tests.simulated.worlds import World, on_simulated

pytestmark = pytest.mark.processes

FAMILIES: Final = {
    "strategies": [
        Program(),
        Program(strategy="grad_op", prefetch="forward", use_orig_params=True),
        Program(strategy="none", clip=True),
        Program(strategy="none", use_orig_params=True, micro_batches=2, no_sync=True),
        Program(strategy="hybrid", micro_batches=2, prefetch="late"),
        Program(strategy="hybrid", use_orig_params=True, twice=True),
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
    "sums": [
        Program(precision="bfloat16", reduce_precision="bfloat16"),
        Program(precision="bfloat16", reduce_precision="bfloat16", strategy="none", use_orig_params=True),
        Program(precision="bfloat16", reduce_precision="bfloat16", strategy="hybrid"),
        Program(precision="bfloat16", reduce_precision="bfloat16", strategy="hybrid_of_one"),
        Program(precision="bfloat16", reduce_precision="bfloat16", divide_factor=3.0, micro_batches=2),
        Program(divide_factor=4.0, strategy="grad_op"),
        Program(divide_factor=4.0, strategy="none"),
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
        Program(scenario="summoned", use_orig_params=True, strategy="none"),
        Program(scenario="saved"),
        Program(scenario="saved", offload=True, optimizer="adam"),
        Program(scenario="checkpointed_asynchronously", optimizer="adam"),
        Program(scenario="checkpointed_asynchronously", offload=True),
        Program(scenario="scaled"),
    ],
}
"""Programs, each family of which runs in one world."""

MENDED: Final[dict[str, Program]] = {
    "a root without parameters of its own": Program(wrap_everything=True, evaluate=True),
    "the norm of offloaded gradients": Program(offload=True, clip=True),
    "accumulating what is copied to the host": Program(offload=True, micro_batches=2),
    "adding to gradients on the host": Program(offload=True, scenario="gradients_kept"),
    "an optimizer in the backward pass, on the host": Program(
        offload=True, scenario="optimizer_in_backward", use_orig_params=True
    ),
    "scaling what is offloaded": Program(offload=True, scenario="scaled"),
    "accumulators of another stream": Program(scenario="first_step_on_side_stream", twice=True),
    "writing parameters that are still copied": Program(offload=True, scenario="evaluated", ranks=1),
    "inputs that come from the device": Program(scenario="computed_on_the_host"),
    "a backward pass that has failed": Program(scenario="interrupted"),
    "a divisor in a world of one": Program(divide_factor=4.0, ranks=1),
}
"""What used to race, to crash or to compute other numbers, and is named after it."""

LONG: Final = ("strategies", "sums", "looking")
"""The families of which each run of the tests has two programs."""

SHORT: Final = {"some of the long ones": [FAMILIES[family][at] for family in LONG for at in (2, 3)]}


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.long) if each in LONG else each for each in (*FAMILIES, *SHORT)],
)
def test_flatparam_has_no_findings(family: str) -> None:
    """Each program of the family has no findings, and computes on the device what it computes on the CPU."""
    _check((FAMILIES | SHORT)[family])


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_mended(ranks: int) -> None:
    """Each program has no findings, and computes on the device what it computes on the CPU."""
    _check([program for program in MENDED.values() if program.ranks == ranks])


def _check(programs: list[Program]) -> None:
    for outcomes in on_simulated(programs[0].ranks, run, programs):
        assert {o.program.name: [str(f) for f in o.findings] for o in outcomes if o.findings} == {}
        assert {o.program.name: o.differences for o in outcomes if any(o.differences.values())} == {}


class Odd(nn.Module):
    """A scalar, as CLIP's, a table as Swin's, and a layer of odd sizes: what puts all behind it at odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.table = nn.Parameter(torch.randn(729, 3))
        self.layer = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x) + self.table[:5, 0]


def places(world: World, way: str, precision: str) -> set[int]:
    """Where the full parameters, their gradients and all ranks' shards begin: bytes modulo 16, in a training step."""
    import flatparam
    from flatparam_runtime import units_in

    dtypes = {"": (), "compute": (torch.bfloat16,), "reduce": (None, torch.bfloat16)}[precision]
    torch.manual_seed(0)
    if way == "fully_shard":
        policy = flatparam.MixedPrecisionPolicy(*dtypes)
        model: Any = flatparam.fully_shard(Odd().to(world.device), mesh=world.group, mp_policy=policy)
    else:
        model = flatparam.FullyShardedDataParallel(
            Odd(),
            world.group,
            device_id=world.device,
            use_orig_params=way == "originals",
            mixed_precision=flatparam.MixedPrecision(*dtypes),
        )
    (handle,) = units_in(model)[0].handles
    seen: set[int] = set()

    def look(module: nn.Module, *_: object) -> None:
        start = handle.buffer.tensor.data_ptr()
        seen.update((leaf.data_ptr() - start) % 16 for leaf in handle.leaves)

    units_in(model)[0].module.register_forward_pre_hook(look)
    model(torch.randn(4, 24, device=world.device)).float().square().mean().backward()
    starts = [slot.span.start for slot in handle.layout.slots]
    starts += [handle.layout.shard_span(each).start for each in range(world.size)]
    for dtype in (handle.flat_param.dtype, handle.buffer.tensor.dtype, handle.gradients.dtype):
        seen.update(start * dtype.itemsize % 16 for start in starts)
    return seen


@pytest.mark.parametrize("precision", ["", "compute", "reduce"])
@pytest.mark.parametrize("way", ["flat", "originals", "fully_shard"])
def test_parameters_and_shards_are_aligned(way: str, precision: str) -> None:
    """Each begins at a multiple of 16 bytes in each dtype that it is held in, behind a scalar, too."""
    assert on_simulated(3, places, way, precision) == [{0}] * 3
