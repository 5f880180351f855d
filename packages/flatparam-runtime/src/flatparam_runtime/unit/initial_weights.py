"""Checksums of the initial weights: each rank keeps only its own part, so different weights would become a mixture."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import Threshold

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_CODES: Final = {1: "B", 2: "h", 4: "i", 8: "q", 16: "q"}
"""The type codes of Python's arrays for the same sizes."""

FEW: Final = Threshold(
    "runtime.few_numel",
    256,
    "Python adds up the checksum of a parameter's initial values up to so many elements; above, an operator does.",
    least=0,
)
"""Up to so many elements of a parameter in CPU memory, Python adds up faster than a call of an operator."""


@final
@attrs.frozen(eq=False)
class InitialWeights:
    """A checksum of each parameter as it was when it was sharded: the sum of its bits, taken as integers."""

    fqns: tuple[str, ...]
    """The names of all parameters below the unit."""
    _small: Mapping[str, int]
    _others: Sequence[str]
    _sums: Tensor | None
    """The sums of the `_others`: 1-D, int64, on the device of the first of them; read when they are compared."""
    stamp: int = 0
    """The stamp of the shards that were made of these weights; weights that have changed since are not compared."""

    @classmethod
    def of(cls, fqns: Sequence[str], parameters: Sequence[nn.Parameter]) -> Self:
        """Return the checksums of `parameters`, of any dtypes and devices; each parameter is read once."""
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
        """Return the checksums by name below the unit, in the order of the parameters."""
        sums = [] if self._sums is None else self._sums.tolist()
        found = {**self._small, **dict(zip(self._others, sums, strict=True))}
        return {fqn: found[fqn] for fqn in self.fqns}


def _sum(parameter: Tensor) -> Tensor:
    nbytes = parameter.itemsize
    # A number is viewed as several integers, which have to lie side by side.
    if nbytes > 8:
        parameter = parameter.reshape(-1)
    return parameter.view(_INTEGERS[nbytes]).sum(dtype=torch.int64)


def _sum_of_few(parameter: Tensor) -> int:
    parameter = parameter.contiguous()
    if not parameter.numel():
        return 0
    raw = ctypes.string_at(parameter.data_ptr(), parameter.nbytes)
    total = sum(array(_CODES[parameter.itemsize], raw))
    # int64 wraps around in the same way.
    return (total + 2**63) % 2**64 - 2**63
