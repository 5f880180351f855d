"""Parameters of tensor classes that cannot be flattened: what is flattened instead, and what modules see of it.

Quantised weights of torchao and the like are flattened as the bytes that they are made of, see `wrapper_tensors`. And
`DTensor`: with FSDP over one dimension of a mesh and tensor parallelism over another, a parameter is the part of a
`DTensor` that this rank holds. That part is flattened and sharded; modules see a `DTensor` again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam.resolving import Ignored
from flatparam.sharding.extension_point import DTensorExtensions, FSDPExtensions
from flatparam.sharding.wrapper_tensors import WrapperRecipe, is_wrapper
from flatparam_comm import FlatParamError, process_group_of
from flatparam_core import PRESENTER, BoundParameter, discover, owner_of
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
    """Return whether parameters among `tensors` may have to be replaced before they are flattened."""
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
        plain, present = _taken_apart(b)
        if present is None:
            continue
        parameter = nn.Parameter(plain.detach(), requires_grad=b.parameter.requires_grad)
        # The attributes of a wrapper class are also its inner tensors.
        drops = is_wrapper(b.parameter)
        noted = vars(b.parameter).items()
        vars(parameter).update(
            {name: value for name, value in noted if not (drops and isinstance(value, Tensor))}
        )
        setattr(parameter, PRESENTER, present)
        for info in b.infos:
            setattr(info.module, info.param_name, parameter)


def _taken_apart(b: BoundParameter) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """The tensor to flatten in the parameter's place, and what makes what modules see of it; `None` if it stays."""
    for extensions in (_extensions, DTensorExtensions() if torch.distributed.is_available() else None):
        if extensions is None:
            continue
        plain, facts = extensions.pre_flatten_transform(b.parameter)
        if plain is not b.parameter:
            return plain, functools.partial(extensions.post_unflatten_transform, param_extension=facts)
    if not is_wrapper(b.parameter):
        return b.parameter, None
    if b.parameter.requires_grad:
        kind = type(b.parameter)
        raise FlatParamError(
            f"parameter {b.names[0]!r} is a {kind.__module__}.{kind.__qualname__} that requires a gradient: expected "
            "requires_grad=False, since only frozen parameters of such a class can be sharded; freeze it and train an "
            "adapter (LoRA) on top, or leave its module whole (ignored_modules)"
        )
    recipe, plain = WrapperRecipe.of(b.parameter)
    return plain, recipe


def chunker() -> Chunker:
    """Return the object that makes sharded tensors and takes them apart: the extensions, if there are any."""
    return OWN_CHUNKER if _extensions is None else _Extended(_extensions)


@final
@attrs.frozen(eq=False)
class _Extended:
    """The extensions, as the layer beneath asks for them."""

    _extensions: FSDPExtensions

    def chunk_tensor(self, place: Place, full: Tensor) -> Any:
        """Have the extension make a `ShardedTensor` over the unit's shard group."""
        group = place.unit.topology.shard
        device = full.device
        per_node = getattr(torch, device.type).device_count() if device.type != "cpu" else 1
        return self._extensions.chunk_tensor(
            full, group.rank, group.size, per_node, process_group_of(group), device
        )

    def chunk_dtensor(self, place: Place, full: Tensor, mesh: Any) -> Any:
        """Have the extension make a `DTensor` over `mesh`."""
        return self._extensions.chunk_dtensor(full, place.unit.topology.shard.rank, mesh)

    def local_shards(self, tensor: Any) -> dict[tuple[int, ...], Tensor]:
        """Return the shards that the extension finds in a tensor, by their offsets."""
        _, shards = self._extensions.pre_load_state_dict_transform(tensor)
        return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in shards}

    def whole(self, tensor: Any, device: torch.device, *, is_presented: bool) -> Tensor:
        """Have the extension gather a `DTensor`; every rank calls it."""
        return self._extensions.all_gather_dtensor(tensor.to(device), tensor.device_mesh)
