"""Where a library that has tensors of its own, as tensor parallelism has, says how they are sharded and restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed._shard.sharded_tensor import Shard
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["FSDPExtensions"]


class FSDPExtensions(ABC):
    """What is done with each parameter's tensor on its way into a flat parameter, out of it, and to a state dict."""

    @abstractmethod
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """The plain tensor to flatten instead of `tensor`, and what `post_unflatten_transform` needs to undo it.

        With `None` for the second, `tensor` is flattened as it is.
        """

    @abstractmethod
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """The tensor that the module is to see for the unflattened `tensor`: the transform before, undone."""

    @abstractmethod
    def chunk_tensor(
        self,
        tensor: Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: ProcessGroup,
        device: torch.device | None = None,
    ) -> Tensor:
        """The `ShardedTensor` of which this rank holds its part of the full `tensor`."""

    @abstractmethod
    def chunk_dtensor(self, tensor: Tensor, rank: int, device_mesh: DeviceMesh) -> Tensor:
        """The `DTensor` over `device_mesh` of which this rank holds its part of the full `tensor`."""

    @abstractmethod
    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Shard]]:
        """The sharded tensor to load, and this rank's shards of it, for what a sharded state dict has."""

    @abstractmethod
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> Tensor:
        """`tensor` gathered over the dimension that data parallelism shards: still a part, where others shard too."""


_METHODS: Final = tuple(sorted(FSDPExtensions.__abstractmethods__))

_extensions: FSDPExtensions | None = None


def _set_fsdp_extensions(flattener: FSDPExtensions | None) -> None:
    """Have modules that are wrapped from now on, in this process, use `flattener`; `None` ends it.

    Raises:
        TypeError: for an object that has not all of the methods. Torch's own extensions have.
    """
    global _extensions
    missing = [name for name in _METHODS if not callable(getattr(flattener, name, None))]
    if flattener is not None and missing:
        raise TypeError(
            f"expected FSDPExtensions, found {flattener!r}, which has no {', '.join(missing)}; subclass FSDPExtensions"
        )
    _extensions = flattener


def _get_fsdp_extensions() -> FSDPExtensions | None:
    """What was set last."""
    return _extensions
