"""Optimizers that step in the backward pass, each as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_runtime import no_sync

from ..models import Branches, Stack, batch
from ..worlds import check_at_rest, check_same, full_parameters, mean_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]
Optimizers: Any = [
    (torch.optim.SGD, {"lr": 0.25, "momentum": 0.5}),
    (torch.optim.AdamW, {"lr": 0.25, "weight_decay": 0.5}),
]


def attach(parameters: Iterable[nn.Parameter], kind: type[torch.optim.Optimizer], how: dict[str, Any]) -> None:
    for parameter in parameters:
        parameter._in_backward_optimizers = [kind([parameter], **how)]  # type: ignore[call-arg, attr-defined]


def loss(module: nn.Module, rank: int, *way: str) -> Tensor:
    out: Tensor = module(batch(rank), *way).square().mean()
    return out


def stepped(
    losses: Iterable[Callable[[nn.Module, int], Tensor]],
    ranks: int,
    make: Callable[[], nn.Module],
    kind: Any,
    how: Any,
) -> dict[str, Tensor]:
    """The parameters of a local module after ordinary steps."""
    local = seeded(make)
    optimizer = kind(local.parameters(), **how)
    for each in losses:
        gradients = mean_gradients(local, each, ranks)
        for name, parameter in local.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in local.named_parameters()}


@each_row(("kind", "how"), Optimizers)
@each_row("when", ["before", "after", "torch"])
def test_steps_are_those_of_an_ordinary_optimizer(kind: Any, how: Any, when: str, ranks: int) -> None:
    """Attached before or after sharding, by hand or by torch's function: same values, and no gradient is left."""

    def make() -> Stack:
        stack = Stack()
        if when == "before":
            attach(stack.parameters(), kind, how)
        return stack

    def steps(collectives: Collectives) -> dict[str, Tensor]:
        module = sharded(make, collectives, units=BLOCKS, use_orig_params=True)
        if when == "after":
            attach(module.parameters(), kind, how)
        elif when == "torch":
            _apply_optimizer_in_backward(kind, module.parameters(), how)
        for _ in range(3):
            loss(module, collectives.rank).backward()
            assert all(parameter.grad is None for parameter in module.parameters())
            check_at_rest(module)
        return full_parameters(module)

    expected = stepped([loss] * 3, ranks, Stack, kind, how)
    for found in run(ranks, steps):
        check_same(dict(found), dict(expected))


def test_a_unit_steps_before_the_backward_pass_is_over() -> None:
    """Parameters are stepped unit by unit, while the units before them still wait for their gradients."""
    units = [f"blocks.{i}" for i in range(4)]
    module = sharded(lambda: Stack(4), SingleCollectives(), units=units, use_orig_params=True)
    order: list[str] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            order.append(self.name)
            super().step()

    for name, parameter in module.named_parameters():
        optimizer = Noting([parameter], lr=0.25)
        optimizer.name = name.rpartition(".")[0]
        parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]
    x = batch().requires_grad_()
    x.register_hook(lambda _: order.append("input"))
    module(x).square().mean().backward()
    found = list(dict.fromkeys(order))
    parts = [f"blocks.{i}.{name}" for i in (3, 2, 1) for name in ("up", "down")]
    assert found[:6] == parts
    assert found.index("input") < found.index("stem")
    assert len(order) == 1 + len(list(module.parameters()))


def test_hooks_step(ranks: int) -> None:
    """`register_post_accumulate_grad_hook` has a parameter's hook called when its reduced gradient is there, in no other pass.

    A parameter of which this rank has no part has no gradient, and no call.
    """
    kind, how = Optimizers[0]

    def steps(collectives: Collectives) -> dict[str, Tensor]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        calls: list[Tensor] = []
        optimizers = {parameter: kind([parameter], **how) for parameter in module.parameters()}

        def step(parameter: Tensor) -> None:
            calls.append(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        with no_sync(module):
            loss(module, collectives.rank).backward()
        assert calls == []
        for _ in range(2):
            loss(module, collectives.rank).backward()
            assert len(calls) == len({*calls}) == sum(p.numel() > 0 for p in module.parameters())
            calls.clear()
        return full_parameters(module)

    expected = stepped([lambda m, rank: 2 * loss(m, rank), loss], ranks, Stack, kind, how)
    for found in run(ranks, steps):
        check_same(dict(found), dict(expected))


def test_hooks_of_what_has_a_new_gradient(ranks: int) -> None:
    """A parameter that a pass does not reach has no call of its hook, even if it has an older gradient."""

    def calls(collectives: Collectives) -> list[set[str]]:
        module = sharded(Branches, collectives, units=["left", "right"], use_orig_params=True)
        found: list[set[str]] = []
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: found[-1].add(name))
        for way in ("lr", "l"):
            found.append(set())
            loss(module, collectives.rank, way).backward()
        return found

    of_ranks = run(ranks, calls)
    both, left = (set().union(*(found[step] for found in of_ranks)) for step in range(2))
    assert left == {name for name in both if not name.startswith("right.")} != both


def test_accumulation(ranks: int) -> None:
    """Nothing is stepped in ``no_sync``; the next backward pass steps with the sum, once."""
    kind, how = Optimizers[0]

    def steps(collectives: Collectives) -> dict[str, Tensor]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        attach(module.parameters(), kind, how)
        with no_sync(module):
            loss(module, collectives.rank).backward()
        check_same(dict(full_parameters(module)), dict(seeded(Stack).named_parameters()))
        loss(module, collectives.rank).backward()
        return full_parameters(module)

    expected = stepped([lambda m, rank: 2 * loss(m, rank)], ranks, Stack, kind, how)
    for found in run(ranks, steps):
        check_same(dict(found), dict(expected))


def test_only_what_has_a_gradient_is_stepped(ranks: int) -> None:
    """Parameters that a pass does not reach, and frozen ones, stay as they are, also with weight decay."""
    kind, how = Optimizers[1]

    def make() -> Branches:
        module = Branches()
        module.left.up.bias.requires_grad_(False)
        return module

    def steps(collectives: Collectives) -> dict[str, Tensor]:
        module = sharded(make, collectives, units=["left", "right"], use_orig_params=True)
        attach((p for p in module.parameters() if p.requires_grad), kind, how)
        for way in ("lr", "l"):
            loss(module, collectives.rank, way).backward()
        return full_parameters(module)

    ways = [lambda m, rank, way=way: loss(m, rank, way) for way in ("lr", "l")]
    expected = stepped(ways, ranks, make, kind, how)
    for found in run(ranks, steps):
        check_same(dict(found), dict(expected))


def test_some_parameters_only(ranks: int) -> None:
    """Parameters without such an optimizer keep their gradients, for an ordinary one."""

    def step(collectives: Collectives) -> list[bool]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        attach(module.blocks.parameters(), *Optimizers[0])
        loss(module, collectives.rank).backward()
        return [p.grad is None for name, p in module.named_parameters() if not name.startswith("blocks")]

    for kept in zip(*run(ranks, step), strict=True):
        assert not all(kept)


def test_without_originals_it_is_refused() -> None:
    """If one flat parameter is trained, the first forward pass names a parameter that has such an optimizer."""

    def make() -> Stack:
        stack = Stack()
        attach([stack.head.bias], *Optimizers[0])
        return stack

    module = sharded(make, SingleCollectives(), units=BLOCKS)
    with pytest.raises(FlatParamError, match="'head.bias' has an optimizer that steps .* use_orig_params=True"):
        module(batch())
