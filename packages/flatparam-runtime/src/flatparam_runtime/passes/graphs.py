"""Modules that `torch.compile` runs as CUDA graphs, which expect each parameter at one address."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Final

from torch import nn

from flatparam_comm import FlatParamError, FlatParamHandle, clean_fqn
from flatparam_runtime.autograd import CALL
from flatparam_runtime.unit import InnerCall, Unit

_CALLS: Final = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
"""The code of torch's functions that call a module, which is their `self`."""
_SETTINGS: Final = "get_compiler_config"
"""The attribute of what `torch.compile` made: a function that returns Inductor's settings, if Inductor compiles it."""


def check_no_graphs(root: Unit, units: tuple[Unit, ...]) -> None:
    """Refuse CUDA graphs of the compiler that would contain parameters of `units`, if these are gathered in each pass.

    Seen are modules of the model, and those from whose calls this is called.

    Raises:
        FlatParamError: naming the module.
    """
    if root.device.type in ("cpu", "meta"):
        # Inductor makes none.
        return
    moving = [handle for unit in units for handle in unit.handles if _moves(handle)]
    holders = {info.module for handle in moving for infos in handle.param_infos for info in infos}
    for name, module in itertools.chain(root.module.named_modules(), _calling()):
        if _has_graphs(module) and not holders.isdisjoint(module.modules()):
            told = clean_fqn(name) or type(module).__name__
            raise FlatParamError(
                f"unit {root.name!r}, rank {root.topology.rank}: module {told!r} is compiled with CUDA graphs "
                "(mode='reduce-overhead' or 'max-autotune', or the option 'triton.cudagraphs'), which expect each "
                "parameter at one address, but full parameters are gathered to other memory in each pass: a graph is "
                "recorded again for each address, and may give out a parameter of another unit; compile without, for "
                "example with mode='max-autotune-no-cudagraphs', or capture the whole step"
            )


def _moves(handle: FlatParamHandle) -> bool:
    """Return whether full parameters have memory of their own, and not that of the flat parameter."""
    is_lent = handle.is_whole and not (handle.is_offloaded or handle.exposure.lists_shard)
    dtype = handle.layout.dtype
    return not (is_lent and handle.precision.compute(dtype) == dtype)


def _has_graphs(module: nn.Module) -> bool:
    compiled = vars(module).get(CALL)
    if isinstance(compiled, InnerCall):
        compiled = compiled.own
    settings = vars(module).get(_SETTINGS) or getattr(compiled, _SETTINGS, None)
    found = settings() if settings is not None else None
    return bool(found and found.get("triton.cudagraphs"))


def _calling() -> list[tuple[str, nn.Module]]:
    """Return the modules whose calls are under way in this thread."""
    found: list[tuple[str, nn.Module]] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # No other frames: a look at the locals of one leaves it a copy, which holds them for as long as it runs.
        if frame.f_code in _CALLS:
            found.append(("", frame.f_locals["self"]))
        frame = frame.f_back
    return found
