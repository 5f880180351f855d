"""`summon_full_params` with every combination of its arguments, for values, gradients and what is kept."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_core import FlatParamError

from .models import Transformer, mlp, seeded
from .worlds import assert_same_state, inputs, on_ranks, train, train_on_mean

LINEAR = ModuleWrapPolicy({nn.Linear})
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")


def gradients_of_mean(ranks: int) -> dict[str, Any]:
    """What each parameter's gradient is, where the first layer is frozen."""
    model = seeded(mlp)
    model[0].requires_grad_(False)
    for number in range(ranks):
        (model(inputs(number)[0]).square().mean() / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize(
    ("writeback", "rank0_only", "offload_to_cpu", "with_grads"), itertools.product([False, True], repeat=4)
)
def test_every_combination(
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> None:
    """S-066, L-27: the values and gradients of the unwrapped model where they are asked for; changes are kept if asked."""

    def is_shown(world: Collectives) -> bool:
        """Where full parameters are shown; other ranks see their own shards, and changing those is no `writeback`."""
        return world.rank == 0 or not rank0_only

    def rank(world: Collectives) -> Any:
        module = seeded(mlp)
        module[0].requires_grad_(False)
        model = FSDP(module, sharding_strategy=strategy, auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        model(inputs(world.rank)[0]).square().mean().backward()
        before = [id(parameter) for parameter in model.parameters()]
        with FSDP.summon_full_params(
            model,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            parameters = dict(model.named_parameters())
            grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            shown = {name: p.detach().clone() for name, p in parameters.items()}
            seen = shown, {name: grad.clone() for name, grad in grads.items()}
            with torch.no_grad():
                for parameter in parameters.values() if is_shown(world) else ():
                    parameter.add_(1)
                for grad in grads.values() if is_shown(world) else ():
                    grad.mul_(2)
        assert [id(parameter) for parameter in model.parameters()] == before
        with FSDP.summon_full_params(model, with_grads=True):
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return is_shown(world), *seen, model.state_dict(), grads

    made, gradients = seeded(mlp).state_dict(), gradients_of_mean(2)
    expected = {name: grad for name, grad in gradients.items() if grad is not None}
    for here, shown, shown_grads, state, grads in on_ranks(2, rank):
        if here:
            assert_same_state(shown, made)
            assert_same_state(shown_grads, expected if with_grads else {})
        assert_same_state(state, {name: value + 1 if writeback else value for name, value in made.items()})
        changed = writeback and with_grads
        assert_same_state(grads, {name: grad * 2 if changed else grad for name, grad in expected.items()})


def test_gradients_that_some_ranks_have_not() -> None:
    """L-55: a gradient is shown on every rank, with parameters in bf16 too, where any rank's part has one."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp).bfloat16(), use_orig_params=True)
        model(inputs(0)[0].bfloat16()).sum().backward()
        model.module[0].weight.grad = None if world.rank else model.module[0].weight.grad
        with FSDP.summon_full_params(model, with_grads=True):
            return [None if p.grad is None else p.grad.dtype for p in model.parameters()]

    assert on_ranks(2, rank) == [[torch.bfloat16] * 6] * 2


def test_shown_parameters_are_in_full_precision() -> None:
    """S-046, S-066: with mixed precision the parameters inside are in their own dtype, and changes lose no bit."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        with FSDP.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter += 2**-20
        return model.state_dict()

    changed = {name: value + 2**-20 for name, value in seeded(mlp).state_dict().items()}
    for state in on_ranks(2, rank):
        assert_same_state(state, changed)


def test_nested_contexts(use_orig_params: bool) -> None:
    """L-28: an inner context shows the same parameters; one that wants more than the outer shows is refused."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        with FSDP.summon_full_params(model), FSDP.summon_full_params(model):
            with torch.no_grad():
                model.module[0].bias.fill_(3)
        assert float(model.state_dict()["0.bias"].sum()) == 15
        with (
            pytest.raises(FlatParamError, match="rank only"),
            FSDP.summon_full_params(model, rank0_only=True),
            FSDP.summon_full_params(model),
        ):
            pytest.fail("must not be entered")
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(world.rank))

    on_ranks(2, rank)


def test_a_step_inside(use_orig_params: bool) -> None:
    """L-28: a forward and a backward inside train the shards, to the bits of training outside."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.parameters())
        for x in inputs(world.rank):
            optimizer.zero_grad()
            with FSDP.summon_full_params(model, writeback=False):
                model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    reference = seeded(mlp)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_tied_parameters_stay_tied() -> None:
    """S-066: both names of a tied parameter show one object, and a change through either is kept."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(Transformer))
        with FSDP.summon_full_params(model):
            assert model.head.weight is model.embed.weight
            with torch.no_grad():
                model.head.weight.fill_(2)
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert torch.equal(state["embed.weight"], torch.full((7, 4), 2.0))
        assert torch.equal(state["head.weight"], state["embed.weight"])


def test_apply_initialises_as_in_one_process(use_orig_params: bool) -> None:
    """S-064: `apply` with a seeded initialiser gives the bits that it gives to the unwrapped module, in every unit."""

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)

    def rank(world: Collectives) -> Any:
        model = FSDP(mlp(), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        torch.manual_seed(5)
        model.apply(initialise)
        return model.state_dict()

    reference = mlp()
    torch.manual_seed(5)
    reference.apply(initialise)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())
