"""PEFT's methods that change a model, which know nothing of shards: what a sharded model cannot do is refused.

`merge_and_unload()` and `unload()` take out modules that units gather parameters for. `merge_adapter()` outside
`summon_full_params` multiplies what is left of a weight on this rank, with an error about shapes, if any.

What asks modules for their state because of its names may ask (`asking_names`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from flatparam.wrapper.refusing import asking_names
from flatparam_core import FlatParamError
from flatparam_runtime import Unit, units_in

__all__ = ["guard_adapters"]

_HOME: Final = "peft.tuners.tuners_utils"
_UNLOADS: Final = ("merge_and_unload", "unload")
_MERGES: Final = ("merge_adapter", "unmerge_adapter")
_KEEPER: Final = "peft.utils.other"
_NAMES: Final = ("adapter_state_dict", "adapter_state_dict_load_map")
_MARK: Final = "_knows_shards"


def guard_adapters() -> None:
    """Have PEFT's methods refuse models that are sharded, if PEFT is imported; a second call does nothing."""
    tuner = getattr(sys.modules.get(_HOME), "BaseTuner", None)
    if tuner is None or hasattr(tuner, _MARK):
        return
    keeper = getattr(sys.modules.get(_KEEPER), "ModulesToSaveWrapper", None)
    for name in _NAMES if keeper is not None else ():
        setattr(keeper, name, _asking_names(getattr(keeper, name)))
    for names, refuse in ((_UNLOADS, _refuse_to_unload), (_MERGES, _refuse_to_merge)):
        for name in names:
            theirs = getattr(tuner, name, None)
            if theirs is not None:
                setattr(tuner, name, _guarded(theirs, refuse))
    setattr(tuner, _MARK, True)


def _asking_names(theirs: Callable[..., Any]) -> Any:
    """Return the method, which asks the module that it keeps for its state, for the names in it."""

    @functools.wraps(theirs)
    def called(*args: Any, **kwargs: Any) -> Any:
        with asking_names():
            return theirs(*args, **kwargs)

    return called


def _guarded(theirs: Callable[..., Any], refuse: Callable[[str, Any, tuple[Unit, ...]], None]) -> Any:
    @functools.wraps(theirs)
    def called(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        units = units_in(tuner)
        if units:
            refuse(theirs.__name__, tuner, units)
        return theirs(tuner, *args, **kwargs)

    return called


def _refuse_to_unload(name: str, tuner: Any, units: tuple[Unit, ...]) -> None:
    raise FlatParamError(
        f"{_who(name, tuner, units)} is sharded, and this would take modules out of it whose parameters are in "
        "shards; nothing was changed. For the merged weights, call merge_adapter() inside summon_full_params and "
        "take state_dict() without the names of the adapter (the guide to PEFT shows it); or load the adapter into a "
        "model that is not sharded"
    )


def _refuse_to_merge(name: str, tuner: Any, units: tuple[Unit, ...]) -> None:
    for unit in units:
        if not all(handle.is_unsharded or handle.is_whole for handle in unit.handles):
            raise FlatParamError(
                f"{_who(name, tuner, units)} is sharded, and this rank has parts of its weights; nothing was changed. "
                f"Call {name}() on every rank inside summon_full_params, with writeback=True"
            )


def _who(name: str, tuner: Any, units: tuple[Unit, ...]) -> str:
    return f"rank {units[0].topology.rank}: {name}(): the model in this {type(tuner).__name__}"
