"""Chunks of all parameters on each rank: what ranks exchange then, and the flat parameter made of it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch

from flatparam_core.geometry.specs import ParamSpec

_BLOCKS: Final = "_flatparam_blocks"
"""The attribute of a flat tensor that has its blocks."""
_DTYPE: Final = operator.attrgetter("dtype")


def chunk_numel(spec: ParamSpec, world_size: int) -> int:
    """Return the elements of the longest chunk of a parameter, which is the first."""
    rows = spec.numel // spec.grain
    return -(-rows // world_size) * spec.grain


@final
@attrs.frozen(eq=False)
class Chunks:
    """The shards of all ranks, end to end, and the flat parameter, in which each parameter is in one piece.

    Both have the same elements. In each, what belongs to a parameter, or to a stretch of padding, is a block with a row
    for each rank; in the shards the rows of a block are a shard apart.
    """

    world_size: int
    numels: tuple[int, ...]
    """The elements of each rank's part of each block, in the order in which they lie in a shard."""
    parameters: tuple[int, ...]
    """The parameter of each block; -1 if it is padding."""
    scalars: frozenset[int]
    """The parameters without dimensions."""

    @classmethod
    def of(cls, specs: Sequence[ParamSpec], starts: Sequence[int], shard_numel: int, world_size: int) -> Chunks:
        """Return the chunks of parameters whose own begin at `starts` in a shard of `shard_numel` elements."""
        found, end = [], 0
        for index, (spec, start) in enumerate(zip(specs, starts, strict=True)):
            chunk = chunk_numel(spec, world_size)
            found += [(-1, start - end), (index, chunk)]
            end = start + chunk
        blocks = [each for each in (*found, (-1, shard_numel - end)) if each[1]]
        return cls(
            world_size,
            tuple(numel for _, numel in blocks),
            tuple(index for index, _ in blocks),
            frozenset(index for index, spec in enumerate(specs) if not spec.shape),
        )

    def shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the shard of `rank`, 1-D, of the flat tensor `full`: a copy."""
        return torch.cat([block[rank] for block in self._in_flat(full.detach())])

    def joined(self, full: torch.Tensor) -> torch.Tensor:
        """Return the shards of all ranks, 1-D, of the flat tensor `full`: a copy."""
        return torch.cat(self._in_flat(full), dim=1).view(-1)

    def join(self, parts: Mapping[int, torch.Tensor], shards: torch.Tensor) -> None:
        """Fill `shards`, 1-D, the shards of all ranks end to end, by one call.

        Args:
            parts: parameters by index, each in its shape; zeros stand for those that are left out.
            shards: parts of a different dtype are cast to its.
        """
        rows: list[Any] = [*map(parts.get, self.parameters)]
        given = set(map(_DTYPE, parts.values()))
        # torch takes neither tensors of several dtypes nor scalars.
        if self.scalars or len(given) > 1 or any(map(operator.is_, rows, itertools.repeat(None))):
            dtype = given.pop() if len(given) == 1 else shards.dtype
            for at, part in enumerate(rows):
                if part is None:
                    rows[at] = shards.new_zeros(self.world_size * self.numels[at], dtype=dtype)
                else:
                    rows[at] = part.reshape(part.shape or 1).to(dtype)
        if torch.is_grad_enabled():
            rows = [row.detach() for row in rows]
        torch._chunk_cat(rows, 0, self.world_size, out=shards.view(self.world_size, -1))

    def spread(self, full: torch.Tensor, shards: torch.Tensor) -> None:
        """Fill the flat tensor `full`, 1-D, with what is in `shards`, by one call."""
        blocks = self._in_flat(full)
        if not blocks:
            # torch refuses an empty list, and parameters without elements have no blocks.
            return
        if full.is_cpu:
            torch._foreach_copy_(blocks, self._in_shards(shards))
        else:
            # One kernel for all; the other call launches one for each block whose rows lie apart.
            rows = shards.view(self.world_size, -1)
            torch.split_with_sizes_copy(rows, self.numels, dim=1, out=blocks)

    def _in_shards(self, shards: torch.Tensor) -> list[torch.Tensor]:
        blocks = self._known(shards)
        if blocks is None:
            rows = shards.detach().view(self.world_size, -1)
            blocks = self._note(shards, [*torch.split(rows, list(self.numels), dim=1)])
        return blocks

    def _in_flat(self, full: torch.Tensor) -> list[torch.Tensor]:
        blocks = self._known(full)
        if blocks is None:
            # Tensors of the blocks' shapes, without memory of their own.
            one = torch.empty((), device="cpu")
            shapes = [one.expand(self.world_size, numel) for numel in self.numels]
            # Of an alias: a view refers to what it was made of, which would live as long as itself.
            blocks = self._note(full, [*torch._C._nn.unflatten_dense_tensors(full.detach(), shapes)])
        return blocks

    def _known(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        known: tuple[Chunks, list[torch.Tensor]] | None = vars(tensor).get(_BLOCKS)
        return known[1] if known is not None and known[0] is self else None

    def _note(self, tensor: torch.Tensor, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        vars(tensor)[_BLOCKS] = (self, blocks)
        return blocks
