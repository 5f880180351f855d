"""`CPUOffload(offload_params=True)`: shards, their gradients and the optimizer live in CPU memory."""

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads

from .models import mlp, seeded
from .worlds import assert_same_state, inputs, on_ranks, train, train_on_mean

LINEAR = ModuleWrapPolicy({nn.Linear})
OFFLOAD = CPUOffload(offload_params=True)
CPU = torch.device("cpu")
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")


def trained(world: Collectives, **arguments: Any) -> Any:
    model = FSDP(seeded(mlp), cpu_offload=OFFLOAD, auto_wrap_policy=LINEAR, **arguments)
    train(model, torch.optim.Adam(model.parameters()), inputs(world.rank))
    return model


@each_row("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_training(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """S-013, L-31: it trains to the bits of the unwrapped model, on a machine without an accelerator too."""
    reference = seeded(mlp)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)

    def rank(world: Collectives) -> Any:
        model = trained(world, sharding_strategy=strategy, use_orig_params=use_orig_params)
        return {(p.device, p.grad.device) for p in model.parameters() if p.grad is not None}, model.state_dict()

    for devices, state in on_ranks(2, rank):
        assert devices == {(CPU, CPU)}
        assert_same_state({name: value.cpu() for name, value in state.items()}, reference.state_dict())


def test_accumulation_without_no_sync(use_orig_params: bool) -> None:
    """L-09: two synchronised backward passes add up; torch keeps the last."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), cpu_offload=OFFLOAD, use_orig_params=use_orig_params)
        for x in inputs(world.rank, 2):
            model(x).square().mean().backward()
        with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True):
            return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    total = [torch.zeros_like(parameter) for parameter in mlp().parameters()]
    for n in range(2):
        reference = seeded(mlp)
        for number in range(2):
            reference(inputs(number, 2)[n]).square().mean().backward()
        total = [a + p.grad / 2 for a, p in zip(total, reference.parameters(), strict=True)]
    for gradients in on_ranks(2, rank):
        assert_same_state(gradients, dict(zip(gradients, total, strict=True)))


@each_row("kept", [False, True])
@each_row("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_with_mixed_precision(strategy: ShardingStrategy, kept: bool, use_orig_params: bool) -> None:
    """S-013, S-049: in bf16 it trains to the bits of not offloading, clipped, with low-precision gradients kept or not."""

    def rank(world: Collectives, offload: CPUOffload) -> Any:
        model = FSDP(
            seeded(mlp),
            sharding_strategy=strategy,
            cpu_offload=offload,
            auto_wrap_policy=LINEAR,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=kept),
            use_orig_params=use_orig_params,
        )
        norms = []
        for x in inputs(world.rank):
            model.zero_grad()
            model(x).float().square().mean().backward()
            norms.append(model.clip_grad_norm_(0.1))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad if parameter.grad is not None else 0
        return {"norms": torch.stack(norms), **model.state_dict()}

    for plain, offloaded in zip(on_ranks(2, rank, CPUOffload()), on_ranks(2, rank, OFFLOAD), strict=True):
        assert_same_state(offloaded, plain)
        assert plain["norms"].dtype == (torch.bfloat16 if kept else torch.float32)


def test_the_wrapper_says_so() -> None:
    """S-013: `cpu_offload` of every wrapper says whether its shards are offloaded."""

    def rank(world: Collectives) -> Any:
        offloaded = FSDP(mlp(), cpu_offload=OFFLOAD, auto_wrap_policy=LINEAR)
        return [m.cpu_offload for m in FSDP.fsdp_modules(offloaded)], FSDP(mlp(), cpu_offload=CPUOffload()).cpu_offload

    assert on_ranks(2, rank) == [([OFFLOAD] * 4, CPUOffload())] * 2


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
def test_between_an_accelerator_and_the_cpu(
    strategy: ShardingStrategy, precision: Any, use_orig_params: bool, accelerator: torch.device
) -> None:
    """S-013: full parameters are on the accelerator, shards pinned on the CPU; it trains as it does without offloading."""
    device = accelerator

    def rank(world: Collectives, offload: CPUOffload) -> Any:
        model = FSDP(
            seeded(mlp),
            sharding_strategy=strategy,
            cpu_offload=offload,
            device_id=device,
            auto_wrap_policy=LINEAR,
            use_orig_params=use_orig_params,
            mixed_precision=precision,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        model.module[0].module.register_forward_hook(lambda layer, args, out: seen.append(layer.weight.device))
        norms = []
        for x in inputs(world.rank):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            norms.append(model.clip_grad_norm_(0.5))
            optimizer.step()
        held = [p for p in model.parameters() if p.numel()]
        facts = {(p.device.type, p.grad.device.type) for p in held}, {p.is_pinned() for p in held}
        return set(seen), facts, {n.device.type for n in norms}, model.state_dict()

    plain = run_threads(2, rank, CPUOffload())
    offloaded = run_threads(2, rank, OFFLOAD)
    for (_, _, _, expected), (seen, (places, pinned), norms, state) in zip(plain, offloaded, strict=True):
        assert seen == {device}
        assert (places, pinned, norms) == ({("cpu", "cpu")}, {True}, {"cpu"})
        for name, value in expected.items():  # SGD and the norms are computed elsewhere, in another order
            torch.testing.assert_close(state[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6)
