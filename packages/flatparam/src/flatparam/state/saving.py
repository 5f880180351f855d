"""Collecting a wrapper's state, in the form of its settings, and what a program writes to the copies that it gets."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast, final

import attrs
import torch
from torch import nn

from flatparam.api import StateDictType
from flatparam.state.form_settings import check_form, form_of
from flatparam.wrapper.interior import Interior, inner_module
from flatparam_core import clean_fqn
from flatparam_runtime import Unit, inside
from flatparam_state.forms.tiling import is_sharded_tensor
from flatparam_state.model.collect import clean_keys, state_shown


def save_state(
    wrapper: nn.Module,
    interior: Interior,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    collect: Callable[..., Any],
) -> Any:
    """Return the state of `wrapper`, in the form of its settings, by `collect`, which is torch's own `state_dict`.

    Args:
        arguments, named: see `collected`.
    """
    return collected(arguments, named, collect, partial(_saving, wrapper, interior))


def collected(
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    collect: Callable[..., Any],
    saving: Callable[[dict[str, Any], str], contextlib.AbstractContextManager[None]],
) -> Any:
    """Return the state that `collect`, which is torch's own `state_dict`, collects.

    Args:
        arguments: those by position, which torch's `state_dict` still takes: destination, prefix, whether variables
            are kept.
        named: the same by name; those by position go before.
        saving: entered while torch collects, with the state and the prefix of the names in it.
    """
    destination, prefix, keep_vars = (*arguments, *list(named.values())[len(arguments) :])
    state = destination
    if state is None:
        state = cast(Any, OrderedDict())
        # Torch notes versions there.
        state._metadata = OrderedDict()
    with saving(state, prefix):
        collect(destination=state, prefix=prefix, keep_vars=keep_vars)
    return state


def attach_saving(wrapper: nn.Module) -> None:
    """Have `wrapper` clean the names of its state before hooks that the user registers see it."""
    wrapper._register_state_dict_hook(_clean)  # type: ignore[no-untyped-call]


def _clean(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    clean_keys(state, prefix)


@contextlib.contextmanager
def _saving(wrapper: nn.Module, interior: Interior, state: dict[str, Any], prefix: str) -> Iterator[None]:
    """While torch collects `wrapper`'s state in `state`, show its form of the parameters."""
    unit, settings = interior.unit, interior.settings
    config = settings.state_dict_config
    check_form(unit, settings.state_dict_type)
    with state_shown(wrapper, form_of(settings.state_dict_type, config)) as stand_ins:
        yield
    stand_ins.resolve(state, prefix)
    if getattr(config, "rank0_only", False) and unit.topology.group.rank > 0:
        for name in own_buffers(wrapper, unit):
            state.pop(prefix + name, None)
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    for name, dtype in unit.held.buffers.original_dtypes.items():
        if prefix + name in state and not is_local:
            state[prefix + name] = state[prefix + name].to(dtype)
    if config.offload_to_cpu:
        for key in [key for key in state if key.startswith(prefix)]:
            value = state[key]
            # A tensor on the meta device stands in for what an outer wrapper puts there.
            if isinstance(value, torch.Tensor) and not is_sharded_tensor(value) and not value.is_meta:
                state[key] = value.cpu()


def modules_of_unit(wrapper: nn.Module, unit: Unit) -> set[nn.Module]:
    """Return the modules of the wrapper's unit.

    A wrapper for activation checkpointing, which may have been put around the unit's module since, is one of them.
    """
    inner = inner_module(wrapper)
    return {inner, *inside(inner), unit.module, *inside(unit.module)}


def own_buffers(wrapper: nn.Module, unit: Unit) -> Iterator[str]:
    """Yield the names of the buffers of the unit's own modules, below the wrapper."""
    own = modules_of_unit(wrapper, unit)
    for path, module in wrapper.named_modules():
        if module in own:
            yield from (clean_fqn(f"{path}.{name}" if path else name) for name in module._buffers)


@final
@attrs.define(eq=False)
class _Watch:
    """The tensors of the states that a model has given, while they are there, and what was written to them."""

    written: set[str] = attrs.field(factory=set)
    _there: dict[str, tuple[weakref.ReferenceType[torch.Tensor], torch.Tensor, int]] = attrs.field(factory=dict)
    """By name: the tensor, an alias that counts its changes, and their number at first."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Watch `tensor`."""
        alias = tensor.detach()
        before = alias._version

        def gone(_: object) -> None:
            if alias._version != before:
                self.written.add(name)
            if name in self._there and self._there[name][1] is alias:
                del self._there[name]

        self._there[name] = weakref.ref(tensor, gone), alias, before

    def found(self) -> list[str]:
        """Return the names of what was written."""
        now = {name for name, (_, alias, before) in self._there.items() if alias._version != before}
        return sorted(self.written | now)


_PLAIN: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The classes of tensors that have memory of their own."""
_WATCHES: Final[weakref.WeakKeyDictionary[nn.Module, _Watch]] = weakref.WeakKeyDictionary()


def watch(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Notice what is written in place to the tensors of `state`, which `model` has given."""
    found = _WATCHES.setdefault(model, _Watch())
    own = {_memory(each) for each in (*model.parameters(), *model.buffers())}
    for name, value in state.items():
        memory = _memory(value)
        if memory and memory not in own and not (value.is_meta or value.is_inference()):
            found.add(name, value)


def _memory(value: Any) -> int:
    """Return the identity of a tensor's memory; of a DTensor that of its local part; 0 of anything else."""
    tensor = getattr(value, "_local_tensor", value)
    return tensor.untyped_storage()._cdata if type(tensor) in _PLAIN else 0


def forget(model: nn.Module) -> None:
    """Forget the states that `model` has given: one was loaded, perhaps one of them."""
    _WATCHES.pop(model, None)


def warn_of_writes(model: nn.Module) -> None:
    """Say that an earlier state of `model` was written to in place and not loaded, if so; not again for those."""
    found = _WATCHES.get(model)
    names = found.found() if found is not None else []
    if names:
        forget(model)
        warnings.warn(
            f"values were written in place to {len(names)} tensors of an earlier state_dict() of this "
            f"{type(model).__name__}, such as {names[0]!r}, and not loaded: the tensors are copies, so the model has "
            "not changed. An average that is kept in this way never moves: keep it by flatparam.ShardedEMA, by "
            "torch.optim.swa_utils.AveragedModel, or by updating the parameters of a copy of the model "
            "(docs/guides/averages.md); or call load_state_dict() with the state",
            stacklevel=3,
        )
