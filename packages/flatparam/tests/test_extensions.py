"""Parameters that are flattened as something else than modules see: `FSDPExtensions`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.sharding.extensions import FSDPExtensions, set_extensions
from flatparam_comm import Collectives, run_threads


class Doubled(FSDPExtensions):
    """Weights are stored as twice their values; biases as they are."""

    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        return (tensor * 2, 0.5) if tensor.dim() > 1 else (tensor, None)

    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        return tensor * param_extension


@pytest.fixture
def extended() -> Iterator[None]:
    set_extensions(Doubled())
    yield
    set_extensions(None)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[4].bias = nn.Parameter(torch.ones(2))
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    return model


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_is_stored_is_not_what_is_shown(use_orig_params: bool) -> None:
    """Modules compute with the presented parameters, gradients come through the presenter, state is as presented."""

    def step(group: Collectives) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor | None]]:
        model = FSDP(make(), use_orig_params=use_orig_params)
        state = model.state_dict()
        out = model(torch.ones(1, 3))
        out.sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        return out.detach(), state, grads

    local = make()
    expected = local(torch.ones(1, 3))
    expected.sum().backward()
    for out, state, grads in run_threads(2, step):
        assert torch.equal(out, expected)
        for name, parameter in local.named_parameters():
            assert torch.equal(state[name], parameter)
            stored = 0.5 if parameter.dim() > 1 else 1.0
            assert torch.equal(grads[name], parameter.grad * stored)
