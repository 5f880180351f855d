"""Full model state, back into shards, through torch's own `load_state_dict`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_runtime import FLAT_PARAM, FlatParamError, clean_fqn, tree_of
from flatparam_state.codec import fragment_of
from flatparam_state.places import Place, places_in

__all__ = ["FullLoad", "load_model_state"]


@final
@attrs.define(eq=False)
class FullLoad:
    """One loading of full tensors into flat parameters, through torch's traversal; no bytes move between ranks.

    While it is open, a hook of each module, which runs after the module's own, takes the entries of its sharded
    parameters out of the state: under the names and at the moment at which torch would. Nothing is copied before
    `commit`, and nothing where anything did not fit.
    """

    _hooks: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    _copies: list[tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=list)
    """This rank's part of a shard, and what goes there."""
    refused: bool = False
    """Whether some entry did not fit."""
    _taken: set[str] = attrs.field(factory=set)
    """The clean names of entries that torch no longer finds, since this has taken them."""

    @classmethod
    def begin(cls, places: Iterable[Place], modules: Collection[nn.Module] | None = None) -> Self:
        """Open the loading of `places`, whose full parameters are freed first.

        Args:
            modules: those whose entries are taken; by default all that hold a parameter of `places`.

        Raises:
            FlatParamError: inside a forward or backward pass.
        """
        loading = cls()
        wanted: dict[nn.Module, dict[str, tuple[Place, int]]] = {}
        for place in places:
            if tree_of(place.unit).is_in_a_pass:
                raise FlatParamError(
                    f"unit {place.unit.name!r}: state cannot be loaded inside a forward or backward pass"
                )
            place.unit.reshard()
            for index, infos in enumerate(place.handle.param_infos):
                for info in infos:
                    if modules is None or info.module in modules:
                        wanted.setdefault(info.module, {})[info.param_name] = (place, index)
        for module, parameters in wanted.items():
            loading.watch(module, functools.partial(loading._take, parameters))
        return loading

    def watch(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Have `hook` run before `module` is loaded, after the module's own hooks, while this loading is open."""
        registered = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks.callback(registered.remove)

    def _take(
        self,
        parameters: Mapping[str, tuple[Place, int]],
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for name, (place, index) in parameters.items():
            key = prefix + name
            if key in state:
                self._taken.add(clean_fqn(key))
                self._plan(place, index, key, state.pop(key), errors)
            elif module._parameters.get(name) is None:  # else torch misses it by itself
                missing.append(key)

    def _plan(self, place: Place, index: int, key: str, value: Any, errors: list[str]) -> None:
        shape = place.handle.layout.slots[index].spec.shape
        if hasattr(
            value, "to_local"
        ):  # a DTensor, for tensor parallelism: this rank's part is what is sharded
            value = value.to_local()
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            fragment, part = fragment_of(place, index, value)
            self._copies.append((place.handle.flat_param.detach()[fragment.in_shard.as_slice()], part))
            return
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        self.refused = True
        errors.append(f"parameter {clean_fqn(key)!r}: expected a tensor of shape {shape}, found {found}.")

    def really_missing(self, missing: list[str]) -> list[str]:
        """What of torch's `missing` is not in the state: neither taken by this loading, nor a flat parameter."""
        return [key for key in missing if clean_fqn(key) not in self._taken and not _is_flat(key)]

    def commit(self) -> None:
        """Copy what was taken to the shards, where all of it fits."""
        if not self.refused:
            for target, part in self._copies:
                target.copy_(part)
        self._copies.clear()

    def stop(self) -> None:
        """Take the hooks away: what was not in the state by now is not taken any more."""
        self._hooks.close()

    def close(self) -> None:
        """Forget everything; calling it twice is harmless."""
        self.stop()
        self._copies.clear()


def _is_flat(key: str) -> bool:
    return key.rpartition(".")[2].startswith(FLAT_PARAM)


def load_model_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load the full state of the unsharded model into a model that was sharded by hooks.

    Every rank passes the full state and copies its own part; nothing is copied to a shard where a shape does not fit.

    Returns:
        What `torch.nn.Module.load_state_dict` returns: the missing and the unexpected keys.

    Raises:
        RuntimeError: torch's, naming every key that does not fit.
    """
    loading = FullLoad.begin(places_in(model))

    def end(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = loading.really_missing(incompatible.missing_keys)
        loading.commit()

    registered = model.register_load_state_dict_post_hook(end)  # type: ignore[no-untyped-call]
    try:
        return model.load_state_dict(state, strict=strict)
    finally:
        registered.remove()
        loading.close()
