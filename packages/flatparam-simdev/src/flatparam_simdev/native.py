"""The compiled part of the simulated device, loaded, and the device's memory as the CPU sees it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from flatparam_simdev import build

NAME: Final = "simulated"


def _compiled() -> Any:
    sys.path.append(str(build.built()))
    return importlib.import_module(build.MODULE)


ACCELERATOR: Final = _compiled()


_captured: dict[int, tuple[Tensor, Tensor]] | None = None
"""While a collective is captured or replayed: of each of its tensors, by identity, the alias that it had first."""


def on_cpu(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor of the CPU: whoever looks at it is not in the log, and waits for nothing."""
    if _captured is None:
        alias: Tensor = ACCELERATOR.cpu_alias(tensor.detach())
        return alias
    if id(tensor) not in _captured:
        _captured[id(tensor)] = (tensor, ACCELERATOR.cpu_alias(tensor.detach()))
    return _captured[id(tensor)][1]


def capturable(move: Callable[[], None]) -> Callable[[], None]:
    """Return what moves the same bytes whenever it is called, in the first memory, even if the tensors have lost it."""
    aliases: dict[int, tuple[Tensor, Tensor]] = {}

    def moving() -> None:
        global _captured
        _captured = aliases
        try:
            move()
        finally:
            _captured = None

    return moving
