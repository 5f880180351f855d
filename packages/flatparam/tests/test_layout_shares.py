"""Shares: ranks whose parts differ in length train the same bits, and their state goes anywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import CPUOffload, FullyShardedDataParallel, MixedPrecision, StateDictType, layout
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_core import FlatParamError, LayoutError
from flatparam_core.testing import check_invariants

from .models import Block, Transformer, seeded
from .worlds import on_ranks

SHARES = (1, 3, 2)
RULES: dict[str, Any] = {
    "element": layout.element,
    "blocks": layout.blocks(3),
    "rows": layout.row,
    "whole": layout.whole,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "low precision": {"mixed_precision": MixedPrecision(torch.bfloat16)},
    "offload": {"cpu_offload": CPUOffload(True)},
}


def built(world: Collectives | None, rule: Any, shares: tuple[int, ...], **arguments: Any) -> Any:
    model = FullyShardedDataParallel(
        seeded(Transformer),
        world,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        layout=layout.by({}, otherwise=rule, shares=shares),
        **arguments,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: Any, optimizer: Any, rank: int, start: int = 0, stop: int = 3) -> None:
    for step in range(start, stop):
        tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        with model.no_sync():
            model(tokens).square().mean().backward()
        model(tokens).square().mean().backward()
        optimizer.step()


def full(model: Any, optimizer: Any) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        found = dict(model.state_dict())
    return found | {f"{name}/{key}": value for name, own in states.items() for key, value in own.items()}


def trained(world: Collectives, rule: Any, shares: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    """The full state after three steps, and the lengths of the root's shards."""
    model, optimizer = built(None if arguments.get("device_mesh") else world, rule, shares, **arguments)
    train(model, optimizer, world.rank)
    for flat in model.params:
        check_invariants(flat._held_by())
    return full(model, optimizer), model.params[0].flat_layout.shard_numels, model.params[0].numel()


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    assert sorted(found) == sorted(expected)
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_uneven_shares_train_the_same_bits(rule: str, setting: str, use_orig_params: bool) -> None:
    """Gathers and sums of parts of different lengths lose nothing, under every rule, dtype and exposure."""
    arguments = {**SETTINGS[setting], "use_orig_params": use_orig_params}
    found = on_ranks(3, trained, RULES[rule], SHARES, arguments)
    expected = on_ranks(3, trained, layout.element, (), arguments)
    for rank, ((state, lengths, own), (plain, _, _)) in enumerate(zip(found, expected, strict=True)):
        assert own == lengths[rank]
        assert lengths[0] < lengths[2] < lengths[1]
        assert same(state, plain)


@pytest.mark.processes
def test_uneven_shares_over_processes() -> None:
    """The same over gloo."""
    arguments = {"use_orig_params": True}
    found = run_processes(3, trained, layout.row, SHARES, arguments)
    expected = run_processes(3, trained, layout.element, (), arguments)
    assert all(same(mine, other) for (mine, _, _), (other, _, _) in zip(found, expected, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_uneven_shares_are_resharded(rule: str, use_orig_params: bool, tmp_path: Path) -> None:
    """A checkpoint of uneven shares goes on at other shares, and equal ones, on other ranks, under the other exposure."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def save(world: Collectives) -> Any:
        model, optimizer = built(world, RULES[rule], SHARES, use_orig_params=use_orig_params)
        train(model, optimizer, 0)
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=3)
        return full(model, optimizer)

    def load(world: Collectives, shares: tuple[int, ...]) -> Any:
        model, optimizer = built(world, layout.element, shares, use_orig_params=not use_orig_params)
        assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        return full(model, optimizer)

    expected = on_ranks(3, save)[0]
    for ranks, shares in ((2, ()), (2, (5, 1)), (4, (1, 1, 2, 1))):
        assert all(same(found, expected) for found in on_ranks(ranks, load, shares))


def test_uneven_shares_are_summoned_and_written(use_orig_params: bool) -> None:
    """Full parameters that are summoned are whole, and what is written to them reaches the ranks that hold it."""

    def rank(world: Collectives) -> None:
        model, _ = built(world, layout.row, SHARES, use_orig_params=use_orig_params)
        with FullyShardedDataParallel.summon_full_params(model):
            for own, plain in zip(model.parameters(), seeded(Transformer).parameters(), strict=True):
                assert torch.equal(own, plain)
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.fill_(number)
        with FullyShardedDataParallel.summon_full_params(model):
            assert all(bool((p == number).all()) for number, p in enumerate(model.parameters()))

    on_ranks(3, rank)


def test_the_norm_is_that_of_all_parts() -> None:
    """Clipping adds up the norms of parts of different lengths."""

    def rank(world: Collectives) -> Any:
        model, _ = built(world, layout.element, SHARES)
        tokens = torch.arange(6).view(2, 3)
        model(tokens).square().mean().backward()
        return model.clip_grad_norm_(1.0)

    plain = seeded(Transformer)
    plain(torch.arange(6).view(2, 3)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for found in on_ranks(3, rank):
        torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)


def test_shares_for_other_ranks_are_refused() -> None:
    """There is a share for each rank of the shard group, and each is a positive number."""

    def rank(world: Collectives) -> None:
        with pytest.raises(LayoutError, match="a share for each of the 2 ranks, found 3 shares"):
            built(world, layout.element, SHARES)

    on_ranks(2, rank)
    with pytest.raises(ValueError, match="a positive number as the share of rank 1, found 0"):
        layout.by({}, shares=(1, 0))


def test_ranks_with_different_shares_are_told() -> None:
    """Shares that differ between ranks are an error on every rank before any byte is gathered."""

    def rank(world: Collectives) -> str:
        model, _ = built(world, layout.element, (1, 2) if world.rank else (2, 1))
        with pytest.raises(FlatParamError, match="different models") as caught:
            model(torch.zeros(1, 2, dtype=torch.long))
        return str(caught.value)

    for message in on_ranks(2, rank):
        assert "the shares of unit" in message
