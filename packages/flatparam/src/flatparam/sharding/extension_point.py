"""FSDP1's extension point for parameters of tensor classes that cannot be flattened, and what it does for `DTensor`."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from flatparam_comm import ProcessGroupCollectives
from flatparam_state import OWN_CHUNKER

__all__ = ["DTensorExtensions", "FSDPExtensions"]


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
        found: Tensor = OWN_CHUNKER.chunk_over_mesh(tensor, device_mesh, rank)
        return found

    def pre_load_state_dict_transform(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the tensor to load in place of `tensor`, a `ShardedTensor`, and its local shards."""
        sharded: Any = tensor
        return tensor, sharded.local_shards()

    def all_gather_dtensor(self, tensor: Tensor, parent_mesh: Any) -> Tensor:
        """Return the tensor that was flattened, of a `DTensor` over `parent_mesh`; every rank calls it."""
        sharded: Any = tensor
        return OWN_CHUNKER.whole(tensor, tensor.device, is_presented=sharded.device_mesh.ndim > 1)


class DTensorExtensions(FSDPExtensions):
    """For `DTensor` parameters over a mesh of other ranks than those that FSDP shards over."""

    @override
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """Return this rank's local part.

        Raises:
            ValueError: for a `DTensor` that is a sum still to be made.
        """
        # Imported late: torch may have been built without distributed.
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return tensor, None
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"a parameter cannot be a partial DTensor, found one with {tensor.placements}")
        facts = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return tensor.to_local(), facts

    @override
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """Return the `DTensor` of which `tensor` is the local part; gradients come back to that part."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = param_extension
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
