"""Which form `state_dict()` has, and the hooks through which torch's own machinery saves and loads it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam._fsdp_extensions import chunker
from flatparam.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from flatparam.compat import as_config, as_enum
from flatparam_comm import Topology
from flatparam_core import FSDP_WRAPPED_MODULE, clean_fqn
from flatparam_runtime import Unit, inside
from flatparam_state import (
    OWN_CHUNKER,
    FormKind,
    ModelLoad,
    StateForm,
    Streamed,
    as_tensor,
    clean_keys,
    from_first,
    is_sharded_tensor,
    is_tensor_like,
    places_in,
    places_of,
    shape_of,
    state_shown,
)

__all__ = ["Loading", "default_settings", "form_of", "resolve_settings", "saving", "streamed"]


_CONFIGS: Final = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_KINDS: Final = {
    StateDictType.FULL_STATE_DICT: FormKind.FULL,
    StateDictType.LOCAL_STATE_DICT: FormKind.LOCAL,
    StateDictType.SHARDED_STATE_DICT: FormKind.SHARDED,
}


def default_settings() -> StateDictSettings:
    """Full tensors on every rank, where they are."""
    return resolve_settings(StateDictType.FULL_STATE_DICT)


def no_settings() -> StateDictSettings:
    """What FSDP1 tells of a module without wrappers."""
    nothing: Any = None
    return StateDictSettings(nothing, nothing, nothing)


def form_of_settings(settings: StateDictSettings) -> tuple[StateDictType, type, type]:
    """The settings without the fields of their configurations, in which wrappers of one form may differ."""
    return (
        settings.state_dict_type,
        type(settings.state_dict_config),
        type(settings.optim_state_dict_config),
    )


def resolve_settings(
    state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> StateDictSettings:
    """The settings asked for.

    Raises:
        RuntimeError: where a configuration is not one of the form's.
    """
    kind = as_enum(StateDictType, state_dict_type, "state_dict_type")
    of_model, of_optimizer = _CONFIGS[kind]
    try:
        return StateDictSettings(
            kind,
            of_model()
            if state_dict_config is None
            else as_config(of_model, state_dict_config, "state_dict_config"),
            of_optimizer()
            if optim_state_dict_config is None
            else as_config(of_optimizer, optim_state_dict_config, "optim_state_dict_config"),
        )
    except TypeError as error:
        raise RuntimeError(f"{kind.name} does not take this configuration: {error}") from error


def form_of(kind: StateDictType, config: StateDictConfig | OptimStateDictConfig) -> StateForm:
    """The form of model or optimizer state that the settings ask for; extensions cut sharded tensors as FSDP1's do."""
    cutting = chunker()
    return StateForm(
        _KINDS[kind],
        offload_to_cpu=config.offload_to_cpu,
        rank0_only=bool(getattr(config, "rank0_only", False)),
        dim_0_chunks=bool(getattr(config, "dim_0_chunks", False)) or cutting is not OWN_CHUNKER,
        use_dtensor=bool(getattr(config, "_use_dtensor", False)),
        chunker=cutting,
    )


@contextlib.contextmanager
def saving(
    wrapper: nn.Module, settings: StateDictSettings, state: dict[str, Any], prefix: str
) -> Iterator[None]:
    """While torch collects `wrapper`'s state in `state`, show its form of the parameters; then clean the names."""
    config = settings.state_dict_config
    unit: Unit = wrapper._unit  # type: ignore[assignment]  # nn.Module's attributes may be anything
    _check_form(unit, settings.state_dict_type)
    with state_shown(wrapper, form_of(settings.state_dict_type, config)) as stand_ins:
        yield
    clean_keys(state, prefix)
    stand_ins.resolve(state, prefix)
    if getattr(config, "rank0_only", False) and unit.plan.topology.group.rank > 0:
        for name in _own_buffers(wrapper):
            state.pop(prefix + name, None)
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    for name, dtype in unit.held.buffers.original_dtypes.items():
        if prefix + name in state and not is_local:
            state[prefix + name] = state[prefix + name].to(dtype)
    if config.offload_to_cpu:
        for key in [key for key in state if key.startswith(prefix)]:
            value = state[key]
            if isinstance(value, torch.Tensor) and not is_sharded_tensor(value) and not value.is_meta:
                state[key] = (
                    value.cpu()
                )  # one on the meta device stands in for what an outer wrapper puts there


def _own_modules(wrapper: nn.Module) -> set[nn.Module]:
    """The modules of the wrapper's unit.

    A wrapper for activation checkpointing, which may have been put around the unit's module since, is one of them.
    """
    inner = wrapper._modules[FSDP_WRAPPED_MODULE]
    assert inner is not None, "the wrapper always has its module"
    unit: Unit = wrapper._unit  # type: ignore[assignment]  # nn.Module's attributes may be anything
    return {inner, *inside(inner), unit.module, *inside(unit.module)}


def _own_buffers(wrapper: nn.Module) -> Iterator[str]:
    """The names of the buffers of the unit's own modules, below the wrapper."""
    own = _own_modules(wrapper)
    for path, module in wrapper.named_modules():
        if module in own:
            yield from (clean_fqn(f"{path}.{name}" if path else name) for name in module._buffers)


def _check_form(unit: Unit, kind: StateDictType) -> None:
    """FSDP1's rules for where a form is possible.

    Raises:
        RuntimeError: for a local state of what was sharded over a mesh.
    """
    if kind is StateDictType.FULL_STATE_DICT:
        return
    if unit.plan.topology.shard.size == 1:
        warnings.warn(
            f"unit {unit.name!r} shards nothing (NO_SHARD), so its full state is returned for {kind.name}",
            stacklevel=4,
        )
    elif kind is StateDictType.LOCAL_STATE_DICT and unit.plan.topology.mesh is not None:
        raise RuntimeError(
            f"unit {unit.name!r} was sharded over a DeviceMesh, which is not compatible with LOCAL_STATE_DICT; use "
            "SHARDED_STATE_DICT, which then has DTensors"
        )


def streamed(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where only the first rank has a state and the others have an empty one: what every rank is to load instead.

    The parameters of units are sent when they are loaded, one after the other; what else there is is sent here.
    Every rank calls it.
    """
    places = list(places_in(model))
    if not places or not _is_only_on_first(places[0].unit.plan.topology, bool(state)):
        return state
    topology, device = places[0].unit.plan.topology, places[0].handle.device
    sharded = {name for place in places for names in place.names for name in names}
    skeleton = from_first(
        topology,
        {
            key: Streamed(shape_of(value), as_tensor(value).dtype) if is_tensor_like(value) else value
            for key, value in state.items()
        },
        label="state dict",
    )
    whole: Any = OrderedDict()
    for key, value in skeleton.items():
        if isinstance(value, Streamed):
            value = attrs.evolve(value, topology=topology, device=device, tensor=state.get(key))
            whole[key] = value if key in sharded else value.arrive()
        else:
            whole[key] = value
    whole._metadata = from_first(topology, getattr(state, "_metadata", None), label="state dict")
    return cast("Mapping[str, Any]", whole)


def _is_only_on_first(topology: Topology, is_here: bool) -> bool:
    found: Any = is_here
    for group in (topology.shard, topology.replicate):
        if group is not None:
            found = tuple(group.exchange(found, label="who has the state"))
    first, *others = _flat(found)
    return first and bool(others) and not any(others)


def _flat(nested: Any) -> list[bool]:
    return [nested] if isinstance(nested, bool) else [each for item in nested for each in _flat(item)]


_LOCAL = threading.local()


@contextlib.contextmanager
def refusing_all(strict: bool) -> Iterator[None]:
    """Inside, a missing or unexpected name keeps everything from being loaded where `strict`; torch tells no hook."""
    before = getattr(_LOCAL, "is_strict", False)
    _LOCAL.is_strict = strict
    try:
        yield
    finally:
        _LOCAL.is_strict = before


@final
@attrs.define(eq=False)
class Loading:
    """The hooks around torch's loading of one wrapper.

    Each wrapper takes the entries of its own unit. The outermost one of a loading copies for all of them at its end,
    and only where everything fits.
    """

    _current: ModelLoad | None = None
    _errors: list[str] | None = None
    """The list in which torch collects the errors of one loading: the same for every module in it."""
    _inside: list[ModelLoad] = attrs.field(factory=list)

    def before(
        self,
        wrapper: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Watch for the unit's parameters, and give the entries the names that torch expects inside the wrapper."""
        if self._current is not None:
            self._current.close()  # an exception ended the loading before
        outermost: Loading | None = getattr(_LOCAL, "outermost", None)
        if outermost is None or outermost._errors is not errors:
            outermost = _LOCAL.outermost = self
            self._inside.clear()
        unit: Unit = wrapper._unit  # type: ignore[assignment]  # nn.Module's attributes may be anything
        self._current = ModelLoad.begin(places_of(unit), _own_modules(wrapper), chunker())
        self._errors = errors
        outermost._inside.append(self._current)
        below = f"{prefix}{FSDP_WRAPPED_MODULE}."
        for key in [key for key in state if key.startswith(prefix) and not key.startswith(below)]:
            state[below + key[len(prefix) :]] = state.pop(key)

    def after(self, wrapper: nn.Module, incompatible: Any) -> None:
        """Copy to the shards; the names in torch's report become the user's."""
        current, self._current = self._current, None
        if current is None or self._errors is None:
            return
        current.stop()  # the wrapper may be reached by another path too
        missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
        missing[:] = map(clean_fqn, current.really_missing(missing))
        unexpected[:] = map(clean_fqn, unexpected)
        self._errors[:] = [error.replace(f"{FSDP_WRAPPED_MODULE}.", "") for error in self._errors]
        if getattr(_LOCAL, "outermost", None) is self:
            in_flat = {handle for loading in self._inside for handle in loading.in_flat}
            missing[:] = [
                key for key in missing if not any(each.is_in(key, in_flat) for each in self._inside)
            ]  # one unit may borrow what is in the flat parameter of another
            is_strict = getattr(_LOCAL, "is_strict", False)
            if not self._errors and not (is_strict and (missing or unexpected)):
                for loading in self._inside:
                    loading.commit()
            for loading in self._inside:
                loading.close()
            self._inside.clear()
            _LOCAL.outermost = None


def with_inner_versions(wrapper: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy of `state` that tells the modules inside `wrapper` their saved versions.

    Torch looks a module's version up under the module's name, which inside the wrapper is another than in the state.
    """
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return state
    copied: Any = OrderedDict(state)
    copied._metadata = OrderedDict(metadata)
    for name, _ in wrapper.named_modules(remove_duplicate=False):
        if clean_fqn(name) in metadata:
            copied._metadata[name] = metadata[clean_fqn(name)]
    result: Mapping[str, Any] = copied
    return result
