"""What flatparam hides behind computing, beside FSDP1 on the same device, and how often the host waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from flatparam_core import all_thresholds
from flatparam_simdev.replay import Costs, Step, replay
from integration_tests.simulated.overlap import STEP
from integration_tests.simulated.programs import Program, run
from integration_tests.simulated.worlds import World, on_simulated

pytestmark = pytest.mark.processes

BLOCKS: Final = 6
ROWS: Final[dict[str, dict[str, Any]]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "grad_op"},
    "NO_SHARD": {"strategy": "none"},
    "hybrid": {"strategy": "hybrid_of_one"},
    "bfloat16": {"precision": "bfloat16"},
    "checkpointing": {"checkpointing": "not reentrant"},
    "accumulation": {"micro_batches": 2, "no_sync": True},
    "offload": {"offload": True},
    "wide": {"width": 192},
    "wide, bfloat16": {"width": 192, "precision": "bfloat16", "use_orig_params": True},
}
NOT_FSDP2: Final = ("NO_SHARD", "hybrid")
COSTS: Final = Costs(communication=100.0)


LONG: Final = ("SHARD_GRAD_OP", "NO_SHARD", "hybrid", "checkpointing", "accumulation")
"""The rows that are not in each run of the tests."""


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> dict[tuple[str, str], Step]:
    """The third step of each program, of all rows that are run with the test's."""
    return replayed(request.node.callspec.params["row"] in LONG if hasattr(request.node, "callspec") else False)


@functools.cache
def replayed(long: bool) -> dict[tuple[str, str], Step]:
    """The third step of each program in a replay; a matrix product costs 100, and so does a collective or a copy."""
    keys = [(library, row) for row in ROWS for library in ("flatparam", "fsdp1", "fsdp2") if (row in LONG) is long]
    keys = [(library, row) for library, row in keys if library != "fsdp2" or row not in NOT_FSDP2]
    outcomes = on_simulated(2, run, [Program(library, blocks=BLOCKS, **ROWS[row]) for library, row in keys])[0]
    steps = [replay(each.log, COSTS, host_call=0.0).step(STEP) for each in outcomes]
    return dict(zip(keys, steps, strict=True))


@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.long) if row in LONG else row for row in ROWS])
def test_a_step_is_at_most_as_long_as_fsdp1s_and_fsdp2s(steps: dict[tuple[str, str], Step], row: str) -> None:
    """flatparam hides what they hide, within 2 % of the lower bound, in no more memory than the allocator has for FSDP1."""
    ours, fsdp1, fsdp2 = (steps.get((library, row)) for library in ("flatparam", "fsdp1", "fsdp2"))
    assert ours is not None
    assert fsdp1 is not None
    # FSDP1 divides the gradients of each unit before the sum, beside the computation; ours one kernel divides all at the
    # end, a shard of each.
    assert ours.length <= fsdp1.length + COSTS.kernel
    assert ours.length <= 1.02 * ours.lower_bound
    assert ours.peak_of_pools_nbytes <= fsdp1.peak_of_pools_nbytes
    assert sum(ours.waits_of_host.values()) == (1 if row == "offload" else 0)
    # With NO_SHARD the flat form copies each unit's parameters, where FSDP1 has views of them: `parameters()` may list
    # both, and a change of all would be made twice.
    copies = BLOCKS + 1 if row == "NO_SHARD" else 0
    assert sum(ours.kernels.values()) <= sum(fsdp1.kernels.values()) + copies
    if fsdp2 is not None:
        assert ours.length <= fsdp2.length


def test_collectives_of_two_meshes_are_hidden_as_those_of_one() -> None:
    """With every other block on halves of the ranks a step is as long as with all on one group, without a race.

    The bits are those of the same program on the CPU.
    """
    programs = [Program(ranks=4, blocks=BLOCKS), Program(strategy="experts", ranks=4, blocks=BLOCKS)]
    for one, two in on_simulated(4, run, programs):
        steps = [replay(each.log, COSTS, host_call=0.0).step(STEP) for each in (one, two)]
        assert steps[1].length == steps[0].length <= 1.02 * steps[0].lower_bound
        assert sum(steps[1].waits_of_host.values()) == 0
        assert two.findings == []
        assert set(two.differences.values()) == {0.0}


@pytest.mark.parametrize("row", ["wide", "wide, bfloat16"])
def test_large_gradients_start_as_few_kernels_as_small_ones(steps: dict[tuple[str, str], Step], row: str) -> None:
    """The gradients of a block with matrices of 288 KiB are copied by one kernel, as those of one with 2 KiB are."""
    narrow = steps["flatparam", "bfloat16" if "bfloat16" in row else "FULL_SHARD"]
    found = steps["flatparam", row]
    for phase in ("step 2 forward 0", "step 2 backward 0"):
        assert found.kernels[phase] == narrow.kernels[phase]


def test_copies_of_offloaded_parameters_are_hidden(steps: dict[tuple[str, str], Step]) -> None:
    """Of the copies and gathers only the first of each is not hidden in the forward pass."""
    forward = steps["flatparam", "offload"].communication_in("forward")
    # a copy and a gather of the root, and a copy of the first block
    assert forward.total - forward.hidden <= 300


class Chain(nn.Module):
    """Layers of one MiB, which are called in an order of their own."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in order)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.layers[number](x)
        return x


def gathered_ahead(
    world: World, nbytes: int | None, forward_prefetch: int, order: Sequence[int] = range(8)
) -> list[list[int]]:
    """For each call of a layer in two forward passes: how many other layers are on their way when it computes."""
    from flatparam import FullyShardedDataParallel as FSDP
    from flatparam.wrap import ModuleWrapPolicy
    from flatparam_runtime import Phase, units_in

    (threshold,) = (each for each in all_thresholds() if each.name == "runtime.prefetch_nbytes")
    chain = Chain(order)
    model = FSDP(
        chain,
        process_group=world.group,
        device_id=world.device,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        forward_prefetch=forward_prefetch,  # type: ignore[arg-type]  # a number of units, beyond FSDP1
    )
    units = [unit for unit in units_in(model) if unit.handles]
    seen: list[list[int]] = []

    def look(module: nn.Module, args: object) -> None:
        seen[-1].append(sum(u.phase is Phase.IDLE and u.residency.name == "UNSHARDING" for u in units))

    for layer in chain.layers:
        layer.module.register_forward_pre_hook(look)  # type: ignore[union-attr, operator]
    with threshold.set_to(threshold.default if nbytes is None else nbytes):
        for _ in range(2):
            seen.append([])
            model(torch.ones(2, 512, device=world.device)).sum().backward()
    return seen


@pytest.mark.parametrize(
    ("nbytes", "forward_prefetch", "ahead"),
    [(1, 0, 1), (None, 0, 4), (2**21, 0, 2), (2**40, 0, 8), (1, 3, 3)],
    ids=["one", "four MiB", "two MiB", "all", "as many as asked for"],
)
def test_units_are_gathered_ahead_by_bytes(nbytes: int | None, forward_prefetch: int, ahead: int) -> None:
    """At least one unit is on its way while another computes, and so many as have the threshold's bytes, in any pass."""
    expected = [min(ahead, 7 - layer) for layer in range(8)]
    for seen in on_simulated(2, gathered_ahead, nbytes, forward_prefetch):
        assert seen == [expected, expected]


def test_another_order_than_that_of_registration() -> None:
    """In the first pass no more is gathered ahead once layers are called in another order; the second knows it."""
    order = (0, 5, 2, 7, 4, 1, 6, 3)
    for first, second in on_simulated(2, gathered_ahead, 1, 0, order):
        assert first == [1, 1, 1, 1, 1, 0, 0, 0]  # layer 1, which waits until it is called
        assert second == [1, 1, 1, 1, 1, 1, 1, 0]


def train_unlike_others(world: World) -> Sequence[str]:
    """What is raised in each of three steps; before the second, rank 1 freezes a parameter."""
    from flatparam import FullyShardedDataParallel as FSDP

    model = FSDP(nn.Linear(4, 4), process_group=world.group, device_id=world.device, use_orig_params=True)
    told = []
    for step in range(3):
        if step == 1 and world.rank == 1:
            model.module.bias.requires_grad_(False)
        try:
            model(torch.ones(2, 4, device=world.device)).sum().backward()
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_ranks_that_differ_are_told_at_the_next_pass() -> None:
    """What the ranks say at the end of a step is looked at when the next begins, on every rank."""
    for rank, (first, second, third) in enumerate(on_simulated(2, train_unlike_others)):
        assert (first, second) == ("", "")
        assert f"rank {rank}: parameter 'bias' of unit '(root)' is not trained on all ranks" in third
