"""Which optimizers step segments: those that are noticed, and that torch lets step something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from flatparam_comm import FlatParamError, SingleCollectives
from flatparam_runtime import notice_optimizers
from flatparam_runtime.optimizers import stepping

from ..models import Stack, batch
from ..worlds import check_same, full_parameters, seeded, sharded


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


class _Preparation:
    """What an add-on has at the entry point."""

    def __init__(self) -> None:
        self.prepared: list[optim.Optimizer] = []

    def prepare_step(self, optimizer: optim.Optimizer) -> None:
        self.prepared.append(optimizer)


def _steps(optimizer_of: Any) -> tuple[optim.Optimizer, dict[str, torch.Tensor]]:
    module = sharded(Stack, SingleCollectives(), use_orig_params=True)
    optimizer: optim.Optimizer = optimizer_of(module.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        module(batch(0)).square().mean().backward()
        optimizer.step()
    return optimizer, full_parameters(module)


def test_an_add_on_prepares_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the entry point names is called with the optimizer before each step; without it, nothing else changes."""
    preparation = _Preparation()
    monkeypatch.setattr(stepping, "_preparation", lambda: preparation)
    optimizer, with_it = _steps(optim.AdamW)
    assert preparation.prepared == [optimizer, optimizer]
    monkeypatch.setattr(stepping, "_preparation", lambda: None)
    _, without = _steps(optim.AdamW)
    check_same(with_it, without)


def test_a_lacking_add_on_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without flatparam-optim optimizers step all the same, and a line of the log says what nobody refuses then."""
    monkeypatch.setattr(stepping, "module_behind", lambda *_: None)
    stepping._preparation.cache_clear()
    _steps(optim.AdamW)
    _steps(optim.SGD)
    stepping._preparation.cache_clear()
    assert [record.name for record in caplog.records] == ["flatparam_runtime"]
    assert "flatparam-optim is not installed" in caplog.text
    assert "is not refused on shards" in caplog.text


def _stepped(module: torch.nn.Module, first: str) -> dict[str, torch.Tensor]:
    """Return the parameters after steps of an optimizer that is made after a forward pass whose output is dropped."""
    module(batch(0))
    optimizer = optim.Adam(module.head.parameters(), lr=0.1)
    for _ in range(2):
        if first == "zero_grad":
            optimizer.zero_grad()
        module(batch(0)).square().mean().backward()
        optimizer.step()
        if first == "step":
            optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in module.named_parameters()}


@pytest.mark.parametrize("first", ["zero_grad", "step"])
def test_an_optimizer_of_full_parameters(first: str) -> None:
    """One that was made of what a module inside shows between its passes steps the parameters themselves."""
    notice_optimizers()
    module = sharded(Stack, SingleCollectives(), use_orig_params=True, free_after_forward=False)
    check_same(_stepped(module, first), _stepped(seeded(Stack), first))


def test_an_optimizer_of_full_parameters_without_originals() -> None:
    """If the flat parameter is what is listed, no other one can be stepped, and the error says what to do."""
    notice_optimizers()
    module = sharded(Stack, SingleCollectives(), free_after_forward=False)
    module(batch(0))
    optimizer = optim.SGD([module.head.weight], lr=0.1)
    with pytest.raises(FlatParamError, match=r"'head.weight'.*in the optimizer SGD.*model's parameters\(\)"):
        optimizer.step()
    # Beside the flat parameter the full ones do no harm: they get no gradient.
    optim.SGD(module.parameters(), lr=0.1).step()
