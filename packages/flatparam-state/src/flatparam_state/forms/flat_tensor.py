"""A flat parameter as the one tensor that it is in a local state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs
import torch
from typing_extensions import Self

from flatparam_runtime import FlatLayout, FlatParamError, FlatParamHandle, Span, memory_view

_ALIGNMENT_NBYTES: Final = 16
"""With `use_orig_params=True` each parameter begins at a multiple of this in files, whatever it is in memory."""


@final
@attrs.frozen(eq=False)
class FlatTensor:
    """Two layouts of the same parameters: that of the flat parameter, and that of a local state.

    A flat parameter is aligned for the device that computes with it. A local state has FSDP1's layout: no gaps, and the
    shortest equal parts. With `use_orig_params=True`, of which FSDP1 has a different order, parameters begin at
    multiples of 16 bytes in the dtype that is stored, and a rank saves what it holds.
    """

    own: FlatLayout
    saved: FlatLayout
    rank: int
    is_torchs: bool
    """Whether the local state is cut over ranks as FSDP1's."""

    @classmethod
    def of(cls, handle: FlatParamHandle) -> Self:
        """Return the two layouts of a flat parameter.

        Raises:
            FlatParamError: if rules or shares have moved the parameters, which a flat tensor would not tell.
        """
        own, is_torchs = handle.layout, handle.exposure.lists_shard
        if not own.is_plain:
            raise FlatParamError(
                f"a local state holds the flat parameter of {own.fqns[0]!r}, ... as it lies, and does not tell "
                "that the rules of its layout have moved the parameters; use a full or a sharded state"
            )
        return cls(own, _saved(own, 0 if is_torchs else _ALIGNMENT_NBYTES), handle.rank, is_torchs)

    @property
    def numel(self) -> int:
        """The elements of the tensor: without the padding at its end."""
        return self.saved.slots[-1].span.stop

    def held_span(self, rank: int) -> Span:
        """Return the elements that `rank` holds in the flat parameter."""
        shard = self.own.shard_span(rank)
        return Span(self._position(shard.start), self._position(shard.stop))

    def _position(self, bound: int) -> int:
        """Return where in the tensor the first element lies that is in the flat parameter at `bound` or behind it."""
        for own, saved in zip(self.own.slots, self.saved.slots, strict=True):
            if bound < own.span.stop:
                return saved.span.start + max(0, bound - own.span.start)
        return self.numel

    def saved_span(self, rank: int) -> Span:
        """Return the elements that `rank` holds in a local state."""
        if not self.is_torchs:
            return self.held_span(rank)
        shard = self.saved.shard_span(rank)
        return Span(min(shard.start, self.numel), min(shard.stop, self.numel))

    @property
    def moves(self) -> bool:
        """Whether some rank saves elements that a different one holds."""
        return any(self.saved_span(rank) != self.held_span(rank) for rank in range(self.own.world_size))

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """For each parameter that this rank holds, its places in the shard and in the `held_span`."""
        start = self.held_span(self.rank).start
        for fragment in self.own.fragments(self.rank):
            if fragment.in_param:
                span = fragment.in_param.shifted(self.saved.slots[fragment.index].span.start)
                yield fragment.in_shard.as_slice(), span.relative_to(start).as_slice()

    def held(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the `held_span` of this rank, 1-D: copied from its shard, and zero between parameters."""
        found = shard.new_zeros(self.held_span(self.rank).numel)
        for in_shard, in_span in self._pieces():
            found[in_span] = shard[in_shard]
        return found

    def lay(self, shard: torch.Tensor, elements: torch.Tensor) -> None:
        """Copy `elements`, the `held_span` of this rank, to their places in its shard."""
        for in_shard, in_span in self._pieces():
            shard[in_shard].copy_(elements[in_span])

    def of_full(self, full: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the `saved_span` of this rank, 1-D, of full parameters in the order of the slots."""
        found = full[0].new_zeros(self.saved_span(self.rank).numel)
        for fragment in self.saved.fragments(self.rank):
            part = memory_view(full[fragment.index], self.saved.slots[fragment.index].spec)
            found[fragment.in_shard.as_slice()] = part[fragment.in_param.as_slice()]
        return found


@functools.lru_cache(maxsize=256)
def _saved(own: FlatLayout, alignment_nbytes: int) -> FlatLayout:
    """Return the layout of a local state; the blocks of a model, which share theirs, share it."""
    return own.repacked(alignment_nbytes)
