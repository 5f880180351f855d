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
    _sums: Tensor
    """1-D, int64, where the first parameter was; looked at when they are compared."""

    @classmethod
    def of(cls, fqns: Sequence[str], parameters: Sequence[Tensor]) -> Self:
        """Of `parameters`, of any dtypes and devices, each read once."""
        home = parameters[0].device
        with torch.no_grad():
            sums = [
                _checksum(each) if each.device == home else _checksum(each).to(home) for each in parameters
            ]
        return cls(tuple(fqns), torch.stack(sums))

    def checksums(self) -> dict[str, int]:
        """By name below the unit."""
        return dict(zip(self.fqns, self._sums.tolist(), strict=True))


def _checksum(parameter: Tensor) -> Tensor:
    nbytes = parameter.itemsize
    if nbytes > 8:  # a number as several integers: they have to lie side by side
        parameter = parameter.reshape(-1)
    return parameter.view(_INTEGERS[nbytes]).sum(dtype=torch.int64)
