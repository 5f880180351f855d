"""`register_comm_hook`: who is called with what, and that the numbers are those of the hook."""

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, layout
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives

from .models import mlp, seeded
from .worlds import assert_same_state, inputs, on_ranks, train, train_on_mean

LINEAR = ModuleWrapPolicy({nn.Linear})

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")


def averaging(world: Collectives, gradient: Tensor, shard: Tensor) -> None:
    """FSDP1's signature for what is sharded: reduce `gradient` to `shard`, and average."""
    world.reduce_scatter(shard, gradient).wait()
    shard.div_(world.size)


def averaging_in_place(world: Collectives, gradient: Tensor) -> None:
    """FSDP1's signature for what is not sharded."""
    world.all_reduce(gradient).wait()
    gradient.div_(world.size)


@each_row("rules", [None, layout.by({}, otherwise=layout.chunk)], ids=["ends", "chunks"])
@each_row(
    ("strategy", "hook"),
    [
        (ShardingStrategy.FULL_SHARD, averaging),
        (ShardingStrategy.SHARD_GRAD_OP, averaging),
        (ShardingStrategy.NO_SHARD, averaging_in_place),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_hook_that_averages(strategy: ShardingStrategy, hook: Any, rules: Any, use_orig_params: bool) -> None:
    """S-071: called for every unit with FSDP1's arguments, it trains to the bits of having none, under any rule."""
    calls: list[int] = []

    def counted(world: Collectives, *tensors: Tensor) -> None:
        calls.append(len(tensors))
        hook(world, *tensors)

    def rank(world: Collectives) -> Any:
        model = FSDP(
            seeded(mlp),
            sharding_strategy=strategy,
            auto_wrap_policy=LINEAR,
            use_orig_params=use_orig_params,
            layout=rules,
        )
        model.register_comm_hook(world, counted)
        train(model, torch.optim.Adam(model.parameters()), inputs(world.rank))
        return model.state_dict()

    reference = seeded(mlp)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())
    assert calls == [2 if hook is averaging else 1] * (2 * 3 * 3)  # ranks, steps, units


def test_the_numbers_are_the_hooks() -> None:
    """S-071: what the hook writes is the gradient; nothing is averaged after it."""

    def rank(world: Collectives) -> Any:
        model = FSDP(mlp(), auto_wrap_policy=LINEAR)
        model.register_comm_hook(None, lambda state, gradient, shard: shard.fill_(3))
        model(inputs(world.rank)[0]).sum().backward()
        return {float(value) for p in model.parameters() for value in p.grad}

    assert on_ranks(2, rank) == [{3.0}] * 2


def test_a_hook_can_be_replaced_and_taken_away() -> None:
    """L-29: `None` takes the hook away, and another can be registered; torch allows one, for ever."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR)
        model.register_comm_hook(None, lambda state, gradient, shard: pytest.fail("was replaced"))
        model.register_comm_hook(None, None)
        model.register_comm_hook(world, averaging)
        train(model, torch.optim.Adam(model.parameters()), inputs(world.rank, 1))
        model.register_comm_hook(None, None)
        return model

    on_ranks(2, rank)


def test_a_second_hook_is_refused() -> None:
    """S-071: as in FSDP1 a unit has one hook; a second one is an error that names the unit, and no unit has got it."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR)
        inner = FSDP.fsdp_modules(model)[-1]
        inner.register_comm_hook(world, averaging)
        with pytest.raises(AssertionError, match=r"unit '\w+' already has a communication hook"):
            model.register_comm_hook(None, lambda state, gradient, shard: pytest.fail("was registered"))
        train(model, torch.optim.Adam(model.parameters()), inputs(world.rank, 1))

    on_ranks(2, rank)


def test_a_hook_is_a_function() -> None:
    """S-071: what cannot be called is refused, and the model is as before."""

    def rank(world: Collectives) -> None:
        model = FSDP(mlp())
        with pytest.raises(ValueError, match="can be called, found int"):
            model.register_comm_hook(None, 3)  # type: ignore[arg-type]
        model(torch.ones(2, 3)).sum().backward()

    on_ranks(2, rank)


def test_a_hook_in_no_sync() -> None:
    """S-071, S-041: inside `no_sync` it is not called; the next backward gives it the sum."""

    def rank(world: Collectives) -> Any:
        sums: list[float] = []

        def note(state: None, gradient: Tensor, shard: Tensor) -> None:
            sums.append(float(gradient.sum()))
            shard.zero_()

        model = FSDP(nn.Linear(2, 1, bias=False))
        model.register_comm_hook(None, note)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        assert not sums
        model(torch.ones(1, 2)).sum().backward()
        return sums

    assert on_ranks(2, rank) == [[4.0]] * 2
