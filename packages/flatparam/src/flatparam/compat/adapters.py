"""PEFT's functions for the state of an adapter, which know the wrapper around a model and not the wrappers inside.

They compare the names of modules, in which each wrapper has a part, with those of a state dict, in which none has. Of a
model with several wrappers an adapter's state is then empty, with torch's FSDP1 too, and nothing is loaded: a resumed
run trains a new adapter.

To load, they ask a model for its state, of which they need the names. With `FullStateDictConfig(rank0_only=True)` the
first rank alone has any, and the others would load nothing. Here they get the first rank's names.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from flatparam.compat.holders import patches_of_holders
from flatparam.compat.patching import Patch
from flatparam.state.streaming import with_names_of_first
from flatparam_core import clean_fqn

__all__ = ["patches_of_adapters"]

_HOME: Final = "peft.utils.save_and_load"
_LOADS: Final = "set_peft_model_state_dict"
_FUNCTIONS: Final = ("get_peft_model_state_dict", _LOADS)
_MARK: Final = "_knows_wrappers_inside"


def patches_of_adapters() -> Iterator[Patch]:
    """The patches of PEFT's functions, if PEFT is imported, in each module that has them."""
    home = sys.modules.get(_HOME)
    found = [getattr(home, name, None) for name in _FUNCTIONS]
    theirs = [each for each in found if each is not None and not hasattr(each, _MARK)]
    # All modules are looked through, and every wrapper asks.
    if theirs:
        yield from patches_of_holders({id(each): (each, _for_wrapped(each)) for each in theirs})


def _for_wrapped(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def called(model: Any, *args: Any, **kwargs: Any) -> Any:
        with _as_unwrapped(model, loads=theirs.__name__ == _LOADS):
            return theirs(model, *args, **kwargs)

    setattr(called, _MARK, True)
    return called


@contextlib.contextmanager
def _as_unwrapped(model: Any, *, loads: bool) -> Iterator[None]:
    """Inside, the names of the modules and parameters of `model` are those of the unwrapped model.

    If there is no wrapper of ours, around the model or inside, nothing is changed.

    Args:
        loads: whether its state is asked for because of the names; every rank has them then.
    """
    from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel

    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        yield
        return
    own: dict[str, Any] = {
        name: _cleaned(getattr(model, name)) for name in ("named_modules", "named_parameters")
    }
    if loads:
        own["state_dict"] = functools.partial(_state_with_names, model)
    vars(model).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(model)[name]


def _state_with_names(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The state, with the first rank's names on every rank."""
    return with_names_of_first(model, type(model).state_dict(model, *args, **kwargs))


def _cleaned(pairs: Callable[..., Any]) -> Callable[..., Iterator[tuple[str, Any]]]:
    def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return ((clean_fqn(name), value) for name, value in pairs(*args, **kwargs))

    return named
