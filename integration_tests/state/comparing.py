"""Demands on state dicts of any form: names, shapes, forms, bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor


def difference(mine: Any, other: Any, path: str = "") -> str | None:
    """The first place where two state dicts, of any form, are not the same; None where they are."""
    return next(_differences(mine, other, path), None)


def assert_same(mine: Any, other: Any, what: str = "") -> None:
    """Demand that two state dicts are the same: keys, forms, shapes, dtypes and bits."""
    found = difference(mine, other)
    assert found is None, f"{what} {found}"


def _differences(mine: Any, other: Any, path: str) -> Iterator[str]:
    if isinstance(other, Mapping):
        if not isinstance(mine, Mapping) or set(mine) != set(other):
            found = sorted(map(str, mine)) if isinstance(mine, Mapping) else type(mine)
            yield f"{path}: expected the keys {sorted(map(str, other))}, found {found}"
            return
        for key in other:
            yield from _differences(mine[key], other[key], f"{path}/{key}")
    elif isinstance(other, (list, tuple)):
        if not isinstance(mine, (list, tuple)) or len(mine) != len(other):
            yield f"{path}: expected {other}, found {mine}"
            return
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            yield from _differences(a, b, f"{path}/{index}")
    elif isinstance(other, ShardedTensor):
        yield from _sharded_differences(mine, other, path)
    elif isinstance(other, DTensor):
        yield from _dtensor_differences(mine, other, path)
    elif isinstance(other, Tensor):
        yield from _tensor_differences(mine, other, path)
    elif type(mine) is not type(other) or mine != other:
        yield f"{path}: expected {other!r}, found {mine!r}"


def _tensor_differences(mine: Any, other: Tensor, path: str) -> Iterator[str]:
    if not isinstance(mine, Tensor) or isinstance(mine, (DTensor, ShardedTensor)):
        yield f"{path}: expected a tensor, found {type(mine)}"
    elif (mine.shape, mine.dtype, mine.device) != (other.shape, other.dtype, other.device):
        expected = (tuple(other.shape), other.dtype, other.device)
        yield f"{path}: expected {expected}, found {(tuple(mine.shape), mine.dtype, mine.device)}"
    elif not torch.equal(mine, other):
        yield f"{path}: expected {other.flatten()[:4]}..., found {mine.flatten()[:4]}..."


def _dtensor_differences(mine: Any, other: DTensor, path: str) -> Iterator[str]:
    if not isinstance(mine, DTensor):
        yield f"{path}: expected a DTensor, found {type(mine)}"
        return
    for name in ("shape", "placements", "dtype"):
        a, b = getattr(mine, name), getattr(other, name)
        if a != b:
            yield f"{path}: expected {name} {b}, found {a}"
    if not torch.equal(mine.device_mesh.mesh, other.device_mesh.mesh):
        yield f"{path}: expected the mesh {other.device_mesh}, found {mine.device_mesh}"
    if mine.device_mesh.mesh_dim_names != other.device_mesh.mesh_dim_names:
        yield f"{path}: expected the mesh {other.device_mesh}, found {mine.device_mesh}"
    yield from _tensor_differences(mine.to_local(), other.to_local(), path)


def _sharded_differences(mine: Any, other: ShardedTensor, path: str) -> Iterator[str]:
    if not isinstance(mine, ShardedTensor):
        yield f"{path}: expected a ShardedTensor, found {type(mine)}"
        return
    a, b = mine.metadata(), other.metadata()
    if (a.size, a.tensor_properties) != (b.size, b.tensor_properties):
        yield f"{path}: expected {b.size} {b.tensor_properties}, found {a.size} {a.tensor_properties}"
    if boxes_of(mine) != boxes_of(other):
        yield f"{path}: expected the shards {boxes_of(other)}, found {boxes_of(mine)}"
    mine_local, other_local = mine.local_shards(), other.local_shards()
    if [s.metadata for s in mine_local] != [s.metadata for s in other_local]:
        yield f"{path}: expected the local shards {other_local}, found {mine_local}"
        return
    for shard, expected in zip(mine_local, other_local, strict=True):
        yield from _tensor_differences(shard.tensor, expected.tensor, path)


def boxes_of(tensor: ShardedTensor) -> list[tuple[list[int], list[int], str]]:
    """Offsets, sizes and place of every shard, of all ranks."""
    return [
        (list(shard.shard_offsets), list(shard.shard_sizes), str(shard.placement))
        for shard in tensor.metadata().shards_metadata
    ]


def whole(value: Any, group: Any = None) -> Any:
    """A state dict with full tensors on every rank, from one of any form. Every rank of `group` calls it."""
    if isinstance(value, Mapping):
        return {key: whole(value[key], group) for key in value}
    if isinstance(value, ShardedTensor):
        return _joined(value)
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value


def _joined(tensor: ShardedTensor) -> Tensor:
    """The full tensor out of every rank's shards, which must tile it."""
    shards = [(list(s.metadata.shard_offsets), s.tensor.detach()) for s in tensor.local_shards()]
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size(tensor._process_group)
    torch.distributed.all_gather_object(of_ranks, shards, group=tensor._process_group)
    full = torch.zeros(tensor.metadata().size, dtype=tensor.dtype)
    times = torch.zeros(tensor.metadata().size, dtype=torch.int)
    for offsets, part in (shard for shards in of_ranks for shard in shards):
        box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
        full[box] = part
        times[box] += 1
    assert torch.equal(times, torch.ones_like(times)), f"the shards do not tile {tuple(full.shape)}: {times}"
    return full


def assert_model(state: Mapping[str, Any], expected: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Demand that a full model state has the same names and bits, but for these tensors, which it must have too."""
    assert set(state) == set(expected), f"names {sorted(state)}, not {sorted(expected)}"
    for name in expected:
        if name not in but:
            assert_same(state[name], expected[name], f"model {name}")


def assert_optimizer(state: Mapping[str, Any], expected: Mapping[str, Mapping[str, Any]]) -> None:
    """Demand that a full optimizer state has the bits of `expected` for each parameter."""
    assert_same(dict(state["state"]), dict(expected), "optimizer")


def parameter_names(state: Mapping[str, Any]) -> list[list[str]]:
    """The names in each parameter group, sorted."""
    groups: Sequence[Any] = state["param_groups"]
    return [sorted(group["params"]) for group in groups]
