"""Parameters of tensor classes that cannot be flattened: what is flattened instead, and what modules see of it.

Above all `DTensor`: with FSDP over one dimension of a mesh and tensor parallelism over another, a parameter is the part
of a `DTensor` that this rank holds. That part is flattened and sharded; modules see a `DTensor` again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam.resolving import Ignored
from flatparam.sharding.extension_point import DTensorExtensions, FSDPExtensions
from flatparam_comm import process_group_of
from flatparam_core import PRESENTER, discover, owner_of
from flatparam_runtime import unit_of
from flatparam_state import OWN_CHUNKER, Chunker, Place

__all__ = [
    "chunker",
    "flatten_extended",
    "needs_extensions",
    "set_extensions",
]


_PLAIN: Final = (nn.Parameter, nn.Buffer, Tensor)
_extensions: FSDPExtensions | None = None


def set_extensions(flattener: FSDPExtensions | None) -> None:
    """Have `flattener` asked for every parameter that is wrapped from now on; `None` for none."""
    global _extensions
    _extensions = flattener


def needs_extensions(tensors: Iterable[Tensor]) -> bool:
    """Whether parameters among `tensors` may have to be replaced before they are flattened."""
    return _extensions is not None or any(type(tensor) not in _PLAIN for tensor in tensors)


def flatten_extended(module: nn.Module, ignored: Ignored) -> None:
    """Put plain parameters in the place of those that cannot be flattened; they carry how they are to be shown."""
    bound = discover(
        module,
        ignored_parameters=ignored.parameters,
        skip_module=lambda child: child in ignored.modules or unit_of(child) is not None,
    )
    for b in bound:
        if (_extensions is None and type(b.parameter) is nn.Parameter) or owner_of(b.parameter) is not None:
            continue
        for extensions in (_extensions, DTensorExtensions() if torch.distributed.is_available() else None):
            if extensions is None:
                continue
            plain, facts = extensions.pre_flatten_transform(b.parameter)
            if plain is b.parameter:
                continue
            parameter = nn.Parameter(plain.detach(), requires_grad=b.parameter.requires_grad)
            vars(parameter).update(vars(b.parameter))
            present = functools.partial(extensions.post_unflatten_transform, param_extension=facts)
            setattr(parameter, PRESENTER, present)
            for info in b.infos:
                setattr(info.module, info.param_name, parameter)
            break


def chunker() -> Chunker:
    """The object that makes sharded tensors and takes them apart: the extensions, if there are any."""
    return OWN_CHUNKER if _extensions is None else _Extended(_extensions)


@final
@attrs.frozen(eq=False)
class _Extended:
    """The extensions, as the layer beneath asks for them."""

    _extensions: FSDPExtensions

    def chunk_tensor(self, place: Place, full: Tensor) -> Any:
        """See `Chunker`."""
        group = place.unit.plan.topology.shard
        device = full.device
        per_node = getattr(torch, device.type).device_count() if device.type != "cpu" else 1
        return self._extensions.chunk_tensor(
            full, group.rank, group.size, per_node, process_group_of(group), device
        )

    def chunk_dtensor(self, place: Place, full: Tensor, mesh: Any) -> Any:
        """See `Chunker`."""
        return self._extensions.chunk_dtensor(full, place.unit.plan.topology.shard.rank, mesh)

    def local_shards(self, tensor: Any) -> dict[tuple[int, ...], Tensor]:
        """See `Chunker`."""
        _, shards = self._extensions.pre_load_state_dict_transform(tensor)
        return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in shards}

    def whole(self, tensor: Any, device: torch.device, *, is_presented: bool) -> Tensor:
        """See `Chunker`."""
        return self._extensions.all_gather_dtensor(tensor.to(device), tensor.device_mesh)
