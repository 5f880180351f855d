"""FSDP1's module of passes: the names that programs call between them."""

from __future__ import annotations

from typing import Any

from torch import nn

from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel
from flatparam_clients.handle_view import HandleView
from flatparam_core import FlatParamError
from flatparam_runtime import tree_of

__all__ = [
    "_get_fsdp_root_states",
    "_is_fsdp_root",
    "_lazy_init",
    "_post_backward_final_callback",
    "_reshard",
    "_unshard",
]


def _lazy_init(state: FullyShardedDataParallel, root_module: nn.Module) -> FullyShardedDataParallel:
    """Find the wrappers inside, as the first pass of a model does; returns `state`."""
    tree_of(state._unit)
    return state


def _is_fsdp_root(state: FullyShardedDataParallel, module: nn.Module) -> bool:
    """Return whether no other wrapper contains this one, as far as any pass has shown."""
    return state.check_is_root()


def _get_fsdp_root_states(module: nn.Module) -> list[FullyShardedDataParallel]:
    """Return the outermost wrappers in `module`."""
    return FullyShardedDataParallel.fsdp_modules(module, root_only=True)


def _post_backward_final_callback(state: FullyShardedDataParallel, module: nn.Module) -> None:
    """Bring the model back to rest after an exception, such as for lack of memory, so that the next pass can begin.

    Full parameters are freed, and gradients of the pass that failed are dropped; shards and `.grad` stay.

    Raises:
        FlatParamError: inside a pass, or if `state` is not a root.
    """
    tree = tree_of(state._unit)
    if tree.root is not state._unit:
        raise FlatParamError(f"unit {state._unit.name!r} is not a root: call this with the outermost wrapper")
    tree.drop_remains()
    if tree.is_in_a_pass:
        raise FlatParamError(
            f"unit {state._unit.name!r}: a pass is running, which ends by itself; call this after the exception that "
            "ended one was caught"
        )
    tree.recover()


def _unshard(
    state: FullyShardedDataParallel,
    handle: HandleView | None,
    unshard_stream: Any = None,
    pre_unshard_stream: Any = None,
) -> None:
    """Gather the full parameters of a handle and have the module show them; any stream will do."""
    if handle is not None:
        handle.unshard()


def _reshard(
    state: FullyShardedDataParallel, handle: HandleView | None, free_unsharded_flat_param: bool = True
) -> None:
    """Free the full parameters of a handle."""
    if handle is not None:
        handle.reshard(free_unsharded_flat_param)
