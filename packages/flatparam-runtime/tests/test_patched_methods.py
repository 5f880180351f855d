"""Methods that the user replaced, and the signature of a watched method."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_runtime import register_forward_method

from .models import Coder, Stack, batch
from .worlds import check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded


def wrap_forward(module: nn.Module) -> None:
    inner = module.forward

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs) + 1.0

    module.forward = wrapped


def replace_forward(module: nn.Linear) -> None:
    module.forward = lambda x: nn.functional.linear(x, module.weight) * 2.0


@each_row(
    ("patch", "late"),
    [
        (wrap_forward, False),
        (replace_forward, False),
        (wrap_forward, True),
    ],
)
def test_a_patched_forward_is_called(patch: Callable[[nn.Linear], None], late: bool, ranks: int) -> None:
    """A ``forward`` that the user put on a submodule is what runs, from in- and outside: before sharding any, later one
    that calls the one before.
    """

    def make() -> Stack:
        stack = Stack()
        if not late:
            patch(stack.head)
        return stack

    def loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).square().mean() + module.head(batch(rank)).sum()
        return out

    def steps(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(make, collectives, units=["blocks.0"])
        if late:
            patch(module.head)
        for _ in range(2):
            module.zero_grad()
            loss(module, collectives.rank).backward()
            check_at_rest(module)
        return full_gradients(module)

    local = seeded(make)
    if late:
        patch(local.head)
    expected = mean_gradients(local, loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


def test_signatures_and_names_are_the_methods_own() -> None:
    """``inspect.signature`` of a watched method is that of the class's."""
    module, local = sharded(Coder, SingleCollectives()), seeded(Coder)
    register_forward_method(module, "encode")
    for found, expected in [
        (module.encode, local.encode),
        (module.stem.forward, local.stem.forward),
        (module.blocks[0].forward, local.blocks[0].forward),
    ]:
        assert inspect.signature(found) == inspect.signature(expected)


def test_what_is_no_method_is_refused() -> None:
    """The error names a method that does not exist, or whose module is in no unit."""
    module = sharded(Stack, SingleCollectives())
    for child, name in [(module, "nothing"), (nn.Linear(1, 1), "forward")]:
        with pytest.raises(FlatParamError, match=f"{type(child).__name__}.{name}: expected a method"):
            register_forward_method(child, name)
