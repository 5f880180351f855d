"""A unit by itself: gather, show, free, reduce, and come back to rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatparam_comm import Collectives, Precision, Residency, SingleCollectives, Topology
from flatparam_core.testing import check_invariants
from flatparam_runtime import EventLog, Phase, Unit, UnitPlan, observe, shard_module, unit_of, units_in

from .models import WIDTH, Block, Stack, batch
from .wires import Wire, WiredCollectives
from .worlds import check_at_rest, is_part_of_shard, run, seeded, sharded, storage_nbytes


def one(collectives: Collectives | None = None, **plan: object) -> tuple[Block, Unit]:
    module = sharded(Block, collectives or SingleCollectives(), **plan)
    unit = unit_of(module)
    assert unit is not None
    return module, unit


def test_filling_and_showing_are_two_steps(ranks: int, use_orig_params: bool) -> None:
    """``begin_unshard`` takes memory and starts the gather; only ``finish_unshard`` changes what the module shows."""

    def steps(collectives: Collectives) -> None:
        module, unit = one(collectives, use_orig_params=use_orig_params)
        assert unit.residency is Residency.SHARDED
        unit.begin_unshard()
        assert unit.residency is Residency.UNSHARDING
        assert storage_nbytes(unit.handles[0].buffer.tensor) == unit.unsharded_nbytes
        assert is_part_of_shard(module.up.weight, unit)
        unit.finish_unshard()
        assert unit.residency is Residency.UNSHARDED
        assert torch.equal(module.up.weight, seeded(Block).up.weight)
        unit.reshard()
        check_at_rest(module)

    run(ranks, steps)


def test_what_is_held_is_not_stale(use_orig_params: bool) -> None:
    """Parameters that a forward pass has kept are gathered anew for a caller if the shards have changed since."""
    module, unit = one(use_orig_params=use_orig_params, free_after_forward=False)
    module(batch(0))
    assert unit.residency is Residency.UNSHARDED
    with torch.no_grad():
        unit.handles[0].flat_param.mul_(2)
    unit.hold()
    unit.finish_unshard()
    assert torch.equal(module.up.weight, 2 * seeded(Block).up.weight)


def test_calling_again_changes_nothing() -> None:
    """A second call of each of the three does nothing: no second gather, no second event."""
    wire = Wire()
    module, unit = one(WiredCollectives(SingleCollectives(), wire))
    log = EventLog()
    with observe(module, log):
        unit.finish_unshard()
        unit.reshard()
        for _ in range(2):
            unit.begin_unshard()
        for _ in range(2):
            unit.unshard()
        for _ in range(2):
            unit.reshard()
    assert log.lines() == ["unshard Block", "use Block", "reshard Block"]
    assert wire.lines() == ["begin all_gather Block", "wait all_gather Block"]


def test_freeing_waits_for_the_gather() -> None:
    """A gather that is not needed any more is waited for before its memory goes."""
    wire = Wire()
    module, unit = one(WiredCollectives(SingleCollectives(), wire))
    unit.begin_unshard()
    unit.reshard()
    assert wire.lines() == ["begin all_gather Block", "wait all_gather Block"]
    check_at_rest(module)


def test_one_gather_for_each_flat_parameter() -> None:
    """Dtypes, and trainable and frozen parameters, lie in flat parameters of their own; a unit moves them together."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
            self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.free = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.free(self.fixed(self.narrow(x.bfloat16()).float()))
            return out

    wire = Wire()
    module = sharded(Mixed, WiredCollectives(SingleCollectives(), wire))
    (unit,) = units_in(module)
    assert len(unit.handles) == 3
    assert unit.unsharded_nbytes == 20 * (2 + 4 + 4)
    log = EventLog()
    with observe(module, log):
        module(batch()).sum().backward()
    counts = {op: sum(entry[:2] == ("begin", op) for entry in wire.log) for op in ("all_gather", "reduce_scatter")}
    assert counts == {"all_gather": 3, "reduce_scatter": 2}
    assert [event.nbytes for event in log.events if event.kind == "reduce"] == [20 * (2 + 4)]
    assert {handle.residency for handle in unit.handles} == {Residency.SHARDED}
    check_at_rest(module)


def test_precision_is_that_of_the_plan(ranks: int) -> None:
    """Full parameters are in the compute dtype, sums in the reduction dtype, shards and ``.grad`` in their own."""

    def steps(collectives: Collectives) -> None:
        precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
        module, unit = one(collectives, precision=precision)
        handle = unit.handles[0]
        seen = []
        module.up.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
        module(batch().bfloat16()).float().sum().backward()
        assert seen == [torch.bfloat16]
        assert handle.gradients.buffer.tensor.dtype is torch.float64
        assert handle.flat_param.dtype is torch.float32
        assert handle.flat_param.grad is not None
        assert handle.flat_param.grad.dtype is torch.float32
        check_at_rest(module)

    run(ranks, steps)


@pytest.mark.pairs
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.INSPECTING, Phase.REDUCING])
@pytest.mark.parametrize("stage", ["begun", "finished", "at rest"])
def test_reset_brings_it_to_rest_from_anywhere(phase: Phase, stage: str) -> None:
    """``reset`` frees and idles a unit from every phase and residency, and leaves the shard as it is."""
    module, unit = one()
    shard = unit.handles[0].flat_param.detach().clone()
    # The gather makes the leaves.
    unit.unshard()
    unit.reshard()
    unit.phase = phase
    if stage != "at rest":
        unit.begin_unshard()
    if stage == "finished":
        unit.finish_unshard()
        module.up.weight.grad = torch.ones(WIDTH, WIDTH)
        unit.handles[0].deposit(0)
        # An interrupt came before the deposit of the gradient.
        module.up.bias.grad = torch.ones(WIDTH)
    unit.reset(drop_gradients=True)
    check_at_rest(module)
    assert torch.equal(unit.handles[0].flat_param, shard)


def test_reset_may_keep_what_was_collected() -> None:
    """A failed forward forgets nothing of what earlier backwards collected."""
    module, unit = one()
    unit.unshard()
    module.up.weight.grad = torch.ones(WIDTH, WIDTH)
    handle = unit.handles[0]
    handle.deposit(0)
    unit.reset(drop_gradients=False)
    assert not handle.gradients.is_empty
    assert float(handle.gradients.slot(0).sum()) == WIDTH * WIDTH
    unit.reset(drop_gradients=True)
    assert handle.gradients.is_empty


def test_a_reduction_owns_its_tensors_until_it_is_settled(ranks: int) -> None:
    """From its beginning to the end of the first sum the flat gradient is allocated; settling gives the mean."""

    def steps(collectives: Collectives) -> None:
        module, unit = one(collectives)
        handle = unit.handles[0]
        unit.unshard()
        module.up.bias.grad = torch.full((WIDTH,), 2.0)
        averaging = unit.reducer.averaging(unit.handles)
        handle.deposit(1, divisor=averaging.before)
        unit.reshard()
        reduction = unit.begin_reduce([handle], averaging)
        assert unit.phase is Phase.REDUCING
        # With one rank the flat gradient becomes `.grad`.
        assert (handle.gradients.buffer.held_nbytes > 0) == (ranks > 1)
        reduction.replicate()
        assert not reduction.is_under_way
        assert handle.gradients.buffer.held_nbytes == 0
        assert unit.phase is Phase.REDUCING
        (reduced,) = reduction.settle()
        assert reduced.handle is handle
        assert list(reduced.arrived) == [0, 1, 0]
        span = handle.layout.shard_span(handle.rank)
        mean = torch.zeros(handle.layout.numel)
        mean[handle.layout.slots[1].span.as_slice()] = 2.0
        assert torch.equal(reduced.gradient, mean[span.as_slice()])
        check_invariants(handle)

    run(ranks, steps)


def test_repr_shows_the_state() -> None:
    """``repr`` has the name, the phase and the residency."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0"])
    module(batch())
    said = repr(unit_of(module))
    assert "(root)" in said
    assert "IDLE" in said
    assert "UNSHARDED" in said


def test_a_unit_is_on_the_device_it_is_given() -> None:
    """``device=`` is the device of shards and full parameters, whatever device the module was on."""
    module = Block()
    unit = shard_module(module, UnitPlan(Topology(SingleCollectives())), device=torch.device("cpu", 0))
    assert unit.handles[0].flat_param.device.type == "cpu"
    assert unit.handles[0].buffer.tensor.device.type == "cpu"


def test_fields_are_fixed() -> None:
    """No attribute can be added to a unit: all of its attributes are declared."""
    _, unit = one()
    with pytest.raises(AttributeError):
        unit.something_else = 1  # type: ignore[attr-defined]  # that is the test
