"""The five strategies: what each keeps, sends and warns of, and that all of them train as one process."""

import warnings
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, SingleCollectives

from .models import mlp, seeded
from .worlds import assert_same_state, inputs, node_groups, on_ranks, train, train_on_mean

LINEAR = ModuleWrapPolicy({nn.Linear})
PLAIN = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
HYBRID = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")


def trained(rank: int, **arguments: Any) -> Any:
    model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, **arguments)
    train(model, torch.optim.Adam(model.parameters()), inputs(rank))
    return model.state_dict()


def local(ranks: int, per_node: int | None = None) -> Any:
    model = seeded(mlp)
    train_on_mean(model, torch.optim.Adam(model.parameters()), ranks, per_node=per_node)
    return model.state_dict()


@each_row("ranks", [2, 4])
@each_row("strategy", PLAIN, ids=lambda strategy: strategy.name)
def test_training_with_one_group(strategy: ShardingStrategy, ranks: int, use_orig_params: bool) -> None:
    """S-030, S-031, S-032, S-034: the bits of the unwrapped model on the mean of the ranks' gradients."""

    def rank(world: Collectives) -> Any:
        return trained(world.rank, sharding_strategy=strategy, use_orig_params=use_orig_params)

    for state in on_ranks(ranks, rank):
        assert_same_state(state, local(ranks))


@pytest.mark.parametrize("strategy", HYBRID, ids=lambda strategy: strategy.name)
def test_training_with_a_pair_of_groups(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """S-011, S-033, S-034: the mean over all four ranks, summed inside the nodes first and then across them."""

    def rank(world: Collectives) -> Any:
        return trained(
            world.rank,
            sharding_strategy=strategy,
            process_group=node_groups(world),
            use_orig_params=use_orig_params,
        )

    for state in on_ranks(4, rank):
        assert_same_state(state, local(4, per_node=2))


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_hybrid_finds_its_groups(per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-012: without groups it shards inside nodes of `LOCAL_WORLD_SIZE` ranks, of whatever size, and trains alike."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=LINEAR)
        sizes = {m._unit.plan.topology.shard.size for m in FSDP.fsdp_modules(model)}
        train(model, torch.optim.Adam(model.parameters()), inputs(world.rank))
        return sizes, model.state_dict()

    for sizes, state in on_ranks(4, rank):
        assert sizes == {per_node}
        assert_same_state(state, local(4, per_node=per_node))


def test_hybrid_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-012: without `LOCAL_WORLD_SIZE` ranks of one host are one node."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def rank(world: Collectives) -> Any:
        model = FSDP(mlp(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=LINEAR)
        return model.world_size

    assert on_ranks(4, rank) == [4, 4, 4, 4]


def test_hybrid_on_uneven_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-012: nodes of different sizes are refused, with the sizes and what to pass."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def rank(world: Collectives) -> Any:
        with pytest.raises(ValueError, match=r"\[2, 1\].*process_group="):
            FSDP(mlp(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=LINEAR)

    on_ranks(3, rank)


def test_units_of_a_hybrid_share_the_groups() -> None:
    """S-014: every unit that a policy makes has the very groups of the wrapper around it."""

    def rank(world: Collectives) -> bool:
        groups = node_groups(world)
        model = FSDP(mlp(), sharding_strategy=HYBRID[0], process_group=groups, auto_wrap_policy=LINEAR)
        topologies = [m._unit.plan.topology for m in FSDP.fsdp_modules(model)]
        return all((t.shard, t.replicate) == groups for t in topologies)

    assert on_ranks(4, rank) == [True] * 4


@each_row(
    ("strategy", "kept"),
    [
        (strategy, strategy.name in ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2"))
        for strategy in (*PLAIN, *HYBRID)
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_is_kept_after_the_forward(strategy: ShardingStrategy, kept: bool) -> None:
    """S-030 to S-033: which strategies keep full parameters between forward and backward, and after an unsynced backward."""

    def rank(world: Collectives) -> Any:
        groups = node_groups(world) if strategy in HYBRID else None
        model = FSDP(mlp(), sharding_strategy=strategy, process_group=groups, auto_wrap_policy=LINEAR)
        handles = [handle for m in FSDP.fsdp_modules(model) for handle in m._unit.handles]
        loss = model(torch.ones(2, 3)).sum()
        between = {handle.is_unsharded for handle in handles}
        loss.backward()
        after = {handle.is_unsharded for handle in handles}
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        return between, after, {handle.is_unsharded for handle in handles}

    for between, after, unsynced in on_ranks(4, rank):
        assert (between, after, unsynced) == ({kept}, {False}, {kept})


def test_what_a_hybrid_sends() -> None:
    """S-033: gather and reduce-scatter inside the shard group; across the copies one all-reduce of each shard.

    The unit that ends last is kept for its backward, so it is gathered once.
    """

    def rank(world: Collectives) -> Any:
        ledgers = ByteLedger(keep=True), ByteLedger(keep=True)
        groups = tuple(map(RecordingCollectives, node_groups(world), ledgers))
        model = FSDP(seeded(mlp), groups, HYBRID[0], auto_wrap_policy=LINEAR)
        model(torch.ones(2, 3)).sum().backward()
        for ledger in ledgers:
            ledger.reset()
        model(torch.ones(2, 3)).sum().backward()
        shards = [4 * handle.layout.shard_numel for m in FSDP.fsdp_modules(model) for handle in m._unit.handles]
        units = {"0", "2", "4"}
        return shards, *([(t.op, t.payload_nbytes) for t in ledger.transfers if t.label in units] for ledger in ledgers)

    for shards, inside, across in on_ranks(4, rank):
        assert sorted(across) == sorted(("all_reduce", nbytes) for nbytes in shards)
        for op, moved in (("reduce_scatter", shards), ("all_gather", shards + shards[:-1])):
            assert sorted(nbytes for found, nbytes in inside if found == op) == sorted(2 * nbytes for nbytes in moved)


def test_accumulation_of_a_hybrid() -> None:
    """S-033, S-041: a backward in `no_sync` sends nothing, and the next one gives the mean of the sums."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), node_groups(world), HYBRID[0], auto_wrap_policy=LINEAR)
        first, second = inputs(world.rank, 2)
        with model.no_sync():
            model(first).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        model(second).square().mean().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    reference = seeded(mlp)
    for n in range(4):
        for x in inputs(n, 2):
            (reference(x).square().mean() / 4).backward()
    for gradients in on_ranks(4, rank):
        for name, parameter in reference.named_parameters():  # the eight gradients are added in another order
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_one_rank_becomes_no_shard() -> None:
    """S-012: in a world of one every strategy becomes `NO_SHARD`, with a warning that names what was asked for."""
    for strategy in (None, *PLAIN[:2]):
        with pytest.warns(UserWarning, match="one rank.*NO_SHARD"):
            model = FSDP(mlp(), SingleCollectives(), strategy, auto_wrap_policy=LINEAR)
        assert {m.sharding_strategy for m in FSDP.fsdp_modules(model)} == {ShardingStrategy.NO_SHARD}


def test_no_shard_is_deprecated_as_in_torch() -> None:
    """S-012: asking for `NO_SHARD` emits one FutureWarning, however many units a policy makes; a rank alone is not told."""

    def rank(world: Collectives) -> None:
        FSDP(mlp(), sharding_strategy=ShardingStrategy.NO_SHARD, auto_wrap_policy=LINEAR)

    for ranks in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            on_ranks(ranks, rank)
        assert [w.category for w in caught] == ([] if ranks == 1 else [FutureWarning] * ranks)


def test_the_default_is_full_shard() -> None:
    """S-012: `None` means `FULL_SHARD`."""
    assert on_ranks(2, lambda world: FSDP(mlp()).sharding_strategy) == [ShardingStrategy.FULL_SHARD] * 2


def test_a_strategy_for_some_units(use_orig_params: bool) -> None:
    """S-014, S-111: a policy may give units strategies of their own; all of them train to the same bits."""
    kinds = [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD]

    def rank(world: Collectives) -> Any:
        chosen = dict(zip((0, 2, 4), kinds, strict=True))
        module = seeded(mlp)
        policy = CustomPolicy(
            lambda m: next(({"sharding_strategy": kind} for i, kind in chosen.items() if m is module[i]), False)
        )
        model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        train(model, torch.optim.Adam(model.parameters()), inputs(world.rank))
        return [m.sharding_strategy for m in FSDP.fsdp_modules(model)][1:], model.state_dict()

    for found, state in on_ranks(2, rank):
        assert found == kinds
        assert_same_state(state, local(2))


@each_row("limited", [False, True])
def test_limit_all_gathers(limited: bool) -> None:
    """S-022: both values train to the same bits."""
    for state in on_ranks(2, lambda world: trained(world.rank, limit_all_gathers=limited)):
        assert_same_state(state, local(2))


@pytest.mark.parametrize("strategy", [*PLAIN, *HYBRID], ids=lambda strategy: strategy.name)
def test_every_replica_starts_from_the_first_rank(strategy: ShardingStrategy) -> None:
    """S-020: `sync_module_states` reaches every rank of every group, whatever values it has made."""

    def rank(world: Collectives) -> Any:
        return FSDP(
            seeded(mlp, seed=world.rank),
            node_groups(world) if strategy in HYBRID else None,
            strategy,
            auto_wrap_policy=LINEAR,
            sync_module_states=True,
        ).state_dict()

    for state in on_ranks(4, rank):
        assert_same_state(state, seeded(mlp, seed=0).state_dict())
