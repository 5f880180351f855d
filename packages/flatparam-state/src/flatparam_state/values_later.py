"""Tensors on the meta device whose values come from somewhere else, once the model is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import attrs
from torch import Tensor, nn

__all__ = ["ValuesLater"]


@final
@attrs.frozen(eq=False)
class ValuesLater:
    """A `param_init_fn` for tensors whose values come later: of parameters, once they are sharded.

    No memory is made for full parameters; buffers stay on the meta device.
    """

    _known: frozenset[int]
    """The identities of these parameters and buffers."""
    _kept: Sequence[Tensor]
    """The tensors themselves, so that the identities stay theirs."""
    function: Callable[[nn.Module], None] | None = None
    """Gives values to modules that have others on the meta device; by default their `reset_parameters()` does."""

    def __call__(self, module: nn.Module) -> None:
        """Refuse: whoever knows this class asks for `function`.

        Raises:
            TypeError: always.
        """
        raise TypeError("ValuesLater gives no values by itself")

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._known

    @classmethod
    def of(
        cls, tensors: Sequence[Tensor], function: Callable[[nn.Module], None] | None = None
    ) -> ValuesLater:
        """Leave out these tensors."""
        return cls(frozenset(map(id, tensors)), tensors, function)
