"""Programs with parameters of several dtypes in one group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .rows import FSDP1, row
from .shared import WIDTH, Model, Off, off, seeded, shard, train, wrap

BF16 = torch.bfloat16


@row("pytorch#156784", "Layers in bf16 and their norms in fp32, in one unit.")
def norms_in_fp32(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded(dtype=BF16)), seeded(dtype=BF16)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(dtype=BF16), most=0.05)


@row("accelerate#3985", "The same under a policy that casts all to bf16.")
def cast(fsdp: Any, rank: int) -> Off:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model, plain = shard(fsdp, seeded(dtype=BF16), mp_policy=policy), seeded(dtype=BF16)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(dtype=BF16), most=0.1)


@row("pytorch#186998", "Frozen layers in bf16 beside norms in fp32, which are trained.")
def frozen_in_bf16(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(dtype=BF16), seeded(dtype=BF16)
    for each in (model, plain):
        for layer in each.layers:
            layer.up.requires_grad_(False)
            layer.down.requires_grad_(False)
    shard(fsdp, model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(dtype=BF16))


class InHalf(Model):
    """A model in bf16, but for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.to(BF16).head.float()

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.float())


@row("Automodel#2655", "A head in fp32 on a model in bf16: both are the root's.")
def head_in_fp32(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded(InHalf)), seeded(InHalf)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(InHalf), most=0.1)


class Quantised(nn.Module):
    """A frozen weight of eight bits, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        bits = torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight / 99) + self.up(self.down(x))


class Adapted(Model):
    """A model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.layers = nn.ModuleList(Quantised() for _ in range(2))


@row("Model-Optimizer#2152", "Weights of eight bits beside adapters that are trained.")
def eight_bits(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded(Adapted)), seeded(Adapted)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Adapted))


@row("twinkle#182", "Weights of eight bits beside adapters, wrapped in FSDP1's class.", FSDP1)
def eight_bits_wrapped(fsdp: Any, rank: int) -> Off:
    model, plain = wrap(fsdp, seeded(Adapted), use_orig_params=True), seeded(Adapted)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Adapted))


@row("miles#1502", "Layers in bf16 and their norms in fp32, wrapped in FSDP1's class.", FSDP1)
def norms_in_fp32_wrapped(fsdp: Any, rank: int) -> Off:
    model, plain = wrap(fsdp, seeded(dtype=BF16)), seeded(dtype=BF16)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(dtype=BF16), most=0.05)
