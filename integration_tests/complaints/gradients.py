"""Programs whose gradients are silently wrong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.utils import clip_grad_norm_

from .rows import FSDP1, row
from .shared import WIDTH, WORDS, Block, Model, Off, backward, loss_of, off, seeded, sgd, shard, train, wrap

BF16 = torch.bfloat16


@row("Megatron#7186", "Of several micro-batches, all but the last are lost.", own=True)
def micro_batches(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for part in range(4):
        model.set_requires_gradient_sync(part == 3)
        backward(model, [rank], part)
        backward(plain, [0, 1], part)
    sgd(model).step()
    sgd(plain).step()
    return off(model, plain, seeded())


@row("Fast-LLM#550", "Of k micro-batches, each reduced at once, 1/k of the gradient is left.", own=True)
def reduced_at_once(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for part in range(4):
        backward(model, [rank], part)
        backward(plain, [0, 1], part)
    sgd(model).step()
    sgd(plain).step()
    return off(model, plain, seeded())


@row(
    "ISEEKYAN#149",
    "64 micro-batches in bf16 are added up in bf16, although they are reduced in fp32.",
    own=True,
)
def sums(fsdp: Any, rank: int) -> Off:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model, plain = shard(fsdp, seeded(), mp_policy=policy), seeded()
    for part in range(64):
        model.set_requires_gradient_sync(part == 63)
        backward(model, [rank], part % 4)
        backward(plain, [0, 1], part % 4)
    sgd(model).step()
    sgd(plain).step()
    return off(model, plain, seeded(), most=0.03)


@row(
    "cosmos-framework#161",
    "`no_sync()` has no effect: three micro-batches inside it, one outside.",
    FSDP1,
    own=True,
)
def inside_no_sync(fsdp: Any, rank: int) -> Off:
    model, plain = wrap(fsdp, seeded()), seeded()
    with model.no_sync():
        for part in range(3):
            backward(model, [rank], part)
        reduced = [each.grad is not None and each.grad.numel() == each.numel() for each in model.parameters()]
    backward(model, [rank], 3)
    for part in range(4):
        backward(plain, [0, 1], part)
    sgd(model).step()
    sgd(plain).step()
    return Off(max(float(any(reduced)), off(model, plain, seeded()).by))


@row(
    "Bridge#3826",
    "What a pass without synchronisation has left is thrown away by `zero_grad()`, and comes back.",
)
def thrown_away(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    optimizer = sgd(model)
    model.set_requires_gradient_sync(False)
    backward(model, [rank], 7)
    optimizer.zero_grad()
    model.set_requires_gradient_sync(True)
    train(model, [rank], optimizer=optimizer)
    train(plain, [0, 1])
    return off(model, plain, seeded())


@row("Megatron#6660", "The gradient is the sum of the ranks', and not twice that.", own=True)
def summed(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for each in (*model.layers, model):
        each.set_gradient_divide_factor(1.0)
        if hasattr(each, "set_force_sum_reduction_for_comms"):
            each.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies
    backward(model, [rank])
    (loss_of(plain, 0) + loss_of(plain, 1)).backward()
    sgd(model).step()
    sgd(plain).step()
    return off(model, plain, seeded())


class TwoExperts(nn.Module):
    """Two experts on each word; words are sent to one that is elsewhere, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        if len(self.experts) == 2:
            return self.head(self.experts[0](x) + self.experts[1](x))
        of_ranks = all_to_all_single(torch.empty(2, *x.shape), torch.stack([x, x]))
        return self.head(all_to_all_single(torch.empty(2, *x.shape), self.experts[0](of_ranks)).sum(0))


@row("Megatron#5956", "An expert on each rank sees all ranks' words: which divisor has its gradient?", own=True)
def divisor_of_experts(fsdp: Any, rank: int) -> Off:
    model, plain, start = seeded(TwoExperts), seeded(TwoExperts), seeded(TwoExperts)
    model.experts = model.experts[rank : rank + 1]
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    fsdp.fully_shard(model.experts[0], mesh=DeviceMesh.from_group(alone, "cpu"))
    model.experts[0].set_gradient_divide_factor(2.0)
    fsdp.fully_shard(model)
    train(model, [rank])
    train(plain, [0, 1])
    for each in (plain, start):
        each.experts = each.experts[rank : rank + 1]
    return off(model, plain, start)


@row("pytorch#167178", "Copies across groups of one, all-reduced after the last of four micro-batches only.")
def copies(fsdp: Any, rank: int) -> Off:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, plain = shard(fsdp, seeded(), mesh=mesh), seeded()
    for part in range(4):
        model.set_requires_all_reduce(part == 3)
        backward(model, [rank], part)
        backward(plain, [0, 1], part)
    sgd(model).step()
    sgd(plain).step()
    return off(model, plain, seeded())


@row("transformers#48516", "Copies across groups of one, whose gradients are clipped.")
def clipped_copies(fsdp: Any, rank: int) -> Off:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, plain = shard(fsdp, seeded(), mesh=mesh), seeded()
    for each, ranks in ((model, [rank]), (plain, [0, 1])):
        backward(each, ranks)
        clip_grad_norm_(each.parameters(), 0.1)
        sgd(each).step()
    return off(model, plain, seeded())


@row("hyper-parallel#306", "Copies in bf16 across groups of one, which are reduced in fp32.")
def copies_in_bf16(fsdp: Any, rank: int) -> Off:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model, plain = shard(fsdp, seeded(), mesh=mesh, mp_policy=policy), seeded()
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(), most=0.03)


class Turning(Block):
    """A block whose output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class InPlace(Model):
    """A model that adds to the outputs of its blocks, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turning() for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
            x += 1
        return self.head(x)


@row("VeOmni#185", "The output of a unit is changed in place.")
def changed_in_place(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded(InPlace)), seeded(InPlace)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(InPlace))


@row("Megatron#7400", "Two passes forward, and one backward through both.")
def two_forwards(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for each, ranks in ((model, [rank]), (plain, [0, 1])):
        (sum(loss_of(each, r, step) for r in ranks for step in (0, 1)) / len(ranks)).backward()
        sgd(each).step()
    return off(model, plain, seeded())


@row("Megatron#7452", "`zero_grad(set_to_none=False)` between two steps.")
def zeroed(fsdp: Any, rank: int) -> Off:
    model, plain = shard(fsdp, seeded()), seeded()
    for each, ranks in ((model, [rank]), (plain, [0, 1])):
        optimizer = sgd(each)
        for step in range(3):
            backward(each, ranks, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return off(model, plain, seeded())


def on_one_rank(fsdp: Any, is_inside: bool, **named: Any) -> Off:
    """Train in bf16 on 64 micro-batches, of which all but the last are inside `no_sync()` or none is."""
    precision = fsdp.MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
    model, plain = wrap(fsdp, seeded(), mixed_precision=precision, **named), seeded()
    for part in range(64):
        with model.no_sync() if is_inside and part < 63 else nullcontext():
            backward(model, [0], part % 4)
        backward(plain, [0], part % 4)
    model.clip_grad_norm_(1.0)
    clip_grad_norm_(plain.parameters(), 1.0)
    sgd(model).step()
    sgd(plain).step()
    return off(model, plain, seeded(), most=0.03)


@row("pytorch#154888", "One rank, bf16: 64 micro-batches inside `no_sync()`.", FSDP1, ranks=1, own=True)
def one_rank_inside(fsdp: Any, rank: int) -> Off:
    return on_one_rank(fsdp, True)


@row("verl#7493", "One rank, bf16, original parameters: the same.", FSDP1, ranks=1, own=True)
def one_rank_inside_original(fsdp: Any, rank: int) -> Off:
    return on_one_rank(fsdp, True, use_orig_params=True)


@row(
    "verl#7494",
    "One rank, bf16, original parameters: 64 micro-batches, each reduced.",
    FSDP1,
    ranks=1,
    own=True,
)
def one_rank_reduced(fsdp: Any, rank: int) -> Off:
    return on_one_rank(fsdp, False, use_orig_params=True)
