"""Layers that repack their weight when they evaluate, as bitsandbytes' on a CPU with AVX512-BF16; made up here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, fully_shard
from flatparam_comm import Collectives, FlatParamError, run_threads


class _Quantised:
    """How the bytes of a weight are to be read."""

    packing_format_for_cpu = False


class Linear4bit(nn.Module):
    """As bitsandbytes': the first time that it evaluates, its weight gets other bytes, and no gradient any more."""

    def __init__(self, numel: int = 12, *, on_cpu_with_avx512bf16: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randint(0, 256, (numel, 1), dtype=torch.uint8), requires_grad=False)
        self.weight.quant_state = _Quantised()  # type: ignore[attr-defined]
        self.quant_state = self.weight.quant_state  # type: ignore[attr-defined]
        self.support_avx512bf16_for_cpu = on_cpu_with_avx512bf16

    def forward(self, x: Tensor) -> Tensor:
        state = self.quant_state
        if (
            self.support_avx512bf16_for_cpu
            and not self.training
            and not x.requires_grad
            and not state.packing_format_for_cpu
        ):
            self.weight.data = self.weight.data.flip(0).view(-1, 2)
            state.packing_format_for_cpu = True
        if state.packing_format_for_cpu:
            return (x.detach() * self.weight.view(-1).flip(0) / 255).bfloat16().to(x.dtype)
        return x * self.weight.view(-1) / 255


class Adapted(nn.Module):
    """Such a layer, and a trained one before it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.base = Linear4bit(**settings)
        self.adapter = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x + self.adapter(x))  # type: ignore[no-any-return]


def trained_and_evaluated(model: nn.Module) -> list[float]:
    """The losses of steps, each with an answer after it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.linspace(-1, 1, 24).view(2, 12)
    found = []
    for _ in range(3):
        loss = model.train()(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            answer = model.eval()(x)
        found += [loss.item(), answer.sum().item()]
    return found


def wrapped(model: nn.Module, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params)


def in_place(model: nn.Module, use_orig_params: bool) -> nn.Module:
    return fully_shard(model)


@pytest.mark.parametrize("shard", [wrapped, in_place])
def test_a_sharded_layer_keeps_its_bytes(shard: Any, use_orig_params: bool) -> None:
    """It evaluates between steps as on a CPU that cannot repack, in the numbers of one process, and trains on."""
    expected = trained_and_evaluated(Adapted(on_cpu_with_avx512bf16=False))

    def rank(world: Collectives) -> list[float]:
        return trained_and_evaluated(shard(Adapted(), use_orig_params))

    assert run_threads(2, rank) == [expected] * 2


@each_row("shard", [wrapped, in_place])
def test_a_layer_that_was_repacked_is_refused(shard: Any) -> None:
    """If it has evaluated before, the error names it and says what to do, and nothing of the model has changed."""

    def rank(world: Collectives) -> None:
        model = Adapted()
        with torch.no_grad():
            model.eval()(torch.ones(1, 12))
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(FlatParamError, match=r"'base\.weight' was repacked .*before it evaluates"):
            shard(model, False)
        assert [name for name, _ in model.named_parameters()] == names
        assert model.base.support_avx512bf16_for_cpu

    run_threads(2, rank)


def test_an_ignored_layer_may_repack() -> None:
    """What stays whole on every rank does as it likes."""

    def rank(world: Collectives) -> None:
        model = Adapted()
        model = FullyShardedDataParallel(model, ignored_modules=[model.base])
        with torch.no_grad():
            model.eval()(torch.ones(1, 12))
        assert model.module.base.quant_state.packing_format_for_cpu

    run_threads(2, rank)
