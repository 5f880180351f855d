"""Full parameters outside of forward and backward: they are read, changed, and put back."""

from __future__ import annotations

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamError, SingleCollectives, memory_view
from flatparam_runtime import (
    Phase,
    full_views,
    gather_full,
    inspecting,
    no_sync,
    shown,
    summon_full_params,
    unit_of,
    units_in,
)

from .models import Chain, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    full_parameters,
    is_part_of_shard,
    mean_gradients,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module)).square().mean()
    return out


def model(collectives: Collectives | None = None, *, use_orig_params: bool = False, **more: object) -> Stack:
    return sharded(Stack, collectives or SingleCollectives(), units=BLOCKS, use_orig_params=use_orig_params, **more)


def test_summoned_parameters_are_those_of_the_local_model(
    ranks: int, use_orig_params: bool, device: torch.device
) -> None:
    """Inside, names, order, shapes and values are those of the unsharded module; after it, shards again."""

    def look(collectives: Collectives) -> dict[str, Tensor]:
        module = model(collectives, use_orig_params=use_orig_params, device=device)
        before = list(module.parameters())
        with summon_full_params(module):
            inside = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
            assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in module.parameters())
            assert all(unit.showing.pins == 1 for unit in units_in(module))
        assert all(a is b for a, b in zip(before, module.parameters(), strict=True))
        check_at_rest(module)
        return inside

    local = dict(seeded(Stack).named_parameters())
    for inside in run(ranks, look):
        assert list(inside) == list(local)
        assert all(torch.equal(inside[name], local[name]) for name in local)


@pytest.mark.parametrize("writeback", [True, False])
def test_changes_are_kept_where_asked_for(writeback: bool, ranks: int, use_orig_params: bool) -> None:
    """In-place changes inside are kept with ``writeback``, and dropped without."""

    def change(collectives: Collectives) -> tuple[dict[str, Tensor], Tensor]:
        module = model(collectives, use_orig_params=use_orig_params)
        with summon_full_params(module, writeback=writeback), torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            return full_parameters(module), module(batch())

    local = seeded(Stack)
    if writeback:
        with torch.no_grad():
            for parameter in local.parameters():
                parameter.mul_(0.5)
    for values, output in run(ranks, change):
        assert all(torch.equal(values[name], p) for name, p in local.named_parameters())
        assert torch.equal(output, local(batch()))


def test_each_rank_keeps_its_own_part() -> None:
    """If ranks change their copies differently, each element has the value from the rank that owns it."""

    def change(collectives: Collectives) -> tuple[Tensor, int]:
        module = sharded(lambda: nn.Linear(4, 3, bias=False), collectives)
        with summon_full_params(module), torch.no_grad():
            module.weight.fill_(collectives.rank)
        first = units_in(module)[0].handles[0].layout.fragment(0, 0)
        return full_parameters(module)["weight"], first.in_param.stop

    for weight, first in run(2, change):
        assert 0 < first < 12
        assert weight.flatten().tolist() == [0.0] * first + [1.0] * (12 - first)


def test_without_recursion_only_its_own(use_orig_params: bool) -> None:
    """``recurse=False`` shows the module's own unit; those below it stay sharded."""
    module = model(use_orig_params=use_orig_params)
    with summon_full_params(module, recurse=False):
        assert module.stem.weight.shape == (4, 4)
        inner = unit_of(module.blocks[0])
        assert inner is not None
        assert is_part_of_shard(module.blocks[0].up.weight, inner)
        assert inner.phase is Phase.IDLE
    check_at_rest(module)


def test_without_recursion_below_no_unit() -> None:
    """``recurse=False`` on a module that is no unit shows nothing, and not the first unit that is found below it."""
    module = model()
    with summon_full_params(module.blocks, recurse=False):
        assert module.blocks[0].up.weight.ndim == 1
    with summon_full_params(module.blocks):
        assert module.blocks[0].up.weight.ndim == 2
        assert module.stem.weight.ndim == 1
    check_at_rest(module)


def test_an_exception_inside_restores(use_orig_params: bool, ranks: int) -> None:
    """An exception inside comes out as it is; the module is sharded again, and trains."""

    def step(collectives: Collectives) -> Grads:
        module = model(collectives, use_orig_params=use_orig_params)
        with pytest.raises(ZeroDivisionError), summon_full_params(module):
            raise ZeroDivisionError
        check_at_rest(module)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_contexts_nest() -> None:
    """A second ``summon_full_params`` inside shows the same parameters, and what it changed is kept with the outer one."""
    module = model()
    with summon_full_params(module):
        outer = module.stem.weight
        with summon_full_params(module), torch.no_grad():
            assert module.stem.weight is outer
            module.stem.weight.zero_()
        assert module.stem.weight is outer
        assert module.stem.weight.shape == (4, 4)
    assert not full_parameters(module)["stem.weight"].any()
    check_at_rest(module)


def test_inside_a_forward_it_is_refused() -> None:
    """Inside the root's forward ``summon_full_params`` raises, for the root and for a unit that is not running."""

    class Curious(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for part in (self, self.blocks[1]):
                with pytest.raises(FlatParamError, match=r"forward|FORWARD"), summon_full_params(part):
                    pass
            return super().forward(x)

    module = sharded(Curious, SingleCollectives(), units=BLOCKS)
    loss(module, 0).backward()
    check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))


def test_inside_a_backward_it_is_refused() -> None:
    """Inside the backward pass ``summon_full_params`` raises, for the root and for a unit that is not at it."""
    module = model()
    output = module(batch())
    refused = []

    def look(gradient: Tensor) -> None:
        for part in (module, module.blocks[0]):
            with pytest.raises(FlatParamError, match=r"backward|BACKWARD"), summon_full_params(part):
                pass
            refused.append(part)

    module.blocks[1].register_forward_hook(lambda m, a, out: (out.register_hook(look), None)[1])
    del output
    loss(module, 0).backward()
    assert len(refused) == 2
    check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))


def test_a_pass_inside(ranks: int, use_orig_params: bool) -> None:
    """Forward and backward run inside ``summon_full_params`` on what it shows, and reduce gradients as outside."""

    def local(module: nn.Module, rank: int) -> Tensor:
        with torch.no_grad():
            module.stem.weight.fill_(2.0)
        return loss(module, rank)

    def inside(collectives: Collectives) -> Grads:
        module = model(collectives, use_orig_params=use_orig_params)
        with summon_full_params(module):
            local(module, collectives.rank).backward()
            assert module.stem.weight.shape == (4, 4)
        check_at_rest(module)
        assert (full_parameters(module)["stem.weight"] == 2).all()
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), local, ranks)
    for found in run(ranks, inside):
        check_same(found, expected)


def test_between_forward_and_backward(free_after_forward: bool) -> None:
    """Looking at the parameters between a forward and its backward does not change the gradients."""
    module = model(free_after_forward=free_after_forward)
    total = loss(module, 0)
    with summon_full_params(module, writeback=False):
        pass
    total.backward()
    check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(Stack), loss, 1))


def test_changes_between_forward_and_backward_are_refused(free_after_forward: bool) -> None:
    """Parameters changed between a forward and its backward raise there, as torch does for a local model."""
    module = model(free_after_forward=free_after_forward)
    total = loss(module, 0)
    with summon_full_params(module), torch.no_grad():
        module.blocks[1].up.weight.mul_(2)
    with pytest.raises(FlatParamError, match=r"parameters were changed .* between its forward pass and the backward"):
        total.backward()
    with torch.no_grad():
        module(batch())
    check_at_rest(module)


def test_inside_accumulation(free_after_forward: bool) -> None:
    """Looking at the parameters between two micro-batches keeps the gradients collected so far."""
    module = model(free_after_forward=free_after_forward, free_after_unsynced_backward=free_after_forward)
    with no_sync(module):
        loss(module, 0).backward()
        with summon_full_params(module):
            pass
    loss(module, 1).backward()
    check_at_rest(module)
    local = seeded(Stack)
    (loss(local, 0)).backward()
    loss(local, 1).backward()
    check_same(full_gradients(module), {name: p.grad for name, p in local.named_parameters()})


def test_a_forward_sees_what_was_loaded_after_unsynced_backward(free_after_forward: bool) -> None:
    """Values written after an unsynced backward are those that the next forward computes with."""
    module = model(free_after_forward=free_after_forward, free_after_unsynced_backward=free_after_forward)
    with no_sync(module):
        loss(module, 0).backward()
        with summon_full_params(module), torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        assert not module(batch()).any()


def test_inspecting_keeps_a_unit_out_of_passes() -> None:
    """``inspecting`` holds a unit sharded and in its phase; leaving it, the unit is idle; a second one raises."""
    module = model()
    module(batch())
    root = unit_of(module)
    assert root is not None
    with inspecting(root):
        assert root.phase is Phase.INSPECTING
        assert not root.handles[0].is_unsharded
        with (
            pytest.raises(FlatParamError, match=r"unit '\(root\)': its full parameters are summoned"),
            inspecting(root),
        ):
            pass
    assert root.phase is Phase.IDLE


def test_shown_values_stand_under_the_names(use_orig_params: bool) -> None:
    """``shown`` puts the given parameters (or none) under the names, alone in ``parameters()``, and takes them back."""
    module = sharded(lambda: Chain(1), SingleCollectives(), use_orig_params=use_orig_params)
    unit = unit_of(module)
    assert unit is not None
    before = list(module.parameters())
    given = {
        "up.weight": nn.Parameter(torch.zeros(1)),
        "up.bias": None,
        "down.weight": nn.Parameter(torch.ones(2)),
    }
    mine = [given[fqn.removeprefix("blocks.0.")] for fqn in unit.handles[0].layout.fqns]
    with inspecting(unit), shown(unit, [mine]):
        assert [p for p in given.values() if p is not None] == list(module.parameters())
        assert module.blocks[0].up.bias is None
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_gathering_anything_of_the_shards_shape(ranks: int) -> None:
    """``gather_full`` and ``full_views`` bring any shard-shaped tensor, of any dtype, to the parameters' shapes."""

    def gather(collectives: Collectives) -> list[tuple[int, ...]]:
        module = model(collectives)
        found = []
        for unit in units_in(module):
            for handle in unit.handles:
                numbers = torch.arange(handle.layout.shard_numel, dtype=torch.int64)
                full = gather_full(unit, handle, numbers + handle.layout.shard_numel * handle.rank)
                assert full.tolist() == list(range(handle.layout.numel))
                for slot, view in zip(handle.layout.slots, full_views(handle, full), strict=True):
                    assert memory_view(view, slot.spec).tolist() == list(range(slot.span.start, slot.span.stop))
                    found.append(tuple(view.shape))
        return found

    shapes = {tuple(p.shape) for p in Stack().parameters()}
    for found in run(ranks, gather):
        assert set(found) == shapes


def test_a_fitting_replacement_is_taken_over() -> None:
    """Assigning a parameter object of the same shape and dtype inside has the effect of assigning its values."""
    module = model()
    with summon_full_params(module):
        module.stem.weight = nn.Parameter(torch.full((4, 4), 2.0))
    with summon_full_params(module):
        assert torch.equal(module.stem.weight, torch.full((4, 4), 2.0))


def test_without_writeback_a_replacement_is_dropped() -> None:
    """Without `writeback` the model has its old values again, whatever was assigned inside."""
    module = model()
    with summon_full_params(module):
        before = module.stem.weight.detach().clone()
    with summon_full_params(module, writeback=False):
        module.stem.weight = nn.Parameter(torch.zeros(4, 4))
    with summon_full_params(module):
        assert torch.equal(module.stem.weight, before)


@each_row(
    "other",
    [torch.zeros(2, 4), torch.zeros(4, 4, dtype=torch.float64)],
    ids=["shape", "dtype"],
)
def test_a_replacement_that_does_not_fit_is_named(other: torch.Tensor) -> None:
    """Assigning a parameter of a different shape or dtype inside raises at the end, with its name."""
    module = model()
    with pytest.raises(FlatParamError, match=r"'stem\.weight' was replaced"), summon_full_params(module):
        module.stem.weight = nn.Parameter(other)
