"""Gradients that are reduced in place have the same bits as gradients that are copied to a flat buffer first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam_comm import (
    COMPLETED,
    Collectives,
    ForwardingCollectives,
    Parts,
    Pending,
    Precision,
    ReduceOp,
)
from flatparam_comm.transfer.reduction import PART_NBYTES
from flatparam_runtime import no_sync, unit_of, units_in

from .models import Branches, Chain, Stack, TiedBranches, TiedRoot, batch
from .worlds import Grads, check_at_rest, check_same, full_gradients, run, sharded


@pytest.fixture(autouse=True)
def _small_parts() -> Iterator[None]:
    with PART_NBYTES.set_to(0):
        yield


class PartsCollectives(ForwardingCollectives):
    """Collectives that take parts; it counts them, and how often it is given a flat tensor."""

    __slots__ = ("flat", "parts")

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.flat = self.parts = 0

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        self.flat += 1
        return self.inner.reduce_scatter(output, full, op=op, label=label)

    def reduce_scatter_parts(self, output: Tensor, full: Parts, *, label: str = "") -> Pending:
        self.parts += 1
        flat = torch.full((full.numel(),), torch.nan, dtype=full.dtype)
        for start in range(0, full.numel(), 10):
            full.fill(start, flat[start : start + 10])
        self.inner.reduce_scatter(output, flat, label=label).wait()
        return COMPLETED

    def _decorate(self, inner: Collectives) -> PartsCollectives:
        return PartsCollectives(inner)


def loss(module: nn.Module, rank: int, step: int) -> Tensor:
    total: Tensor = module(batch(rank, step)).square().sum()
    return total


Step = Callable[[nn.Module, int], None]


def two_steps(module: nn.Module, rank: int) -> None:
    loss(module, rank, 0).backward()
    loss(module, rank, 1).backward()


def unsynced_first(module: nn.Module, rank: int) -> None:
    with no_sync(module):
        loss(module, rank, 0).backward()
    loss(module, rank, 1).backward()


def failed_first(module: nn.Module, rank: int) -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError

    out = loss(module, rank, 0)
    middle = next(unit for unit in units_in(module) if unit.handles).handles[0].leaves[0]
    hook = middle.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        out.backward()
    hook.remove()
    loss(module, rank, 1).backward()


MODELS = {
    "stack": (Stack, ["blocks.0", "blocks.1"]),
    "one unit": (Stack, []),
    "chain": (lambda: Chain(3), ["blocks.0", "blocks.1", "blocks.2"]),
    "branches": (Branches, []),
    "shared in a unit": (TiedBranches, []),
    "shared with the root": (TiedRoot, ["blocks.0", "blocks.1"]),
}


@pytest.mark.parametrize("do", [two_steps, unsynced_first, failed_first])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_flat_gradients(name: str, ranks: int, do: Step) -> None:
    """The bits are the same over two passes, also if the first is not reduced, or fails; no gradient is left behind."""
    make, units = MODELS[name]

    def train(collectives: Collectives, parts: bool) -> Grads:
        group = PartsCollectives(collectives) if parts else collectives
        module = sharded(make, group, units=units)  # type: ignore[type-var]  # they are modules
        do(module, collectives.rank)
        check_at_rest(module)
        if isinstance(group, PartsCollectives):
            assert group.parts or do is unsynced_first
        return full_gradients(module)

    for by_parts, flat in zip(run(ranks, train, True), run(ranks, train, False), strict=True):
        assert by_parts.keys() == flat.keys()
        for key, value in flat.items():
            assert value is not None
            assert torch.equal(by_parts[key], value), key  # type: ignore[arg-type]


class FlatGradients(TorchDispatchMode):
    """The most bytes of flat gradients at once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.ledgers = [handle.gradients for unit in units_in(module) for handle in unit.handles]
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.most = max(self.most, sum(ledger.buffer.held_nbytes for ledger in self.ledgers))
        return function(*args, **(kwargs or {}))


def _most(collectives: Collectives, do: Step, **plan: Any) -> tuple[int, int, int]:
    group = PartsCollectives(collectives)
    module = sharded(lambda: Chain(3), group, units=["blocks.0", "blocks.1", "blocks.2"], **plan)
    with FlatGradients(module) as found:
        do(module, collectives.rank)
    check_at_rest(module)
    return found.most, group.parts, group.flat


def test_no_flat_gradient_is_made() -> None:
    """No unit allocates a flat gradient."""
    assert run(2, _most, two_steps) == [(0, 6, 0)] * 2


@each_row(("more", "parts"), [(0, 6), (1, 0)])
def test_small_gradients_are_copied_first(more: int, parts: int) -> None:
    """If gradients have fewer bytes on average than the threshold, one flat gradient for all is used."""
    block = Chain(1)
    sizes = [4 * parameter.numel() for parameter in block.parameters()]
    padded = -(-sum(sizes) // 8) * 8
    with PART_NBYTES.set_to(padded // len(sizes) + more):
        assert [found[1:] for found in run(2, _most, two_steps)] == [(parts, 6 - parts)] * 2


def test_sums_of_several_passes_are_flat() -> None:
    """Gradients collected in `no_sync` are added up in the flat buffer, and reduced from there."""
    for most, parts, flat in run(2, _most, unsynced_first):
        assert most > 0
        assert (parts, flat) == (0, 3)


def test_what_is_divided_before_is_flat() -> None:
    """Gradients in float16 are divided before they are summed, so they are copied."""
    precision = Precision(reduce_dtype=torch.float16)
    for most, parts, flat in run(2, partial(_most, precision=precision), two_steps):
        assert most > 0
        assert (parts, flat) == (0, 6)


def test_gradients_beside_large_frozen_parameters_are_means() -> None:
    """The size of frozen parameters of another dtype decides nothing that changes the mean of those beside them."""

    class Adapted(Chain):
        def __init__(self) -> None:
            super().__init__(1)
            self.frozen = nn.Linear(64, 64, bias=False, dtype=torch.float64).requires_grad_(False)

        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) + self.frozen.weight[0, 0].float()

    def step(collectives: Collectives, *, parts: bool) -> Grads:
        module = sharded(Adapted, PartsCollectives(collectives) if parts else collectives)
        loss(module, collectives.rank, 0).backward()
        return full_gradients(module)

    # On average over all parameters the gradients would be larger, over the trained ones they are smaller.
    with PART_NBYTES.set_to(2**12):
        (expected, _), (found, _) = run(2, partial(step, parts=False)), run(2, partial(step, parts=True))
    check_same(found, expected)


def test_a_hook_is_given_a_flat_gradient() -> None:
    """A communication hook takes one tensor, as it always did."""

    def step(collectives: Collectives) -> tuple[list[int], int]:
        group, seen = PartsCollectives(collectives), []
        module = sharded(Stack, group)

        def hook(full: Tensor, output: Tensor) -> None:
            seen.append(full.numel())
            collectives.reduce_scatter(output, full).wait()

        unit = unit_of(module)
        assert unit is not None
        unit.reducer.hooks.reduce = hook
        loss(module, collectives.rank, 0).backward()
        return seen, group.parts

    for seen, parts in run(2, step):
        assert len(seen) == 1
        assert parts == 0
