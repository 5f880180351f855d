"""Whether the ranks begin with the same weights: each keeps a part of its own, so others would make it a mixture."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self, final

from flatparam_comm import Threshold

__all__ = ["InitialWeights"]

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_CODES: Final = {1: "B", 2: "h", 4: "i", 8: "q", 16: "q"}
"""The same for Python's arrays."""

FEW: Final = Threshold(
    "runtime.few_numel",
    256,
    "The checksum of a parameter's first values is made by Python up to so many elements, and by an operator above.",
    least=0,
)
"""Up to so many elements a parameter in CPU memory is added up by Python, which takes less than to call an operator."""


@final
@attrs.frozen(eq=False)
class InitialWeights:
    """A checksum of each parameter as it was when it was sharded: the sum of its bits, taken as integers."""

    fqns: tuple[str, ...]
    """Of all, below the unit."""
    _small: Mapping[str, int]
    _others: Sequence[str]
    _sums: Tensor | None
    """Theirs: 1-D, int64, where the first of them was; looked at when they are compared."""
    stamp: int = 0
    """The stamp of the shards that were made of them; what has changed since is not compared."""

    @classmethod
    def of(cls, fqns: Sequence[str], parameters: Sequence[nn.Parameter]) -> Self:
        """Of `parameters`, of any dtypes and devices, each read once."""
        small: dict[str, int] = {}
        others: dict[str, Tensor] = {}
        with torch.no_grad():
            for fqn, parameter in zip(fqns, parameters, strict=True):
                if type(parameter) is nn.Parameter and parameter.numel() <= FEW.value and parameter.is_cpu:
                    small[fqn] = _sum_of_few(parameter)
                else:
                    others[fqn] = _sum(parameter)
            home = [each.to(next(iter(others.values())).device) for each in others.values()]
            return cls(tuple(fqns), small, tuple(others), torch.stack(home) if others else None)

    def checksums(self) -> dict[str, int]:
        """By name below the unit, in the order of the parameters."""
        sums = [] if self._sums is None else self._sums.tolist()
        found = {**self._small, **dict(zip(self._others, sums, strict=True))}
        return {fqn: found[fqn] for fqn in self.fqns}


def _sum(parameter: Tensor) -> Tensor:
    nbytes = parameter.itemsize
    if nbytes > 8:  # a number as several integers: they have to lie side by side
        parameter = parameter.reshape(-1)
    return parameter.view(_INTEGERS[nbytes]).sum(dtype=torch.int64)


def _sum_of_few(parameter: Tensor) -> int:
    parameter = parameter.contiguous()
    if not parameter.numel():
        return 0
    raw = ctypes.string_at(parameter.data_ptr(), parameter.nbytes)
    total = sum(array(_CODES[parameter.itemsize], raw))
    return (total + 2**63) % 2**64 - 2**63  # as int64 wraps around
