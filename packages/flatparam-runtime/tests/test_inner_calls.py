"""A module inside a unit, or a method of it, that is called by itself from outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_runtime import EventLog, UnitPlan, no_sync, observe, register_forward_method, shard_module

from .models import Coder, Stack, batch
from .worlds import (
    check_at_rest,
    check_same,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0"]


def by_submodules(module: nn.Module, rank: int) -> Tensor:
    x = module.stem(batch(rank))
    x = module.blocks[1](module.blocks[0](x))
    out: Tensor = module.head(x).square().mean()
    return out


def by_methods(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module.decode(module.encode(batch(rank), shift=0.5)).square().mean()
    return out


def by_part_of_a_part(module: nn.Module, rank: int) -> Tensor:
    x = module.blocks[1].up(module.stem(batch(rank)))
    out: Tensor = module.blocks[0].down(x).square().mean()
    return out


def by_self_and_part(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(module.stem(batch(rank))).square().mean() + module.head(batch(rank)).sum()
    return out


def with_methods(module: Coder) -> Coder:
    for name in ("encode", "decode"):
        register_forward_method(module, name)
    return module


LOSSES = [by_submodules, by_methods, by_part_of_a_part, by_self_and_part]


@each_row("loss", LOSSES)
def test_gradients_are_those_of_the_local_model(
    loss: Callable[[nn.Module, int], Tensor], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """Submodules and methods that are called by themselves train, step after step, like the unsharded model."""

    def steps(collectives: Collectives) -> list[dict[str, Tensor | None]]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = with_methods(sharded(Coder, collectives, units=BLOCKS, **plan))
        found = []
        for _ in range(2):
            module.zero_grad()
            loss(module, collectives.rank).backward()
            check_at_rest(module)
            found.append(full_gradients(module))
        return found

    expected = mean_gradients(seeded(Coder), loss, ranks)
    for found in run(ranks, steps):
        for each in found:
            check_same(each, expected)


def test_accumulation_and_evaluation(ranks: int, use_orig_params: bool) -> None:
    """Inner calls take part in ``no_sync``, and without gradients they compute what the module inside computes."""

    def steps(collectives: Collectives) -> tuple[dict[str, Tensor | None], Tensor]:
        module = sharded(Coder, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        with no_sync(module):
            by_submodules(module, collectives.rank).backward()
        with torch.no_grad():
            seen = module.head(batch())
        by_submodules(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module), seen

    local = seeded(Coder)
    expected = mean_gradients(local, lambda m, rank: by_submodules(m, rank) * 2, ranks)
    for found, seen in run(ranks, steps):
        check_same(found, expected)
        assert torch.equal(seen, local.head(batch()))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_inside(error: type[BaseException], ranks: int) -> None:
    """An exception in an inner call comes out as it is, and the next step has the right gradients."""

    def steps(collectives: Collectives) -> dict[str, Tensor | None]:
        module = with_methods(sharded(Coder, collectives, units=BLOCKS))
        module.stem.error = error
        for call in (module.stem, module.encode):
            with pytest.raises(error):
                call(batch())
            check_at_rest(module)
        module.stem.error = None
        by_methods(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Coder), by_methods, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


def test_the_class_has_its_method_while_the_unit_runs() -> None:
    """Inside the unit's own forward no ``forward`` of an inner module is replaced, even after an exception."""
    seen: list[list[str]] = []
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    inside = {"stem": module.stem, "head": module.head, "blocks": module.blocks}

    def note(*_: object) -> None:
        seen.append([name for name, each in inside.items() if "forward" in vars(each)])

    hook = module.blocks[0].register_forward_hook(note)
    for _ in range(2):
        module(batch()).sum().backward()
        note()
        module.stem(batch())
        note()
    assert seen == [[], list(inside), list(inside)] * 2
    hook.remove()
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(1, 3))
    note()
    assert seen[-1] == list(inside)


def test_an_inner_call_gathers_only_its_unit() -> None:
    """The units around and beside the one that a called module is inside of stay sharded."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0", "blocks.1"])
    log = EventLog()
    with observe(module, log):
        module.stem(batch()).sum().backward()
    assert {event.unit for event in log.events} == {"(root)"}


class Reader(nn.Module):
    """A module without parameters, whose method computes with those of another module."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight_of_the_other = lambda: other.weight

    def read(self, x: Tensor) -> Tensor:
        return (x @ self.weight_of_the_other()).sin()


class WithReader(nn.Module):
    """A layer, and beside it a module that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reader = Reader(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_named_method_of_a_module_without_parameters(use_reentrant: bool, use_orig_params: bool) -> None:
    """A method that the user has registered gets the unit's parameters even if a checkpoint calls it again."""

    def loss(module: nn.Module) -> Tensor:
        x = torch.ones(2, 4, requires_grad=True)
        read: Tensor = checkpoint(module.reader.read, x, use_reentrant=use_reentrant)  # type: ignore[union-attr]
        return read.square().sum()

    def rank(collectives: Collectives) -> dict[str, Tensor | None]:
        module = seeded(WithReader)
        shard_module(module, UnitPlan(Topology(collectives), use_orig_params=use_orig_params))
        register_forward_method(module.reader, "read")
        loss(module).backward()
        return full_gradients(module)

    alone = seeded(WithReader)
    loss(alone).backward()
    for gradients in run(2, rank):
        assert torch.equal(gradients["layer.weight"], alone.layer.weight.grad)
