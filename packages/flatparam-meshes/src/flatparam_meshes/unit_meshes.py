"""The common ground of the parameters of one unit that are `DTensor`s: their gradients are completed together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from flatparam_comm import (
    Collectives,
    FlatParamError,
    FlatParamHandle,
    ProcessGroupCollectives,
    ReduceOp,
    Topology,
    process_group_of,
)
from flatparam_comm.process_group import c10d
from flatparam_comm.process_group import groups as process_groups
from flatparam_core import PRESENTER, FlatParameter, handle_of, owner_of
from flatparam_meshes.form import HeldPart, MeshForm, chunk_over

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@final
@attrs.define(eq=False)
class UnitMeshes:
    """The meshes that the parameters of a unit are on, beside that of data parallelism.

    A layer that reduces gradients, or asks all ranks about them, finds it at `FullForms.meshes` of a flat parameter.
    """

    sums_late: bool
    """Whether gradients of copies are added up once they are reduced over the data-parallel ranks.

    It takes shards that are cut alike on all ranks of tensor parallelism, that is, parts of one size. Otherwise each
    gradient is added up when autograd has computed it.
    """
    experts: Collectives | None = None
    """The ranks that hold other experts in the place of these, if the unit holds some; see `hold_experts`."""
    is_stacked: bool = False
    """Whether files have the experts of all ranks as one tensor, stacked along dimension 0; see `hold_experts`."""
    around: frozenset[int] = frozenset()
    """The global numbers of the model's data-parallel ranks, if the unit holds experts."""

    @classmethod
    def join(cls, presenters: Sequence[object]) -> Self:
        """Return what the forms among `presenters`, those of one unit, share from now on."""
        forms = [each for each in presenters if isinstance(each, MeshForm)]
        meshes = cls(all(form.is_even for form in forms))
        for form in forms:
            form.meshes = meshes
        return meshes

    def complete(self, handle: FlatParamHandle, gradient: Tensor, *, label: str = "") -> None:
        """Add up, over the ranks that hold copies of parameters, a gradient that is reduced over the others.

        Every rank that holds part of the unit calls it, in the order of reductions.

        Args:
            handle: a flat parameter of the unit.
            gradient: this rank's shard of its gradient, 1-D, `layout.shard_numel` elements, in the dtype of the
                reduction; changed in place.
        """
        if not self.sums_late:
            return
        parts: dict[tuple[Collectives, ...], list[Tensor]] = {}
        for index, form in _forms_of(handle):
            span = handle.layout.fragment(index, handle.rank).in_shard
            groups = form.copied_over
            if groups and span.numel:
                parts.setdefault(groups, []).append(gradient[span.as_slice()])
        for groups, pieces in parts.items():
            # One collective for all parameters of the unit.
            together = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            for group in groups:
                group.all_reduce(together, label=label).wait()
            if len(pieces) > 1:
                torch._foreach_copy_(pieces, torch.split(together, [piece.numel() for piece in pieces]))

    def gradients(
        self, parameters: Iterable[nn.Parameter], *, padded: bool = True
    ) -> Iterator[tuple[tuple[Collectives, ...], Tensor | None]]:
        """Yield the gradients of `parameters`, each with the groups whose ranks hold other parts of it.

        The groups are those beside data parallelism. The gradient of a flat parameter is yielded in pieces, as views,
        if its parameters differ in that.

        Args:
            parameters: those of the unit that optimizers hold, in one order on every rank.
            padded: the gradient of a flat parameter may contain its padding, which is zero.
        """
        for parameter in parameters:
            grad = parameter.grad
            if not isinstance(parameter, FlatParameter):
                owner = owner_of(parameter)
                assert owner is not None, "the unit holds it"
                yield self._spread_over(owner[0])[owner[1]], grad
                continue
            handle = handle_of(parameter)
            assert handle is not None, "the unit holds it"
            over = self._spread_over(handle)
            if padded and len({*over}) == 1:
                yield over[0], grad
                continue
            for groups, fragment in zip(over, handle.layout.fragments(handle.rank), strict=True):
                yield groups, None if grad is None else grad[fragment.in_shard.as_slice()]

    def form(self, handle: FlatParamHandle, index: int) -> MeshForm | None:
        """Return the form of parameter `index`; `None` if it is no `DTensor`."""
        found = _presenters_of(handle)[index]
        return found if isinstance(found, MeshForm) else None

    def held(self, handle: FlatParamHandle, index: int, name: str) -> HeldPart | None:
        """Return the part that this rank holds of parameter `index`, which is called `name`; None if it is the whole.

        Raises:
            FlatParamError: see `MeshForm.held`.
        """
        form = self.form(handle, index)
        if form is not None:
            return form.held(name)
        if self.experts is None or not self.is_stacked:
            return None
        spec, place = handle.layout.slots[index].spec, self.experts.rank
        rows, *others = spec.shape
        start = (place * rows, *(0 for _ in others))
        shape = (self.experts.size * rows, *others)
        return HeldPart(shape, spec.stride, start, spec.shape, place * spec.numel, None)

    def chunk(self, full: DTensor, mesh: DeviceMesh) -> DTensor:
        """Return the `DTensor` over `mesh` too, of which this rank holds its chunk of `full`; see `chunk_over`."""
        return chunk_over(full, mesh)

    def whole(self, handle: FlatParamHandle, index: int, local: Tensor) -> Tensor:
        """Return all of parameter `index`, of which `local` is the part of `held`; all ranks with parts call it.

        Row-major, the dtype of `local`. Memory: the whole, twice for a moment.
        """
        form = self.form(handle, index)
        if form is not None:
            return form.whole(local)
        assert self.experts is not None, "it is a part"
        full = local.new_empty((self.experts.size * local.shape[0], *local.shape[1:]))
        self.experts.all_gather(full.view(-1), local.contiguous().view(-1), label="whole experts").wait()
        return full

    def shown(self, handle: FlatParamHandle, index: int, full: Tensor) -> Tensor:
        """Return the `DTensor` over `full`, shaped like the full parameter `index`; `full` for one that is none."""
        form = self.form(handle, index)
        return full if form is None else form.over(full)

    def agree(self, handles: Sequence[FlatParamHandle], found: bool) -> bool:
        """Return whether any rank that holds parts or copies of parameters has `found`; every one of them calls it."""
        flag = torch.tensor(float(found), device=handles[0].device)
        for group in self.groups(handles):
            group.all_reduce(flag, op=ReduceOp.MAX, label="not finite").wait()
        return bool(flag)

    def ranks_of_whole(self, form: MeshForm, topology: Topology) -> Topology:
        """Return the ranks that hold parts of a parameter, those of all meshes as one shard group.

        Every one of them calls it, in one order of parameters; the first call makes a process group.

        Args:
            form: that of the parameter.
            topology: the data-parallel ranks of its unit.
        """
        return _ranks_of_whole(topology, form.spread_over)

    def groups(self, handles: Sequence[FlatParamHandle], *, experts: bool = True) -> list[Collectives]:
        """Return all groups that parameters of `handles` are on, beside those of data parallelism.

        Args:
            handles: flat parameters of one or several units.
            experts: also the ranks that hold other experts.
        """
        found: dict[Collectives, None] = {}
        for handle in handles:
            for _, form in _forms_of(handle):
                found.update(dict.fromkeys((*form.spread_over, *form.copied_over)))
            across = None if handle.forms.meshes is None else handle.forms.meshes.experts
            if experts and across is not None:
                found[across] = None
        return list(found)

    def ordered(self, handles: Sequence[FlatParamHandle]) -> dict[Collectives, bool]:
        """Return the groups beside those of data parallelism, and whether their ranks do the same with the unit.

        Ranks compare what they have done over these, too. Parts of different sizes take different numbers of bytes.
        """
        return dict.fromkeys(self.groups(handles, experts=False), self.sums_late)

    def groups_beside(
        self, handles: Sequence[FlatParamHandle], groups: Iterable[Collectives | None]
    ) -> list[Collectives]:
        """Return those of the groups that cut parameters of `handles` along dimensions apart from those of `groups`.

        They have no rank in common but this one, with each other or with one of `groups`: a smaller one in a larger one
        is left out, and one of several over the same ranks is returned.
        """
        taken = [_numbers(group) for group in groups if group is not None]
        found = []
        for group in sorted(self.groups(handles, experts=False), key=lambda each: -each.size):
            numbers = _numbers(group)
            if not any(len(numbers & others) > 1 for others in taken):
                taken.append(numbers)
                found.append(group)
        return found

    def all_ranks(self, topology: Topology, handles: Sequence[FlatParamHandle]) -> AllRanks:
        """Return the ranks of `topology`, and of the groups beside it that parameters of `handles` are on."""
        return AllRanks(topology, tuple(self.groups_beside(handles, topology.groups)))

    def _spread_over(self, handle: FlatParamHandle) -> list[tuple[Collectives, ...]]:
        """Return for each parameter the groups whose ranks hold other parts of it, beside those of its shard."""
        found = []
        for each in _presenters_of(handle):
            over = each.spread_over if isinstance(each, MeshForm) else ()
            # A `DTensor` may itself be cut over the ranks that hold other experts.
            is_cut_there = any(len(self.around & _numbers(group)) > 1 for group in over)
            found.append(over if self.experts is None or is_cut_there else (*over, self.experts))
        return found


@final
@attrs.frozen
class AllRanks:
    """The data-parallel ranks of a model, and those beside each of them: all that hold it together."""

    topology: Topology
    beside: tuple[Collectives, ...]

    @property
    def groups(self) -> tuple[Collectives, ...]:
        """The groups of several ranks; what the first rank has reaches all by one after the other, the last first."""
        return (*self.topology.groups, *(group for group in self.beside if group.size > 1))

    @property
    def rank(self) -> int:
        """Return this rank's number among all of them."""
        rank, size = self.topology.rank, self.topology.data_parallel_size
        for group in self.beside:
            rank, size = rank + group.rank * size, size * group.size
        return rank

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.topology.data_parallel_size * math.prod(group.size for group in self.beside)

    @property
    def is_first(self) -> bool:
        """Return whether this is the first of all of them."""
        return self.rank == 0

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Return every rank's `value`, in the order of `rank`; every rank calls it."""
        known = self.topology.exchange(value, label=label)
        for group in self.beside:
            known = [each for found in group.exchange(known, label=label) for each in found]
        return known

    def barrier(self, *, label: str = "") -> None:
        """Return when every rank has called it."""
        self.exchange(None, label=label)


def _presenters_of(handle: FlatParamHandle) -> list[object]:
    return [noted.get(PRESENTER) for noted in handle.forms.attributes]


def _numbers(group: Collectives) -> set[int]:
    process_group = process_group_of(group)
    return set() if process_group is None else set(torch.distributed.get_process_group_ranks(process_group))


def _forms_of(handle: FlatParamHandle) -> list[tuple[int, MeshForm]]:
    """Return the forms of the parameters that are `DTensor`s, with their indices."""
    return [(i, each) for i, each in enumerate(_presenters_of(handle)) if isinstance(each, MeshForm)]


# The ranks that hold a parameter once, over all meshes


_LABEL: Final = "ranks that hold a parameter"
_made: Final[dict[tuple[Collectives | None, ...], Topology]] = {}
"""The topologies that were made, by the groups that each is of."""


def _ranks_of_whole(topology: Topology, spread_over: Sequence[Collectives]) -> Topology:
    """Return the ranks of `topology`, of which the shard group is joined with those of `spread_over`.

    Ranks that hold copies stay apart: each set of ranks that holds a parameter once is a shard group. The first call
    for these groups makes a process group, in which the ranks are in the order of their global numbers; every rank in
    it calls it.

    Raises:
        FlatParamError: if the data-parallel ranks are no process group.
    """
    key = (topology.shard, topology.replicate, *spread_over)
    if key not in _made:
        _made[key] = Topology(_joined([topology.shard, *spread_over]), topology.replicate)
    return _made[key]


def _joined(parts: Sequence[Collectives]) -> Collectives:
    """Return the group of all ranks that are reached by `parts`, one after the other."""
    group = process_group_of(parts[-1])
    if group is None:
        raise FlatParamError("a DTensor is over a mesh of processes, found ranks that are none: shard over a mesh")
    ranks, made = [c10d.first_of("get_rank")()], len(_made)
    for part in parts:
        told = part.exchange((ranks, made), label=_LABEL)
        ranks = sorted(itertools.chain.from_iterable(each for each, _ in told))
        made = max(count for _, count in told)
    # torch's default is that every rank of the world must call; some have other parameters.
    with c10d.making_apart(f"flatparam whole {made}: {' '.join(map(str, ranks))}"):
        found = c10d.first_of("new_group")(
            ranks,
            use_local_synchronization=True,
            backend=c10d.first_of("get_backend_config")(group),
            timeout=process_groups.timeout_of(group),
        )
    return ProcessGroupCollectives(found)
