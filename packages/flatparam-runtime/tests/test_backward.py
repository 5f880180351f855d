"""Backward passes: every gradient arrives once, whichever part of the graphs is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_runtime import EventLog, observe, units_in

from .models import WIDTH, Branches, Chain, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
)

Way = Callable[[nn.Module, int], None]
BLOCKS = ["blocks.0", "blocks.1"]


def loss(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = module(batch(rank, step, near=module)).square().mean()
    return out


def two_forwards(module: nn.Module, rank: int) -> None:
    """Two forwards, and one backward through both graphs."""
    (loss(module, rank) + loss(module, rank, 1)).backward()


def several_forwards(module: nn.Module, rank: int) -> None:
    """Four forwards of which the middle ones have no part in the backward."""
    losses = [loss(module, rank, step) for step in range(4)]
    (losses[0] * losses[3]).backward()


def two_graphs(module: nn.Module, rank: int) -> None:
    """Two forwards, and then a backward through each graph, the older one first."""
    first, second = loss(module, rank), loss(module, rank, 1)
    first.backward()
    second.backward()


def two_graphs_backwards(module: nn.Module, rank: int) -> None:
    """Two forwards, and then a backward through each graph, the younger one first."""
    first, second = loss(module, rank), loss(module, rank, 1)
    second.backward()
    first.backward()


def several_roots(module: nn.Module, rank: int) -> None:
    """One call of the engine with two losses."""
    torch.autograd.backward([loss(module, rank), loss(module, rank, 1)])


def with_gradients(module: nn.Module, rank: int) -> None:
    """A backward from an output that is no scalar."""
    output = module(batch(rank, near=module))
    output.backward(torch.full_like(output, 0.5))


def twice(module: nn.Module, rank: int) -> None:
    """Two backwards through one graph that is kept."""
    total = loss(module, rank)
    total.backward(retain_graph=True)
    total.backward()


WAYS: list[Way] = [
    two_forwards,
    several_forwards,
    two_graphs,
    two_graphs_backwards,
    several_roots,
    with_gradients,
    twice,
]


def gradients(way: Way, module: nn.Module, rank: int) -> Grads:
    """The gradients of a local module."""
    way(module, rank)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_any_way_of_backward(way: Way, use_orig_params: bool, free_after_forward: bool, device: torch.device) -> None:
    """However forwards and backwards are put together, the gradients are those of a local module, and all is freed."""
    module = sharded(
        Stack,
        SingleCollectives(),
        units=BLOCKS,
        device=device,
        use_orig_params=use_orig_params,
        free_after_forward=free_after_forward,
        free_after_unsynced_backward=free_after_forward,
    )
    way(module, 0)
    check_at_rest(module)
    check_same(full_gradients(module), gradients(way, seeded(Stack, device), 0))


@each_row("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_any_way_of_backward_on_two_ranks(way: Way, free_after_forward: bool) -> None:
    """On two ranks gradients are the mean of each rank's own, as one reduction for each backward sums them."""

    def step(collectives: Collectives) -> Grads:
        module = sharded(Stack, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        way(module, collectives.rank)
        check_at_rest(module)
        return full_gradients(module)

    alone = [gradients(way, seeded(Stack), rank) for rank in range(2)]
    for found in run(2, step):
        for name, value in found.items():
            first, second = alone[0][name], alone[1][name]
            assert value is not None
            assert first is not None
            assert second is not None
            torch.testing.assert_close(value, (first + second) / 2)


@pytest.mark.parametrize("which", [0, 1], ids=["older", "younger"])
def test_a_step_between_forward_and_backward_is_refused(
    which: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """A backward through a graph from before the optimizer's step raises, as it does locally: no wrong gradient."""
    module = sharded(
        Stack,
        SingleCollectives(),
        units=BLOCKS,
        use_orig_params=use_orig_params,
        free_after_forward=free_after_forward,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    totals = [loss(module, 0), loss(module, 0, 1)]
    totals[which].backward()
    optimizer.step()
    with pytest.raises(FlatParamError, match="parameters were changed"):
        totals[1 - which].backward()
    optimizer.zero_grad()
    del totals
    after = loss(module, 0)
    after.backward()
    check_at_rest(module)


def test_only_some_units_are_reached(ranks: int, use_orig_params: bool) -> None:
    """A backward from the middle of the model gives gradients to the layers before it, and to no others."""

    class Tapped(Stack):
        def forward(self, x: Tensor) -> Tensor:
            middle = self.blocks[0](self.stem(x))
            self.head(self.blocks[1](middle))
            out: Tensor = middle
            return out

    def step(collectives: Collectives) -> Grads:
        module = sharded(Tapped, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        # The remains of the first pass do not disturb the second.
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = None
            loss(module, collectives.rank).backward()
            check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Tapped), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)
        if use_orig_params:
            assert found["blocks.1.up.weight"] is None
            assert found["head.weight"] is None


def test_each_rank_may_take_another_way(use_orig_params: bool) -> None:
    """A parameter that is used on one rank only gets its share of the mean on every rank."""

    def ways(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank), "lr").square().mean()
        return out

    class Gated(Branches):
        """Both branches are called; the rank's number decides which parameter inside is used."""

        def forward(self, x: Tensor, way: str = "lr") -> Tensor:
            x = super().forward(x, way)
            return x * self.gate if float(x.detach()[0, 0]) > self.threshold else x

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.full((WIDTH,), 2.0))
            values = [float(Branches.forward(self, batch(rank)).detach()[0, 0]) for rank in range(2)]
            self.threshold = sum(values) / 2

    def step(collectives: Collectives) -> Grads:
        module = sharded(Gated, collectives, units=["left", "right"], use_orig_params=use_orig_params)
        ways(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Gated), ways, 2)
    assert expected["gate"] is not None
    for found in run(2, step):
        check_same(found, expected)
        assert found["gate"] is not None


class Twins(nn.Module):
    """Two units of one size, of which the second's gradients are finished before or after the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cut: bool) -> Tensor:
        early = self.second(x)
        early = early.detach() if cut else early
        return torch.tanh(self.first(early)) + self.second(x * 2)


def test_ranks_reduce_in_one_order(use_orig_params: bool) -> None:
    """If gradients are finished in a different order on each rank, the reductions (of equal sizes!) are not mixed up."""

    def ways(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank), rank == 0).square().mean()
        return out

    def step(collectives: Collectives) -> tuple[Grads, list[str]]:
        module = sharded(Twins, collectives, units=["first", "second"], use_orig_params=use_orig_params)
        log = EventLog()
        with observe(module, log):
            ways(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module), [event.unit for event in log.events if event.kind == "reduce"]

    expected = mean_gradients(seeded(Twins), ways, 2)
    outcomes = run(2, step)
    assert outcomes[0][1] == outcomes[1][1]
    for found, _ in outcomes:
        check_same(found, expected)


def test_inputs_alone_get_gradients(free_after_forward: bool) -> None:
    """``autograd.grad`` for the inputs returns their gradients, gives no parameter any, and leaves all units at rest."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, free_after_forward=free_after_forward)
    local = seeded(Stack)
    for _ in range(2):
        x = batch().requires_grad_()
        (found,) = torch.autograd.grad(module(x).square().mean(), x)
        (expected,) = torch.autograd.grad(local(x).square().mean(), x)
        assert torch.equal(found, expected)
        check_at_rest(module)
        assert all(parameter.grad is None for parameter in module.parameters())
    loss(module, 0).backward()
    check_same(full_gradients(module), mean_gradients(local, loss, 1))


def test_backward_for_chosen_inputs(free_after_forward: bool) -> None:
    """``backward(inputs=[x])`` gives the input its gradient and the parameters none."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, free_after_forward=free_after_forward)
    x = batch().requires_grad_()
    module(x).square().mean().backward(inputs=[x])
    check_at_rest(module)
    assert all(parameter.grad is None for parameter in module.parameters())
    y = batch().requires_grad_()
    seeded(Stack)(y).square().mean().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


def test_inputs_that_need_a_gradient_get_it(ranks: int) -> None:
    """The gradient of a leaf input is there after the backward, and each rank keeps its own."""

    def step(collectives: Collectives) -> Tensor:
        module = sharded(Stack, collectives, units=BLOCKS)
        x = batch(collectives.rank).requires_grad_()
        module(x).square().mean().backward()
        check_at_rest(module)
        assert x.grad is not None
        return x.grad

    for rank, found in enumerate(run(ranks, step)):
        x = batch(rank).requires_grad_()
        seeded(Stack)(x).square().mean().backward()
        assert x.grad is not None
        assert torch.equal(found, x.grad)


def test_gradients_add_up_over_steps(ranks: int, use_orig_params: bool) -> None:
    """Without ``zero_grad`` the reduced gradients of several steps are summed, as they are locally."""

    def step(collectives: Collectives) -> Grads:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        for number in range(3):
            loss(module, collectives.rank, number).backward()
        return full_gradients(module)

    parts = [mean_gradients(seeded(Stack), lambda m, r, n=n: loss(m, r, n), ranks) for n in range(3)]
    expected: Grads = {}
    for name in parts[0]:
        first, second, third = (part[name] for part in parts)
        assert first is not None
        assert second is not None
        assert third is not None
        expected[name] = first + second + third
    for found in run(ranks, step):
        check_same(found, expected)


class Buffers(TorchDispatchMode):
    """After each operation: the units that have full parameters, and those that have a flat gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.handles = [(unit, handle) for unit in units_in(module) for handle in unit.handles]
        self.seen: list[tuple[set[str], set[str]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        full = {unit.name for unit, handle in self.handles if handle.buffer.is_allocated}
        gradients = {unit.name for unit, handle in self.handles if handle.gradients.buffer.is_allocated}
        self.seen.append((full, gradients))
        return result


@each_row("overlaps", [True, False, None])
def test_gradients_are_collected_one_unit_at_a_time(overlaps: bool | None) -> None:
    """There is one flat gradient at a time, even if one is reduced while the next unit's gradients are computed.

    `None` means that they overlap on an accelerator only, so not here.
    """
    names = [f"blocks.{number}" for number in range(5)]

    def step(collectives: Collectives) -> list[tuple[set[str], set[str]]]:
        module = sharded(lambda: Chain(5), collectives, units=names, overlaps_reductions=overlaps)
        with Buffers(module) as buffers:
            loss(module, 0).backward()
        return buffers.seen

    for seen in run(2, step):
        assert set.union(*(gradients for _, gradients in seen)) == {*names}
        assert max(len(gradients) for _, gradients in seen) == 1


def test_gradients_take_the_place_of_the_parameters() -> None:
    """A unit collects its gradients only when its full parameters are freed; the last one does so at the end."""
    names = [f"blocks.{number}" for number in range(5)]

    def step(collectives: Collectives) -> list[tuple[set[str], set[str]]]:
        module = sharded(lambda: Chain(5), collectives, units=names)
        with Buffers(module) as buffers:
            loss(module, 0).backward()
        return buffers.seen

    for seen in run(2, step):
        assert set.union(*(full for full, _ in seen)) == {*names}
        assert {name for full, gradients in seen for name in full & gradients} == set()
