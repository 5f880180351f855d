"""Full parameters outside of forward and backward: read, change or differentiate them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import FlatParamError, FlatParamHandle, Residency
from flatparam_runtime.inspection.resting import full_views, gather_full, inspecting, refuse_in_a_pass, shown
from flatparam_runtime.optimizers.clip import grad_parts
from flatparam_runtime.unit import Phase, Unit, unit_of, units_in
from flatparam_runtime.unit.phases import Wishes


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show the full parameters of every unit of `module`, as ordinary registered parameters in their own dtype.

    Every rank enters and leaves the context. All units are gathered at once, which takes memory for the whole module.
    Inside, the module runs, and can be differentiated, on these very parameters, in full precision; a backward pass
    reduces gradients to the shards as usual. With `rank0_only`, `offload_to_cpu` on an accelerator, or `with_grads` the
    parameters can only be read and changed. Contexts may nest: the inner one shows what the outer one does.

    The full parameters have no memory once the context ends, and code that reads them then can end the process. Views
    and NumPy arrays of them that somebody has still got keep their memory, and the values from inside. A program that
    `torch.export` makes inside holds the parameters themselves, and runs only inside.

    Args:
        recurse: also the units below `module`, not only its own.
        writeback: copy changes to the shards, also those of parameters that were replaced by others of the same shape
            and dtype, and refuse other replacements; without it all of this is dropped at the end. Each rank keeps its
            own part of its own changes, or with `rank0_only` its part of rank 0's.
        rank0_only: only the first rank of each group that shares a shard (of all ranks, if nothing is sharded) gets
            full parameters; the others see their shards.
        offload_to_cpu: put the full parameters in CPU memory.
        with_grads: show full gradients as `.grad` too; `writeback` copies their changes as well.

    Raises:
        FlatParamError: inside a forward or backward pass, or nested in a context that shows less.
    """
    wishes = Wishes(writeback, rank0_only, offload_to_cpu, with_grads)
    own = unit_of(module)
    units = units_in(module) if recurse else (() if own is None else (own,))
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(_summoned(unit, wishes))
        yield


@contextlib.contextmanager
def _summoned(unit: Unit, wishes: Wishes) -> Iterator[None]:
    if unit.showing.wishes is not None and not unit.showing.wishes.shows(wishes):
        raise FlatParamError(
            f"unit {unit.name!r}: an outer summon_full_params() shows its full parameters on one rank only, or without "
            "gradients; pass the outer one the arguments that this one needs"
        )
    if unit.phase is Phase.INSPECTING and unit.showing.wishes is not None:
        yield
        return
    if not unit.showing.pins and (wishes.is_copied or (wishes.offload_to_cpu and unit.device.type != "cpu")):
        with inspecting(unit), _copied(unit, wishes):
            yield
        return
    with _pinned(unit, wishes):
        yield


@contextlib.contextmanager
def _pinned(unit: Unit, wishes: Wishes) -> Iterator[None]:
    """Keep the full parameters that the unit computes with in memory, in their own dtype."""
    refuse_in_a_pass(unit)
    showing = unit.showing
    if not showing.pins:
        # Full parameters in memory may have a different dtype, or be stale.
        unit.take_over(frees=True)
        # In memory of their own, so that changes that are not written back are dropped.
        unit.unshard(full_precision=True, copied=True)
        for handle in unit.handles:
            handle.exposure.list_flat_parameter(False)
            handle.form.count_holders()
        showing.begin(wishes, unit.stamp())
    showing.pin()
    try:
        yield
    finally:
        showing.pin(-1)
        if not showing.pins:
            showing.end()
            for handle in unit.handles:
                handle.exposure.list_flat_parameter(True)
        # An exception in a pass has brought everything to rest.
        if unit.residency is not Residency.UNSHARDED:
            pass
        # If the stamps differ, an optimizer's step is newer.
        elif wishes.writeback and showing.is_of(unit.stamp()):
            for handle in unit.handles:
                handle.write_back()
            showing.are_written(unit.stamp())
        else:
            for handle in unit.handles:
                # Parameters that the user put in the place of ours, and data given to ours, are dropped with the rest.
                if not wishes.writeback:
                    handle.exposure.put_back()
                handle.form.reclaim()
        unit.reshard()


@contextlib.contextmanager
def _copied(unit: Unit, wishes: Wishes) -> Iterator[None]:
    """Show full parameters in memory of their own."""
    unit.showing.begin(wishes)
    try:
        copies = [_Copy.make(unit, handle, wishes) for handle in unit.handles]
        here = not wishes.rank0_only or unit.topology.group.rank == 0
        with shown(unit, [copy.parameters for copy in copies]) if here else contextlib.nullcontext():
            try:
                yield
            finally:
                if here and not wishes.writeback:
                    for handle in unit.handles:
                        handle.exposure.put_back()
        if wishes.writeback:
            for copy in copies:
                copy.write_back()
    finally:
        unit.showing.end()


@final
@attrs.define(eq=False)
class _Copy:
    """The full parameters of one flat parameter, and their gradients, in memory of their own."""

    unit: Unit
    handle: FlatParamHandle
    rank0_only: bool
    full: Tensor
    """1-D, `layout.numel` elements."""
    parameters: list[nn.Parameter]
    grads: Tensor | None = None
    """The full gradients, 1-D, `layout.numel` elements, if they are shown."""

    @classmethod
    def make(cls, unit: Unit, handle: FlatParamHandle, wishes: Wishes) -> Self:
        """Gather on every rank; with `rank0_only`, only the first rank shows the copy."""
        device = torch.device("cpu") if wishes.offload_to_cpu else handle.device
        full = gather_full(unit, handle, handle.flat_param.detach()).to(device)
        wanted = handle.exposure.requires_grad()
        parameters = [
            nn.Parameter(handle.present(index, view).detach(), requires_grad=needs)
            for index, (view, needs) in enumerate(zip(full_views(handle, full), wanted, strict=True))
        ]
        copy = cls(unit, handle, wishes.rank0_only, full, parameters)
        if wishes.with_grads:
            copy._show_grads(device)
        return copy

    def _show_grads(self, device: torch.device) -> None:
        handle, unit = self.handle, self.unit
        local = _grad_shard(handle)
        flags = bytes(part is not None for part in grad_parts(handle))
        everyone = unit.topology.shard.exchange(flags, label=f"gradients of {unit.name}")
        has_grad = [any(column) for column in zip(*everyone, strict=True)]
        if not any(has_grad):
            return
        self.grads = gather_full(unit, handle, local).to(device)
        views, meshes = full_views(handle, self.grads), handle.forms.meshes
        for index, (parameter, there) in enumerate(zip(self.parameters, has_grad, strict=True)):
            if there:
                parameter.grad_dtype = self.grads.dtype
                parameter.grad = views[index] if meshes is None else meshes.shown(handle, index, views[index])

    def write_back(self) -> None:
        """Copy this rank's part of the changes to its shard, and to its gradients."""
        for index, view in enumerate(full_views(self.handle, self.full)):
            self._take(index, self.parameters[index].detach(), view)
        own = self._own_part(self.full)
        # A copy of equal values would count as a change.
        if not torch.equal(own, self.handle.flat_param.detach()):
            self.handle.flat_param.detach().copy_(own)
        if self.grads is None:
            return
        for index, view in enumerate(full_views(self.handle, self.grads)):
            gradient = self.parameters[index].grad
            if gradient is None:
                view.zero_()
            else:
                self._take(index, gradient, view)
        own = self._own_part(self.grads)
        fragments = list(self.handle.layout.fragments(self.handle.rank))
        for part, fragment in zip(grad_parts(self.handle), fragments, strict=True):
            if part is not None:
                part.view(-1).copy_(own[fragment.in_shard.as_slice()])

    def _take(self, index: int, shown: Tensor, view: Tensor) -> None:
        found: Any = shown if self.handle.forms.meshes is None else self.handle.flattened(index, shown)
        if found.data_ptr() != view.data_ptr():
            view.copy_(found)

    def _own_part(self, full: Tensor) -> Tensor:
        if self.rank0_only:
            sent = full.to(self.handle.device)
            self.unit.topology.group.broadcast(sent, root=0, label=self.unit.name).wait()
            full = sent
        return self.handle.layout.shard_of(full, self.handle.rank).to(self.handle.flat_param.device)


def _grad_shard(handle: FlatParamHandle) -> Tensor:
    """Return the gradients laid out as a shard, with zeros for parameters without a gradient."""
    dtype = handle.precision.grad(handle.layout.dtype)
    shard = torch.zeros(handle.flat_param.numel(), dtype=dtype, device=handle.flat_param.device)
    for part, fragment in zip(grad_parts(handle), handle.layout.fragments(handle.rank), strict=True):
        if part is not None:
            shard[fragment.in_shard.as_slice()].copy_(part.reshape(-1))
    return shard
