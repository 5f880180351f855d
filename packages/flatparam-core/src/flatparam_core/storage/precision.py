"""The dtypes of a flat parameter at rest, in computation and in reduction."""

from __future__ import annotations

from typing import Any, final

import attrs
import torch

from flatparam_core.errors import FlatParamError


@final
@attrs.frozen
class Precision:
    """The compute and the reduction dtype of a unit; `None` leaves the dtype as it is.

    Only floating-point parameters are cast. At rest (the shard, the optimizer, a checkpoint) a parameter has
    its own dtype.

    Raises:
        FlatParamError: for anything but floating-point dtypes, and for a reduction in 8 bits, which no backend can do.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    """Whether `.grad` has the compute dtype instead of the parameter's own."""

    def __attrs_post_init__(self) -> None:
        given: dict[str, Any] = {"param_dtype": self.param_dtype, "reduce_dtype": self.reduce_dtype}
        for name, dtype in given.items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise FlatParamError(
                    f"{name}: expected a floating-point dtype, such as torch.bfloat16, or None; found {dtype!r}"
                )
        if self.reduce_dtype is not None and self.reduce_dtype.itemsize < 2:
            raise FlatParamError(
                "reduce_dtype: expected a dtype in which gradients can be added up, of 16 bits or more, such as "
                f"torch.bfloat16, or None; found {self.reduce_dtype}"
            )

    def compute(self, storage: torch.dtype) -> torch.dtype:
        """Return the dtype of the unsharded parameters of a flat parameter that is stored as `storage`."""
        return self.param_dtype if self.param_dtype and storage.is_floating_point else storage

    def reduce(self, storage: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients are summed over ranks: by default the compute dtype."""
        if self.reduce_dtype and storage.is_floating_point:
            return self.reduce_dtype
        return self.compute(storage)

    @property
    def held_in(self) -> tuple[torch.dtype, ...]:
        """The dtypes that full parameters or unsharded gradients have beside their own."""
        return tuple(dtype for dtype in (self.param_dtype, self.reduce_dtype) if dtype is not None)

    def grad(self, storage: torch.dtype) -> torch.dtype:
        """Return the dtype of `.grad`: that of the parameter, unless low precision is kept."""
        return self.compute(storage) if self.keep_low_precision_grads else storage
