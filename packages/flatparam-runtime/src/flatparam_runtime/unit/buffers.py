"""The buffers of a unit's modules: their dtype while the unit computes, and the same values on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import Topology, broadcast_tensors, clean_fqn
from flatparam_runtime.unit.plan import BufferDtype


@final
@attrs.frozen(eq=False)
class _Site:
    """One buffer: the module that registers it, and its name below the unit."""

    module: weakref.ReferenceType[nn.Module]
    name: str
    fqn: str

    def __getstate__(self) -> tuple[object, ...]:
        return self.module(), self.name, self.fqn

    def __setstate__(self, state: tuple[nn.Module | None, str, str]) -> None:
        module, name, fqn = state
        # That of a module which was taken out of the model refers to nothing.
        type(self).__init__(self, weakref.ref(nn.Module() if module is None else module), name, fqn)


@final
@attrs.define(eq=False)
class UnitBuffers:
    """The buffers of a unit's own modules, which are cast when the unit begins to compute."""

    _sites: tuple[_Site, ...] = ()
    _before: dict[str, torch.dtype] = attrs.field(factory=dict)
    """The dtype that each cast buffer had before its first cast, by name below the unit."""

    @classmethod
    def of(cls, unit_module: nn.Module, modules: Collection[nn.Module]) -> Self:
        """Return the floating-point buffers that `modules`, which are inside `unit_module`, register themselves."""
        if not modules:
            return cls()
        names = {module: name for name, module in unit_module.named_modules()}
        return cls(
            tuple(
                _Site(weakref.ref(module), name, clean_fqn(f"{names[module]}.{name}" if names[module] else name))
                for module in modules
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.is_floating_point()
            )
        )

    def tensors(self) -> Iterator[tuple[_Site, Tensor]]:
        """Yield every buffer that still exists, with its site."""
        for site in self._sites:
            module = site.module()
            buffer = None if module is None else module._buffers.get(site.name)
            if buffer is not None:
                yield site, buffer

    def cast(self, policy: BufferDtype) -> None:
        """Give each buffer the dtype that `policy` says, or its original dtype if that is `None`."""
        for site, buffer in self.tensors():
            wanted = policy(site.fqn, buffer) if callable(policy) else policy
            wanted = wanted or self._before.get(site.fqn, buffer.dtype)
            module = site.module()
            if buffer.dtype != wanted and module is not None:
                self._before.setdefault(site.fqn, buffer.dtype)
                module._buffers[site.name] = buffer.to(wanted)

    @property
    def original_dtypes(self) -> Mapping[str, torch.dtype]:
        """The original dtypes of the buffers that were cast, by name below the unit."""
        return self._before


def broadcast_buffers(module: nn.Module, topology: Topology) -> None:
    """Give every rank the first rank's buffers, as `DistributedDataParallel(broadcast_buffers=True)` does."""
    buffers = list(module.buffers())
    for group in reversed(topology.groups if buffers else ()):
        broadcast_tensors(group, buffers, label="buffers")
