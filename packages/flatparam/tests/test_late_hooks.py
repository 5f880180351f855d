"""Forward hooks that a program registers on a wrapped module after wrapping, as most programs do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision
from flatparam_comm import Collectives

from .models import seeded
from .worlds import on_ranks


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def norm_of(weight: torch.Tensor) -> float:
    return float(weight.detach().float().norm())


@pytest.mark.parametrize("copied", [False, True], ids=["first", "copied"])
def test_hooks_see_full_parameters(use_orig_params: bool, copied: bool) -> None:
    """The hook of the first registration and of any later one sees the whole weight in every pass, copies too."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        layer = module[0]
        model = FSDP(
            nn.Sequential(FSDP(layer, use_orig_params=use_orig_params), *module[1:]),
            use_orig_params=use_orig_params,
        )
        if copied:
            model = copy.deepcopy(model)
            layer = model.module[0].module
        found: list[float] = []
        for _ in range(2):
            layer.register_forward_hook(lambda mod, inputs, output: found.append(norm_of(mod.weight)))
            model(torch.ones(1, 3)).sum().backward()
        return found

    expected = norm_of(seeded(make)[0].weight)
    for found in on_ranks(2, rank):
        assert found == [expected] * 3


def test_what_a_hook_returns_is_what_autograd_sees(use_orig_params: bool) -> None:
    """A hook that changes the output by the weight has the outputs and the gradients of one process."""

    def scaled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        return output + inputs[0] @ weight.t()

    def output_of(model: nn.Module) -> torch.Tensor:
        output: torch.Tensor = model(torch.ones(2, 3))
        output.square().sum().backward()
        return output.detach()

    reference = seeded(make)
    reference[2].register_forward_hook(scaled)
    expected = output_of(reference)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        last = module[2]
        model = FSDP(
            nn.Sequential(*module[:2], FSDP(last, use_orig_params=use_orig_params)),
            use_orig_params=use_orig_params,
        )
        last.register_forward_hook(scaled)
        return output_of(model), model.clip_grad_norm_(float("inf"))

    for found in on_ranks(2, rank):
        torch.testing.assert_close(found, (expected, norm))


def test_a_hook_sees_the_dtype_of_computation() -> None:
    """With mixed precision a late hook sees the dtype of computation, as the module has it."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        seen: list[torch.dtype] = []
        model = FSDP(module, mixed_precision=MixedPrecision(torch.bfloat16))
        module.register_forward_hook(lambda mod, inputs, output: seen.append(output.dtype))
        model(torch.ones(1, 3))
        return seen

    assert on_ranks(2, rank) == [[torch.bfloat16]] * 2
