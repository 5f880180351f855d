"""The norm of gradients that are spread over ranks, and clipping by it."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_runtime import UnitPlan, clip_grad_norm_, clip_gradients_, shard_module

from ..models import WIDTH, Stack, batch
from ..worlds import (
    Grads,
    full_gradients,
    mean_gradients,
    named_handles,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0", "blocks.1"]
NORMS = [1.0, 2.0, 3.0, math.inf]


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module)).square().sum()
    return out


def local_clip(max_norm: float, norm_type: float, ranks: int) -> tuple[Tensor, Grads]:
    """The norm and the gradients that torch computes for the unsharded model."""
    module = seeded(Stack)
    gradients = mean_gradients(module, loss, ranks)
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name]
    norm = nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
    return norm, {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_norm_and_gradients_are_those_of_the_whole_model(
    norm_type: float, max_norm: float, ranks: int, use_orig_params: bool, device: torch.device
) -> None:
    """Norm and clipped gradients are those of ``torch.nn.utils.clip_grad_norm_`` on the whole model, on every rank."""

    def step(collectives: Collectives) -> tuple[Tensor, Grads]:
        module = sharded(Stack, collectives, units=BLOCKS, device=device, use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        norm = clip_grad_norm_(module, max_norm, norm_type)
        assert norm.device.type == device.type
        return norm, full_gradients(module)

    expected, gradients = local_clip(max_norm, norm_type, ranks)
    outcomes = run(ranks, step)
    assert len({float(norm) for norm, _ in outcomes}) == 1
    for norm, found in outcomes:
        assert norm.shape == ()
        torch.testing.assert_close(norm.cpu(), expected.cpu())
        for name, value in gradients.items():
            other = found[name]
            assert value is not None
            assert other is not None
            torch.testing.assert_close(other.cpu(), value.cpu())


def test_a_small_norm_scales_nothing(ranks: int) -> None:
    """Gradients whose norm is below the bound are bit by bit what they were."""

    def step(collectives: Collectives) -> tuple[Grads, Grads]:
        module = sharded(Stack, collectives, units=BLOCKS)
        loss(module, collectives.rank).backward()
        before = full_gradients(module)
        clip_grad_norm_(module, 1e9)
        return before, full_gradients(module)

    for before, after in run(ranks, step):
        for name, value in before.items():
            other = after[name]
            assert value is not None
            assert other is not None
            assert torch.equal(other, value)


@each_row("norm_type", [-1.0, -2.0, float("-inf")])
@each_row("max_norm", [1e-9, 1e6])
def test_norms_of_negative_order(norm_type: float, max_norm: float, ranks: int, use_orig_params: bool) -> None:
    """Padding, and ranks without a part of a parameter, count as nothing; clipping is that of one process."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    def gradients(module: nn.Module) -> None:
        module(torch.arange(1.0, 9.0).view(2, 4) / 8).square().mean().backward()

    def step(collectives: Collectives) -> tuple[Tensor, Grads]:
        module = sharded(make, collectives, units=["0"], use_orig_params=use_orig_params)
        gradients(module)
        return clip_grad_norm_(module, max_norm, norm_type), full_gradients(module)

    plain = seeded(make)
    gradients(plain)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    assert expected > 0
    for norm, found in run(ranks, step):
        torch.testing.assert_close(norm, expected)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("norm_type", [0.0, math.nan])
def test_an_order_that_no_norm_has(norm_type: float, ranks: int) -> None:
    """It is refused on every rank, also on one that would divide by nothing, and no gradient changes."""

    def step(collectives: Collectives) -> tuple[Grads, Grads]:
        module = sharded(Stack, collectives, units=BLOCKS)
        loss(module, collectives.rank).backward()
        before = full_gradients(module)
        with pytest.raises(ValueError, match="expected the order of a norm"):
            clip_grad_norm_(module, 1.0, norm_type)
        return before, full_gradients(module)

    for before, after in run(ranks, step):
        assert all(torch.equal(before[name], after[name]) for name in before)


@each_row("norm_type", NORMS)
def test_whole_parameters_count_once(norm_type: float, ranks: int, use_orig_params: bool) -> None:
    """Gradients of ignored, whole parameters count once, not once per rank, and are clipped with the others."""

    def step(collectives: Collectives) -> tuple[Tensor, Tensor]:
        module = seeded(Stack)
        whole = list(module.blocks[0].parameters())
        shard_module(
            module,
            UnitPlan(Topology(collectives), use_orig_params=use_orig_params),
            ignored_parameters=whole,
        )
        # The data are equal, so that the gradients of whole parameters are equal too.
        loss(module, 0).backward()
        norm = clip_grad_norm_(module, 0.5, norm_type)
        assert whole[0].grad is not None
        return norm, whole[0].grad

    expected, gradients = local_clip(0.5, norm_type, 1)
    for norm, gradient in run(ranks, step):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(gradient, gradients["blocks.0.up.weight"])


@each_row("norm_type", NORMS)
def test_no_gradient_at_all(norm_type: float, ranks: int, use_orig_params: bool) -> None:
    """If nothing has a gradient the norm is zero, in fp32, on every rank, and nothing gets one."""

    def clip(collectives: Collectives) -> Tensor:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        norm = clip_grad_norm_(module, 1.0, norm_type)
        assert all(parameter.grad is None for parameter in module.parameters())
        return norm

    for norm in run(ranks, clip):
        assert norm == 0.0
        assert norm.dtype is torch.float32


@each_row("norm_type", NORMS)
def test_zero_gradients_stay_zero(norm_type: float, ranks: int) -> None:
    """A norm of zero divides nothing by zero."""

    def clip(collectives: Collectives) -> tuple[Tensor, Grads, Tensor | None]:
        module = sharded(Stack, collectives, units=BLOCKS)
        (loss(module, collectives.rank) * 0).backward()
        return clip_grad_norm_(module, 1.0, norm_type), full_gradients(module)

    for norm, found in run(ranks, clip):
        assert norm == 0.0
        assert all(value is not None and not value.any() for value in found.values())


def test_gradients_on_some_ranks_only(use_orig_params: bool) -> None:
    """A rank whose shards hold nothing of the parameters with gradients takes part, and gets the same norm."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.tensor([3.0]))
            self.unused = nn.Parameter(torch.ones(60))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.used

    def clip(collectives: Collectives) -> Tensor:
        module = sharded(Uneven, collectives, use_orig_params=use_orig_params)
        module(torch.tensor([4.0])).sum().backward()
        return clip_grad_norm_(module, 1.0, math.inf) + clip_grad_norm_(module, 1e9, 2.0)

    first, second, third = run(3, clip)
    assert first == second == third
    torch.testing.assert_close(first, torch.tensor(5.0), rtol=1e-4, atol=0)


def test_the_norm_has_the_widest_dtype_of_the_gradients() -> None:
    """With gradients of several dtypes the norm has the widest of them."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.wide = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.wide(self.narrow(x.bfloat16()).double())
            return out

    module = sharded(Mixed, SingleCollectives())
    module(batch()).sum().backward()
    norm = clip_grad_norm_(module, 0.5)
    assert norm.dtype is torch.float64
    squares = sum(p.grad.double().square().sum() for p in module.parameters() if p.grad is not None)
    torch.testing.assert_close(float(squares) ** 0.5, 0.5, rtol=1e-2, atol=0)


def test_a_bad_gradient_shows_on_every_rank() -> None:
    """One NaN on one rank is in every rank's norm, so that all ranks skip the step alike."""

    def clip(collectives: Collectives) -> Tensor:
        module = sharded(Stack, collectives, units=BLOCKS)
        loss(module, collectives.rank).backward()
        if collectives.rank == 1:
            gradient = next(module.parameters()).grad
            assert gradient is not None
            gradient[0] = math.nan
        return clip_grad_norm_(module, 1.0)

    assert all(torch.isnan(norm) for norm in run(2, clip))


@each_row("foreach", [None, True, False])
@each_row("narrow", [torch.bfloat16, torch.float32])
def test_all_gradients_are_scaled_alike(foreach: bool | None, narrow: torch.dtype) -> None:
    """Gradients of one dtype or of two, scaled together or one by one, end up the same: at the bound."""
    module = sharded(lambda: nn.ModuleList([nn.Linear(4, 4, dtype=narrow), nn.Linear(4, 4)]), SingleCollectives())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in module.parameters())
    norm = clip_grad_norm_(module, 0.5, foreach=foreach)
    torch.testing.assert_close(float(norm), count**0.5, rtol=1e-6, atol=0)
    expected = torch.tensor(0.5 / count**0.5)
    for parameter in module.parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected.to(parameter.dtype).expand_as(parameter))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_names_gradients_that_are_not_finite(bad: float, use_orig_params: bool) -> None:
    """With `error_if_nonfinite` every rank raises, names ranks and parameters, and leaves all gradients as they are."""

    def clip(collectives: Collectives) -> str:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        spoiled = {"stem.weight", "head.bias"}
        for prefix, _, handle in named_handles(module):
            fragments = handle.layout.fragments(handle.rank)
            for number, fragment in enumerate(fragments):
                if prefix + handle.layout.fqns[fragment.index] in spoiled and fragment.in_shard:
                    if use_orig_params:
                        gradient = handle.exposure.parameters()[number].grad
                        assert gradient is not None
                        gradient.view(-1)[0] = bad
                    else:
                        assert handle.flat_param.grad is not None
                        handle.flat_param.grad[fragment.in_shard.start] = bad
        before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        with pytest.raises(RuntimeError, match="the total norm of order") as raised:
            clip_grad_norm_(module, 1.0, error_if_nonfinite=True)
        after = [p.grad for p in module.parameters() if p.grad is not None]
        for was, gradient in zip(before, after, strict=True):
            assert torch.equal(was.nan_to_num(7, 7), gradient.nan_to_num(7, 7))
        return str(raised.value)

    first, second = run(2, clip)
    assert first == second
    assert "(rank 0 has such a gradient of 'stem.weight'; rank 1 has such a gradient of 'head.bias')" in first


def test_an_error_without_a_unit(use_orig_params: bool) -> None:
    """A module without units, and gradients of whole parameters: the error names no gradient of a unit."""
    plain = nn.Linear(2, 2)
    for parameter in plain.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    with pytest.raises(RuntimeError, match="is inf, so they cannot be clipped; look for the step"):
        clip_grad_norm_(plain, 1.0, error_if_nonfinite=True)
    whole = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), whole)
    shard_module(
        module,
        UnitPlan(Topology(SingleCollectives()), use_orig_params=use_orig_params),
        ignored_parameters=[*whole.parameters()],
    )
    module(batch()).sum().backward()
    whole.weight.grad = torch.full_like(whole.weight, math.inf)
    with pytest.raises(RuntimeError, match="is inf, so they cannot be clipped; look for the step"):
        clip_grad_norm_(module, 1.0, error_if_nonfinite=True)


def test_a_module_without_units() -> None:
    """The norm is torch's; of a module without parameters it is zero, and nobody is warned."""
    plain, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for number, parameters in enumerate(zip(plain.parameters(), other.parameters(), strict=True)):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, number + 3.0)
    norm = clip_grad_norm_(plain, 0.5)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    for mine, theirs in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(clip_grad_norm_(nn.Tanh(), 1.0)) == 0.0


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_some_parameters_are_of_units_and_others_are_not() -> None:
    """`clip_gradients_` counts those of units with all ranks' parts, any other once, and one that is given twice once."""

    def clip(collectives: Collectives) -> tuple[Tensor, Grads, Tensor | None]:
        module = sharded(Stack, collectives, units=BLOCKS)
        loss(module, collectives.rank).backward()
        plain = _with_gradient(torch.full((1,), 5.0))
        given = [*module.blocks.parameters(), plain, *module.parameters()]  # type: ignore[union-attr]
        norm, scaled = clip_gradients_(given, 1.0), plain.grad
        plain.grad = torch.full((1,), math.nan)
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            clip_gradients_(given, 1.0, error_if_nonfinite=True)
        return norm, full_gradients(module), scaled

    module, plain = seeded(Stack), _with_gradient(torch.full((1,), 5.0))
    gradients = mean_gradients(module, loss, 2)
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name]
    expected = nn.utils.clip_grad_norm_([*module.parameters(), plain], 1.0)
    for norm, found, scaled in run(2, clip):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(scaled, plain.grad)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("norm_type", [math.inf, -math.inf, -1.0, 2.0])
def test_an_empty_gradient_counts_as_nothing(norm_type: float) -> None:
    """A rank that has no element of a parameter has an empty gradient, of which not every norm exists."""
    gradients = [torch.zeros(0, 3), torch.tensor([3.0, -4.0])]
    expected = torch.linalg.vector_norm(gradients[1], norm_type)
    assert torch.equal(clip_gradients_(map(_with_gradient, gradients), 100.0, norm_type), expected)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, -2.0, math.inf, -math.inf])
def test_norms_of_float64_are_added_up_in_float64(norm_type: float, use_orig_params: bool) -> None:
    """Their range and their digits are those of one process: what overflows in fp32 does not, and no gradient is lost."""

    def huge(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank).double()).square().sum() * 1e30
        return out

    def doubled() -> nn.Module:
        return Stack().double()

    def step(collectives: Collectives) -> tuple[Tensor, Grads]:
        module = sharded(doubled, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        huge(module, collectives.rank).backward()
        return clip_grad_norm_(module, 1.0, norm_type), full_gradients(module)

    module = seeded(doubled)
    gradients = mean_gradients(module, huge, 2)
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name]
    expected = nn.utils.clip_grad_norm_(module.parameters(), 1.0, norm_type)
    for norm, found in run(2, step):
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0.0)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=0.0)
