"""The seam to c10d: what the installed torch calls its collectives, what its backends refuse, and its private names.

torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor` to `all_gather_single` and
`reduce_scatter_single` and warns about the old names; 2.11 and 2.12 have the old ones only. Everything is looked up
when it is called, so that importing this package works on a torch that was built without `torch.distributed`.

| private name of torch | what it tells | if it is gone |
| --- | --- | --- |
| `ProcessGroup._get_backend` | the backend for one kind of device | an error that names it |
| `Backend.Options._timeout` | the time limit of a group's collectives | subgroups wait for torch's 30 minutes |
| `distributed_c10d._process_group_name` | how torch names a group | an error that names it |
| `distributed_c10d._get_split_source` | what communicators are split from | groups in groups may wait for all |
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_comm.collectives import ReduceOp
from flatparam_comm.errors import CommError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def destroyed() -> ProcessGroup:
    """Raise the error of a process group that is not there any more, in the place of the group."""
    raise CommError(
        "expected the process group that this was made with, found that it has been destroyed: use what was sharded "
        "over it only before destroy_process_group()"
    )


def all_gather(output: Tensor, shard: Tensor, group: ProcessGroup | None) -> Any:
    """Issue an all-gather; returns its `Work`."""
    call = getattr(dist, "all_gather_single", None) or first_of("all_gather_single", "all_gather_into_tensor")
    return call(output, shard, group=group or destroyed(), async_op=True)


def reduce_scatter(output: Tensor, full: Tensor, op: ReduceOp, group: ProcessGroup | None) -> Any:
    """Issue a reduce-scatter; returns its `Work`."""
    call = getattr(dist, "reduce_scatter_single", None) or first_of("reduce_scatter_single", "reduce_scatter_tensor")
    # To ask an enum for a name takes longer than all the rest.
    reduction = dist.ReduceOp.SUM if op is ReduceOp.SUM else _c10d_op(op)
    return call(output, full, op=reduction, group=group or destroyed(), async_op=True)


def all_to_all(
    output: Tensor, full: Tensor, group: ProcessGroup | None, sizes: tuple[list[int], list[int]] | None = None
) -> Any:
    """Issue an all-to-all: slice `r` of `full` goes to rank `r`, and `output` receives theirs; returns its `Work`.

    The slices are equal, or of `sizes`: those of `output`, then those of `full`.
    """
    received, sent = sizes or (None, None)
    call = first_of("all_to_all_single")
    return call(output, full, received, sent, group=group or destroyed(), async_op=True)


def all_reduce(tensor: Tensor, op: ReduceOp, group: ProcessGroup | None) -> Any:
    """Issue an all-reduce in place; returns its `Work`."""
    return first_of("all_reduce")(tensor, op=_c10d_op(op), group=group or destroyed(), async_op=True)


def broadcast(tensor: Tensor, root: int, group: ProcessGroup | None) -> Any:
    """Issue a broadcast in place from the *group's* rank `root`; returns its `Work`."""
    return first_of("broadcast")(tensor, group_src=root, group=group or destroyed(), async_op=True)


def _c10d_op(op: ReduceOp) -> Any:
    return getattr(dist.ReduceOp, op.name)


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group for this kind of device; None if it has none."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def time_limit_of(backend: Any) -> timedelta | None:
    """The time limit of a backend's collectives, which has no public getter; None if the backend does not tell it."""
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def call_with_default_group(call: Callable[[], None]) -> None:
    """Have `call` called whenever torch has made its default group, or has left it; torch has no event for this."""
    module: Any = getattr(dist, "distributed_c10d", None)
    of_torch = getattr(module, "_update_default_pg", None)
    if of_torch is None:
        return

    def ours(*args: Any, **kwargs: Any) -> Any:
        of_torch(*args, **kwargs)
        call()

    module._update_default_pg = ours


@contextmanager
def making_apart(name: str) -> Iterator[None]:
    """Inside, the group that this thread makes concerns its members alone, and is called `name`.

    torch's own counts of groups stay as they are. And no communicator of NCCL is split off the default group's, which
    torch does if that group is bound to a device: for a split, every rank of the world has to call.
    """
    module: Any = dist.distributed_c10d
    thread = threading.get_ident()
    answers = {"_process_group_name": name, "_get_split_source": None}
    with _MAKING:
        of_torch = {each: getattr(module, each) for each in answers if hasattr(module, each)}

        def answer(each: str, *args: Any, **kwargs: Any) -> Any:
            return answers[each] if threading.get_ident() == thread else of_torch[each](*args, **kwargs)

        for each in of_torch:
            setattr(module, each, functools.partial(answer, each))
        try:
            yield
        finally:
            for each, function in of_torch.items():
                setattr(module, each, function)


_MAKING: Final = threading.Lock()


def first_of(*names: str) -> Any:
    """Return the first of these functions that the installed torch has."""
    for name in names:
        found = getattr(dist, name, None)
        if found is not None:
            return found
    raise RuntimeError(
        f"expected torch.distributed to have one of {', '.join(names)}; torch {torch.__version__} has none "
        f"(torch.distributed.is_available() is {dist.is_available()}); install torch 2.11 or later with distributed"
    )
