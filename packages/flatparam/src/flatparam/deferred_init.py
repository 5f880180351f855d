"""Giving values to a module that was made on the meta device, without ever holding all of it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import final

from flatparam.placement import broadcast_from_first
from flatparam.resolve import Ignored, Resolved
from flatparam_comm import Topology
from flatparam_core import BoundParameter, discover
from flatparam_runtime import Initialise, unit_of

__all__ = ["initialiser"]


def initialiser(module: nn.Module, resolved: Resolved) -> Initialise:
    """What gives the unit's parameters their values, where some are on the meta device.

    Module by module, breadth first: `param_init_fn(module)`, or `to_empty()` and `reset_parameters()` of the modules
    that hold parameters or buffers themselves. Each module's parameters are packed and let go before the next is made.
    """
    ignored = resolved.ignored
    bound = discover(
        module,
        ignored_parameters=ignored.parameters,
        skip_module=lambda child: child in ignored.modules or unit_of(child) is not None,
    )
    topology = resolved.plan.topology if resolved.sync_module_states else None
    return _Initialiser(
        module, ignored, resolved.param_init_fn, resolved.device or torch.device("cpu"), topology, bound
    )


@final
@attrs.define(eq=False)
class _Initialiser:
    module: nn.Module
    ignored: Ignored
    function: Callable[[nn.Module], None] | None
    device: torch.device
    topology: Topology | None
    """Whose first rank's values count; `None`: each rank's own do."""
    bound: tuple[BoundParameter, ...]

    def __call__(self, pack: Callable[[str, Tensor], None]) -> None:
        """Make, pack and let go of one module after the other."""
        holders = {(info.module, info.param_name): b for b in self.bound for info in b.infos}
        to_come = {b: len(b.infos) for b in self.bound}
        for child in _own_modules(self.module, self.ignored):
            if any(tensor.is_meta for tensor in _tensors(child, self.ignored)):
                self._make(child)
            if self.topology is not None:
                broadcast_from_first(self.topology, list(_tensors(child, self.ignored)))
            for name, parameter in child._parameters.items():
                b = holders.get((child, name))
                if b is None or parameter is None:
                    continue
                for info in b.infos:  # a tie is not broken by a new object under one of its names
                    info.module._parameters[info.param_name] = parameter
                pack(b.names[0], parameter.detach())
                to_come[b] -= 1
                if not to_come[b]:
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _make(self, child: nn.Module) -> None:
        try:
            with torch.no_grad():
                if self.function is not None:
                    self.function(child)
                elif any(True for _ in _tensors(child, self.ignored)):
                    child.to_empty(device=self.device, recurse=False)
                    child.reset_parameters()  # type: ignore[operator]  # by convention; an error is told below
        except BaseException as error:
            how = "param_init_fn" if self.function is not None else "to_empty() and reset_parameters()"
            warnings.warn(
                f"{type(child).__name__} could not be initialised from the meta device by {how}: {error}",
                stacklevel=2,
            )
            raise
        left = [
            name
            for name, p in child._parameters.items()
            if p is not None and p.is_meta and p not in self.ignored
        ]
        if left:
            raise ValueError(
                f"param_init_fn left {left} of {type(child).__name__} on the meta device: it must give every parameter "
                "of the module that it is called with a device and values"
            )


def _own_modules(module: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    """`module` and those below it, breadth first, without units, what is ignored, and all below these."""
    seen = {module}
    queue = deque([module])
    while queue:
        current = queue.popleft()
        yield current
        for child in current.children():
            if child not in seen and child not in ignored.modules and unit_of(child) is None:
                seen.add(child)
                queue.append(child)


def _tensors(module: nn.Module, ignored: Ignored) -> Iterator[Tensor]:
    """The parameters and buffers that `module` itself registers and that are not ignored."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor not in ignored:
            yield tensor
