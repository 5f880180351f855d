"""The forms that state dicts have: full, sharded, or local tensors; and a rank's part of a tensor in any of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from typing_extensions import Self

from flatparam_runtime import Collectives, ParamSpec, Span, Topology, memory_view
from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker, is_chunked_over, is_dtensor, local_shape, mesh_of
from flatparam_state.forms.deferred import (
    LazyTensor,
    Streamed,
    as_tensor,
    dtype_of,
    is_tensor_like,
    not_ordinary,
    shape_of,
)
from flatparam_state.forms.flat_tensor import FlatTensor
from flatparam_state.forms.tiling import Tiling, cut, gathered, holders_of, is_sharded_tensor
from flatparam_state.places import Place, gather

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FormKind(enum.Enum):
    """The form that a parameter has in a state dict."""

    FULL = enum.auto()
    """A full tensor."""
    SHARDED = enum.auto()
    """A `ShardedTensor` or a `DTensor` under the parameter's own name."""
    LOCAL = enum.auto()
    """Nothing; the flat parameter is there instead, as a `ShardedTensor` of one dimension."""


@final
@attrs.frozen(eq=False)
class StateForm:
    """One form, with its choices."""

    kind: FormKind = FormKind.FULL
    offload_to_cpu: bool = False
    """Put tensors in CPU memory."""
    rank0_only: bool = False
    """Only the first rank gets full tensors."""
    dim_0_chunks: bool = False
    """A rank holds a chunk of dimension 0 of each tensor, for which each unit is gathered, not just what it owns."""
    use_dtensor: bool = False
    """Sharded tensors are `DTensor`s; also if a unit was sharded over a mesh."""
    chunker: Chunker = OWN_CHUNKER
    """The functions that make chunks."""
    empty_parts: bool = True
    """A rank that owns nothing of a `ShardedTensor` holds an empty part of it, as `torch.distributed.checkpoint` has to
    find something; without it has none, as with `dim_0_chunks`."""

    def at(self, place: Place) -> StateForm:
        """Return this form, or the full one if nothing is sharded."""
        if place.unit.topology.shard.size > 1 or self.kind is FormKind.FULL:
            return self
        return attrs.evolve(self, kind=FormKind.FULL, rank0_only=False)

    @property
    def is_one_for_all(self) -> bool:
        """Return whether a program saves a parameter of one name once, for all ranks."""
        return self.kind is FormKind.SHARDED or (self.rank0_only and self.kind is FormKind.FULL)

    @property
    def device(self) -> torch.device | None:
        """The device that tensors go to; `None` leaves them where they are."""
        return torch.device("cpu") if self.offload_to_cpu else None

    def keeps(self, place: Place) -> bool:
        """Return whether this rank keeps full tensors."""
        return not self.rank0_only or place.unit.topology.group.rank == 0

    def mesh(self, place: Place) -> DeviceMesh | None:
        """Over what `DTensor`s are sharded; `None` if they are not wanted.

        Raises:
            FlatParamError: if the ranks are none of torch's.
        """
        # Ranks beside these have other parts under the same name, which a `ShardedTensor` of these would not say.
        return mesh_of(place, makes_one=self.use_dtensor or place.handle.forms.meshes is not None)

    def sharded(
        self, place: Place, shard: torch.Tensor, present: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> list[Any]:
        """Return the sharded forms of what `shard` holds of each parameter; every rank calls it.

        Args:
            shard: 1-D, `layout.shard_numel` elements, any dtype.
            present: what modules see of the full tensor of a parameter, by its index.
        """
        mesh = self.mesh(place)
        if mesh is None and not self.dim_0_chunks:
            return self._owned(place, shard)
        found = []
        for index, full in enumerate(gather(place, shard, device=None)):
            if mesh is not None:
                chunk = self.chunker.chunk_dtensor(place, present(index, full), mesh)
            else:
                chunk = self.chunker.chunk_tensor(place, full)
            found.append(chunk.cpu() if self.offload_to_cpu else chunk)
        return found

    def _owned(self, place: Place, shard: torch.Tensor) -> list[Any]:
        """Return the elements that each rank owns anyway; of a 0-d tensor, which has no sharded form, the whole."""
        group, slots = place.unit.topology.shard, place.handle.layout.slots
        fragments = list(place.handle.layout.fragments(place.handle.rank))
        parts = [shard[fragment.in_shard.as_slice()] for fragment in fragments]
        scalars = [index for index, slot in enumerate(slots) if not slot.spec.shape]
        if scalars:
            mine = {index: parts[index].view(()).cpu() for index in scalars if parts[index].numel()}
            everyone = group.exchange(mine, label="0-d state")
            values = {
                index: value.to(self.device or shard.device) for each in everyone for index, value in each.items()
            }
        return [
            self.owned(Wanted.of_parameter(place, index), part, place, empty_parts=self.empty_parts)
            if slots[index].spec.shape
            else values[index]
            for index, part in enumerate(parts)
        ]

    def owned(self, wanted: Wanted, elements: torch.Tensor, place: Place, *, empty_parts: bool = False) -> Any:
        """The `ShardedTensor` of which this rank holds `elements` (1-D, in memory order), copied; nothing is moved."""
        tiling = wanted.tiling
        views = cut(wanted.spec, tiling.of_rank(wanted.rank), elements)
        parts = [
            view.to(self.device or view.device, copy=True, memory_format=torch.contiguous_format) for view in views
        ]
        group = place.unit.topology.shard
        return tiling.sharded_tensor(parts, elements.dtype, group, empty_parts=empty_parts)


def _as_it_is(value: Any) -> Any:
    return value


def _copy(target: torch.Tensor, elements: torch.Tensor) -> None:
    target.copy_(elements)


def _not_ordinary(value: Any) -> str | None:
    """Return what `not_ordinary` says; of what ranks hold pieces of nothing, since torch does not answer for it."""
    return None if is_sharded_tensor(value) or is_dtensor(value) else not_ordinary(value)


@final
@attrs.frozen(eq=False)
class Wanted:
    """A tensor of which each rank of a group wants an interval of the elements, in memory order."""

    spec: ParamSpec
    span_of: Callable[[int], Span]
    ranks: range
    """The ranks that may want a part that is not empty."""
    topology: Topology
    rank: int
    device: torch.device
    """The device on which collectives work."""
    presented_over: int = 0
    """The dimensions of the mesh of the `DTensor` that modules see, of which the tensor is this rank's part."""
    whole: tuple[int, ...] | None = None
    """The shape of that `DTensor`; a full tensor of it fits, too."""
    flattened: Callable[[Any], Any] = _as_it_is
    """Turns a value like what modules see, such as a quantised weight, into what is sharded of it."""
    lay: Callable[[torch.Tensor, torch.Tensor], None] = _copy
    """Copies this rank's elements, the second argument, to its memory, the first."""

    @classmethod
    def of_parameter(cls, place: Place, index: int) -> Self:
        """Parameter `index` of a flat parameter."""
        handle = place.handle
        layout, meshes = handle.layout, handle.forms.meshes
        form = None if meshes is None else meshes.form(handle, index)
        return cls(
            layout.slots[index].spec,
            lambda rank: layout.fragment(index, rank).in_param,
            layout.ranks_of(index),
            place.unit.topology,
            handle.rank,
            handle.device,
            int(handle.has_presenter(index)) if form is None else form.mesh.ndim,
            None if form is None else tuple(form.shape),
            lambda value: handle.flattened(index, value),
        )

    @classmethod
    def of_flat_parameter(cls, place: Place) -> Self:
        """Return the flat parameter itself, as a local state has it; see `FlatTensor`."""
        handle = place.handle
        flat = FlatTensor.of(handle)
        return cls(
            ParamSpec("flat parameter", (flat.numel,), handle.layout.dtype, requires_grad=False),
            flat.held_span,
            range(handle.layout.world_size),
            place.unit.topology,
            handle.rank,
            handle.device,
            lay=flat.lay,
        )

    @property
    def span(self) -> Span:
        """The elements that this rank wants."""
        return self.span_of(self.rank)

    @property
    def tiling(self) -> Tiling:
        """The elements that every rank wants, as boxes."""
        return Tiling.of_spans(self.spec, self.span_of, self.ranks)

    @property
    def _group(self) -> Collectives:
        return self.topology.shard

    def misfit(self, value: Any) -> str | None:
        """The kind or shape of `value` if it is not this tensor in one of its forms, with elements that can be copied.

        Its type and shape are the same on every rank.
        """
        if isinstance(value, (Streamed, LazyTensor)):
            if value.shape not in (self.spec.shape, self.whole if isinstance(value, Streamed) else None):
                return f"shape {value.shape}"
            return _not_ordinary(value.tensor) if isinstance(value, Streamed) else None
        value = self.flattened(value)
        if not is_tensor_like(value):
            return type(value).__name__
        shape = shape_of(value)
        if is_dtensor(value) and self.presented_over:
            shape = local_shape(value, self.presented_over)
        return _not_ordinary(value) if shape == self.spec.shape else f"shape {shape}"

    def part(self, value: Any, chunker: Chunker = OWN_CHUNKER) -> torch.Tensor:
        """This rank's elements of `value`, 1-D, possibly a view; every rank of the group calls it, in the same order.

        Nothing is moved between ranks for a full tensor, nor for a `ShardedTensor` that is cut like the model is.
        Chunks of dimension 0 need the memory of the full tensor for a moment; what is cut otherwise, that of two.
        """
        if isinstance(value, LazyTensor):
            return value.part(self.spec, self.span)
        if not isinstance(value, torch.Tensor) and is_tensor_like(value):
            value = as_tensor(value)
        value = self.flattened(value.arrive() if isinstance(value, Streamed) else value)
        span = self.span.as_slice()
        if is_dtensor(value):
            if chunker is OWN_CHUNKER and not self.presented_over and is_chunked_over(value, self._group):
                held = Tiling.of_chunks(value.shape, self._group.size)
                local = {box.offsets: value.to_local() for box in held.of_rank(self.rank)}
                value = gathered(held, local, value.dtype, self._group, self.device)
            else:
                value = chunker.whole(value, self.device, presented_over=self.presented_over)
        elif is_sharded_tensor(value):
            group, ranks = holders_of(value, self.topology)
            held = Tiling.of_shards_on(value, ranks)
            if group is self._group and held.agrees_with(self.tiling):
                return self._own(value, chunker)
            shards = chunker.local_shards(value)
            value = gathered(held, shards, value.dtype, group, self.device)
        return memory_view(value, self.spec)[span]

    def _own(self, value: Any, chunker: Chunker) -> torch.Tensor:
        boxes = self.tiling.of_rank(self.rank)
        shards = chunker.local_shards(value)
        device = next((shard.device for shard in shards.values()), self.device)
        part = torch.empty(self.span.numel, dtype=dtype_of(value), device=device)
        for box, view in zip(boxes, cut(self.spec, boxes, part), strict=True):
            if box.numel:
                view.copy_(shards[box.offsets])
        return part
