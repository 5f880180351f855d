"""The hooks through which torch's own `load_state_dict` loads wrappers, and a state that only the first rank has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import attrs
import torch
from torch import nn

from flatparam.debug_log import SimpleProfiler
from flatparam.sharding.extensions import chunker
from flatparam.state.saving import modules_of_unit
from flatparam.wrapper.interior import Interior, TreeLoad, interior_of
from flatparam_core import FSDP_WRAPPED_MODULE, clean_fqn
from flatparam_state.forms.deferred import Streamed, as_tensor, from_first, is_tensor_like, shape_of
from flatparam_state.model.load import COMPILED, ModelLoad, put_inside
from flatparam_state.places import places_in, places_of
from flatparam_state.ranks import refused_anywhere, told_by_first


def attach_loading(wrapper: nn.Module) -> None:
    """Have `wrapper` take part in torch's own loading."""
    wrapper.register_load_state_dict_pre_hook(_before)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_after)  # type: ignore[no-untyped-call]


def load_state(
    wrapper: nn.Module, interior: Interior, state: Mapping[str, Any], strict: bool, load: Callable[..., Any]
) -> Any:
    """Load `state`, of any form, by `load`, which is torch's own `load_state_dict` of the wrapper."""
    if getattr(interior.settings.state_dict_config, "rank0_only", False):
        state = streamed(wrapper, state)
    state = _with_inner_versions(wrapper, state)
    with SimpleProfiler.profile(SimpleProfiler.Type.ALL), interior.being_strict(strict):
        try:
            loaded = load(state, strict=strict)
        except Exception as error:
            # The other ranks wait to hear whether everything fits here.
            if not interior.has_told:
                _tell(interior, [f"{type(error).__name__}: {error}"])
            raise
        finally:
            # If an exception has ended it: units show their shards again, which have their former values.
            if interior.load is not None and interior.load.outermost is wrapper:
                interior.load.close()
    SimpleProfiler.dump_and_reset("FSDP load_state_dict() profiling:")
    return loaded


def _before(
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
    interior = _interior(wrapper)
    load = interior.load
    if load is None or load.is_closed or load.errors is not errors:
        load = _begun_by(wrapper, errors)
    load.begin(
        wrapper,
        ModelLoad.begin(
            places_of(interior.unit),
            modules_of_unit(wrapper, interior.unit),
            chunker(),
            load.taken,
            shows_full=load.is_ours,
        ),
    )
    put_inside(state, prefix, FSDP_WRAPPED_MODULE)


def _begun_by(outermost: nn.Module, errors: list[str]) -> TreeLoad:
    """Return a new loading of the wrappers in `outermost`."""
    load = TreeLoad(outermost, errors, _interior(outermost).is_loading)
    for wrapper, interior in _interiors(outermost):
        # An exception may have ended the loading before.
        if interior.load is not None:
            interior.load.leave(wrapper)
        interior.load = load
    return load


def _after(wrapper: nn.Module, incompatible: Any) -> None:
    """Copy to the shards; the names in torch's report become the user's."""
    interior = _interior(wrapper)
    load = interior.load
    own = None if load is None else load.end(wrapper)
    if load is None or own is None:
        return
    missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
    missing[:] = map(clean_fqn, own.really_missing(missing))
    unexpected[:] = map(clean_fqn, unexpected)
    load.errors[:] = [each.replace(f"{FSDP_WRAPPED_MODULE}.", "").replace(f"{COMPILED}.", "") for each in load.errors]
    if load.outermost is not wrapper:
        return
    missing[:] = load.really_missing(missing)
    refused = [*load.errors]
    if interior.is_strict:
        refused += [f"missing key {name!r}" for name in missing]
        refused += [f"unexpected key {name!r}" for name in unexpected]
    on_any_rank = _tell(interior, refused, load.checksums(interior.unit.topology))
    if not on_any_rank:
        load.commit()
    elif not refused:
        # torch raises one error for all of them.
        load.errors += on_any_rank
    load.close()
    for _, inside in _interiors(wrapper):
        inside.load = None


def _tell(interior: Interior, refused: list[str], loaded: Mapping[str, int] | None = None) -> list[str]:
    interior.has_told = True
    return refused_anywhere(interior.unit.topology, refused, loaded)


def _interiors(module: nn.Module) -> Iterator[tuple[nn.Module, Interior]]:
    """Yield all wrappers that torch comes to when it loads `module`, with their interiors."""
    for inside in module.modules():
        interior = interior_of(inside)
        if interior is not None:
            yield inside, interior


def _interior(wrapper: nn.Module) -> Interior:
    interior = interior_of(wrapper)
    assert interior is not None, "only wrappers have these hooks"
    return interior


def _with_inner_versions(wrapper: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of `state` that tells the modules inside `wrapper` their saved versions.

    Torch looks a module's version up under the module's name, which inside the wrapper is different from the state's.
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


def streamed(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state for every rank to load, if only the first rank has one and the others pass an empty one; else `state`.

    The parameters of units are sent when they are loaded, one after the other; everything else is sent here.
    Every rank calls it.
    """
    ranks, whole = _of_first(model, state, lambda tensor: Streamed(shape_of(tensor), as_tensor(tensor).dtype))
    if ranks is None:
        return state
    places = list(places_in(model))
    sharded = {name for place in places for names in place.names for name in names}
    for key, value in whole.items():
        if isinstance(value, Streamed):
            value = attrs.evolve(value, ranks=ranks, device=places[0].handle.device, tensor=state.get(key))
            whole[key] = value if key in sharded else value.arrive()
    whole._metadata = from_first(ranks, getattr(state, "_metadata", None), label="state dict")
    return cast("Mapping[str, Any]", whole)


def with_names_of_first(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, if only the first rank has one, with its names on every rank; else `state`. Every rank calls it.

    In the places of the first rank's tensors the others have tensors on the meta device.
    """
    _, named = _of_first(
        model, state, lambda tensor: torch.empty(shape_of(tensor), dtype=as_tensor(tensor).dtype, device="meta")
    )
    return state or cast("Mapping[str, Any]", named)


def _of_first(model: nn.Module, state: Mapping[str, Any], stand_in: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the ranks that hold `model`, and the first one's state with stand-ins for tensors, if it alone has one.

    Otherwise the ranks are None, and the state is this rank's.
    """
    ranks = told_by_first(model, state.values())
    first, *others = ranks.exchange(bool(state), label="who has the state")
    if not any(places_in(model)) or not first or not others or any(others):
        return None, state
    named = OrderedDict((key, stand_in(value) if is_tensor_like(value) else value) for key, value in state.items())
    return ranks, from_first(ranks, named, label="state dict")
