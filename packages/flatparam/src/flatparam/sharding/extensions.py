"""Parameters of tensor classes that cannot be flattened: what is flattened instead, and what modules see of it.

Quantised weights of torchao and the like are flattened as the bytes that they are made of, see `WrapperRecipe`. Of a
`DTensor`, the part that this rank holds is flattened and sharded; the add-on flatparam-meshes shows modules the whole.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import Self

from flatparam.addons import load
from flatparam.resolving.settings import Resolved
from flatparam.sharding.placement import bound_parameters
from flatparam_comm import FlatParamError, ProcessGroupCollectives, process_group_of
from flatparam_core import PRESENTER, BoundParameter, owner_of
from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker, is_dtensor
from flatparam_state.places import Place

_PLAIN: Final = (nn.Parameter, nn.Buffer, Tensor)
_extensions: FSDPExtensions | None = None


def set_extensions(flattener: FSDPExtensions | None) -> None:
    """Have `flattener` asked for every parameter that is wrapped from now on; `None` for none."""
    global _extensions
    _extensions = flattener


def needs_extensions(tensors: Iterable[Tensor]) -> bool:
    """Return whether parameters among `tensors` may have to be replaced before they are flattened."""
    return _extensions is not None or any(type(tensor) not in _PLAIN for tensor in tensors)


def flatten_extended(module: nn.Module, resolved: Resolved) -> Resolved:
    """Put plain parameters in the place of those that cannot be flattened; they carry how they are to be shown."""
    presenters: list[Any] = []
    for b in bound_parameters(module, resolved.ignored):
        if (_extensions is None and type(b.parameter) is nn.Parameter) or owner_of(b.parameter) is not None:
            continue
        plain, present = _taken_apart(b)
        if present is None:
            continue
        parameter = nn.Parameter(plain.detach(), requires_grad=b.parameter.requires_grad)
        # The attributes of a wrapper class are also its inner tensors.
        drops = is_wrapper(b.parameter)
        noted = vars(b.parameter).items()
        kept = {name: value for name, value in noted if not (drops and isinstance(value, Tensor))}
        vars(parameter).update(kept)
        setattr(parameter, PRESENTER, present)
        presenters.append(present)
        for info in b.infos:
            setattr(info.module, info.param_name, parameter)
    if any(hasattr(each, "meshes") for each in presenters):
        return load("flatparam_meshes").join_forms(module, presenters, resolved)  # type: ignore[no-any-return]
    return resolved


def _taken_apart(b: BoundParameter) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """The tensor to flatten in the parameter's place, and what makes what modules see of it; `None` if it stays."""
    if _extensions is not None:
        plain, facts = _extensions.pre_flatten_transform(b.parameter)
        if plain is not b.parameter:
            made = functools.partial(_extensions.post_unflatten_transform, param_extension=facts)
            return plain, facts if hasattr(facts, "meshes") else made
    if is_dtensor(b.parameter):
        form = load("flatparam_meshes").MeshForm.of(b.parameter, b.names[0])
        return form.part(b.parameter), form
    if not is_wrapper(b.parameter):
        return b.parameter, None
    if b.parameter.requires_grad:
        kind = type(b.parameter)
        raise FlatParamError(
            f"parameter {b.names[0]!r} is a {kind.__module__}.{kind.__qualname__} that requires a gradient: expected "
            "requires_grad=False, since only frozen parameters of such a class can be sharded; freeze it and train an "
            "adapter (LoRA) on top, or leave its module whole (ignored_modules, or ignored_params of fully_shard)"
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
        return self._extensions.chunk_tensor(full, group.rank, group.size, per_node, process_group_of(group), device)

    def chunk_dtensor(self, place: Place, full: Tensor, mesh: Any) -> Any:
        """Have the extension make a `DTensor` over `mesh`."""
        return self._extensions.chunk_dtensor(full, place.unit.topology.shard.rank, mesh)

    def local_shards(self, tensor: Any) -> dict[tuple[int, ...], Tensor]:
        """Return the shards that the extension finds in a tensor, by their offsets."""
        _, shards = self._extensions.pre_load_state_dict_transform(tensor)
        return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in shards}

    def whole(self, tensor: Any, device: torch.device, *, presented_over: int) -> Tensor:
        """Have the extension gather a `DTensor`; every rank calls it."""
        return self._extensions.all_gather_dtensor(tensor.to(device), tensor.device_mesh)


class FSDPExtensions(abc.ABC):
    """How parameters of some tensor class are flattened, and how their sharded state is made and taken apart.

    FSDP1's extension point: see `set_extensions`. The first two methods have to be there.
    """

    @abc.abstractmethod
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """Return the plain tensor to flatten in place of `tensor`, and what it takes to make the like of it again.

        `(tensor, None)` leaves it as it is.
        """

    @abc.abstractmethod
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """Make what modules see of `tensor`, a full parameter as flattened; differentiably."""

    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: Any,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return a `ShardedTensor` over `pg` of which this rank holds `tensor.chunk(world_size, dim=0)[rank]`."""
        found: Tensor = OWN_CHUNKER.chunk_over(tensor, ProcessGroupCollectives(pg))
        return found if device is None else found.to(device)

    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: Any) -> Tensor:
        """Return a `DTensor` over `device_mesh` of which this rank holds `tensor.chunk(size, dim=0)[rank]`."""
        over = load("flatparam_meshes").form.chunk_over if is_dtensor(tensor) else OWN_CHUNKER.chunk_over_mesh
        found: Tensor = over(tensor, device_mesh, rank)
        return found

    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the tensor to load in place of `tensor`, a `ShardedTensor`, and its local shards."""
        sharded: Any = tensor
        return tensor, sharded.local_shards()

    def all_gather_dtensor(self, tensor: Tensor, parent_mesh: Any) -> Tensor:
        """Return the tensor that was flattened, of a `DTensor` over `parent_mesh`; every rank calls it."""
        sharded: Any = tensor
        return OWN_CHUNKER.whole(tensor, tensor.device, presented_over=int(sharded.device_mesh.ndim > 1))


_ALIGNMENT: Final = 16


@final
@attrs.frozen
class _Span:
    """An inner tensor: its bytes among those of the parameter."""

    start: int
    numel: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, data: Tensor) -> Tensor:
        """Return the inner tensor, in the memory of `data`: 1-D, uint8."""
        raw = data[self.start : self.start + self.numel * self.dtype.itemsize]
        if raw.data_ptr() % self.dtype.itemsize:
            raw = raw.clone()
        return raw.view(self.dtype).view(self.shape)


@final
@attrs.frozen
class WrapperRecipe:
    """How a tensor of a wrapper class is made of bytes again."""

    _make: Callable[..., Tensor]
    _context: Any
    _shape: torch.Size
    _stride: tuple[int, ...]
    _parts: dict[str, Any]
    """By the name of an attribute, an inner tensor: a span of the bytes, or a recipe for one of a wrapper class."""

    @classmethod
    def of(cls, tensor: Tensor) -> tuple[Self, Tensor]:
        """Return the recipe of `tensor`, and the bytes: 1-D, uint8, on the device of the inner tensors.

        Each inner tensor begins at a multiple of 16 bytes. They have to be on one device.
        """
        rows: list[Tensor] = []
        recipe = cls._collect(tensor, rows)
        return recipe, torch.cat(rows)

    @classmethod
    def _collect(cls, tensor: Tensor, rows: list[Tensor]) -> Self:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # is_wrapper
        parts: dict[str, Any] = {}
        for name in names:
            inner = getattr(tensor, name)
            if is_wrapper(inner):
                parts[name] = cls._collect(inner, rows)
                continue
            start = sum(row.numel() for row in rows)
            parts[name] = _Span(start, inner.numel(), inner.dtype, inner.shape)
            rows.append(inner.detach().contiguous().view(-1).view(torch.uint8))
            rows.append(rows[-1].new_zeros(-rows[-1].numel() % _ALIGNMENT))
        make = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]  # is_wrapper
        return cls(make, context, tensor.shape, tensor.stride(), parts)

    def made_of(self, data: Tensor) -> Tensor:
        """Return the tensor whose bytes `data` has (1-D, uint8); its inner tensors are in that memory."""
        inner = {
            name: part.of(data) if isinstance(part, _Span) else part.made_of(data) for name, part in self._parts.items()
        }
        return self._make(inner, self._context, self._shape, self._stride)

    def __call__(self, data: Tensor) -> nn.Parameter:
        """Return the same as a frozen parameter, which modules see."""
        return nn.Parameter(self.made_of(data.detach()), requires_grad=False)

    def flattened(self, value: object) -> object:
        """Return the bytes of `value`, if it is a tensor like the one that this recipe makes; else `value`."""
        if not isinstance(value, Tensor) or not is_wrapper(value):
            return value
        recipe, data = self.of(value)
        return data if recipe == self else value


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether `tensor` is of a wrapper class whose inner tensors can be taken out and put together again."""
    return bool(is_traceable_wrapper_subclass(tensor)) and hasattr(type(tensor), "__tensor_unflatten__")
