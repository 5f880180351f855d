"""Run a function on ranks, shard a module there, and look at its parameters, its gradients, and whether it rests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatparam_comm import (
    Collectives,
    Fault,
    FaultyCollectives,
    FlatParamHandle,
    Residency,
    SingleCollectives,
    Topology,
    run_threads,
)
from flatparam_core.testing import check_invariants
from flatparam_runtime import Phase, Unit, UnitPlan, full_views, gather_full, shard_module, units_in

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Grads = dict[str, "Tensor | None"]


def run(ranks: int, fn: Callable[..., T], *args: Any, faults: Sequence[Fault] = ()) -> list[T]:
    """The results of ``fn(collectives, *args)`` on each rank of a world of one, or of a world of threads."""
    if ranks == 1:
        single: Collectives = SingleCollectives()
        return [fn(FaultyCollectives(single, faults) if faults else single, *args)]
    return run_threads(ranks, fn, *args, faults=faults)


def seeded(make: Callable[[], M], device: torch.device | str | None = None) -> M:
    """The same module on every call, on torch's default device if none is given."""
    torch.manual_seed(7)
    # The values are the same on every device.
    return make().to(device or torch.get_default_device())


def sharded(
    make: Callable[[], M],
    where: Collectives | Topology,
    *,
    units: Sequence[str] = (),
    device: torch.device | str | None = None,
    **plan: Any,
) -> M:
    """The seeded module, with the submodules in ``units`` (inner ones first) and itself as units."""
    module = seeded(make, device)
    planned = UnitPlan(where if isinstance(where, Topology) else Topology(where), **plan)
    for name in units:
        shard_module(module.get_submodule(name), planned)
    shard_module(module, planned)
    return module


def named_handles(module: nn.Module) -> Iterator[tuple[str, Unit, FlatParamHandle]]:
    """Every handle below ``module``, with the prefix that makes its parameters' names whole."""
    names = {child: name for name, child in module.named_modules()}
    for unit in units_in(module):
        for handle in unit.handles:
            yield names[unit.module] + "." if names[unit.module] else "", unit, handle


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the full parameters of every unit; every rank calls it."""
    found = {}
    for prefix, unit, handle in named_handles(module):
        full = gather_full(unit, handle, handle.flat_param.detach())
        for fqn, view in zip(handle.layout.fqns, full_views(handle, full), strict=True):
            found[prefix + fqn] = view.clone()
    return found


def full_gradients(module: nn.Module) -> Grads:
    """The full gradient of every parameter, or ``None``; every rank calls it.

    With one flat parameter in place of the originals a parameter without a gradient has zeros beside those that have.
    """
    found: Grads = {}
    for prefix, unit, handle in named_handles(module):
        shown = handle.exposure.parameters()
        missing = [parameter.grad is None for parameter in shown]
        shard = torch.zeros_like(handle.flat_param)
        if len(missing) == 1 and shown[0] is handle.flat_param:
            missing *= len(handle.layout.slots)
            if shown[0].grad is not None:
                shard = shown[0].grad
        else:
            for parameter, fragment in zip(shown, handle.layout.fragments(handle.rank), strict=True):
                if parameter.grad is not None:
                    shard[fragment.in_shard.as_slice()] = parameter.grad.reshape(-1)
            everyone = unit.plan.topology.shard.exchange(missing, label="test")
            missing = [nobody_has_gradient(handle, n, list(of)) for n, of in enumerate(zip(*everyone, strict=True))]
        full = gather_full(unit, handle, shard.detach())
        for fqn, view, absent in zip(handle.layout.fqns, full_views(handle, full), missing, strict=True):
            found[prefix + fqn] = None if absent else view.clone()
    return found


def is_part_of_shard(tensor: Tensor, unit: Unit) -> bool:
    """Whether `tensor` lies in the memory of the unit's shards, as the parameters of a sharded module do."""
    shards = {handle.flat_param.untyped_storage().data_ptr() for handle in unit.handles}
    return tensor.untyped_storage().data_ptr() in shards


def nobody_has_gradient(handle: FlatParamHandle, index: int, missing: Sequence[bool]) -> bool:
    """Whether no rank has a gradient of parameter `index`; all ranks with elements of it must agree."""
    slot = handle.layout.slots[index]
    owners = handle.layout.ranks_of(index) if slot.span else range(handle.layout.world_size)
    (nobody,) = {missing[rank] for rank in owners}
    assert all(absent for rank, absent in enumerate(missing) if rank not in owners)
    return nobody


def mean_gradients(module: nn.Module, losses: Callable[[nn.Module, int], Tensor], ranks: int) -> Grads:
    """The mean of the gradients of a local module on each rank's loss, summed in the order of ranks.

    As in a world of threads, backward runs in this thread; on an accelerator this changes the order of additions.
    """
    found: Grads = dict.fromkeys(name for name, _ in module.named_parameters())
    for rank in range(ranks):
        with torch.autograd.set_multithreading_enabled(ranks == 1):
            losses(module, rank).backward()
        for name, parameter in module.named_parameters():
            before, part = found[name], parameter.grad
            if part is not None:
                found[name] = part / ranks if before is None else before + part / ranks
            parameter.grad = None
    return found


def check_same(found: Grads, expected: Grads, *, exact: bool = True) -> None:
    """Assert bit-equality (or nearly so); if one side has no gradient, the other has none or zeros."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            rest = value if other is None else other
            assert rest is None or not rest.any(), f"{name}: one side has a gradient"
        elif exact:
            assert torch.equal(other, value), f"{name}: {other} is not {value}"
        else:
            torch.testing.assert_close(other, value, msg=f"{name}: {other} is not {value}")


def check_training(
    make: Callable[[], nn.Module],
    losses: Sequence[Callable[[nn.Module, int], Tensor]],
    ranks: int,
    *,
    exact: bool = True,
    **how: Any,
) -> None:
    """Assert that steps of SGD, one for each of ``losses``, make of the sharded module what they make of a local one.

    ``how`` goes to ``sharded``. The gradients of every step are compared too.
    """

    def training(collectives: Collectives) -> list[Grads]:
        module = sharded(make, collectives, **how)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        found = []
        for loss in losses:
            optimizer.zero_grad()
            loss(module, collectives.rank).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
            optimizer.step()
        return [*found, dict(full_parameters(module))]

    local = seeded(make)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.25)
    expected = []
    for loss in losses:
        expected.append(mean_gradients(local, loss, ranks))
        for name, parameter in local.named_parameters():
            parameter.grad = expected[-1][name]
        optimizer.step()
        optimizer.zero_grad()
    for found in run(ranks, training):
        for each, wanted in zip(found, [*expected, dict(local.named_parameters())], strict=True):
            check_same(each, wanted, exact=exact)


def check_at_rest(module: nn.Module) -> None:
    """Assert that no pass is running, and that only shards and their gradients take memory."""
    for unit in units_in(module):
        assert unit.phase is Phase.IDLE, repr(unit)
        assert unit.residency is Residency.SHARDED, repr(unit)
        assert not unit.calls, repr(unit)
        for handle in unit.handles:
            check_invariants(handle)
            assert handle.buffer.held_nbytes == 0, f"{unit!r}: the full parameters are freed"
            assert handle.gradients.buffer.held_nbytes == 0, f"{unit!r}: no gradient waits"
            assert all(leaf.grad is None for leaf in handle.leaves), repr(unit)


def storage_nbytes(tensor: Tensor) -> int:
    """The bytes behind ``tensor``."""
    return tensor.untyped_storage().size()


def zero_gradients(module: nn.Module) -> None:
    """Forget ``.grad`` of everything that the module lists."""
    for parameter in module.parameters():
        parameter.grad = None
