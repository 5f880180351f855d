"""The entries of an optimizer's state: how they are copied and compared, and those that differ between ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, TypeGuard, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_runtime import FlatParamError, Span
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


# States in eight bits, with a scale for each block of elements, become tensors that are cut like their parameter: each
# element gets the scale of its block, so that any rank finds the scales of its elements, wherever these were before.
# The layout has to keep blocks whole. It is done for the optimizers of bitsandbytes, whose states are bytes with scales
# beside them, and of torchao, whose states are tensors of a class of its own.

_BLOCK: Final = 256
"""The elements of a block, in both libraries."""
_NESTED: Final = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes puts states in its `state_dict()` that FSDP1 should not look at."""
_SCALES: Final = {"absmax1": "state1", "absmax2": "state2"}
_TABLES: Final = ("qmap1", "qmap2")
_CLASS, _MODULE = "OptimState8bit", "torchao.optim.subclass_8bit"
_CODES, _SCALE, _TABLE = ".codes", ".scale", ".table"


def spread_out(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the states of one parameter, with a scale for each element; `values` itself if nothing is in blocks."""
    if _NESTED in values:
        outer = {name: value for name, value in values.items() if name != _NESTED}
        values = outer | values[_NESTED]
    found: dict[Any, Any] = {}
    for name, value in values.items():
        if type(value).__name__ == _CLASS and type(value).__module__ == _MODULE:
            found[f"{name}{_CODES}"] = value.codes
            found[f"{name}{_SCALE}"] = _spread(value.scale, value.codes)
            found[f"{name}{_TABLE}"] = value.qmap.tolist()
        elif name in _SCALES and _is_of(value, values.get(_SCALES[name])):
            found[name] = _spread(value, values[_SCALES[name]])
        elif name in _TABLES and isinstance(value, Tensor):
            found[name] = value.tolist()
        else:
            found[name] = value
    return found if found.keys() != values.keys() or any(found[key] is not values[key] for key in found) else values


def _is_of(scales: Any, codes: Any) -> bool:
    """Return whether `scales` has one number for each block of `codes`."""
    if not isinstance(scales, Tensor) or not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        return False
    return scales.dim() == 1 and scales.numel() == -(-codes.numel() // _BLOCK)


def _spread(scales: Tensor, codes: Tensor) -> Tensor:
    return scales.repeat_interleave(_BLOCK)[: codes.numel()].view(codes.shape)


def in_blocks(values: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the result of `spread_out` for the states of `parameter`, as its optimizer holds them.

    Raises:
        FlatParamError: if the states are torchao's, and it is not installed.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.endswith(_CODES):
            found[name.removesuffix(_CODES)] = _of_torchao(name.removesuffix(_CODES), values, parameter)
        elif name.endswith((_SCALE, _TABLE)) and f"{name.rpartition('.')[0]}{_CODES}" in values:
            continue
        elif name in _SCALES and isinstance(value, Tensor) and value.shape == parameter.shape:
            found[name] = value.reshape(-1)[::_BLOCK].contiguous()
        elif name in _TABLES and isinstance(value, list):
            found[name] = torch.tensor(value, dtype=torch.float32, device=parameter.device)
        else:
            found[name] = value
    return found


def _of_torchao(name: str, values: Mapping[str, Any], parameter: Tensor) -> Tensor:
    try:
        kind = getattr(importlib.import_module(_MODULE), _CLASS)
    except ImportError as error:
        raise FlatParamError(
            f"the optimizer state {name!r} was saved in the eight bits of torchao, which cannot be imported: install "
            "torchao, or leave this state out"
        ) from error
    codes = values[f"{name}{_CODES}"]
    scale = values[f"{name}{_SCALE}"].reshape(-1)[::_BLOCK].contiguous()
    table = torch.tensor(values[f"{name}{_TABLE}"], dtype=torch.float32, device=codes.device)
    made: Tensor = kind(codes, scale, table, bool(table.min() < 0), dtype=parameter.dtype)
    return made
