"""Which optimizers step segments: those that are noticed, and that torch lets step something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from flatparam_comm import SingleCollectives
from flatparam_runtime import notice_optimizers, tensors_stepped
from flatparam_runtime.optimizers import stepping
from flatparam_runtime.optimizers.torch_optimizers import STEPS, steps_of

from ..models import Stack, batch
from ..worlds import check_same, full_parameters, sharded


def test_the_hook_is_installed_by_its_own_call_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shard_module` changes nothing for the process; `notice_optimizers` does, the first time."""
    installed: list[Any] = []
    monkeypatch.setattr(stepping, "register_optimizer_step_pre_hook", installed.append)
    notice_optimizers.cache_clear()
    sharded(Stack, SingleCollectives(), use_orig_params=True)
    assert installed == []
    notice_optimizers()
    notice_optimizers()
    assert len(installed) == 1


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
