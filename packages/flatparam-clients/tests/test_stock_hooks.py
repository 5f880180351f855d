"""The communication hooks that FSDP1 comes with, on CPU and with every strategy."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.algorithms._comm_hooks.default_hooks as theirs
import torch.distributed.fsdp as torch_fsdp
from each_row import each_row
from torch import nn

import flatparam
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision
from flatparam import ShardingStrategy as Strategy
from flatparam.algorithms import _comm_hooks
from flatparam.algorithms._comm_hooks import default_hooks as ours
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_comm.testing import run_processes
from flatparam_core import clean_fqn
from packages.flatparam.tests.models import mlp, seeded
from packages.flatparam.tests.worlds import assert_same_state, on_ranks, train

SHARDING = [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP]
HYBRID = [Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2]
COMPRESSING = [ours.fp16_compress_hook, ours.bf16_compress_hook]
STEPS = 3

Grads = list[torch.Tensor]


def inputs(rank: int) -> list[torch.Tensor]:
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(STEPS)]


def groups_of(ranks: Collectives, strategy: Strategy) -> tuple[Any, Any]:
    """The shard group and the replicate group that a strategy works over; where it has one only, that one twice."""
    if strategy not in HYBRID:
        return ranks, ranks
    half = ranks.size // 2
    shard = [ranks.subgroup(range(start, start + half)) for start in (0, half)]
    replicate = [ranks.subgroup([rank, rank + half]) for rank in range(half)]
    return next(filter(None, shard)), next(filter(None, replicate))


def trained(
    ranks: Collectives, strategy: Strategy, register: Callable[[FSDP, Any], None], *options: dict[str, Any]
) -> Any:
    """The state after some steps of a model for which `register(model, replicate group)` was called."""
    shard, replicate = groups_of(ranks, strategy)
    model = FSDP(
        seeded(mlp),
        (shard, replicate) if strategy in HYBRID else shard,
        strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **{name: value for given in options for name, value in given.items()},
    )
    register(model, replicate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, inputs(ranks.rank))
    return model.state_dict()


def nothing(model: FSDP, replicate: Any) -> None:
    """No hook."""


def stock(model: FSDP, replicate: Any) -> None:
    """The hooks that do what the wrapper does by itself."""
    if model.sharding_strategy is Strategy.NO_SHARD:
        model.register_comm_hook(ours.DefaultState(model.process_group), ours.allreduce_hook)
    else:
        model.register_comm_hook(ours.DefaultState(model.process_group), ours.reduce_scatter_hook)


def reference(world_size: int, mean: Callable[[Grads], torch.Tensor]) -> dict[str, Any]:
    """The state of the unsharded model whose gradients are `mean(one for each rank)`."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in zip(*(inputs(rank) for rank in range(world_size)), strict=True):
        of_ranks = [torch.autograd.grad(model(x).square().mean(), list(model.parameters())) for x in batches]
        for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
            parameter.grad = mean(grads)
        optimizer.step()
    return model.state_dict()


def mean_in(dtype: torch.dtype) -> Callable[[Grads], torch.Tensor]:
    """The mean over two ranks as it is when they exchange and add in `dtype`."""
    return lambda grads: (grads[0].to(dtype) / 2 + grads[1].to(dtype) / 2).to(grads[0].dtype)


DTYPE_OF = {ours.fp16_compress_hook: torch.float16, ours.bf16_compress_hook: torch.bfloat16}


@each_row("size", [1, 2, 3, 4, 6, 8, 9, 16])
def test_factors(size: int) -> None:
    """S-120: a state divides by torch's factors, whose product is the number of ranks."""

    def factors(ranks: Collectives) -> tuple[int, float, float]:
        state = ours.LowPrecisionState(ranks)
        return state.world_size, state.gradient_predivide_factor, state.gradient_postdivide_factor

    before = theirs.DefaultState._get_gradient_predivide_factor(size)
    assert on_ranks(size, factors)[0] == (size, before, size / before)


@each_row("kind", [ours.DefaultState, ours.LowPrecisionState])
def test_a_state_needs_one_group(kind: Any) -> None:
    """S-120: `None` is a ValueError, even where there is a default group; a pair of groups too."""
    alone = SingleCollectives()
    with pytest.raises(ValueError, match="found None; pass the model's process_group"):
        kind(None)
    with pytest.raises(ValueError, match="expected one group, found two"):
        kind((alone, alone))
    assert kind(alone).process_group is alone


def test_low_precision_state() -> None:
    """S-120: parameters are in fp32 where nothing else is said."""
    assert ours.LowPrecisionState(SingleCollectives()).parameter_type is torch.float32
    assert ours.LowPrecisionState(SingleCollectives(), torch.float64).parameter_type is torch.float64


@each_row(
    "name",
    [
        "DefaultState",
        "LowPrecisionState",
        "allreduce_hook",
        "reduce_scatter_hook",
        "fp16_compress_hook",
        "bf16_compress_hook",
    ],
)
def test_signatures(name: str) -> None:
    """S-003: names, order and defaults of the arguments are torch's."""

    def arguments(module: Any) -> list[Any]:
        return [(p.name, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]

    assert arguments(ours) == arguments(theirs)
    assert name in ours.__all__


def test_which_hooks_compress() -> None:
    """S-121: the list of the hooks that cast has torch's two, and cannot be added to, since nothing would follow."""
    assert list(_comm_hooks.LOW_PRECISION_HOOKS) == COMPRESSING
    assert _comm_hooks.default_hooks is ours
    assert not hasattr(_comm_hooks.LOW_PRECISION_HOOKS, "append")


@each_row("strategy", [*SHARDING, Strategy.NO_SHARD, *HYBRID], ids=str)
def test_hooks_in_full_precision_change_nothing(strategy: Strategy, use_orig_params: bool) -> None:
    """S-071, S-121: training with the averaging hooks is bit for bit that of the wrapper's own reduction."""
    world_size = 4 if strategy in HYBRID else 3
    option = {"use_orig_params": use_orig_params}
    hooked = on_ranks(world_size, trained, strategy, stock, option)
    plain = on_ranks(world_size, trained, strategy, nothing, option)
    for found, expected in zip(hooked, plain, strict=True):
        assert_same_state(found, expected)


@pytest.mark.parametrize("hook", COMPRESSING)
@pytest.mark.parametrize("strategy", [*SHARDING, Strategy.NO_SHARD], ids=str)
def test_compressing_hooks(hook: Any, strategy: Strategy, use_orig_params: bool) -> None:
    """S-121, L-30: on CPU gradients are cast, averaged in 16 bits and cast back; parameters stay in fp32."""

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(ours.LowPrecisionState(model.process_group), hook)

    expected = reference(2, mean_in(DTYPE_OF[hook]))
    for found in on_ranks(2, trained, strategy, register, {"use_orig_params": use_orig_params}):
        assert_same_state(found, expected)
    assert not torch.equal(expected["0.weight"], reference(2, lambda g: (g[0] + g[1]) / 2)["0.weight"])


@each_row("strategy", HYBRID, ids=str)
def test_compressing_hooks_inside_and_across_groups(strategy: Strategy) -> None:
    """S-121, L-29: a hybrid strategy takes a hook for each of its two stages, over the group of that stage."""
    dtype = torch.bfloat16

    def register(model: FSDP, replicate: Any) -> None:
        inside, across = ours.LowPrecisionState(model.process_group), ours.LowPrecisionState(replicate)
        model.register_comm_hook(inside, ours.bf16_compress_hook)
        model.register_comm_hook(across, ours.bf16_compress_hook, stage="all_reduce")

    def mean(grads: Grads) -> torch.Tensor:
        inside = mean_in(dtype)
        return inside([inside(grads[:2]), inside(grads[2:])])

    for found in on_ranks(4, trained, strategy, register):
        assert_same_state(found, reference(4, mean))


@each_row("strategy", HYBRID, ids=str)
def test_a_hook_inside_groups_only(strategy: Strategy) -> None:
    """S-121, L-29: across its groups a hybrid strategy averages as it would without a hook inside them."""

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(ours.LowPrecisionState(model.process_group), ours.fp16_compress_hook)

    def mean(grads: Grads) -> torch.Tensor:
        inside = mean_in(torch.float16)
        return (inside(grads[:2]) + inside(grads[2:])) / 2

    for found in on_ranks(4, trained, strategy, register):
        assert_same_state(found, reference(4, mean))


@each_row("strategy", HYBRID, ids=str)
def test_a_hook_across_groups_only(strategy: Strategy) -> None:
    """L-29: a hook for the stage `all_reduce` averages; the gradient is not divided by these ranks once more."""

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(ours.DefaultState(replicate), ours.allreduce_hook, stage="all_reduce")

    for found, expected in zip(
        on_ranks(4, trained, strategy, register), on_ranks(4, trained, strategy, nothing), strict=True
    ):
        assert_same_state(found, expected)


@each_row("strategy", HYBRID, ids=str)
def test_a_hook_where_each_group_is_one_rank(strategy: Strategy) -> None:
    """S-121: with one rank in each shard group the gradients are averaged over the copies all the same."""

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(ours.LowPrecisionState(model.process_group), ours.bf16_compress_hook)

    for found in on_ranks(2, trained, strategy, register):
        assert_same_state(found, reference(2, mean_in(torch.bfloat16)))


@pytest.mark.parametrize("hook", COMPRESSING)
@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.NO_SHARD], ids=str)
def test_compressing_what_is_narrow_already(hook: Any, strategy: Strategy) -> None:
    """S-121: with a reduction dtype of its own the model still trains in fp32, and step after step.

    The gradients are in the reduction dtype when the hook gets them; in place it leaves them there.
    """

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(ours.LowPrecisionState(model.process_group), hook)

    def mean(grads: Grads) -> torch.Tensor:
        average = mean_in(DTYPE_OF[hook])([grad.bfloat16().float() for grad in grads])
        return average.bfloat16().float() if strategy is Strategy.NO_SHARD else average

    precision = {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}
    for found in on_ranks(2, trained, strategy, register, precision):
        assert_same_state(found, reference(2, mean))


def test_parameter_type() -> None:
    """S-120: a shard is given the dtype of the parameters; its own memory is kept where it has that dtype."""
    state = ours.LowPrecisionState(SingleCollectives(), torch.float64)
    for dtype in (torch.float16, torch.float32, torch.float64):
        output = torch.empty(3, dtype=dtype)
        address = output.data_ptr()
        ours.bf16_compress_hook(state, torch.tensor([1.0, 2.0, 1 / 3]), output)
        expected = torch.tensor([1.0, 2.0, 1 / 3]).bfloat16().double()
        assert torch.equal(output, expected)
        assert (output.data_ptr() == address) == (dtype is torch.float64)


def test_whole_gradients_of_any_shape() -> None:
    """S-121: what is averaged in place may have any shape and memory order."""

    def averaged(ranks: Collectives, hook: Any) -> torch.Tensor:
        grad = torch.arange(6.0).reshape(2, 3).t() * (1 + ranks.rank)
        assert not grad.is_contiguous()
        assert hook(ours.LowPrecisionState(ranks), grad) is None
        return grad

    for hook in (ours.allreduce_hook, *COMPRESSING):
        for found in on_ranks(2, averaged, hook):
            assert torch.equal(found, torch.arange(6.0).reshape(2, 3).t() * 1.5)


@each_row("hook", COMPRESSING)
def test_complex_gradients_are_refused(hook: Any) -> None:
    """A cast to 16 bits would drop the imaginary part: it is a TypeError, for whole gradients and for shards."""
    state, grad = ours.LowPrecisionState(SingleCollectives()), torch.ones(2, dtype=torch.complex64)
    for more in ([], [torch.empty(2, dtype=torch.complex64)]):
        with pytest.raises(TypeError, match=r"expected real gradients .* found torch.complex64"):
            hook(state, grad, *more)


def test_hooks_of_units_are_their_own() -> None:
    """L-29, L-35: a hook can be given to one unit, be taken away and given anew; the others reduce by themselves."""
    calls: list[str] = []

    def noting(state: tuple[str, Any], grad: torch.Tensor, output: torch.Tensor) -> None:
        name, ranks = state
        calls.append(name)
        ours.reduce_scatter_hook(ours.DefaultState(ranks), grad, output)

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(("all", model.process_group), noting)
        model[0].register_comm_hook(None, None)
        model[0].register_comm_hook(("first", model.process_group), noting)
        model[2].register_comm_hook(None, None)

    for found in on_ranks(2, trained, Strategy.FULL_SHARD, register):
        assert_same_state(found, reference(2, lambda grads: (grads[0] + grads[1]) / 2))
    assert sorted(calls) == ["all"] * 2 * STEPS + ["first"] * 2 * STEPS


def test_a_copied_model_keeps_its_hooks() -> None:
    """A copy reduces with the same hook and the same state."""

    def trains_alike(ranks: Collectives) -> None:
        model = FSDP(seeded(mlp), ranks)
        model.register_comm_hook(ours.LowPrecisionState(ranks), ours.bf16_compress_hook)
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each(inputs(ranks.rank)[0]).square().mean().backward()
        assert torch.equal(model._flat_param.grad, twin._flat_param.grad)

    on_ranks(2, trains_alike)


@each_row("strategy", [Strategy.FULL_SHARD, Strategy.NO_SHARD], ids=str)
def test_a_hook_may_give_a_gradient_other_memory(strategy: Strategy) -> None:
    """S-071: a hook that sets `grad.data`, as torch's own compressing hooks do, trains as ours that does not."""

    def exchanging(state: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        grad.data = grad.data.bfloat16()
        ours.bf16_compress_hook(state, grad, *([] if output is None else [output]))
        if output is None:
            grad.data = grad.data.float()

    def register(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(ours.LowPrecisionState(model.process_group), exchanging)

    for found in on_ranks(2, trained, strategy, register):
        assert_same_state(found, reference(2, mean_in(torch.bfloat16)))


def beside_torch(ranks: Collectives, name: str) -> tuple[Any, Any, Any]:
    """Torch's wrapper with torch's hook, ours with ours, ours with torch's: what training ends with."""
    strategy = Strategy[name]
    hook = "allreduce_hook" if strategy is Strategy.NO_SHARD else "reduce_scatter_hook"
    group = torch.distributed.group.WORLD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's is deprecated
        model = torch_fsdp.FullyShardedDataParallel(
            seeded(mlp),
            group,
            torch_fsdp.ShardingStrategy[name],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
        )
        model.register_comm_hook(theirs.DefaultState(group), getattr(theirs, hook))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(ranks.rank))
        with torch_fsdp.FullyShardedDataParallel.summon_full_params(model):
            state = {clean_fqn(name): value.clone() for name, value in model.module.state_dict().items()}

    def torchs(model: FSDP, replicate: Any) -> None:
        model.register_comm_hook(theirs.DefaultState(model.process_group), getattr(theirs, hook))

    return state, *(trained(ranks, strategy, register) for register in (stock, torchs))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_beside_torch(name: str) -> None:
    """S-071, S-121: two processes train as torch's FSDP1 with torch's hooks, bit for bit, with either one's hooks."""
    for expected, *states in run_processes(2, beside_torch, name):
        for state in states:
            assert {k: v.tolist() for k, v in state.items()} == {k: v.tolist() for k, v in expected.items()}


def by_torchs_names(ranks: Collectives) -> dict[str, Any]:
    """The states after training with the hooks that a program takes from torch, after `install()`."""
    with flatparam.install():
        from torch.distributed.algorithms._comm_hooks import default_hooks
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        found = {}
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            for name in ("fp16_compress_hook", "bf16_compress_hook"):
                model = FullyShardedDataParallel(seeded(mlp), sharding_strategy=strategy)
                state = default_hooks.LowPrecisionState(process_group=model.process_group)
                model.register_comm_hook(state, getattr(default_hooks, name))
                train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(ranks.rank))
                found[f"{strategy.name} {name}"] = model.state_dict()
        return found


@pytest.mark.processes
@pytest.mark.usefixtures("leftovers_do_not_count")
def test_torchs_names_are_ours_after_install() -> None:
    """Torch's own compressing hooks work on a CPU after `install()`, where torch's would fail in the backward pass."""
    before = theirs.bf16_compress_hook
    for found in run_processes(2, by_torchs_names):
        for name, state in found.items():
            dtype = torch.float16 if "fp16" in name else torch.bfloat16
            assert_same_state(state, reference(2, mean_in(dtype)))
    with flatparam.install():
        assert theirs.bf16_compress_hook is ours.bf16_compress_hook
        assert theirs.DefaultState is ours.DefaultState
    assert theirs.bf16_compress_hook is before
