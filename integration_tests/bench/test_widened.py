"""Linear layers of bf16 that compute in fp32."""

from __future__ import annotations

import pytest
import torch
from bench import widened
from bench.workloads import WORKLOADS
from each_row import each_row
from torch import nn


@each_row("bias", [True, False])
def test_products_are_those_of_fp32_rounded_once(bias: bool) -> None:
    """Output and gradients are what an fp32 layer of the same numbers has, rounded to bf16."""
    torch.manual_seed(0)
    wide = nn.Linear(8, 6, bias=bias).bfloat16().float()
    narrow = widened.WidenedLinear(8, 6, bias=bias).bfloat16()
    narrow.load_state_dict(wide.state_dict())
    given, gradient = torch.randn(2, 3, 8).bfloat16(), torch.randn(2, 3, 6).bfloat16()
    inputs = [given.float().requires_grad_(), given.clone().requires_grad_()]
    outputs = [layer(x) for layer, x in zip((wide, narrow), inputs, strict=True)]
    outputs[0].backward(gradient.float())
    outputs[1].backward(gradient)
    pairs = [outputs, inputs_gradients(inputs), *zip(*(gradients(m) for m in (wide, narrow)), strict=True)]
    for expected, found in pairs:
        assert found.dtype == torch.bfloat16
        assert torch.equal(expected.bfloat16(), found)


def inputs_gradients(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.grad for x in inputs if x.grad is not None]


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("fast", [True, False])
def test_only_where_torch_is_slow(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has fast kernels, a model keeps its own layers; elsewhere all are widened, with their parameters."""
    monkeypatch.setattr(widened, "multiplies_bf16", lambda: fast)
    model = WORKLOADS["tiny small"].seeded()
    before = dict(model.named_parameters())
    widened.widen(model)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {isinstance(module, widened.WidenedLinear) for module in linear} == {not fast}
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
