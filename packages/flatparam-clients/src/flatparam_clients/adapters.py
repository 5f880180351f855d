"""PEFT's functions and methods, which know nothing of shards, or only of the wrapper around a model.

Functions for the state of an adapter compare the names of modules, in which each wrapper has a part, with those of a
state dict, in which none has. Of a model with several wrappers an adapter's state is then empty, with torch's FSDP1
too, and nothing is loaded: a resumed run trains a new adapter.

To load, they ask a model for its state, of which they need the names. With `FullStateDictConfig(rank0_only=True)` the
first rank alone has any, and the others would load nothing. Here they get the first rank's names.

Modules that are saved whole (`modules_to_save`) they ask for their own state, which is empty if a unit has one flat
parameter. Here it has the names that it has without sharding; and of a state that is another rank's nothing is taken.
What asks modules for their state because of its names may ask (`asking_names`).

Methods that change a model are refused: `merge_and_unload()` and `unload()` take out modules that units gather
parameters for. `merge_adapter()` outside `summon_full_params` multiplies what is left of a weight on this rank, with an
error about shapes, if any.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import nn

from flatparam.compat import Patch
from flatparam.state.load_hooks import with_names_of_first
from flatparam.wrapper.refusing import asking_names
from flatparam_clients.names import patches_of_holders
from flatparam_core import FlatParamError, FlatParameter, clean_fqn
from flatparam_runtime import Unit, holder_of_parameter, units_in

_HOME: Final = "peft.utils.save_and_load"
_LOADS: Final = "set_peft_model_state_dict"
_FUNCTIONS: Final = ("get_peft_model_state_dict", _LOADS)
_MARK: Final = "_knows_wrappers_inside"


def patches_of_adapters() -> Iterator[Patch]:
    """Yield the patches of PEFT's functions, if PEFT is imported, in each module that has them."""
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
    own: dict[str, Any] = {name: _cleaned(getattr(model, name)) for name in ("named_modules", "named_parameters")}
    if loads:
        own["state_dict"] = functools.partial(_state_with_names, model)
    given: list[tuple[Any, dict[str, Any]]] = [(model, own)]
    held = _held_names(model)
    for module in model.modules():
        if hasattr(module, "adapter_state_dict"):
            given.append((module, _whole_names(module, held)))
    for module, methods in given:
        vars(module).update(methods)
    try:
        yield
    finally:
        for module, methods in given:
            for name in methods:
                del vars(module)[name]


def _held_names(model: Any) -> dict[nn.Module, list[str]]:
    """For each module, its own parameters that are in a flat parameter."""
    found: dict[nn.Module, list[str]] = {}
    for unit in units_in(model):
        for handle in unit.handles:
            for infos in handle.param_infos:
                for info in infos:
                    found.setdefault(info.module, []).append(info.param_name)
    return found


def _whole_names(wrapper: Any, held: Mapping[nn.Module, Sequence[str]]) -> dict[str, Any]:
    """Methods in place of those of PEFT's wrapper around something that an adapter has beside its own weights."""
    ask, map_names = wrapper.adapter_state_dict, wrapper.adapter_state_dict_load_map
    saved = getattr(wrapper, "modules_to_save", None)

    def names(adapter: str) -> list[str]:
        whole = saved[adapter] if isinstance(saved, nn.ModuleDict) and adapter in saved else None
        return [] if whole is None else _state_names(whole, held)

    def adapter_state_dict(adapter: str, state: Mapping[str, Any]) -> dict[str, Any]:
        if not state:
            return {}
        kept = {name: f"modules_to_save.{adapter}.{name}" for name in names(adapter)}
        return {name: state[key] for name, key in kept.items()} or dict(ask(adapter, state))

    def adapter_state_dict_load_map(adapter: str) -> dict[str, str]:
        kept = {name: f"modules_to_save.{adapter}.{name}" for name in names(adapter)}
        return kept or dict(map_names(adapter))

    return {"adapter_state_dict": adapter_state_dict, "adapter_state_dict_load_map": adapter_state_dict_load_map}


def _state_names(whole: nn.Module, held: Mapping[nn.Module, Sequence[str]]) -> list[str]:
    """Return the names that the state dict of `whole` has without sharding."""
    found: dict[str, None] = {}
    for path, module in whole.named_modules():
        own = list(held.get(module, ()))
        own += [name for name, p in module._parameters.items() if p is not None and not isinstance(p, FlatParameter)]
        own += [
            name
            for name, b in module._buffers.items()
            if b is not None and name not in module._non_persistent_buffers_set
        ]
        found.update((clean_fqn(f"{path}.{name}".removeprefix(".")), None) for name in own)
    return list(found)


def _state_with_names(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the state, with the first rank's names on every rank."""
    return with_names_of_first(model, type(model).state_dict(model, *args, **kwargs))


def _cleaned(pairs: Callable[..., Any]) -> Callable[..., Iterator[tuple[str, Any]]]:
    def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return ((clean_fqn(name), value) for name, value in pairs(*args, **kwargs))

    return named


_TUNERS: Final = "peft.tuners.tuners_utils"
_UNLOADS: Final = ("merge_and_unload", "unload")
_MERGES: Final = ("merge_adapter", "unmerge_adapter")
_KEEPER: Final = "peft.utils.other"
_ASKING: Final = ("adapter_state_dict", "adapter_state_dict_load_map")
_KNOWS_SHARDS: Final = "_knows_shards"
_ADALORA: Final = "peft.tuners.adalora.model"
_KNOWS_PENALTY: Final = "_knows_penalty"


def guard_adapters() -> None:
    """Have PEFT's methods refuse models that are sharded, if PEFT is imported; a second call does nothing."""
    _guard_penalty()
    tuner = getattr(sys.modules.get(_TUNERS), "BaseTuner", None)
    if tuner is None or hasattr(tuner, _KNOWS_SHARDS):
        return
    keeper = getattr(sys.modules.get(_KEEPER), "ModulesToSaveWrapper", None)
    for name in _ASKING if keeper is not None else ():
        setattr(keeper, name, _asking_names(getattr(keeper, name)))
    for names, refuse in ((_UNLOADS, _refuse_to_unload), (_MERGES, _refuse_to_merge)):
        for name in names:
            theirs = getattr(tuner, name, None)
            if theirs is not None:
                setattr(tuner, name, _guarded(theirs, refuse))
    setattr(tuner, _KNOWS_SHARDS, True)


def _guard_penalty() -> None:
    """Have AdaLoRA refuse units: its loss has products of whole matrices, and its budget compares whole rows."""
    tuner: Any = getattr(sys.modules.get(_ADALORA), "AdaLoraModel", None)
    if tuner is None or hasattr(tuner, _KNOWS_PENALTY):
        return
    forward = tuner.forward

    @functools.wraps(forward)
    def with_penalty(model: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(model, *args, **kwargs)
        has_loss = getattr(outputs, "loss", None) is not None
        if has_loss and model.peft_config[model.trainable_adapter_name].orth_reg_weight:
            # A unit in whose forward call this is has whole matrices.
            _refuse_penalty("forward", model, tuple(unit for unit in units_in(model) if not unit.calls))
        return outputs

    allocate = tuner.update_and_allocate

    @functools.wraps(allocate)
    def allocate_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
        # The unit may be one around the adapter.
        owners = filter(None, map(holder_of_parameter, model.parameters()))
        _refuse_penalty("update_and_allocate", model, (*units_in(model), *owners))
        return allocate(model, *args, **kwargs)

    tuner.forward, tuner.update_and_allocate = with_penalty, allocate_whole
    setattr(tuner, _KNOWS_PENALTY, True)


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


def _refuse_penalty(name: str, tuner: Any, units: tuple[Unit, ...]) -> None:
    if any(not handle.is_whole for unit in units for handle in unit.handles):
        raise FlatParamError(
            f"{_who(name, tuner, units)} is sharded, and AdaLoRA multiplies and ranks the rows of whole matrices, of "
            "which this rank has parts: the numbers would be others. Use LoRA, or DDP (NO_SHARD)"
        )


def _who(name: str, tuner: Any, units: tuple[Unit, ...]) -> str:
    return f"rank {units[0].topology.rank}: {name}(): the model in this {type(tuner).__name__}"
