"""States in eight bits, with a scale for each block of elements, as tensors that are cut like their parameter.

Each element gets the scale of its block, so that any rank finds the scales of its elements, wherever these were before.
The layout has to keep blocks whole. It is done for the optimizers of bitsandbytes, whose states are bytes with scales
beside them, and of torchao, whose states are tensors of a class of its own. What saves and loads states finds this
module by the entry point `blocks` of `flatparam.optimizers`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from flatparam_comm import FlatParamError

__all__ = ["in_blocks", "spread_out"]

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
