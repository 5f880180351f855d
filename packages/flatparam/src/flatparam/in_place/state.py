"""The state of modules that `fully_shard` has sharded: `state_dict()` and `load_state_dict()`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import nn

from flatparam.sharding.extensions import chunker
from flatparam.state.saving import collected
from flatparam.state.streaming import streamed
from flatparam_core import FlatParamError
from flatparam_runtime import process_group_of, units_in
from flatparam_state import FormKind, StateForm, load_model_state, state_shown

__all__ = ["load_state", "refuse_torchs_loading", "save_state", "sharded_form"]

_LOADING: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
"""The modules that `load_state` loads now, with all inside them."""


def sharded_form(model: nn.Module, *, offload_to_cpu: bool = False) -> StateForm:
    """The form of the state of `model`: `DTensor`s; full tensors if its ranks are not those of a process group."""
    groups = [process_group_of(unit.topology.shard) for unit in units_in(model) if unit.handles]
    if any(group is None for group in groups):
        return StateForm(offload_to_cpu=offload_to_cpu)
    return StateForm(FormKind.SHARDED, offload_to_cpu=offload_to_cpu, use_dtensor=True, chunker=chunker())


def save_state(
    module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], collect: Callable[..., Any]
) -> Any:
    """Return the state of `module`, by `collect`, which is torch's own `state_dict`.

    Args:
        arguments, named: see `flatparam.state.saving.collected`.
    """
    return collected(arguments, named, collect, lambda state, prefix: _saving(module, state, prefix))


@contextlib.contextmanager
def _saving(module: nn.Module, state: dict[str, Any], prefix: str) -> Iterator[None]:
    with state_shown(module, sharded_form(module)) as stand_ins:
        yield
    stand_ins.resolve(state, prefix)


def load_state(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool,
    load: Callable[..., Any] | None = None,
    rank0_only: bool = False,
) -> Any:
    """Load `state`, of any form, into `model`; every rank calls it.

    Args:
        load: torch's own `load_state_dict` of the model, if the model's class has a different one.
        rank0_only: the first rank's state counts, and is sent tensor by tensor.

    Raises:
        RuntimeError: torch's, on every rank, naming every key that does not fit on some rank; nothing is changed.
    """
    with _loading(model):
        if rank0_only:
            state = streamed(model, state)
        return load_model_state(model, state, strict=strict, load=load, chunker=chunker())


@contextlib.contextmanager
def _loading(model: nn.Module) -> Iterator[None]:
    modules = [module for module in model.modules() if module not in _LOADING]
    _LOADING.update(modules)
    try:
        yield
    finally:
        _LOADING.difference_update(modules)


def refuse_torchs_loading(module: nn.Module) -> None:
    """Check that `module` is being loaded by `load_state`.

    Raises:
        FlatParamError: if torch's own `load_state_dict` of a module around it loads it, which knows no shards.
    """
    if module not in _LOADING:
        raise FlatParamError(
            f"{type(module).__name__} is sharded, and the module whose load_state_dict() was called is not: call "
            "fully_shard for that module too, or flatparam.checkpoint.state_dict.set_model_state_dict(model, state)"
        )
