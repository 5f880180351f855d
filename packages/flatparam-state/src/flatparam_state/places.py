"""Every flat parameter of a model: the names of its parameters there, and its full tensors and shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import nn

from flatparam_runtime import (
    Collectives,
    FlatParamError,
    FlatParamHandle,
    Fragment,
    Unit,
    clean_fqn,
    full_views,
    gather_full,
    memory_view,
    unit_of,
    warn_caller,
)


@final
@attrs.frozen(eq=False)
class Place:
    """A flat parameter of a model, the unit that holds it, and the names of its parameters there.

    `prefix` is that of the unit's first name; it is clean and ends with a dot (or is empty).
    """

    prefix: str
    unit: Unit
    handle: FlatParamHandle
    names: tuple[tuple[str, ...], ...]
    """All names of each parameter, in the order of the slots. The first is what `named_parameters()` of the unsharded
    model gives, whatever the units are; the others are those of a tied parameter. One whose modules were taken out of
    the model has none."""

    fqns: tuple[str, ...] = attrs.field(init=False)
    """The first name of each parameter; what is in the model now may have the old name of one that was taken out."""
    indices: tuple[int, ...] = attrs.field(init=False)
    """The parameters that are the model's; the modules of the others were taken out of it."""

    @fqns.default
    def _first_names(self) -> tuple[str, ...]:
        both = zip(self.names, self.handle.layout.fqns, strict=True)
        return tuple(names[0] if names else f"{self.prefix}{fqn} (taken out)" for names, fqn in both)

    @indices.default
    def _in_model(self) -> tuple[int, ...]:
        return tuple(index for index, names in enumerate(self.names) if names)


def places_of(unit: Unit) -> tuple[Place, ...]:
    """The flat parameters that `unit` uses, its own and those that it borrows, under their names in their units."""
    return tuple(
        Place("", each, handle, tuple((slot.spec.fqn, *slot.spec.aliases) for slot in handle.layout.slots))
        for each in (unit, *unit.links.lenders)
        for handle in each.handles
    )


def places_in(model: nn.Module) -> Iterator[Place]:
    """Yield the flat parameters of `model`, in the order of its modules."""
    paths: dict[nn.Module, list[tuple[int, str]]] = {}
    units: dict[Unit, str] = {}
    for number, (name, module) in enumerate(model.named_modules(remove_duplicate=False)):
        path = clean_fqn(name)
        prefix = f"{path}." if path else ""
        paths.setdefault(module, []).append((number, prefix))
        unit = unit_of(module)
        if unit is not None:
            units.setdefault(unit, prefix)
    for unit, prefix in units.items():
        for handle in unit.handles:
            yield Place(prefix, unit, handle, tuple(_names(handle, paths)))


def mesh_handles(units: Iterable[Unit]) -> list[FlatParamHandle]:
    """Return the flat parameters that other groups than those of data parallelism hold parts of."""
    return [handle for unit in units for handle in unit.handles if handle.forms.meshes is not None]


def mesh_groups(units: Iterable[Unit], beside: Iterable[Any]) -> list[Collectives]:
    """Return the groups that cut parameters along dimensions of a mesh apart from those of the groups `beside`."""
    handles = mesh_handles(units)
    return handles[0].forms.meshes.groups_beside(handles, beside) if handles else []


def held_part(place: Place, index: int) -> Any:
    """Return the `HeldPart` that this rank has of a parameter beside data parallelism; `None` if that is the whole."""
    meshes = place.handle.forms.meshes
    return None if meshes is None else meshes.held(place.handle, index, place.fqns[index])


def check_names(places: Sequence[Place], form: Any = None) -> None:
    """Check that a name stands for one parameter on all ranks, as that of an expert may not.

    Raises:
        FlatParamError: for one over some of the model's ranks that is no `DTensor` nor, without `form`, stacked. In a
            state dict it is a warning if nobody has said that it is an expert: ranks may hold equal ones.
    """
    if form is not None and not form.is_one_for_all:
        return
    size = max((place.unit.topology.data_parallel_size for place in places), default=1)
    for place in places:
        own = place.unit.topology.data_parallel_size
        for index, name in enumerate(place.fqns if own < size else ()):
            part = held_part(place, index)
            if part is not None and (part.is_copy is not None or form is None):
                continue
            text = (
                f"parameter {name!r} is over {own} of the model's {size} data-parallel ranks: another expert that "
                "others hold under that name would be lost; make it a DTensor with Shard(0) over the ranks of all, or "
                "call flatparam_meshes.hold_experts(model, dim=0) and save with Checkpointer"
            )
            if form is None or getattr(place.handle.forms.meshes, "experts", None) is not None:
                raise FlatParamError(text)
            warn_caller(text)
            return


def _names(handle: FlatParamHandle, paths: Mapping[nn.Module, Sequence[tuple[int, str]]]) -> Iterator[tuple[str, ...]]:
    """Yield all names of each parameter, in the order of the modules that hold it."""
    for infos in handle.param_infos:
        found = [
            (number, order, path + info.param_name)
            for order, info in enumerate(infos)
            for number, path in paths.get(info.module, ())
        ]
        yield tuple(dict.fromkeys(name for _, _, name in sorted(found)))


# Between shards and full tensors, for anything that is shaped like the parameters: weights, moments, averages


def gather(place: Place, shard: torch.Tensor, *, device: torch.device | None, keep: bool = True) -> list[torch.Tensor]:
    """Return the full tensors of which every rank holds a shard; every rank calls it.

    Args:
        shard: this rank's part, 1-D, `layout.shard_numel` elements, any dtype.
        device: where the full tensors go; `None` leaves them where the shard is.
        keep: this rank wants them; otherwise it only takes part.

    Returns:
        One tensor per parameter, in its shape, each with memory of its own; empty if `keep` is false.
        Extra memory: the flat parameter, once.
    """
    full = gather_full(place.unit, place.handle, shard)
    if not keep:
        return []
    return [_own(view, device) for view in full_views(place.handle, full)]


def _own(view: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    copy = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device or view.device)
    return copy.copy_(view)


def fragment_of(place: Place, index: int, tensor: torch.Tensor) -> tuple[Fragment, torch.Tensor]:
    """Return this rank's part of a full tensor (the shape of parameter `index`): where it lies, and its elements.

    The elements are 1-D in memory order, a view if the tensor has that order.
    """
    layout = place.handle.layout
    fragment = layout.fragment(index, place.handle.rank)
    return fragment, memory_view(tensor, layout.slots[index].spec)[fragment.in_param.as_slice()]


def shard_of(place: Place, parts: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Lay this rank's `parts` (see `fragment_of`) out as a shard; zero if a part is missing.

    Returns:
        1-D, `layout.shard_numel` elements, dtype of the parts, on the device of `like`.
    """
    layout = place.handle.layout
    dtype = next((part.dtype for part in parts if part is not None), like.dtype)
    shard = torch.zeros(place.handle.flat_param.numel(), dtype=dtype, device=like.device)
    for fragment, part in zip(layout.fragments(place.handle.rank), parts, strict=True):
        if part is not None:
            shard[fragment.in_shard.as_slice()].copy_(part)
    return shard
