"""The values of a module that is sharded in place: its state, and those that it gives itself after the meta device."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from flatparam.resolving.parameters import Ignored
from flatparam.sharding.extensions import chunker
from flatparam.sharding.placement import own_modules
from flatparam.state.load_hooks import streamed
from flatparam.state.saving import collected
from flatparam_core import FlatParamError
from flatparam_runtime import process_group_of, summon_full_params, unit_of, units_in
from flatparam_state import FormKind, StateForm, load_model_state
from flatparam_state.forms.deferred import ValuesLater
from flatparam_state.model.collect import state_shown

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


#: The methods by which modules give themselves values: torch's convention, and that of many models.
_METHODS: Final = ("reset_parameters", "init_weights")


def initialisers_of(original: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class that give its modules values, each to be called with full parameters in place."""
    found = {name: getattr(original, name, None) for name in _METHODS}
    return {name: _with_full_parameters(method) for name, method in found.items() if callable(method)}


def _with_full_parameters(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def initialise(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(module)
        if unit is None or unit.showing.wishes is not None:
            return method(module, *args, **kwargs)
        # Sharded modules inside, whose methods this one calls, show theirs, one after the other.
        with summon_full_params(module, recurse=False):
            return method(module, *args, **kwargs)

    return initialise


def values_to_come(module: nn.Module, ignored: Ignored, *, parameters: bool) -> ValuesLater | None:
    """Return the tensors on the meta device to which nothing in their module gives values.

    Buffers are made by `make_on_device`.

    Args:
        parameters: whether parameters are among them.
    """
    found = [
        tensor
        for child in own_modules(module, ignored)
        if not callable(getattr(child, "reset_parameters", None))
        for tensor in (*child.buffers(recurse=False), *(child.parameters(recurse=False) if parameters else ()))
        if tensor.is_meta
    ]
    return ValuesLater.of(found) if found else None


def make_on_device(module: nn.Module, device: Any) -> None:
    """Give buffers that are on the meta device memory; parameters have theirs since the module was sharded.

    Raises:
        FlatParamError: for a different device than that of the units; nothing is changed.
    """
    asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    for unit in units_in(module):
        devices = {unit.device, *(handle.flat_param.device for handle in unit.handles)}
        if not any(_is_of(asked, known) for known in devices):
            raise FlatParamError(
                f"to_empty(): unit {unit.name!r} is on {unit.device}, found device={str(device)!r}; its parameters "
                "have memory there since fully_shard, so pass that device, or leave out to_empty()"
            )
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = torch.empty_like(buffer, device=asked)


def _is_of(asked: torch.device, known: torch.device) -> bool:
    """Return whether a device is the one that was asked for, which need not say which of its kind it is."""
    return asked == known or str(asked) == known.type
