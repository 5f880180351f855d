"""What a program writes in place to the tensors of a state: they are copies, so the model does not change by it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, Final, final

import attrs
import torch
from torch import nn

__all__ = ["forget", "warn_of_writes", "watch"]


@final
@attrs.define(eq=False)
class _Watch:
    """The tensors of the states that a model has given, while they are there, and what was written to them."""

    written: set[str] = attrs.field(factory=set)
    _there: dict[str, tuple[weakref.ReferenceType[torch.Tensor], torch.Tensor, int]] = attrs.field(
        factory=dict
    )
    """By name: the tensor, an alias that counts its changes, and their number at first."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Watch `tensor`."""
        alias = tensor.detach()
        before = alias._version

        def gone(_: object) -> None:
            if alias._version != before:
                self.written.add(name)
            if name in self._there and self._there[name][1] is alias:
                del self._there[name]

        self._there[name] = weakref.ref(tensor, gone), alias, before

    def found(self) -> list[str]:
        """Return the names of what was written."""
        now = {name for name, (_, alias, before) in self._there.items() if alias._version != before}
        return sorted(self.written | now)


_PLAIN: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The classes of tensors that have memory of their own."""
_WATCHES: Final[weakref.WeakKeyDictionary[nn.Module, _Watch]] = weakref.WeakKeyDictionary()


def watch(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Notice what is written in place to the tensors of `state`, which `model` has given."""
    found = _WATCHES.setdefault(model, _Watch())
    own = {_memory(each) for each in (*model.parameters(), *model.buffers())}
    for name, value in state.items():
        memory = _memory(value)
        if memory and memory not in own and not (value.is_meta or value.is_inference()):
            found.add(name, value)


def _memory(value: Any) -> int:
    """What tells the memory of a tensor from other memory; of a DTensor that of its local part; 0 of anything else."""
    tensor = getattr(value, "_local_tensor", value)
    return tensor.untyped_storage()._cdata if type(tensor) in _PLAIN else 0


def forget(model: nn.Module) -> None:
    """Forget the states that `model` has given: one was loaded, perhaps one of them."""
    _WATCHES.pop(model, None)


def warn_of_writes(model: nn.Module) -> None:
    """Say that an earlier state of `model` was written to in place and not loaded, if so; not again for those."""
    found = _WATCHES.get(model)
    names = found.found() if found is not None else []
    if names:
        forget(model)
        warnings.warn(
            f"values were written in place to {len(names)} tensors of an earlier state_dict() of this "
            f"{type(model).__name__}, such as {names[0]!r}, and not loaded: the tensors are copies, so the model has "
            "not changed. An average that is kept in this way never moves: keep it by flatparam.ShardedEMA, by "
            "torch.optim.swa_utils.AveragedModel, or by updating the parameters of a copy of the model "
            "(docs/guides/averages.md); or call load_state_dict() with the state",
            stacklevel=3,
        )
