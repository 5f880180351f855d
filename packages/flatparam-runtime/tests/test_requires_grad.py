"""Freezing and thawing after sharding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import DivergenceError, EventLog, no_sync, observe

from .models import Chain, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


FREEZES = {
    "one of a unit": ["blocks.0.up.weight"],
    "one of the root": ["stem.bias"],
    "a unit in the middle": ["blocks.0."],
    "the first unit": ["stem."],
}


@each_row("when", ["before the first pass", "later", "before accumulation", "before evaluation"])
@each_row("prefixes", FREEZES.values(), ids=FREEZES)
def test_one_rank_freezes(prefixes: list[str], when: str) -> None:
    """If `requires_grad` differs between ranks, every rank raises at the next pass, and names the parameter and ranks."""

    def rank(collectives: Collectives) -> str:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        if when != "before the first pass":
            loss(module, collectives.rank).backward()
        if collectives.rank == 1:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(not name.startswith(tuple(prefixes)))
        with pytest.raises(DivergenceError) as caught:
            if when == "before accumulation":
                with no_sync(module):
                    loss(module, collectives.rank).backward()
            if when == "before evaluation":
                with torch.no_grad():
                    loss(module, collectives.rank)
            out = loss(module, collectives.rank)
            if out.requires_grad:
                out.backward()
            with torch.no_grad():
                loss(module, collectives.rank)
        return str(caught.value)

    messages = run(2, rank)
    for number, message in enumerate(messages):
        assert message.startswith(f"rank {number}: ")
        assert "frozen" in message
        names = [n for n, _ in Stack().named_parameters() if n.startswith(tuple(prefixes))]
        assert any(repr(name.removeprefix("blocks.0.")) in message for name in names)


def test_single_parameters_are_frozen_and_thawed(ranks: int) -> None:
    """With original parameters each can be frozen and thawed between steps: a frozen one's gradient is ``None``."""
    schedule = [["stem.weight"], ["stem.weight", "blocks.0.up.bias"], [], ["head.bias"]]

    def steps(collectives: Collectives) -> list[Grads]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        named = dict(module.named_parameters())
        found = []
        for frozen in schedule:
            for name, parameter in named.items():
                parameter.requires_grad_(name not in frozen)
            zero_gradients(module)
            loss(module, collectives.rank).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
        return found

    expected = []
    for frozen in schedule:
        local = seeded(Stack)
        for name, parameter in local.named_parameters():
            parameter.requires_grad_(name not in frozen)
        expected.append(mean_gradients(local, loss, ranks))
    for found in run(ranks, steps):
        for each, wanted in zip(found, expected, strict=True):
            check_same(each, wanted)
            assert [n for n, g in each.items() if g is None] == [n for n, g in wanted.items() if g is None]


def test_a_whole_unit_is_frozen_and_thawed(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """A unit that is frozen is reduced once more, so that ranks can differ, and then no more; thawed, it trains again."""

    def steps(collectives: Collectives) -> tuple[Grads, Grads, list[list[str]]]:
        module = sharded(
            lambda: Chain(2),
            collectives,
            units=BLOCKS,
            use_orig_params=use_orig_params,
            free_after_forward=free_after_forward,
        )
        loss(module, collectives.rank).backward()
        held = list(module.blocks[0].parameters())
        for parameter in held:
            parameter.requires_grad_(False)
        lines = []
        for _ in range(2):
            zero_gradients(module)
            log = EventLog()
            with observe(module, log):
                loss(module, collectives.rank).backward()
            check_at_rest(module)
            lines.append(log.lines())
        frozen = full_gradients(module)
        for parameter in held:
            parameter.requires_grad_(True)
        zero_gradients(module)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return frozen, full_gradients(module), lines

    local = seeded(lambda: Chain(2))
    whole = mean_gradients(local, loss, ranks)
    part = {n: None if n.startswith("blocks.0.") else g for n, g in whole.items()}
    for frozen, thawed, lines in run(ranks, steps):
        check_same(frozen, part)
        check_same(thawed, whole)
        assert ["reduce blocks.0" in of_pass for of_pass in lines] == [ranks > 1, False]
        assert all("reduce blocks.1" in of_pass for of_pass in lines)


@pytest.mark.parametrize("collected", [False, True])
def test_thawing_what_was_frozen_when_sharded(collected: bool, ranks: int, use_orig_params: bool) -> None:
    """Parameters that were frozen when they were sharded can be trained later, also with gradients collected before."""

    def make() -> Chain:
        module = Chain(2)
        module.blocks[0].requires_grad_(False)
        return module

    def steps(collectives: Collectives) -> Grads:
        module = sharded(make, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        zero_gradients(module)
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        if collected:
            with no_sync(module):
                (0 * loss(module, collectives.rank)).backward()
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(lambda: Chain(2)), loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


def test_freezing_with_gradients_collected(use_orig_params: bool) -> None:
    """A unit that is frozen after gradients were collected without synchronisation keeps nothing in memory for ever."""
    module = sharded(lambda: Chain(2), SingleCollectives(), units=BLOCKS, use_orig_params=use_orig_params)
    held = list(module.blocks[0].parameters())
    with no_sync(module):
        loss(module, 0).backward()
    for parameter in held:
        parameter.requires_grad_(False)
    loss(module, 1).backward()
    check_at_rest(module)


def test_freezing_between_forward_and_backward() -> None:
    """A parameter that was trainable when it was recorded gets its gradient, or none; but nothing stays in memory."""
    module = sharded(lambda: Chain(2), SingleCollectives(), units=BLOCKS)
    total = loss(module, 0)
    for parameter in module.blocks[0].parameters():
        parameter.requires_grad_(False)
    total.backward()
    check_at_rest(module)
    module(batch())


def test_all_frozen_but_the_input(ranks: int) -> None:
    """With every parameter frozen after sharding, gradients still reach the input."""

    def step(collectives: Collectives) -> Tensor:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        x = batch().requires_grad_()
        module(x).square().mean().backward()
        check_at_rest(module)
        assert x.grad is not None
        return x.grad

    x = batch().requires_grad_()
    seeded(Stack)(x).square().mean().backward()
    assert x.grad is not None
    for found in run(ranks, step):
        assert torch.equal(found, x.grad)


def _train(
    module: nn.Module, listed: list[nn.Parameter], drops: bool, change: Callable[[nn.Module], None]
) -> list[float]:
    """Return the losses of steps before and after `change`, which sees full parameters if a forward pass is dropped."""
    optimizer = torch.optim.SGD(listed, lr=0.1)
    losses = []
    for step in range(5):
        if drops:
            loss(module, 0)
        if step in (1, 3):
            change(module)
        out = loss(module, 0)
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.item())
    return losses


@pytest.mark.parametrize("drops", [False, True], ids=["at rest", "after a forward pass whose output is dropped"])
@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
def test_a_module_inside_is_frozen(keeps: bool, drops: bool, ranks: int) -> None:
    """What a module inside shows is what is frozen and thawed, full parameters too, on the first pass after that."""

    def change(module: nn.Module) -> None:
        for parameter in module.head.parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    def rank(collectives: Collectives) -> list[float]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True, free_after_forward=not keeps)
        return _train(module, [*module.parameters()], drops, change)

    local = seeded(Stack)
    expected = _train(local, [*local.parameters()], drops, change)
    assert all(found == expected for found in run(ranks, rank))


def test_a_flat_parameter_is_frozen_as_a_whole() -> None:
    """Of a unit that lists its flat parameter, all full parameters together are frozen, and one alone is not."""
    module = sharded(Stack, SingleCollectives())
    (flat,) = module.parameters()
    loss(module, 0)
    module.head.bias.requires_grad_(False)
    loss(module, 0)
    assert flat.requires_grad
    assert module.head.bias.requires_grad
    for parameter in full(module):
        parameter.requires_grad_(False)
    loss(module, 0)
    assert not flat.requires_grad


def full(module: nn.Module) -> list[nn.Parameter]:
    """Return the full parameters that modules show."""
    return [*module.stem.parameters(), *module.blocks.parameters(), *module.head.parameters()]
