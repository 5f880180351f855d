"""Collecting a wrapper's state, in the form of its settings."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from flatparam.api import StateDictType
from flatparam.state.own import own_buffers
from flatparam.state.settings import check_form, form_of
from flatparam.wrapper.interior import Interior
from flatparam_state import clean_keys, is_sharded_tensor, state_shown

__all__ = ["attach_saving", "collected", "save_state"]


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
