"""Frozen parameters: gradients flow through them, and they cost neither gradient memory nor bytes."""

from __future__ import annotations

from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import EventLog, observe

from .models import Chain, batch
from .worlds import Grads, check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


def frozen_middle() -> Chain:
    module = Chain(3)
    module.blocks[1].requires_grad_(False)
    return module


def frozen_start() -> Chain:
    module = Chain(3)
    module.blocks[0].requires_grad_(False)
    return module


def frozen_inside() -> Chain:
    module = Chain(3)
    module.blocks[1].up.requires_grad_(False)
    return module


def all_but_a_bias() -> Chain:
    module = Chain(3)
    module.requires_grad_(False)
    module.blocks[0].up.bias.requires_grad_(True)
    return module


@each_row("make", [frozen_middle, frozen_start, frozen_inside, all_but_a_bias])
def test_frozen_parameters(make: type[Chain], ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """Gradients flow through frozen units, which get none, and are freed as soon as their input's gradient is there."""

    def step(collectives: Collectives) -> Grads:
        module = sharded(
            make,
            collectives,
            units=["blocks.0", "blocks.1", "blocks.2"],
            use_orig_params=use_orig_params,
            free_after_forward=free_after_forward,
        )
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)
        assert all((found[name] is None) == (value is None) for name, value in expected.items())


def test_a_frozen_unit_is_freed_before_the_next_ones_gradients() -> None:
    """The full parameters of a frozen unit go as soon as its input's gradient is known, not at the end of the pass."""
    module = sharded(frozen_middle, SingleCollectives(), units=["blocks.0", "blocks.1", "blocks.2"])
    log = EventLog()
    output = module(batch())
    with observe(module, log):
        output.sum().backward()
    lines = log.lines()
    assert lines.index("reshard blocks.1") < lines.index("reduce blocks.0")
    assert "reduce blocks.1" not in lines


def test_nothing_is_reduced_where_nothing_trains() -> None:
    """A wholly frozen model passes gradients to its input, reduces nothing, and is at rest afterwards."""

    def make() -> Chain:
        return Chain(2).requires_grad_(False)

    module = sharded(make, SingleCollectives(), units=BLOCKS)
    x = batch().requires_grad_()
    log = EventLog()
    with observe(module, log):
        module(x).sum().backward()
    assert x.grad is not None
    assert not any(event.kind == "reduce" for event in log.events)
    check_at_rest(module)
