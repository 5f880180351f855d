"""The entries of an optimizer's state: how they are copied and compared, and those that differ between ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias, TypeGuard, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_runtime import Span, module_behind
from flatparam_state.forms.tiling import is_sharded_tensor

State: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The states of an optimizer: by the name of a parameter, what it has under which name."""


@final
@attrs.frozen(eq=False)
class AsItIs:
    """A saved state that belongs to its parameter as a whole, whatever its shape."""

    value: Any


def copy_value(value: Any, device: torch.device | None) -> Any:
    """`value` with memory of its own, on `device` if one is given; a `ShardedTensor` as it is."""
    # It is of a parameter that no unit holds: only who made it knows its ranks.
    if is_sharded_tensor(value):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copy_value(each, device) for key, each in value.items()}
    return value


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are the same; tensors by their elements, dtype and shape."""
    if a is b:
        return True
    # To compare their elements, ranks would have to communicate.
    if is_sharded_tensor(a) or is_sharded_tensor(b):
        return False
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and torch.equal(a.cpu(), b.cpu())
        )
    return bool(a == b)


# States that differ between ranks and are not cut like their parameter


PER_RANK: Final = "flatparam.per_rank"
"""The one key of the entry that a state dict has for a `PerRank`: a list of what each rank that holds a part of the
parameter has, `{"interval": [start, stop], "value": ...}`."""


@final
@attrs.frozen(eq=False)
class PerRank:
    """A state that differs between ranks and is not cut like its parameter, and so has a value for each rank.

    The state dict has it as the entry `{PER_RANK: [...]}`, the manifest of a checkpoint as one `RankValue` a rank.
    """

    values: tuple[tuple[Span, Any], ...]
    """The part of the parameter that a rank holds, and its value."""

    def to_entry(self) -> dict[str, Any]:
        """Return the entry of a state dict; see `PER_RANK`."""
        return {PER_RANK: [{"interval": [part.start, part.stop], "value": value} for part, value in self.values]}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Self:
        """Return the state of which `to_entry` made `entry`."""
        return cls(tuple((Span(*each["interval"]), each["value"]) for each in entry[PER_RANK]))


def is_per_rank(entry: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether an entry of a state dict is that of a `PerRank`."""
    return isinstance(entry, Mapping) and PER_RANK in entry


# States in blocks, with a scale for each, become tensors that are cut like their parameter, by flatparam-optim


class StatesInBlocks(Protocol):
    """A module that the entry point `blocks` of `flatparam.optimizers` names."""

    def spread_out(self, values: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return the states of one parameter as they are saved; `values` itself if nothing is in blocks."""

    def in_blocks(self, values: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return the result of `spread_out` for the states of `parameter`, as its optimizer holds them."""


@functools.cache
def _blocks() -> StatesInBlocks | None:
    found: StatesInBlocks | None = module_behind("flatparam.optimizers", "blocks", "flatparam_optim.eight_bits")
    return found


def spread_out(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the states of one parameter as they are saved; see `StatesInBlocks`."""
    found = _blocks() if any(map(_may_be_in_blocks, values.values())) else None
    return values if found is None else found.spread_out(values)


def _may_be_in_blocks(value: Any) -> bool:
    """Return whether it is of bytes, of a class of its own, or has other states in it."""
    if isinstance(value, Tensor):
        return value.dtype == torch.uint8 or type(value) is not Tensor
    return isinstance(value, Mapping)


def in_blocks(values: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return saved states of `parameter` as its optimizer holds them; see `StatesInBlocks`."""
    found = _blocks()
    return values if found is None else found.in_blocks(values, parameter)
