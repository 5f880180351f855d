"""The groups of ranks that share a shard, or hold copies of it: from a strategy and what FSDP1 takes as groups."""

from __future__ import annotations

import socket
from typing import Any

import attrs
from torch import Tensor

from flatparam.api import ShardingStrategy
from flatparam.resolving.arguments import Environment
from flatparam_comm import Collectives, CommHook, HookedCollectives, SingleCollectives, Topology, resolve_topology
from flatparam_runtime import warn_caller

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})


def resolve_groups(
    strategy: ShardingStrategy, process_group: Any, device_mesh: Any, *, has_policy: bool, environment: Environment
) -> tuple[Topology, ShardingStrategy]:
    """Return the topology that the arguments ask for, and the strategy as it is then: `NO_SHARD` in a world of one.

    Raises:
        ValueError: if both a group and a mesh are given, if they do not fit the strategy, or if there is no group to
            be found.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other: pass one of them")
    # A wrapper passes its topology on to those that its policy makes.
    if isinstance(process_group, Topology):
        return _shared(process_group, strategy), strategy
    where = device_mesh if process_group is None else process_group
    if strategy in HYBRID:
        topology = _hybrid(strategy, where, has_policy=has_policy, environment=environment)
    else:
        topology = _single_group(strategy, where)
    if topology.data_parallel_size == 1 and strategy is not ShardingStrategy.NO_SHARD:
        warn_caller(f"the world has one rank, so there is nothing to shard: using NO_SHARD for {strategy}")
        strategy = ShardingStrategy.NO_SHARD
    elif strategy is ShardingStrategy.NO_SHARD:
        topology = Topology(SingleCollectives(), topology.shard)
    return _silenced(topology, environment), strategy


def _shared(topology: Topology, strategy: ShardingStrategy) -> Topology:
    """Return the groups of the wrapper around, for a unit that a policy may have given a different strategy."""
    if strategy is ShardingStrategy.NO_SHARD and topology.replicate is None:
        return Topology(SingleCollectives(), topology.shard)
    if strategy not in HYBRID and topology.replicate is not None and topology.shard.size == 1:
        return topology if strategy is ShardingStrategy.NO_SHARD else Topology(topology.replicate)
    return topology


def _single_group(strategy: ShardingStrategy, where: Any) -> Topology:
    if isinstance(where, tuple):
        raise ValueError(f"process_group: a pair of groups is for the hybrid strategies, found {strategy}")
    topology = resolve_topology(where)
    if topology.replicate is not None:
        raise ValueError(
            f"device_mesh: {strategy} shards over a mesh of one dimension, found {where}; pass a slice of it, or use "
            "HYBRID_SHARD"
        )
    return topology


def _hybrid(strategy: ShardingStrategy, where: Any, *, has_policy: bool, environment: Environment) -> Topology:
    if where is None:
        if not has_policy:
            raise ValueError(
                f"{strategy} needs to know its groups if modules are wrapped by hand: pass "
                "process_group=(shard group, replicate group) or a device_mesh of two dimensions"
            )
        return _by_node(resolve_topology(None).shard, environment)
    if isinstance(where, tuple) and len(where) != 2:
        raise ValueError(f"process_group: expected a pair (shard group, replicate group), found {len(where)} of them")
    try:
        topology = resolve_topology(where)
    except TypeError as error:
        raise ValueError(f"process_group: expected a pair (shard group, replicate group): {error}") from error
    if topology.replicate is None:
        raise ValueError(
            f"{strategy} needs a pair of groups or a device_mesh of two dimensions (replicate, shard), found {where!r}"
        )
    return topology


def _by_node(world: Collectives, environment: Environment) -> Topology:
    """Shard inside each node, replicate across nodes; as torchrun counts them, or else by the hosts' names."""
    per_node = environment.nodes_of
    if per_node is None:
        hosts = world.exchange(socket.gethostname(), label="hosts")
        nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    else:
        nodes = [list(range(start, min(start + per_node, world.size))) for start in range(0, world.size, per_node)]
    sizes = {len(node) for node in nodes}
    if len(sizes) > 1:
        raise ValueError(
            f"HYBRID_SHARD: expected as many ranks on every node, found {[len(node) for node in nodes]}; pass the "
            "groups yourself, as process_group=(shard group, replicate group)"
        )
    return Topology.cut(world, nodes)


def _silenced(topology: Topology, environment: Environment) -> Topology:
    """Return the groups with collectives of which some move nothing, to see what they cost (`FSDP_USE_FAKE_...`)."""
    hooks: dict[str, CommHook] = {}
    if environment.fake_all_gather:
        hooks["all_gather"] = _keep_output
    if environment.fake_reduce:
        hooks["reduce_scatter"] = _take_own_part
    if not hooks:
        return topology
    replicate = None if topology.replicate is None else HookedCollectives(topology.replicate, **hooks)
    return attrs.evolve(topology, shard=HookedCollectives(topology.shard, **hooks), replicate=replicate)


def _keep_output(inner: Collectives, output: Tensor, shard: Tensor, label: str) -> None:
    """Move nothing: the output keeps what it holds."""


def _take_own_part(inner: Collectives, output: Tensor, full: Tensor, label: str) -> None:
    """Move nothing: the output is this rank's own part."""
    output.copy_(full[inner.rank * output.numel() : (inner.rank + 1) * output.numel()])
