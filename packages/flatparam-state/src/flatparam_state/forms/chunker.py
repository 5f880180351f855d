"""Between full tensors and those that torch shards over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import attrs
import torch

from flatparam_runtime import Collectives, FlatParamError, process_group_of
from flatparam_state.forms.tiling import Tiling
from flatparam_state.places import Place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Chunker(Protocol):
    """Between full tensors and torch's sharded ones; FSDP1's extension point has the same four."""

    def chunk_tensor(self, place: Place, full: torch.Tensor) -> Any:
        """Return a `ShardedTensor` of which this rank holds `full.chunk(world_size, dim=0)[rank]`."""

    def chunk_dtensor(self, place: Place, full: torch.Tensor, mesh: DeviceMesh) -> Any:
        """A `DTensor` over `mesh`, sharded over its dimension 0; `full` is one itself under tensor parallelism."""

    def local_shards(self, tensor: Any) -> Mapping[tuple[int, ...], torch.Tensor]:
        """Return this rank's shards of a `ShardedTensor`, by their offsets."""

    def whole(self, tensor: Any, device: torch.device, *, presented_over: int) -> torch.Tensor:
        """The tensor of which data parallelism shards parts: all of a `DTensor`, or this rank's part over its last
        `presented_over` dimensions, as modules see it; every rank calls it. `device` is where collectives work."""


@final
@attrs.frozen(eq=False)
class OwnChunker:
    """The chunks as torch's own FSDP makes them."""

    def chunk_tensor(self, place: Place, full: torch.Tensor) -> Any:
        """Return the `ShardedTensor` of which this rank holds its chunk of `full`, over the ranks of `place`."""
        return self.chunk_over(full, place.unit.topology.shard)

    def chunk_over(self, full: torch.Tensor, group: Collectives) -> Any:
        """Return a `ShardedTensor` over `group`."""
        tiling = Tiling.of_chunks(full.shape, group.size)
        parts = [box.of(full).clone(memory_format=torch.contiguous_format) for box in tiling.of_rank(group.rank)]
        return tiling.sharded_tensor(parts, full.dtype, group)

    def chunk_dtensor(self, place: Place, full: torch.Tensor, mesh: DeviceMesh) -> Any:
        """Return the `DTensor` over `mesh` of which this rank holds its chunk of `full`."""
        if is_dtensor(full) and place.handle.forms.meshes is not None:
            return place.handle.forms.meshes.chunk(full, mesh)
        return self.chunk_over_mesh(full, mesh, place.unit.topology.shard.rank)

    def chunk_over_mesh(self, full: torch.Tensor, mesh: DeviceMesh, rank: int) -> Any:
        """Return a `DTensor` over `mesh`, of a tensor that is none."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        size = mesh.size(mesh.ndim - 1)
        chunks = full.chunk(size) if full.dim() else [full] * size
        local = chunks[rank] if rank < len(chunks) else full[:0]
        cut, mesh = _place_in_root(mesh)
        placements: list[Any] = [Replicate()] * mesh.ndim
        if full.dim():
            placements[cut] = Shard(0)
        shape, stride = full.shape, full.stride()
        return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=shape, stride=stride)

    def local_shards(self, tensor: Any) -> Mapping[tuple[int, ...], torch.Tensor]:
        """Return this rank's shards of `tensor`, by the offsets that its metadata give them."""
        return {tuple(shard.metadata.shard_offsets): shard.tensor for shard in tensor.local_shards()}

    def whole(self, tensor: Any, device: torch.device, *, presented_over: int) -> torch.Tensor:
        """Return what data-parallel ranks have parts of: gathered, if `tensor` is not whole on each of them."""
        from torch.distributed.tensor import Replicate

        kept = tensor.placements[tensor.device_mesh.ndim - presented_over :]
        data_parallel = tensor.placements[: tensor.device_mesh.ndim - presented_over]
        if not all(placement.is_replicate() for placement in data_parallel):
            placements = [*[Replicate()] * len(data_parallel), *kept]
            tensor = tensor.to(device).redistribute(placements=placements)
        local: torch.Tensor = tensor.to_local()
        return local


OWN_CHUNKER: Final = OwnChunker()


def is_dtensor(value: object) -> bool:
    """Return whether `value` is torch's `DTensor`; it is not imported for that."""
    return any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def local_shape(value: Any, dims: int) -> tuple[int, ...]:
    """Return the shape of this rank's part of a `DTensor` over the last `dims` dimensions of its mesh."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, outer = value.device_mesh, value.device_mesh.ndim - dims
    inner = mesh if outer <= 0 else mesh[mesh.mesh_dim_names[outer:]]
    return tuple(compute_local_shape_and_global_offset(value.shape, inner, value.placements[max(outer, 0) :])[0])


def is_chunked_over(value: Any, group: Collectives) -> bool:
    """Return whether the ranks of `group` hold the chunks of a `DTensor`'s dimension 0, and all others copies."""
    process_group = process_group_of(group)
    cut = [dim for dim, placement in enumerate(value.placements) if not placement.is_replicate()]
    if process_group is None or len(cut) != 1 or not value.placements[cut[0]].is_shard(0):
        return False
    ranks = torch.distributed.get_process_group_ranks
    return ranks(value.device_mesh.get_group(cut[0])) == ranks(process_group)


def mesh_of(place: Place, *, makes_one: bool) -> DeviceMesh | None:
    """Return the mesh that the unit of `place` was sharded over; None if it was not, unless one is made of its ranks.

    Raises:
        FlatParamError: if the ranks are none of torch's.
    """
    topology = place.unit.topology
    if topology.mesh is not None or not makes_one:
        return topology.mesh
    group = process_group_of(topology.shard)
    if group is None:
        raise FlatParamError("a DTensor needs a process group of torch.distributed; use a full state dict")
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, place.handle.device.type)


def _place_in_root(mesh: DeviceMesh) -> tuple[int, DeviceMesh]:
    """Return the mesh that `mesh` is a slice of, and the dimension of it that data parallelism shards over."""
    # The method has no public name.
    found: Any = mesh
    root: DeviceMesh = found._get_root_mesh()
    names, own = root.mesh_dim_names or (), mesh.mesh_dim_names or ("",)
    return (names.index(own[-1]), root) if own[-1] in names else (mesh.ndim - 1, mesh)
