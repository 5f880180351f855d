"""The world of threads that a thread is a rank of, and the random numbers that it has there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import Collectives


class _Current(threading.local):
    collectives: Collectives | None = None


_CURRENT = _Current()


def current_collectives() -> Collectives | None:
    """Return the world of threads that the calling thread is a rank of, or None outside of `run_threads`."""
    return _CURRENT.collectives


@contextlib.contextmanager
def set_current_collectives(collectives: Collectives) -> Iterator[None]:
    """Inside, `current_collectives()` returns `collectives` in the calling thread."""
    before = _CURRENT.collectives
    _CURRENT.collectives = collectives
    try:
        yield
    finally:
        _CURRENT.collectives = before


def accelerator_in_use() -> Any | None:
    """Return the module of the accelerator (`torch.cuda`, `torch.xpu`, ...) if there is one and it is initialised."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module: Any = torch.get_device_module(accelerator)
    return module if module.is_initialized() else None


@attrs.frozen
class GeneratorStates:
    """The states of the default generators (CPU, and the current accelerator's if it is in use)."""

    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def capture(cls) -> GeneratorStates:
        """Return the states as they are now."""
        module = accelerator_in_use()
        return cls(torch.get_rng_state(), None if module is None else module.get_rng_state())

    def install(self) -> None:
        """Make the default generators draw from here on what they would have drawn after `capture`."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            module = accelerator_in_use()
            assert module is not None, "the accelerator was in use before"
            module.set_rng_state(self.accelerator)
