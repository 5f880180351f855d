"""The inside of a wrapper: the module that it stands for, its unit's ranks and parameters, and a loading under way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry

from flatparam.api import StateDictSettings
from flatparam_comm import Collectives, RanksOnly, Topology, engine_of, process_group_of
from flatparam_core import FSDP_WRAPPED_MODULE, clean_fqn, owner_of
from flatparam_runtime import Phase, Unit, call_unit, holder_of, refuse_in_a_pass, shown, unit_of, untraced
from flatparam_state.model.load import ModelLoad

_INTERIOR = "_interior"
"""The attribute of a wrapper that holds it."""


@final
@attrs.define(eq=False)
class Interior:
    """The things that a wrapper holds beside the wrapped module: no parameter, no buffer, and no module."""

    unit: Unit
    settings: StateDictSettings
    """The form of the wrapper's state."""
    ignored: frozenset[nn.Module] = frozenset()
    """The modules that are left whole, with all below them."""
    clean_names: bool = False
    """Whether parameters and buffers always have the names of the unwrapped module."""
    is_loading: bool = False
    """Whether the wrapper's own `load_state_dict` is under way."""
    is_strict: bool = False
    """Whether the wrapper's own `load_state_dict`, if it is under way, refuses missing and unexpected names."""
    has_told: bool = False
    """Whether the ranks have told each other what does not fit in the wrapper's own `load_state_dict` under way."""
    load: TreeLoad | None = None
    """The loading that the wrapper takes part in, or took part in last if that one failed."""

    @contextlib.contextmanager
    def being_strict(self, strict: bool) -> Iterator[None]:
        """Inside, a missing or unexpected name keeps everything from being loaded if `strict`; torch tells no hook."""
        before = self.is_loading, self.is_strict
        self.is_loading, self.is_strict = True, strict
        self.has_told = False
        try:
            yield
        finally:
            self.is_loading, self.is_strict = before


def interior_of(module: nn.Module) -> Interior | None:
    """Return the interior of a wrapper; `None` of any other module."""
    interior: Interior | None = vars(module).get(_INTERIOR)
    return interior


@partial(untraced, with_callees=False)
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the wrapped module, with its full parameters in place."""
    interior, inner = interior_of(self), self._modules[FSDP_WRAPPED_MODULE]
    assert interior is not None, "a wrapper is made with it"
    assert inner is not None, "and with a module"
    return call_unit(interior.unit, inner, args, kwargs)


def module_of(self: nn.Module) -> nn.Module:
    """Return the wrapped module, without an activation-checkpointing wrapper around it."""
    inner = inner_module(self)
    checkpointed = inner._modules.get("_checkpoint_wrapped_module")
    return inner if checkpointed is None else checkpointed


def inner_module(module: nn.Module) -> nn.Module:
    """Return the wrapped module if `module` is a wrapper, otherwise `module` itself."""
    inner = module._modules.get(FSDP_WRAPPED_MODULE) if interior_of(module) is not None else None
    return module if inner is None else inner


def unit_inside(module: nn.Module) -> Unit:
    """Return the unit of a wrapped module, which may be given with or without its wrapper.

    Raises:
        ValueError: if the module is not wrapped.
    """
    unit = unit_of(inner_module(module))
    if unit is None:
        raise ValueError(f"expected a wrapped module, found a {type(module).__name__} that is not")
    return unit


def wrappers_in(module: nn.Module, *, root_only: bool = False) -> dict[nn.Module, Interior]:
    """Return the wrappers in `module`, itself included, depth first, each once with its interior.

    Args:
        root_only: leave out wrappers that are inside others.
    """
    found: dict[nn.Module, Interior] = {}
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        interior = interior_of(current)
        if interior is not None:
            found[current] = interior
            if root_only:
                continue
        stack.extend(child for child in reversed(list(current.children())) if not is_replicated(child))
    return found


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's composable `replicate` has `module`: then it is not FSDP's."""
    return "replicate" in (_get_registry(module) or ())


def ranks_of(unit: Unit) -> Collectives:
    """The ranks that the parameters are sharded over, or, if they are not sharded, those that hold copies of them."""
    return unit.topology.group


def process_group(unit: Unit) -> Any:
    """Return the same as torch's process group, or as what stands for it."""
    return _as_torchs(ranks_of(unit))


def copies(unit: Unit) -> Any:
    """Return the ranks that hold copies of this rank's shard, in the same form.

    Raises:
        AttributeError: if there are none, as FSDP1's wrapper has no such attribute then.
    """
    replicate = unit.topology.replicate
    if replicate is None or unit.topology.shard.size == 1:
        raise AttributeError("only the hybrid strategies have ranks that hold copies of a shard")
    return _as_torchs(replicate)


def _as_torchs(ranks: Collectives) -> Any:
    engine = engine_of(ranks)
    return engine.group if isinstance(engine, RanksOnly) else process_group_of(engine) or engine


T = TypeVar("T")


def named(interior: Interior, pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """`pairs` of names and tensors, with the names that a wrapper gives them now."""
    unit = interior.unit
    clean = interior.clean_names or unit.showing.wishes is not None or unit.phase is Phase.INSPECTING
    for name, value in pairs:
        yield (clean_fqn(name) if clean else name), value


def listed(pairs: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """`pairs` with what stands for each parameter in a list; none for what only the flat parameter stands for."""
    for name, parameter in pairs:
        shown_as = _stand_in(parameter)
        if shown_as is not None:
            yield name, shown_as


def _stand_in(parameter: nn.Parameter) -> nn.Parameter | None:
    owner = owner_of(parameter)
    if owner is None:
        return parameter
    handle, index = owner
    unit = holder_of(handle)
    if unit is None or unit.is_needed or unit.phase is Phase.INSPECTING or handle.exposure.hides_shard:
        return parameter
    held = handle.exposure.listed()
    return held[index] if held[0] is not handle.flat_param else None


def not_summoned(units: Iterable[Unit]) -> list[Unit]:
    """Return those whose full parameters are not shown by `summon_full_params`."""
    return [unit for unit in units if unit.showing.wishes is None]


@contextlib.contextmanager
def moving_shards(units: Iterable[Unit], fn: Callable[[Tensor], Tensor]) -> Generator[None, None, None]:
    """Move or cast the shards of `units` as wholes by `fn`; inside the context, modules show no parameters of theirs.

    Raises:
        FlatParamError: inside a forward or backward pass.
    """
    units = list(units)
    for unit in units:
        refuse_in_a_pass(unit)
        unit.reshard()
    with torch.no_grad():
        for unit in units:
            for handle in unit.handles:
                handle.apply(fn)
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(shown(unit, [[None] * len(handle.layout.slots) for handle in unit.handles]))
        yield


@final
@attrs.define(eq=False)
class TreeLoad:
    """One loading of a tree of wrappers, which belongs to the outermost of them and ends with it.

    Each wrapper takes the entries of its own unit. The outermost one copies for all of them at the end, and only if
    everything fits.
    """

    outermost: nn.Module
    errors: list[str]
    """The list in which torch collects the errors of one loading: the same object for every module in it."""
    is_ours: bool = False
    """Whether the wrapper's own `load_state_dict` is under way, and not that of a plain module around it."""
    taken: set[str] = attrs.field(factory=set)
    """The clean names of the entries that wrappers have taken."""
    _loads: list[ModelLoad] = attrs.field(factory=list)
    _open: dict[nn.Module, ModelLoad] = attrs.field(factory=dict)
    """By wrapper, the loads of those whose modules torch is loading now."""
    is_closed: bool = False

    def begin(self, wrapper: nn.Module, load: ModelLoad) -> None:
        """Note that `wrapper` takes the entries of its unit from now on."""
        self._loads.append(load)
        self._open[wrapper] = load

    def end(self, wrapper: nn.Module) -> ModelLoad | None:
        """Return the load of `wrapper`, which takes no entries any more; `None` if it has none."""
        load = self._open.pop(wrapper, None)
        if load is not None:
            load.stop()
        return load

    def leave(self, wrapper: nn.Module) -> None:
        """Have `wrapper`, whose loading an exception ended, take nothing any more.

        The loads of the wrappers around it are left to them: torch may be iterating over the hooks on `wrapper`.
        """
        load = self._open.pop(wrapper, None)
        if load is not None:
            load.close()

    def really_missing(self, missing: list[str]) -> list[str]:
        """The names of `missing` that are in no flat parameter; one unit may borrow a parameter of a different one."""
        in_flat = {handle for load in self._loads for handle in load.in_flat}
        return [key for key in missing if not any(each.is_in(key, in_flat) for each in self._loads)]

    def checksums(self, topology: Topology) -> dict[str, int]:
        """Return the checksums of what each unit's load has taken, by name."""
        return {name: each for load in self._loads for name, each in load.checksums(topology).items()}

    def commit(self) -> None:
        """Copy what was taken to the shards; every rank calls it."""
        for load in self._loads:
            load.commit()

    def close(self) -> None:
        """Forget everything, at the end of the outermost wrapper's loading."""
        for load in self._loads:
            load.close()
        self._loads.clear()
        self._open.clear()
        self.is_closed = True
