"""The needs of client programs when a model is sharded: the wrapper calls these functions, if this package is there.

The average of a copy that was made before the model was sharded, such as that of Lightning's `WeightAveraging`, has
whole parameters, and the model has shards. What goes through both, parameter by parameter, ends in an error about sizes
in the middle, or mixes elements that do not belong together where sizes happen to allow it; so it is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from torch import nn
from torch.optim.swa_utils import AveragedModel

from flatparam.compat import apply
from flatparam_clients.adapters import guard_adapters, patches_of_adapters
from flatparam_core import FlatParamError
from flatparam_runtime import units_in

WHEN_WRAPPED: Final[list[Callable[[], object]]] = []
"""Each is called when a wrapper is made; other libraries may have been imported since `install`."""


def unit_made() -> None:
    """Have the functions of other libraries that know nothing of shards refuse sharded models."""
    guard_adapters()
    guard_averages()


def wrapped() -> None:
    """Call each function of `WHEN_WRAPPED`.

    Without an installation PEFT's functions learn of wrappers all the same: they would save an adapter without tensors.
    """
    for notice in WHEN_WRAPPED or [lambda: apply(patches_of_adapters())]:
        notice()


_HOMES: Final = ("lightning.pytorch.callbacks.weight_averaging", "pytorch_lightning.callbacks.weight_averaging")
_GUARDED: Final = "_knows_shards"


def guard_averages() -> None:
    """Have torch's `AveragedModel`, and Lightning's callback, refuse such copies; a second call does nothing."""
    _guard_kind(AveragedModel, ("update_parameters",), lambda average: average.module)
    for home in _HOMES:
        callback = getattr(sys.modules.get(home), "WeightAveraging", None)
        if callback is not None:
            names = ("_swap_models", "_copy_average_to_current")
            _guard_kind(callback, names, lambda average: average._average_model.module)


def _guard_kind(kind: Any, names: tuple[str, ...], copy_of: Callable[[Any], nn.Module]) -> None:
    if _GUARDED in vars(kind):
        return
    for name in names:
        theirs = getattr(kind, name, None)
        if theirs is not None:
            setattr(kind, name, _guarded(theirs, f"{kind.__name__}.{name}()", copy_of))
    setattr(kind, _GUARDED, True)


def _guarded(theirs: Callable[..., Any], call: str, copy_of: Callable[[Any], nn.Module]) -> Any:
    @functools.wraps(theirs)
    def called(average: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _refuse_early_copy(call, copy_of(average), model)
        return theirs(average, model, *args, **kwargs)

    return called


def _refuse_early_copy(call: str, copy: nn.Module, model: nn.Module) -> None:
    """Raise on every rank if `copy` has the whole parameters of `model`, and the model does not show them whole."""
    units = units_in(model)
    if not units or units_in(copy):
        return
    pairs = zip(copy.named_parameters(), model.parameters(), strict=False)
    shapes = [(name, tuple(one.shape), tuple(other.shape)) for (name, one), other in pairs]
    misfits = [each for each in shapes if each[1] != each[2]]
    # Inside summon_full_params, and where a rank has all, the two are alike.
    shown = all(each.is_unsharded or each.is_whole for unit in units for each in unit.handles)
    if not shapes or (shown and not misfits):
        return
    name, whole, part = (misfits or shapes)[0]
    raise FlatParamError(
        f"rank {units[0].topology.rank}: {call}: expected an average of the sharded model, found one of a copy that "
        f"was made before the model was sharded. For example, the copy has {name!r} in the shape {whole}, where this "
        f"rank's part has {part}. Nothing was changed. Keep the average by ema = flatparam.ShardedEMA(model, "
        "decay), made after the model is sharded, and call ema.update() after each step (docs/guides/averages.md); or "
        "make the AveragedModel after the model is sharded"
    )
