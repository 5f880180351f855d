"""The forms that state dicts have: full, sharded, or local tensors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker, mesh_of
from flatparam_state.forms.tiling import cut
from flatparam_state.forms.wanted import Wanted
from flatparam_state.places import Place, gather

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FormKind", "StateForm"]


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
        return mesh_of(place, makes_one=self.use_dtensor)

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
                index: value.to(self.device or shard.device)
                for each in everyone
                for index, value in each.items()
            }
        return [
            self.owned(Wanted.of_parameter(place, index), part, place, empty_parts=self.empty_parts)
            if slots[index].spec.shape
            else values[index]
            for index, part in enumerate(parts)
        ]

    def owned(
        self, wanted: Wanted, elements: torch.Tensor, place: Place, *, empty_parts: bool = False
    ) -> Any:
        """The `ShardedTensor` of which this rank holds `elements` (1-D, in memory order), copied; nothing is moved."""
        tiling = wanted.tiling
        views = cut(wanted.spec, tiling.of_rank(wanted.rank), elements)
        parts = [
            view.to(self.device or view.device, copy=True, memory_format=torch.contiguous_format)
            for view in views
        ]
        group = place.unit.topology.shard
        return tiling.sharded_tensor(parts, elements.dtype, group, empty_parts=empty_parts)
