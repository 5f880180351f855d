"""A torch whose optimizers cannot be stepped in segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from flatparam_comm import SingleCollectives
from flatparam_optim import tensors_stepped
from flatparam_runtime.optimizers.torch_optimizers import STEPS, steps_of

from .beneath import Stack, batch, check_same, full_parameters, sharded


def test_a_torch_whose_optimizers_collect_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `_init_group` an optimizer steps each parameter by itself, to the same numbers."""

    class Collects(optim.Optimizer):
        def _init_group(self) -> None: ...

        def step(self, closure: Any = None) -> None: ...

    class Steps(optim.Optimizer):
        def step(self, closure: Any = None) -> None: ...

    assert list(steps_of([Collects, Steps])) == [Collects]

    def trained() -> tuple[dict[str, torch.Tensor], int | None]:
        module = sharded(Stack, SingleCollectives(), use_orig_params=True)
        optimizer = optim.AdamW(module.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            module(batch(0)).square().mean().backward()
            optimizer.step()
        return full_parameters(module), tensors_stepped(optimizer)

    together, count = trained()
    monkeypatch.delitem(STEPS, optim.AdamW)  # type: ignore[arg-type]  # a dictionary that nothing else changes
    alone, none = trained()
    check_same(together, alone)
    assert (count, none) == (1, None)
