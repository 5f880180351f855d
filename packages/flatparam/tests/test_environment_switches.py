"""The environment variables of FSDP1: what each changes, and that it says so once."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import layout
from flatparam.layout import LayoutPolicy
from flatparam.resolving import arguments
from flatparam.resolving.arguments import Environment
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, SingleCollectives

from .models import mlp, seeded
from .worlds import inputs, on_ranks

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})


@pytest.fixture(autouse=True)
def _nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warning is given once in a process: let every test see it."""
    monkeypatch.setattr(arguments, "_told", set())


def sent(world: Collectives, rules: LayoutPolicy | None = None) -> Any:
    """What one step sends, and the gradients that it leaves."""
    ledger = ByteLedger(keep=True)
    recording = RecordingCollectives(world, ledger)
    model = FSDP(seeded(mlp), recording, auto_wrap_policy=LINEAR, layout=rules)
    model(inputs(world.rank)[0]).square().mean().backward()
    units = {"0", "2", "4"}
    return {t.op for t in ledger.transfers if t.label in units}, [p.grad.clone() for p in model.parameters()]


def test_nothing_is_faked_by_default() -> None:
    """S-127: without the switches parameters are gathered and gradients reduced."""
    assert [ops for ops, _ in on_ranks(2, sent)] == [{"all_gather", "reduce_scatter"}] * 2


@pytest.mark.filterwarnings("ignore:FSDP_USE_FAKE")
def test_fake_all_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-127: `FSDP_USE_FAKE_ALL_GATHER=1` gathers nothing, and goes on reducing."""
    monkeypatch.setenv("FSDP_USE_FAKE_ALL_GATHER", "1")
    assert [ops for ops, _ in on_ranks(2, sent)] == [{"reduce_scatter"}] * 2


@pytest.mark.filterwarnings("ignore:FSDP_USE_FAKE")
def test_different_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of different lengths nothing is moved either, if both switches are on."""
    rules = layout.by({}, shares=(3, 1))
    assert all(ops for ops, _ in on_ranks(2, sent, rules))
    for name in ("FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE"):
        monkeypatch.setenv(name, "1")
    assert [ops for ops, _ in on_ranks(2, sent, rules)] == [set(), set()]


@pytest.mark.filterwarnings("ignore:FSDP_USE_FAKE")
def test_fake_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-127: `FSDP_USE_FAKE_REDUCE=1` leaves each rank its own part of its own gradients, halved for the mean of two."""
    monkeypatch.setenv("FSDP_USE_FAKE_REDUCE", "1")
    found = on_ranks(2, sent)
    assert [ops for ops, _ in found] == [{"all_gather"}] * 2
    for rank, (_, gradients) in enumerate(found):
        reference = seeded(mlp)
        (reference(inputs(rank)[0]).square().mean() / 2).backward()
        for layer, gradient in zip((0, 2, 4), gradients, strict=True):
            whole = torch.cat([p.grad.flatten() for p in reference[layer].parameters()])
            part = whole[rank * len(gradient) : (rank + 1) * len(gradient)]
            assert torch.equal(gradient[: len(part)], part)


@pytest.mark.parametrize("name", ["FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE", "FSDP_SKIP_WRITEBACK_CHECK"])
def test_a_dangerous_switch_warns_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-127: the first wrapper that finds it on says by name what it does; later ones are silent."""
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=f"{name}=1"):
        FSDP(mlp(), HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the world has one rank")
        FSDP(mlp(), HERE, auto_wrap_policy=LINEAR)


@pytest.mark.parametrize("value", ["", "0", "true"])
def test_only_one_switches_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-127: any value but "1" leaves a switch off."""
    for name in ("FSDP_USE_FAKE_ALL_GATHER", "FSDP_USE_FAKE_REDUCE", "FSDP_USE_FULL_PREC_IN_EVAL"):
        monkeypatch.setenv(name, value)
    assert Environment.read() == Environment(nodes_of=Environment.read().nodes_of)


def test_unsafe_setattr_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-127: `FSDP_USE_UNSAFE_SETATTR=1` is accepted; a module's own `__setattr__` is left out of nothing that counts."""
    found = on_ranks(2, sent)
    monkeypatch.setenv("FSDP_USE_UNSAFE_SETATTR", "1")
    for (_, gradients), (_, plain) in zip(on_ranks(2, sent), found, strict=True):
        assert all(map(torch.equal, gradients, plain))


@pytest.mark.filterwarnings("ignore:FSDP_SKIP_WRITEBACK_CHECK")
def test_skipping_the_check_for_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-043, S-127: with `FSDP_SKIP_WRITEBACK_CHECK=1` data that a parameter was given after wrapping is not taken over."""
    monkeypatch.setenv("FSDP_SKIP_WRITEBACK_CHECK", "1")
    model = FSDP(seeded(mlp), HERE, use_orig_params=True)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 3)), seeded(mlp)(torch.ones(2, 3)))
