"""Layers of bitsandbytes that give their weight other bytes when they evaluate on a CPU: they are told not to.

On a CPU with AVX512-BF16 a `Linear4bit` repacks its weight the first time that it evaluates, for a faster product, and
rounds the scales. Nothing undoes that exactly, and the layer trains no more. A rank holds only a part of the weight, so
it cannot repack it; without that the layer evaluates as it trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

from flatparam.resolving import Ignored
from flatparam_core import FlatParamError

__all__ = ["keep_packing", "refuse_repacked"]

_MAY_REPACK: Final = "support_avx512bf16_for_cpu"
_IS_REPACKED: Final = "packing_format_for_cpu"


def keep_packing(modules: Iterable[nn.Module], ignored: Ignored) -> None:
    """Have those of `modules` whose weight is to be sharded keep its bytes when they evaluate."""
    for module in modules:
        if vars(module).get(_MAY_REPACK) and module._parameters.get("weight") not in ignored:
            setattr(module, _MAY_REPACK, False)


def refuse_repacked(module: nn.Module, ignored: Ignored) -> None:
    """Refuse a model of which a layer has evaluated before, so that its weight is repacked.

    Raises:
        FlatParamError: naming the parameter.
    """
    for path, child in module.named_modules():
        # TorchScript's parameters are in no dict; they are refused, or ignored, later.
        if isinstance(child, torch.jit.ScriptModule):
            continue
        weight = child._parameters.get("weight")
        if weight is None or weight in ignored:
            continue
        if getattr(getattr(weight, "quant_state", None), _IS_REPACKED, False):
            name = f"{path}.weight" if path else "weight"
            raise FlatParamError(
                f"parameter {name!r} was repacked when its {type(child).__name__} evaluated on this CPU (AVX512-BF16), "
                "which rounds its scales and is not undone, and the layer trains no more: expected the bytes as they "
                f"were quantised; shard the model before it evaluates, or set {_MAY_REPACK} = False of its layers first"
            )
