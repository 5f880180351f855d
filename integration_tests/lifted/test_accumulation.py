"""Gradients of several batches in one: their dtype while they wait, and what is there already."""

from __future__ import annotations

import copy

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload as TorchOffload
from torch.distributed.fsdp import MixedPrecision as TorchPrecision

from flatparam import CPUOffload, MixedPrecision
from flatparam_comm import Collectives
from integration_tests.lifted.our_half import (
    RANKS,
    batch,
    both_exposures,
    full_gradients,
    full_parameters,
    mean_gradients,
    mlp,
    on_two_ranks,
    seeded,
    sgd,
    square_loss,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, gradients_of, parameters_of

MICRO_BATCHES = 3


def one_weight() -> nn.Module:
    """Its gradient is its input."""
    return nn.Linear(1, 1, bias=False)


def accumulate(model: nn.Module) -> None:
    """256 first, and then 1, which a sum of 8 bits loses; on every rank."""
    with model.no_sync():
        model(torch.tensor([[256.0]])).sum().backward()
    model(torch.tensor([[1.0]])).sum().backward()


def torch_l08(group: Collectives, use_orig_params: bool) -> list[Tensor]:
    precision = TorchPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fsdp1(seeded(one_weight), mixed_precision=precision, use_orig_params=use_orig_params)
    accumulate(model)
    return [p.grad for p in model.parameters() if p.grad is not None and p.grad.any()]


def torch_l09(group: Collectives, use_orig_params: bool) -> None:
    model = fsdp1(seeded(mlp), cpu_offload=TorchOffload(offload_params=True), use_orig_params=use_orig_params)
    square_loss(model, 0, group.rank).backward()


@both_exposures
def test_l08_torch_accumulates_in_the_compute_dtype(processes: Outcomes, use_orig_params: bool) -> None:
    """L-08: with reduce_dtype=float32 torch still adds up the gradients in no_sync as bfloat16: 256 + 1 = 256."""
    grads, none = processes.values(torch_l08, use_orig_params)  # rank 1 holds no part of one element
    assert [grad.tolist() for grad in grads] in ([[256.0]], [[[256.0]]])
    assert none == []


@both_exposures
def test_l08_sums_wait_in_the_reduction_dtype(use_orig_params: bool) -> None:
    """L-08: the same 256 + 1 = 257."""

    def rank(group: Collectives) -> Tensor:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = wrapped(seeded(one_weight), mixed_precision=precision, use_orig_params=use_orig_params)
        accumulate(model)
        return full_gradients(model)["weight"]

    for grad in on_two_ranks(rank):
        assert grad.tolist() == [[257.0]]


@both_exposures
@each_row("reduce_dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_l08_bits_of_a_sum_in_the_reduction_dtype(use_orig_params: bool, reduce_dtype: torch.dtype | None) -> None:
    """L-08: bfloat16 gradients, each half of it cast to the reduction dtype and added there, one by one."""

    def rank(group: Collectives) -> dict[str, Tensor | None]:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = wrapped(seeded(mlp), nn.Linear, mixed_precision=precision, use_orig_params=use_orig_params)
        with model.no_sync():
            for step in range(MICRO_BATCHES - 1):
                square_loss(model, step, group.rank).backward()
        square_loss(model, MICRO_BATCHES - 1, group.rank).backward()
        return full_gradients(model)

    sums = [low_precision_sum(number, reduce_dtype or torch.bfloat16) for number in range(RANKS)]
    expected = {name: (sums[0][name] + sums[1][name]).float() for name in sums[0]}
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "gradient")


def low_precision_sum(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Half of the sum of a rank's gradients, which are computed in bfloat16, in `dtype`."""
    model = copy.deepcopy(seeded(mlp)).bfloat16()
    total: dict[str, Tensor] = {}
    for step in range(MICRO_BATCHES):
        model.zero_grad()
        model(batch(step, rank).bfloat16()).square().mean().backward()
        for name, grad in gradients_of(model).items():
            assert grad is not None
            half = grad.to(dtype) / 2
            total[name] = total[name] + half if name in total else half
    return total


@both_exposures
def test_l09_torch_does_not_offload_on_the_cpu(processes: Outcomes, use_orig_params: bool) -> None:
    """L-09: without an accelerator torch refuses CPUOffload altogether.

    So the row's claim, that a second pass replaces the gradients of the first, cannot be seen here: it is about
    gradients on another device than the parameters that are computed with.
    """
    assert processes.error(torch_l09, use_orig_params).startswith("RuntimeError")


@both_exposures
@pytest.mark.parametrize("offload", [True, False], ids=["offloaded", "in-place"])
@pytest.mark.parametrize("quiet", [(), (0,), (1,)], ids=["sync", "quiet-first", "quiet-second"])
def test_l09_passes_add_up(use_orig_params: bool, offload: bool, quiet: tuple[int, ...]) -> None:
    """L-09: gradients of several passes are added, offloaded or not, and with some of the passes in no_sync."""

    def rank(group: Collectives) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
        model = wrapped(seeded(mlp), nn.Linear, cpu_offload=CPUOffload(offload), use_orig_params=use_orig_params)
        optimizer = sgd(model.parameters())
        for first in (0, MICRO_BATCHES):
            optimizer.zero_grad()
            for number in range(MICRO_BATCHES):
                if number in quiet:
                    with model.no_sync():
                        square_loss(model, first + number, group.rank).backward()
                else:
                    square_loss(model, first + number, group.rank).backward()
            gradients = full_gradients(model)
            optimizer.step()
        return gradients, full_parameters(model)

    reference = seeded(mlp)
    optimizer = sgd(reference.parameters())
    for first in (0, MICRO_BATCHES):
        accumulate_local(reference, first, quiet)
        optimizer.step()
    for gradients, found in on_two_ranks(rank):
        assert_same_tensors(gradients, gradients_of(reference), "gradient")
        assert_same_tensors(found, parameters_of(reference), "parameter")


def accumulate_local(model: nn.Module, first: int, quiet: tuple[int, ...]) -> None:
    """The same sums in the same order: inside a rank over quiet passes, then over ranks, then over the others."""
    total: dict[str, Tensor] = {}
    waiting: list[int] = []
    for number in range(first, first + MICRO_BATCHES):
        waiting.append(number)
        if number - first in quiet:
            continue

        def backward(module: nn.Module, rank: int, steps: tuple[int, ...] = tuple(waiting)) -> None:
            for step in steps:
                square_loss(module, step, rank).backward()

        mean_gradients(model, backward)
        waiting.clear()
        for name, grad in gradients_of(model).items():
            assert grad is not None
            total[name] = total[name] + grad if name in total else grad
    for name, parameter in model.named_parameters():
        parameter.grad = total[name]
