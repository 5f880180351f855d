"""Mixed precision: the dtypes to which parameters, inputs, outputs, buffers and gradients are cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, Precision, SingleCollectives
from flatparam_runtime import Casting, summon_full_params

from .models import WIDTH, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0", "blocks.1"]
HALF = torch.bfloat16
PRECISIONS = {
    "compute": Precision(HALF),
    "fp16": Precision(torch.float16),
    "reduce wide": Precision(HALF, torch.float32),
    "reduce narrow": Precision(None, HALF),
    "two halves": Precision(torch.float16, HALF),
    "keep": Precision(HALF, keep_low_precision_grads=True),
    "keep, reduce wide": Precision(HALF, torch.float32, keep_low_precision_grads=True),
}


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).float().square().mean()
    return out


def reference(precision: Precision, ranks: int) -> Grads:
    """The gradients of local models with the same casts: divided and summed in the reduction dtype, cast for ``.grad``."""
    stored = torch.float32
    compute, reduce = precision.compute(stored), precision.reduce(stored)
    sums: dict[str, Tensor] = {}
    for rank in range(ranks):
        local = seeded(Stack).to(compute)
        local(batch(rank).to(compute)).float().square().mean().backward()
        for name, parameter in local.named_parameters():
            assert parameter.grad is not None
            wide = torch.promote_types(parameter.grad.dtype, reduce)
            part = (parameter.grad.to(wide) / ranks).to(reduce)
            sums[name] = sums[name] + part if rank else part
    return {name: total.to(precision.grad(stored)) for name, total in sums.items()}


@each_row("kind", PRECISIONS)
def test_gradients(kind: str, ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """With any precision gradients are, bit by bit, those of local models with the same casts, in the right dtype."""
    precision = PRECISIONS[kind]

    def steps(collectives: Collectives) -> list[Grads]:
        plan: dict[str, Any] = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        casting = Casting(precision.param_dtype)
        module = sharded(Stack, collectives, units=BLOCKS, precision=precision, casting=casting, **plan)
        found = []
        for _ in range(2):
            module.zero_grad()
            loss(module, collectives.rank).backward()
            check_at_rest(module)
            for parameter in module.parameters():
                assert parameter.dtype == torch.float32
                assert parameter.grad is None or parameter.grad.dtype == precision.grad(torch.float32)
            found.append(full_gradients(module))
        return found

    expected = {name: None if value is None else value.float() for name, value in reference(precision, ranks).items()}
    for found in run(ranks, steps):
        for each in found:
            check_same(each, expected)


class Scaling(nn.Module):
    """A layer that notes the dtype of its input, and returns that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.taken: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.taken.append(x.dtype)
        return x * self.scale.to(x.dtype)


class Widening(Scaling):
    """A module that calls its inner module with fp32 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaling()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(super().forward(x).float())
        self.taken.append(x.dtype)
        return x


FULL = torch.float32
CASTINGS = [
    (Casting(), (FULL, FULL, FULL, FULL)),
    (Casting(HALF), (HALF, FULL, FULL, FULL)),
    (Casting(HALF, at_root=False), (FULL, FULL, FULL, FULL)),
    (Casting(HALF, below_root=True), (HALF, HALF, HALF, HALF)),
    (Casting(HALF, below_root=True, restores_outputs=True), (HALF, HALF, FULL, FULL)),
]


@each_row(("casting", "dtypes"), CASTINGS)
def test_who_casts(casting: Casting, dtypes: tuple[torch.dtype, ...]) -> None:
    """The outermost unit of a pass, or every unit, casts its inputs, and its outputs back, as the plan says."""
    module = sharded(Widening, SingleCollectives(), units=["inner"], casting=casting)
    out = module(batch())
    first, between = module.taken
    assert (first, *module.inner.taken, between, out.dtype) == dtypes
    out.float().sum().backward()
    check_at_rest(module)
    with torch.no_grad():
        module.inner(batch())
    assert module.inner.taken[-1] == (HALF if casting.applies(is_top=True) else FULL)


class Without(nn.Module):
    """A module without parameters besides those of `layer`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.taken: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.taken.append(x.dtype)
        return self.layer(x)  # type: ignore[no-any-return]


@each_row(
    ("casting", "taken"),
    [
        (Casting(HALF, at_root=False, below_root=True), FULL),
        (Casting(HALF, below_root=True), HALF),
        (Casting(HALF, at_root=False, below_root=True, restores_outputs=True), HALF),
    ],
)
def test_a_unit_without_parameters_casts_as_a_root(casting: Casting, taken: torch.dtype) -> None:
    """A unit without parameters casts because it is outermost, or because it restores its outputs, not as a unit below."""
    module = sharded(Without, SingleCollectives(), units=["layer"], precision=Precision(HALF), casting=casting)
    module(batch())
    assert module.taken == [taken]


def test_what_is_not_floating_point_is_not_cast() -> None:
    """Integers and booleans reach the module as they are, in any nesting."""
    given = {"x": batch(), "rest": [torch.arange(3), torch.tensor(True), "text"]}

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: dict[str, Any]) -> Any:
            return self.layer(inputs["x"]), [getattr(each, "dtype", each) for each in inputs["rest"]]

    module = sharded(Taking, SingleCollectives(), precision=Precision(HALF), casting=Casting(HALF))
    out, dtypes = module(given)
    assert out.dtype == HALF
    assert dtypes == [torch.int64, torch.bool, "text"]
    assert given["x"].dtype == torch.float32


@pytest.mark.parametrize("in_eval", [True, False])
def test_evaluation_in_full_precision(in_eval: bool, ranks: int, use_orig_params: bool) -> None:
    """In ``eval()`` a module computes in its own dtype if the plan says so, and inside ``summon_full_params`` always."""

    def outputs(collectives: Collectives) -> tuple[Tensor, ...]:
        module = sharded(
            Stack,
            collectives,
            units=BLOCKS,
            precision=Precision(HALF),
            casting=Casting(HALF),
            full_precision_in_eval=in_eval,
            use_orig_params=use_orig_params,
        )
        trained = module(batch())
        trained.sum().backward()
        with torch.no_grad():
            evaluated = module.eval()(batch())
            again = module.train()(batch())
            with summon_full_params(module):
                summoned = module(batch())
        check_at_rest(module)
        return trained, evaluated, again, summoned

    full = seeded(Stack)(batch())
    half = seeded(Stack).to(HALF)(batch().to(HALF))
    for found in run(ranks, outputs):
        for each, expected in zip(found, (half, full if in_eval else half, half, full), strict=True):
            assert each.dtype == expected.dtype
            assert torch.equal(each, expected)
