"""The functions of `torch.distributed.checkpoint.state_dict`, for models that are sharded with flatparam.

Names, arguments and results are those of torch. For a model that flatparam does not shard, neither by wrappers nor in
place, these functions call torch's own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn

from flatparam.api import (
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from flatparam.compat import torchs_own
from flatparam.in_place import module_state as in_place
from flatparam.state.form_settings import form_of, settings_shown
from flatparam.state.load_hooks import streamed
from flatparam.wrapper.interior import wrappers_in
from flatparam_core import FSDP_WRAPPED_MODULE, FlatParamError, clean_fqn
from flatparam_runtime import units_in
from flatparam_state import StateForm, load_optimizer_state, model_state_dict, optimizer_state_dict
from flatparam_state.forms.chunker import is_dtensor
from flatparam_state.model.load import COMPILED
from flatparam_state.optimizer.held import Holding, held_parameters
from flatparam_state.places import places_in
from flatparam_state.ranks import all_of

F = TypeVar("F", bound=Callable[..., Any])

_HOME: Final = "torch.distributed.checkpoint.state_dict"
__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


@dataclass
class StateDictOptions:
    """Options for getting and setting state, with torch's names.

    Args:
        full_state_dict: full tensors instead of sharded ones.
        cpu_offload: tensors in CPU memory; only the first rank gets full tensors, the others get an empty dict.
        ignore_frozen_params: leave out parameters that require no gradient.
        keep_submodule_prefixes: with `submodules`, keep their names in front of their parameters'.
        strict: refuse missing and unexpected keys.
        broadcast_from_rank0: only the first rank has the (full) state; it is sent tensor by tensor.
        flatten_optimizer_state_dict: one level of keys, as in `state.layer1.weight.exp_avg`.
        dsd_fqn_modifiers: a method by which modules say how their hooks rename parameters; not needed, because
            flatparam runs the hooks themselves.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def _of_sharded_models(function: F) -> F:
    """Have torch's own function of the same name answer for a model that flatparam does not shard."""

    @functools.wraps(function)
    def answer(model: nn.Module, *args: Any, **named: Any) -> Any:
        if units_in(model):
            given = args[0] if args else named.get("optimizers")
            with _unpatched([model, *(given if isinstance(given, (list, tuple)) else [given])]):
                # What `torch.compile` has returned has one name more than the module inside.
                return function(model._modules.get(COMPILED, model), *args, **named)
        # Torch's module also loads torch's FSDP, so it is imported only if it is needed.
        if named.get("options") is not None:
            named["options"] = torchs_own(_HOME, "StateDictOptions")(**vars(named["options"]))
        return torchs_own(_HOME, function.__name__)(model, *args, **named)

    return cast("F", answer)


@contextlib.contextmanager
def _unpatched(owners: Iterable[Any]) -> Iterator[None]:
    """Have models and optimizers answer by themselves inside, if torch has patched them to call functions of here."""
    patches = getattr(sys.modules.get(_HOME), "_patched_state_dict", ())
    spaces = [vars(each) for each in owners if isinstance(each, (nn.Module, torch.optim.Optimizer))]
    found = [(space, name) for space in spaces for name in ("state_dict", "load_state_dict")]
    taken = [(space, name, space.pop(name)) for space, name in found if space.get(name) in patches]
    try:
        yield
    finally:
        for space, name, call in taken:
            space[name] = call


@_of_sharded_models
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """Return the model's state under clean names, sharded by default; every rank calls it."""
    options = _checked(options)
    state: dict[str, Any]
    if wrappers_in(model):
        with _form_of(model, options):
            state = model.state_dict()
    else:
        state = model_state_dict(model, form=_form(model, options))
    state = {clean_fqn(key): _whole(value, options) for key, value in state.items()}
    if _is_elsewhere(model, options):
        return {}
    if options.ignore_frozen_params:
        frozen = _frozen(model)
        state = {key: value for key, value in state.items() if key not in frozen}
    return _of_submodules(model, state, submodules, options.keep_submodule_prefixes) if submodules else state


@_of_sharded_models
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> dict[str, Any]:
    """Return the state of all optimizers by parameter name, as one state; every rank calls it.

    Of an optimizer that has not made a step yet it is what the first step will start from. The optimizer is left as it
    is; torch steps it, with zeros for gradients, and so the run that goes on from there counts a step too many.
    """
    options = _checked(options)
    form = _form(model, options)
    state: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in _several(optimizers):
        found = optimizer_state_dict(model, optimizer, form=form, first_state=True)
        for fqn, values in found.get("state", {}).items():
            values.update({name: _whole(value, options) for name, value in values.items()})
            state["state"][fqn] = values
        state["param_groups"] += found.get("param_groups", [])
    if _is_elsewhere(model, options):
        return {}
    return flattened(state) if options.flatten_optimizer_state_dict else state


@_of_sharded_models
def get_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's state and the optimizers' state; see `get_model_state_dict`, `get_optimizer_state_dict`."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


@_of_sharded_models
def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: Any = None) -> Any:
    """Load a model state of any form; every rank calls it.

    Returns:
        The result of `load_state_dict`: missing and unexpected keys.

    Raises:
        RuntimeError: if keys or shapes do not fit; the error names every key.
    """
    options = _checked(options)
    state = _with_prefixes(model, model_state_dict)
    if options.full_state_dict:
        state = _with_tied_names(model, state)
    if not wrappers_in(model):
        if not (state or options.broadcast_from_rank0):
            return nn.modules.module._IncompatibleKeys([], [])
        return in_place.load_state(model, state, strict=options.strict, rank0_only=options.broadcast_from_rank0)
    if options.broadcast_from_rank0:
        state = streamed(model, state)
    elif not state:
        return nn.modules.module._IncompatibleKeys([], [])
    with _form_of(model, options):
        return model.load_state_dict(_with_compiled_names(model, state), strict=options.strict)


@_of_sharded_models
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: Any = None,
) -> None:
    """Load optimizer state of any form, flattened or not, into each of `optimizers`; every rank calls it.

    Raises:
        RuntimeError: on every rank, before anything is loaded, if a trained parameter has no state and the options are
            strict, or if the state of some rank does not fit.
    """
    for optimizer, state in _to_load_by(model, optimizers, optim_state_dict, _checked(options)):
        optimizer.load_state_dict(state)


@_of_sharded_models
def set_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> Any:
    """Load the model's state and the optimizers' state, and return the missing and unexpected keys of the model.

    An empty model state is none, so that the optimizers' state is loaded alone. If one of the two does not fit, neither
    is loaded.
    """
    loads = _to_load_by(model, optimizers, optim_state_dict, _checked(options))
    incompatible = set_model_state_dict(model, model_state_dict, options=options)
    for optimizer, state in loads:
        optimizer.load_state_dict(state)
    return incompatible


def _checked(given: Any) -> StateDictOptions:
    options = StateDictOptions(**({} if given is None else vars(given)))
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0=True needs full_state_dict=True: the first rank sends full tensors")
    return options


def _form(model: nn.Module, options: StateDictOptions) -> StateForm:
    if not options.full_state_dict and not wrappers_in(model):
        return in_place.sharded_form(model, offload_to_cpu=options.cpu_offload)
    if not options.full_state_dict:
        config = ShardedOptimStateDictConfig(options.cpu_offload)
        return form_of(StateDictType.SHARDED_STATE_DICT, config)
    return StateForm(offload_to_cpu=options.cpu_offload, rank0_only=options.cpu_offload)


@contextlib.contextmanager
def _form_of(model: nn.Module, options: StateDictOptions) -> Generator[None, None, None]:
    config: StateDictConfig = ShardedStateDictConfig(options.cpu_offload)
    kind = StateDictType.SHARDED_STATE_DICT
    if options.full_state_dict:
        config = FullStateDictConfig(options.cpu_offload, rank0_only=options.cpu_offload)
        kind = StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings(), settings_shown(model, kind, config):
        warnings.filterwarnings("ignore", message=".*shards nothing.*")
        yield


def _is_elsewhere(model: nn.Module, options: StateDictOptions) -> bool:
    """Return whether only the first rank gets the state, and this is another."""
    return options.full_state_dict and options.cpu_offload and not all_of(model).is_first


def _whole(value: Any, options: StateDictOptions) -> Any:
    """Return all of a `DTensor` over ranks beside those of data parallelism, if full tensors are asked for."""
    if not (options.full_state_dict and is_dtensor(value)):
        return value
    # Collectives work on the device of the mesh.
    full = value.to(value.device_mesh.device_type).full_tensor()
    return full.cpu() if options.cpu_offload else full


def _frozen(model: nn.Module) -> set[str]:
    """Return the names of the parameters that require no gradient."""
    frozen: set[str] = set()
    for place in places_in(model):
        wanted = place.handle.exposure.requires_grad()
        frozen.update(*(names for names, trains in zip(place.names, wanted, strict=True) if not trains))
    for item in held_parameters(model).values():
        if item.place is None and not item.parameter.requires_grad:
            frozen |= set(item.fqns)
    return frozen


def _of_submodules(
    model: nn.Module, state: Mapping[str, Any], submodules: set[nn.Module], keep_prefixes: bool
) -> dict[str, Any]:
    prefixes = [f"{clean_fqn(name)}." for name, module in model.named_modules() if module in submodules]
    return {
        key if keep_prefixes else key[len(prefix) :]: value
        for key, value in state.items()
        for prefix in prefixes
        if key.startswith(prefix)
    }


def _with_prefixes(model: nn.Module, state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Return a state by submodule, `{module: state}`, as one of the whole model."""
    if not any(isinstance(key, nn.Module) for key in state):
        return state
    names = {module: clean_fqn(name) for name, module in model.named_modules()}
    return {
        f"{names[module]}.{key}" if names[module] else key: value
        for module, inner in state.items()
        for key, value in inner.items()
    }


def _with_tied_names(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state in which a tied parameter has all of its names, if it has one: files have it once."""
    tied = (names for place in places_in(model) for names in place.names if len(names) > 1)
    more = {name: state[known] for names in tied for known in names if known in state for name in names}
    lacking = {name: value for name, value in more.items() if name not in state}
    if not lacking:
        return state
    # A copy has the versions of modules, too, which torch keeps beside the entries.
    full: Any = copy.copy(state)
    full.update(lacking)
    return cast("Mapping[str, Any]", full)


def _with_compiled_names(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state with the names that torch's loading expects below what `torch.compile` has returned."""
    compiled = {
        f"{clean_fqn(path)}.": f"{path}.{COMPILED}."
        for path, module in model.named_modules()
        if COMPILED in module._modules and FSDP_WRAPPED_MODULE not in path
    }
    if not compiled:
        return state
    renamed: Any = copy.copy(state)
    for key in [key for key in state if COMPILED not in key]:
        below = max((prefix for prefix in compiled if key.startswith(prefix)), key=len, default="")
        if below:
            renamed[compiled[below] + key[len(below) :]] = renamed.pop(key)
    return cast("Mapping[str, Any]", renamed)


def _several(optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> Sequence[Any]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def _to_load_by(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions,
) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return what each optimizer loads of the state; refused on every rank if that of some rank does not fit."""
    loads: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
    without: list[str] = []
    error = None
    try:
        for optimizer in _several(optimizers):
            state, lacking = _to_load(model, optimizer, optim_state_dict, options)
            loads.append((optimizer, state))
            without += lacking
    except FlatParamError as caught:
        error = caught
    told = all_of(model).exchange((without, str(error or "")), label="what does not fit")
    if error is not None:
        raise error
    refused = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
    if refused:
        raise FlatParamError("; ".join(refused))
    without = list(dict.fromkeys(fqn for lacking, _ in told for fqn in lacking))
    if options.strict and without:
        raise FlatParamError(
            f"the optimizer state has nothing for the trained parameters {', '.join(map(repr, without))}; load it with "
            "StateDictOptions(strict=False) to leave them without"
        )
    return loads


def _to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], options: StateDictOptions
) -> tuple[dict[str, Any], list[str]]:
    """Return what the optimizer loads of `state`, and the trained parameters for which there is nothing."""
    if state and "state" not in state:
        state = unflattened(model, optimizer, state)
    loaded = load_optimizer_state(model, optimizer, state, rank0_only=options.broadcast_from_rank0)
    if not (loaded["state"] or optimizer.state):
        # A state without entries is that of an optimizer without steps, unless this one has made some.
        return loaded, []
    is_given = all_of(model).is_first or not options.broadcast_from_rank0
    known = {clean_fqn(key) for key in state["state"]} if is_given else set()
    names = {fqn: each for place in places_in(model) for fqn, each in zip(place.fqns, place.names, strict=True)}
    without: list[str] = []
    for number, item in enumerate(Holding.of(model, optimizer).items):
        if not item.parameter.requires_grad:
            continue
        if item.is_flat and is_given:
            # The state of a flat parameter has zeros for one of its parameters that has none.
            without += [fqn for fqn in item.fqns if known.isdisjoint(names[fqn])]
        elif item.parameter.numel() and number not in loaded["state"]:
            without += item.fqns
    return loaded, without


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state by parameter name, flattened; each parameter has a copy of its group's settings."""
    flat = dict(_leaves("state", state["state"]))
    for group in state["param_groups"]:
        for fqn in group["params"]:
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    flat[f"param_groups.{fqn}.{name}"] = value
    return flat


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, each in value.items():
        yield from _leaves(f"{path}.{key}", each)


def unflattened(model: nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of what `optimizer` holds, from a flattened one.

    Raises:
        FlatParamError: if the parameters of one group have different settings.
    """
    groups = [[fqn for item in items for fqn in item.fqns] for _, items in Holding.of(model, optimizer).groups]
    known = {fqn for fqns in groups for fqn in fqns}
    states, own = _by_parameter(flat, "state.", known), _by_parameter(flat, "param_groups.", known)
    state: dict[str, Any] = {"state": states, "param_groups": []}
    for fqns in groups:
        settings: dict[str, Any] = {}
        names = [fqn for fqn in fqns if fqn in own]
        for fqn in names:
            for name, value in own[fqn].items():
                if settings.setdefault(name, value) != value:
                    raise FlatParamError(
                        f"the optimizer state has {name}={value!r} for {fqn!r} and {settings[name]!r} for "
                        f"{names[0]!r}, which are in one parameter group now; give the optimizer the groups that it had"
                    )
        state["param_groups"].append({**settings, "params": names})
    return state


def _by_parameter(flat: Mapping[str, Any], prefix: str, fqns: set[str]) -> dict[str, dict[str, Any]]:
    """Return the nested entries of each parameter, of keys that begin with `prefix` and its name."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        parts = key.removeprefix(prefix).split(".") if key.startswith(prefix) else []
        for end in range(1, len(parts)):
            fqn = ".".join(parts[:end])
            if fqn in fqns:
                target = nested.setdefault(fqn, {})
                for part in parts[end:-1]:
                    target = target.setdefault(part, {})
                target[parts[-1]] = value
                break
    return nested
