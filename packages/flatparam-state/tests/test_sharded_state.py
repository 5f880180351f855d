"""Sharded and local state: torch's `ShardedTensor`s of what each rank owns, in processes that torch connects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatparam_comm import ByteLedger, Collectives, FlatParamError, RecordingCollectives, SingleCollectives
from flatparam_comm.testing import run_processes, run_threads
from flatparam_state import (
    FormKind,
    StateForm,
    load_model_state,
    load_optimizer_state,
    model_state_dict,
    optimizer_state_dict,
)

from .optimizers import adam
from .worlds import made_up_gradients, shard, step

SHARDED, LOCAL = StateForm(FormKind.SHARDED), StateForm(FormKind.LOCAL)
CHUNKS = StateForm(FormKind.SHARDED, dim_0_chunks=True)
NO_EMPTY_PARTS = StateForm(FormKind.SHARDED, empty_parts=False)
DTENSORS = StateForm(FormKind.SHARDED, use_dtensor=True)


class Every(nn.Module):
    """Parameters of all kinds: tied, 0-d, empty, one row, channels_last, frozen, of a different dtype; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("mean", torch.ones(2))


def every() -> Every:
    torch.manual_seed(3)
    return Every()


def changed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def round_trips(ranks: Collectives, use_orig_params: bool) -> None:
    for form in (SHARDED, NO_EMPTY_PARTS, LOCAL, CHUNKS, DTENSORS):
        round_trip(ranks, form, use_orig_params)


def round_trip(ranks: Collectives, form: StateForm, use_orig_params: bool) -> None:
    """Save, load into a model of zeros, and compare; and again with an optimizer's state."""
    ledger = ByteLedger()
    recording = RecordingCollectives(ranks, ledger)
    model = shard(every(), recording, ("conv", ""), use_orig_params=use_orig_params)
    expected = every().state_dict()
    ledger.reset()
    state = model_state_dict(model, form=form)
    if form in (SHARDED, NO_EMPTY_PARTS, LOCAL):
        assert ledger.total.count == 0, "saving moves nothing"
    if form is not LOCAL:
        assert list(state) == list(expected)
        assert all(tuple(value.shape) == tuple(expected[name].shape) for name, value in state.items())
        assert state["embed.weight"] is state["head.weight"]
    other = changed(shard(every(), recording, ("conv", ""), use_orig_params=use_orig_params))
    ledger.reset()
    load_model_state(other, state)
    if form in (SHARDED, NO_EMPTY_PARTS, LOCAL):
        assert ledger.total.count == 0, "nor does loading"
    found = model_state_dict(other)
    assert all(torch.equal(found[name], value) for name, value in expected.items())

    optimizer = adam(model.parameters())
    step(model, optimizer, made_up_gradients(every(), 1))
    wanted = optimizer_state_dict(model, optimizer)
    if form.kind is FormKind.SHARDED:
        ledger.reset()
        saved = optimizer_state_dict(model, optimizer, form=form)
        assert form is not SHARDED or ledger.total.count == 0
        again = adam(model.parameters())
        again.load_state_dict(load_optimizer_state(model, again, saved))
        assert form is not SHARDED or ledger.total.count == 0
        loaded = optimizer_state_dict(model, again)
        for fqn, values in wanted["state"].items():
            for name, value in values.items():
                assert torch.equal(loaded["state"][fqn][name], value), (fqn, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_round_trips(world_size: int, use_orig_params: bool) -> None:
    """L-37, L-38, L-39: each form loads back bit for bit, in both exposures; what each rank owns moves no byte."""
    run_processes(world_size, round_trips, use_orig_params)


def _what_each_rank_holds(ranks: Collectives) -> dict[str, list[tuple[Any, Any]]]:
    model = shard(every(), ranks)
    state = model_state_dict(model, form=SHARDED)
    return {
        name: [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in value.local_shards()]
        for name, value in state.items()
        if hasattr(value, "local_shards")
    }


def test_every_rank_has_a_local_shard() -> None:
    """A rank that owns nothing of a tensor has an empty shard of it: torch's planners forget those without any."""
    first, second = run_processes(2, _what_each_rank_holds)
    assert all(first.values())
    assert all(second.values())
    assert first["row"] == [((0, 0), (1, 7))]
    assert second["row"] == [((1, 0), (0, 7))]


def _saved_as_chunks_loaded_as_owned(ranks: Collectives) -> None:
    """FSDP1's chunks fit a model that is cut otherwise; the parts move."""
    state = model_state_dict(shard(every(), ranks), form=CHUNKS)
    other = changed(shard(every(), ranks, ("conv", ""), use_orig_params=True))
    load_model_state(other, state)
    found = model_state_dict(other)
    assert all(torch.equal(found[name], value) for name, value in every().state_dict().items())


def test_another_cut_is_loaded_too() -> None:
    """S-086: a `ShardedTensor` that is cut in another way is gathered, one tensor at a time."""
    run_processes(3, _saved_as_chunks_loaded_as_owned)


def _refusals(ranks: Collectives) -> str:
    model = shard(every(), ranks)
    before = model_state_dict(model)
    state = model_state_dict(model, form=SHARDED)
    state["row"] = state["embed.weight"]
    with pytest.raises(RuntimeError, match=r"row.*expected a tensor of shape \(1, 7\), found shape \(7, 3\)"):
        load_model_state(model, state)
    del state["row"]
    with pytest.raises(RuntimeError, match="Missing key.*row"):
        load_model_state(model, state)
    with torch.no_grad():
        model.mean.fill_(7)
    loaded = load_model_state(model, state, strict=False)
    assert loaded.missing_keys == ["row"]
    after = model_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return "refused"


def one_description(ranks: Collectives, use_orig_params: bool) -> None:
    model = shard(every(), ranks, ("conv", ""), use_orig_params=use_orig_params)
    expected = every().state_dict()
    for form in (SHARDED, NO_EMPTY_PARTS, CHUNKS):
        state = model_state_dict(model, form=form)
        tensors = {name: value for name, value in state.items() if hasattr(value, "local_shards")}
        described = {
            name: [(tuple(each.shard_offsets), tuple(each.shard_sizes)) for each in value.metadata().shards_metadata]
            for name, value in tensors.items()
        }
        assert ranks.exchange(described) == [described] * ranks.size
        for name, value in tensors.items():
            sizes = [part.tensor.numel() for part in value.local_shards()]
            assert sizes or form is not SHARDED, name
            assert all(sizes) or form is SHARDED or not expected[name].numel(), name
            if form is SHARDED:
                # As before all ranks had one description: each rank knew of its own empty part alone.
                own = [part.metadata.shard_offsets for part in value.local_shards()]
                facts = value.metadata().shards_metadata
                facts[:] = [each for each in facts if 0 not in each.shard_sizes or each.shard_offsets in own]
        changed(model)
        load_model_state(model, state)
        for name, value in model_state_dict(model).items():
            assert torch.equal(value, expected[name]), (form, name)


def test_all_ranks_describe_a_tensor_alike(use_orig_params: bool) -> None:
    """The metadata of each `ShardedTensor` are those of every rank, with and without empty parts; each form is loaded.

    So is that of earlier versions, in which a rank without elements had an empty part that the others did not know of.
    """
    run_processes(3, one_description, use_orig_params)


def test_what_does_not_fit() -> None:
    """L-38: a wrong shape and, unless told otherwise, a missing name are refused on every rank; nothing is changed."""
    assert run_processes(2, _refusals) == ["refused"] * 2


def test_a_world_without_process_groups() -> None:
    """Where torch connects no processes there is no `ShardedTensor`: the error says what to use instead."""

    def rank(ranks: Collectives) -> None:
        model = shard(every(), ranks)
        with pytest.raises(FlatParamError, match=r"needs a process group.*full state dict"):
            model_state_dict(model, form=SHARDED)
        assert torch.equal(model_state_dict(model)["row"], every().row)

    run_threads(2, rank)


def test_a_world_of_one_has_full_tensors() -> None:
    """S-087: where nothing is sharded, each form gives full tensors."""
    model = shard(every(), SingleCollectives())
    for form in (SHARDED, LOCAL):
        found = model_state_dict(model, form=form)
        assert all(torch.equal(found[name], value) for name, value in every().state_dict().items())
