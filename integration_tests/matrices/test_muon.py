"""Muon over sharded parameters: the bits of `torch.optim.Muon` in one process, each matrix orthogonalised once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives, run_threads
from flatparam_optim import MatrixOptimizer, Muon
from flatparam_optim.muon import orthogonalised
from integration_tests.matrices.whole_cases import Case, Sign, all_cases, assert_same, check, few_cases

SETTINGS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.01, "adamw_betas": (0.9, 0.95)}


def plain(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices, and its AdamW for the rest."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, **settings),
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95)),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", few_cases(), ids=str)
def test_muon_is_exact(case: Case) -> None:
    """Parameters and states are those of torch's optimizers in one process, given equal gradients: to the bit."""
    check(case, lambda parameters: Muon(parameters, **SETTINGS), plain, whole=6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", list(all_cases()), ids=str)
def test_muon_is_exact_in_every_setting(case: Case) -> None:
    """The same for every combination of ranks, wrapping, strategy, exposure, layout, accumulation and clipping."""
    check(case, lambda parameters: Muon(parameters, **SETTINGS), plain, whole=6)


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"ns_steps": 2, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-3},
    ],
    ids=["momentum", "rate", "iteration"],
)
def test_every_setting_is_that_of_torch(settings: dict[str, Any]) -> None:
    """With other settings the bits are torch's, too."""
    check(
        Case(3, "one unit"),
        lambda parameters: Muon(parameters, **SETTINGS, **settings),
        lambda model: plain(model, **settings),
        whole=6,
    )


@pytest.mark.parametrize("shape", [(4, 4), (3, 9), (9, 3), (1, 5), (64, 200)])
def test_orthogonalised_is_that_of_torch(shape: tuple[int, int]) -> None:
    """The iteration has the bits of torch's, and leaves its argument as it is, also in bfloat16."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        matrix = torch.randn(shape, dtype=dtype)
        before = matrix.clone()
        found = orthogonalised(matrix, steps=4)
        assert torch.equal(matrix, before)
        theirs = _zeropower_via_newtonschulz(before.clone(), (3.4445, -4.7750, 2.0315), 4, 1e-7)
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, theirs)


@pytest.mark.parametrize("kind", ["Muon", "MatrixOptimizer"])
def test_half_precision_is_exact(kind: str, use_orig_params: bool) -> None:
    """Parameters in half precision have the bits of the same optimizer in one process, wherever they are cut."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Muon(parameters, **SETTINGS) if kind == "Muon" else MatrixOptimizer(parameters, Sign(), lr=0.1)

    def build_half() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 16)).to(torch.bfloat16)

    def train(model: nn.Module) -> nn.Module:
        optimizer = make(model.parameters())
        for step in range(3):
            model.zero_grad()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            model(x).square().mean().backward()
            optimizer.step()
        return model

    def rank(world: Collectives) -> Any:
        return dict(train(FSDP(build_half(), world, use_orig_params=use_orig_params)).state_dict())

    expected = dict(train(build_half()).state_dict())
    for found in run_threads(4, rank):
        assert_same(found, expected)
