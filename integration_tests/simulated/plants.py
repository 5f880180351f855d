"""Bugs that tests plant beneath a library, where all libraries can have them. To import this registers the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor

from flatparam_simdev import device, groups


@contextlib.contextmanager
def _replaced(name: str, of: type, replacement: Callable[..., Any]) -> Iterator[None]:
    original = of.__dict__[name]
    setattr(of, name, replacement)
    try:
        yield
    finally:
        setattr(of, name, original)


def _waits_skipped(collective: str) -> AbstractContextManager[None]:
    """Nobody waits for these collectives, although everybody calls `wait()`."""
    wait = groups.Work.wait

    def hasty(self: Any, timeout: Any = None) -> bool:
        if self.name != collective:
            return wait(self, timeout)
        self._tensors = ()
        return True

    return _replaced("wait", groups.Work, hasty)


def _gradients_freed_early() -> AbstractContextManager[None]:
    """The memory of what is reduced is given back when the reduction is queued, and not when it is waited for."""
    queue = groups.Group._queue

    def freeing(
        self: Any, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], move: Callable[[], None]
    ) -> Any:
        work = queue(self, name, reads, writes, move)
        if name == "reduce_scatter":
            work._tensors = ()
            for tensor in reads:
                tensor.untyped_storage().resize_(0)
        return work

    return _replaced("_queue", groups.Group, freeing)


PLANTS: Final[dict[str, Callable[[], AbstractContextManager[None]]]] = {
    "": contextlib.nullcontext,
    "gathers are not waited for": lambda: _waits_skipped("all_gather"),
    "reductions are not waited for": lambda: _waits_skipped("reduce_scatter"),
    "gradients are freed early": _gradients_freed_early,
    "the host does not wait": lambda: device.behaving("host_waits", False),
    "streams are not recorded": lambda: device.behaving("records_streams", False),
}


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, there is this bug; none where there is no name."""
    return PLANTS[name]()
