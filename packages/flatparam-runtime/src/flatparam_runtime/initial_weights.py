"""Whether the ranks begin with the same weights: each keeps a part of its own, so others would make it a mixture."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from typing_extensions import Self, final

__all__ = ["InitialWeights"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@final
@attrs.frozen(eq=False)
class InitialWeights:
    """A checksum of each parameter as it was when it was sharded: the sum of its bits, taken as integers."""

    fqns: tuple[str, ...]
    _sums: tuple[Tensor, ...]
    """0-d, int64, where the parameters were; looked at when they are compared."""

    @classmethod
    def of(cls, fqns: Sequence[str], parameters: Sequence[Tensor]) -> Self:
        """Of `parameters`, of any dtype and device, each read once."""
        return cls(tuple(fqns), tuple(map(_checksum, parameters)))

    def checksums(self) -> dict[str, int]:
        """By name below the unit."""
        return {fqn: int(total) for fqn, total in zip(self.fqns, self._sums, strict=True)}


def _checksum(parameter: Tensor) -> Tensor:
    bits = parameter.detach().reshape(-1).view(_INTEGERS[parameter.element_size()])
    return bits.sum(dtype=torch.int64)
