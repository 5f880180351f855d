"""Model state in any form, back into shards, through torch's own `load_state_dict`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_runtime import (
    FLAT_PARAM,
    FlatParamError,
    FlatParamHandle,
    Topology,
    Unit,
    clean_fqn,
    inside,
    summon_full_params,
    tree_of,
)
from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker
from flatparam_state.forms.deferred import is_ordinary
from flatparam_state.forms.state_form import Wanted
from flatparam_state.model.collect import IN_FLAT, local_name
from flatparam_state.places import Place, places_in
from flatparam_state.ranks import checksums, refused_anywhere

_OURS: Final = frozenset({"flatparam", "flatparam_state", "flatparam_runtime", "flatparam_comm", "flatparam_core"})
_READS_STATE_ONLY: Final = _OURS | {"torch", "bitsandbytes", "peft"}
"""The packages whose code does not look at the parameters of the module that is loaded."""


@final
@attrs.define(eq=False)
class ShownUnits:
    """The units that show their full parameters, while a state is loaded, to code of their modules' own."""

    units: set[Unit] = attrs.field(factory=set)
    modules: set[nn.Module] = attrs.field(factory=set)
    """The modules of these units."""
    _before: list[tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=list)
    """The tensors of these modules, and the shards of these units, with the values that they had before."""
    _contexts: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

    def add(self, unit: Unit) -> None:
        """Show the full parameters of `unit`, if its modules have code of their own; every rank does so."""
        # Inside summon_full_params() they are shown already; and those that are elsewhere cannot be.
        if unit in self.units or unit.showing.pins or unit.showing.away:
            return
        modules = (unit.module, *inside(unit.module))
        if not any(map(_has_own_code, modules)):
            return
        self.units.add(unit)
        self.modules.update(modules)
        named = [info for handle in unit.handles for infos in handle.param_infos for info in infos]
        sharded = {(info.module, info.param_name) for info in named}
        kept: list[torch.Tensor] = [handle.flat_param for handle in unit.handles]
        for module in modules:
            plain = {**module._parameters, **module._buffers}
            kept += [p for name, p in plain.items() if is_ordinary(p) and (module, name) not in sharded]
        self._before += [(tensor.detach(), tensor.detach().clone()) for tensor in kept]
        self._contexts.enter_context(summon_full_params(unit.module, recurse=False))

    def write_back(self) -> None:
        """Write back what torch and the modules' own code have put into full parameters, and free these."""
        self._contexts.close()

    def keep(self) -> None:
        """Keep what was written back."""
        self._before.clear()

    def undo(self) -> None:
        """Give the shards, and what is not sharded, the values that they had before, unless what came is kept."""
        for tensor, values in self._before:
            tensor.copy_(values)
        self._before.clear()


def _has_own_code(module: nn.Module) -> bool:
    """Whether `module` may look at its parameters while it is loaded: it has hooks, or its own way to load itself."""
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    functions = [module._load_from_state_dict, *(getattr(hook, "hook", hook) for hook in hooks)]
    return not all(map(_is_known, functions))


def _is_known(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    home: str = getattr(function, "__module__", None) or type(function).__module__
    return home.partition(".")[0] in _READS_STATE_ONLY


_CHECKPOINTED: Final = "_checkpoint_wrapped_module."
COMPILED: Final = "_orig_mod"
"""The name of the module that was compiled inside of one that `torch.compile` has returned; no saved name has it."""


@final
@attrs.define(eq=False)
class ModelLoad:
    """Loads one state into flat parameters, through torch's traversal.

    While it is open, a hook of each module, which runs after the module's own, takes the entries of its sharded
    parameters out of the state, and of what torch would copy itself: under the names and at the moment at which torch
    would. Nothing is copied before `commit`, and nothing if anything did not fit. Each entry may have any form (see
    `Wanted.part`); no bytes move between ranks for full tensors, nor for sharded ones that are cut like the model is.

    If a module of a unit has code of its own that may look at its parameters meanwhile, the unit shows its full
    parameters to this code, and torch itself loads full tensors into them. What is there at the end is written back;
    if anything did not fit, the shards get their former values again.
    """

    _chunker: Chunker
    _taken: set[str] = attrs.field(factory=set)
    """The clean names of entries that torch no longer finds, since this has taken them."""
    _hooks: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    shown: ShownUnits = attrs.field(factory=ShownUnits)
    """The units that show their full parameters meanwhile."""
    _copies: list[tuple[torch.Tensor, Wanted, Any]] = attrs.field(factory=list)
    """This rank's part of a shard, what belongs there, and what it is to be taken from."""
    _plain: list[tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=list)
    """Tensors that are not sharded, buffers above all, and the values that go there."""
    _whole: dict[str, tuple[Topology, Any]] = attrs.field(factory=dict)
    """By the clean names of sharded parameters, the ranks that share them, and what the state has for them."""
    refused: bool = False
    """Whether some entry did not fit."""
    _handles: dict[str, FlatParamHandle] = attrs.field(factory=dict)
    """By the clean names of their parameters."""
    in_flat: set[FlatParamHandle] = attrs.field(factory=set)
    """Those that are in the state as flat parameters, so that their parameters need not be."""

    @classmethod
    def begin(
        cls,
        places: Iterable[Place],
        modules: Collection[nn.Module] | None = None,
        chunker: Chunker | None = None,
        taken: set[str] | None = None,
        shows_full: bool = False,
    ) -> Self:
        """Open the loading of `places`, whose full parameters are freed first.

        Args:
            modules: those whose entries are taken; by default all that hold a parameter of `places`.
            chunker: what takes torch's sharded tensors apart.
            taken: the names that this load takes are added to these, those of other loads of the same state.
            shows_full: show the full parameters of units whose modules have code of their own; the caller makes sure
                that the loading is closed if an exception ends it. Every rank does so.

        Raises:
            FlatParamError: inside a forward or backward pass.
        """
        loading = cls(chunker or OWN_CHUNKER, set() if taken is None else taken)
        named: dict[nn.Module, dict[str, tuple[Place, int]]] = {}
        flat: dict[nn.Module, dict[str, Place]] = {}
        for place in places:
            tree = tree_of(place.unit)
            tree.drop_remains()
            if tree.is_in_a_pass:
                raise FlatParamError(
                    f"unit {place.unit.name!r}: state cannot be loaded inside a forward or backward pass"
                )
            place.unit.reshard()
            # What is loaded is newer than what the user gave.
            place.unit.take_over()
            if shows_full:
                loading.shown.add(place.unit)
            for index, infos in enumerate(place.handle.param_infos):
                for info in infos:
                    if modules is None or info.module in modules:
                        named.setdefault(info.module, {})[info.param_name] = (place, index)
            owner = place.unit.module
            if modules is None or owner in modules:
                flat.setdefault(owner, {})[local_name(place.unit.handles.index(place.handle))] = place
        for module in {*named, *flat, *(modules or ())}:
            if COMPILED in module._modules:
                loading.watch(module, _name_what_is_compiled)
            loading.watch(module, functools.partial(loading._take, named.get(module, {}), flat.get(module, {})))
            loading._report_to(module)
        return loading

    def watch(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Have `hook` run before `module` is loaded, after the module's own hooks, while this loading is open."""
        registered = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        self._hooks.callback(registered.remove)

    def _report_to(self, module: nn.Module) -> None:
        """Remove what was taken from torch's report before the module's own hooks read it."""

        def remove(_: nn.Module, incompatible: Any) -> None:
            incompatible.missing_keys[:] = self.really_missing(incompatible.missing_keys)

        registered = module.register_load_state_dict_post_hook(remove)  # type: ignore[no-untyped-call]
        # It is an ordered dictionary.
        module._load_state_dict_post_hooks.move_to_end(registered.id, last=False)  # type: ignore[attr-defined]
        self._hooks.callback(registered.remove)

    def _take(
        self,
        parameters: Mapping[str, tuple[Place, int]],
        flat: Mapping[str, Place],
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for name, place in flat.items():
            # The hook of torch's wrapper for activation checkpointing has put its own name before that of its unit.
            keys = (prefix + name, prefix + _CHECKPOINTED + name, f"{prefix}{COMPILED}.{name}")
            key = next((key for key in keys if key in state), None)
            if key is not None:
                shard = place.handle.flat_param.detach()
                self._check_order(place, key, metadata.get(IN_FLAT, {}).get(name), errors)
                self._plan(Wanted.of_flat_parameter(place), shard, key, state.pop(key), errors)
                self.in_flat.add(place.handle)
        for name, (place, index) in parameters.items():
            key = prefix + name
            if key in state:
                self._whole[clean_fqn(key)] = place.unit.topology, state[key]
            is_torchs = place.unit in self.shown.units and not metadata.get("assign_to_params_buffers", False)
            if key in state and is_torchs and is_ordinary(state[key]):
                pass
            elif key in state:
                shard = place.handle.flat_param.detach()
                part = shard[place.handle.layout.fragment(index, place.handle.rank).in_shard.as_slice()]
                self._plan(Wanted.of_parameter(place, index), part, key, state.pop(key), errors)
            elif module._parameters.get(name) is None:
                # Torch itself reports the others as missing.
                missing.append(key)
            self._handles[clean_fqn(key)] = place.handle
        if not metadata.get("assign_to_params_buffers", False) and module not in self.shown.modules:
            self._take_plain(module, parameters.keys(), state, prefix)

    def _take_plain(self, module: nn.Module, sharded: Collection[str], state: dict[str, Any], prefix: str) -> None:
        """Take what is not sharded, if it fits; the rest is left for torch to refuse."""
        buffers = {
            name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        for name, target in {**module._parameters, **buffers}.items():
            value = state.get(prefix + name)
            if name in sharded or not is_ordinary(target) or not is_ordinary(value):
                continue
            if target.shape == value.shape:
                self._taken.add(clean_fqn(prefix + name))
                self._plain.append((target.detach(), state.pop(prefix + name)))

    def _plan(self, wanted: Wanted, target: torch.Tensor, key: str, value: Any, errors: list[str]) -> None:
        self._taken.add(clean_fqn(key))
        found = wanted.misfit(value)
        if found is None:
            self._copies.append((target, wanted, value))
            return
        self.refused = True
        errors.append(f"parameter {clean_fqn(key)!r}: expected a tensor of shape {wanted.spec.shape}, found {found}.")

    def _check_order(self, place: Place, key: str, saved: Sequence[str] | None, errors: list[str]) -> None:
        """Refuse a flat parameter in which the parameters are not in the same order; warn if nothing tells."""
        fqns = place.handle.layout.fqns
        if saved is not None and tuple(saved) != fqns:
            self.refused = True
            errors.append(
                f"flat parameter {clean_fqn(key)!r}: expected one of {', '.join(fqns)}, in this order, found one of "
                f"{', '.join(saved)}: it was saved with a different use_orig_params or other frozen parameters; load "
                "it with those, and save a full or a sharded state."
            )
        # None, if modules do not list their originals: then these are in the order of the modules.
        names = (clean_fqn(name) for name, _ in place.unit.module.named_parameters())
        listed = [name for name in names if name in fqns]
        if saved is None and listed and listed != list(fqns):
            warnings.warn(
                f"{clean_fqn(key)!r}: this local state does not tell the order of the parameters in it, and with "
                "use_orig_params=True matrices come first: if it was saved by FSDP1, or with use_orig_params=False, "
                "load it with use_orig_params=False, and save a full or a sharded state",
                stacklevel=2,
            )

    def really_missing(self, missing: list[str]) -> list[str]:
        """The keys of torch's `missing` that the state lacks: neither taken by this load, nor of a flat parameter."""
        return [key for key in missing if not self._is_there(clean_fqn(key))]

    def _is_there(self, name: str) -> bool:
        if name in self._taken or name.rpartition(".")[2].startswith(FLAT_PARAM):
            return True
        return self.is_in(name, self.in_flat)

    def is_in(self, key: str, handles: Collection[FlatParamHandle]) -> bool:
        """Return whether the unit's parameter `key` is part of one of these flat parameters."""
        return self._handles.get(clean_fqn(key)) in handles

    def checksums(self, topology: Topology) -> dict[str, int]:
        """Checksums of the full tensors that were taken, by the clean names of parameters that these ranks share.

        Ranks may have other values of parameters that they do not share, such as experts.
        """
        return checksums({name: value for name, (ranks, value) in self._whole.items() if ranks == topology})

    def commit(self) -> None:
        """Copy the taken values to the shards, if all of them fit; every rank calls it."""
        if not self.refused:
            self.shown.keep()
            for target, wanted, value in self._copies:
                wanted.lay(target, wanted.part(value, self._chunker))
            for target, tensor in self._plain:
                target.copy_(tensor)
        self.forget()

    def forget(self) -> None:
        """Drop the taken values without copying them, and undo what was written back."""
        self.shown.undo()
        self._copies.clear()
        self._plain.clear()
        self._whole.clear()

    def stop(self) -> None:
        """Take the hooks away: what was not in the state by now is not taken any more."""
        self._hooks.close()
        self.shown.write_back()

    def close(self) -> None:
        """Forget everything; calling it twice is harmless."""
        self.stop()
        self.forget()


def _name_what_is_compiled(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the entries the names that torch expects inside of a module that `torch.compile` has returned."""
    put_inside(state, prefix, COMPILED)


def put_inside(state: dict[str, Any], prefix: str, name: str) -> None:
    """Put `name` behind `prefix` in the names of the entries below it, if it is not there."""
    below = f"{prefix}{name}."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(below)]:
        state[below + key[len(prefix) :]] = state.pop(key)


def load_model_state(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool = True,
    load: Callable[..., Any] | None = None,
    chunker: Chunker | None = None,
) -> Any:
    """Load the state of the unsharded model, in any form, into a model that was sharded by hooks; every rank calls it.

    Of full tensors every rank passes all, and copies its own part; nothing is changed on any rank if something does
    not fit on one.

    Args:
        load: torch's own `load_state_dict` of the model, for a model whose class has a different one.
        chunker: what takes torch's sharded tensors apart.

    Returns:
        What `torch.nn.Module.load_state_dict` returns: the missing and the unexpected keys.

    Raises:
        RuntimeError: torch's, naming every key that does not fit.
    """
    places = list(places_in(model))
    loading = ModelLoad.begin(places, set(model.modules()), chunker, shows_full=True)
    torchs_errors: list[list[str]] = []

    def begin(*arguments: Any) -> None:
        torchs_errors[:] = [arguments[-1]]

    def end(module: nn.Module, incompatible: Any) -> None:
        missing, unexpected = incompatible.missing_keys, incompatible.unexpected_keys
        missing[:] = loading.really_missing(missing)
        errors = next(iter(torchs_errors), [])
        loading.shown.write_back()
        refused = [*errors]
        if strict:
            refused += [f"missing key {name!r}" for name in missing]
            refused += [f"unexpected key {name!r}" for name in unexpected]
        on_any_rank = refused
        if places:
            topology = places[0].unit.topology
            on_any_rank = refused_anywhere(topology, refused, loading.checksums(topology))
        if on_any_rank:
            loading.forget()
        if not refused:
            errors += on_any_rank
        loading.commit()

    loading.watch(model, begin)
    registered = model.register_load_state_dict_post_hook(end)  # type: ignore[no-untyped-call]
    try:
        return (load or model.load_state_dict)(state, strict=strict)
    finally:
        registered.remove()
        loading.close()
