"""PEFT's functions for the state of an adapter, which know the wrapper around a model and not the wrappers inside.

They compare the names of modules, in which each wrapper has a part, with those of a state dict, in which none has. Of a
model with several wrappers an adapter's state is then empty, with torch's FSDP1 too, and nothing is loaded: a resumed
run trains a new adapter.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from flatparam.compat.holders import patches_of_holders
from flatparam.compat.patching import Patch
from flatparam_core import clean_fqn

__all__ = ["patches_of_adapters"]

_HOME: Final = "peft.utils.save_and_load"
_FUNCTIONS: Final = ("get_peft_model_state_dict", "set_peft_model_state_dict")
_MARK: Final = "_knows_wrappers_inside"


def patches_of_adapters() -> Iterator[Patch]:
    """The patches of PEFT's functions, if PEFT is imported, in each module that has them."""
    home = sys.modules.get(_HOME)
    found = [getattr(home, name, None) for name in _FUNCTIONS]
    theirs = [each for each in found if each is not None and not hasattr(each, _MARK)]
    # All modules are looked through, and every wrapper asks.
    if theirs:
        yield from patches_of_holders({id(each): (each, _with_clean_names(each)) for each in theirs})


def _with_clean_names(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def called(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _clean_names(model):
            return theirs(model, *args, **kwargs)

    setattr(called, _MARK, True)
    return called


@contextlib.contextmanager
def _clean_names(model: Any) -> Iterator[None]:
    """Inside, the names of the modules and parameters of `model`, if we wrap it, are those of the unwrapped model."""
    from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel

    if not isinstance(model, FullyShardedDataParallel):
        yield
        return
    own = {name: _cleaned(getattr(model, name)) for name in ("named_modules", "named_parameters")}
    vars(model).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(model)[name]


def _cleaned(pairs: Callable[..., Any]) -> Callable[..., Iterator[tuple[str, Any]]]:
    def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return ((clean_fqn(name), value) for name, value in pairs(*args, **kwargs))

    return named
