"""Optimizer state, key by key, beside torch's FSDP1 in the same processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TheirFSDP
from torch.distributed.fsdp import OptimStateKeyType as TheirKeyType

import flatparam
import integration_tests.state.torch_files as torch_files
from flatparam import OptimStateKeyType, StateDictType
from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_optimizer, assert_same, parameter_names, whole
from integration_tests.state.ours import (
    FSDP,
    full_optimizer_state,
    numbers_of,
    ours,
    prime,
    restored,
    settings_of,
)
from integration_tests.state.sample import AFTER, BEFORE, adamw, build, loss_of, named_state, train, trained
from integration_tests.state.torch_files import Files, fsdp1
from integration_tests.state.worlds import on_ranks

BOTH = [False, True]
FORMS = {"full": "full", "chunked": "sharded", "dtensor": "dtensor"}
FULL = StateDictType.FULL_STATE_DICT

Pair = tuple[tuple[FSDP, torch.optim.Optimizer], tuple[Any, torch.optim.Optimizer]]


def groups_of(model: nn.Module, several: bool) -> Any:
    """The parameters for an optimizer: as one group, or in two with settings of their own."""
    parameters = list(model.parameters())
    if not several:
        return parameters
    return [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:], "weight_decay": 0.0}]


def trained_pair(
    group: Collectives, originals: bool, form: str, several: bool = False, mixed: bool | None = None
) -> Pair:
    """The sample after two steps, with its optimizer, in ours and in torch's wrapper."""
    mixed = originals if mixed is None else mixed
    mine = ours(build(mixed), originals, form)
    theirs = fsdp1(build(mixed), originals, FORMS.get(form, form))
    found = []
    for model in (mine, theirs):
        optimizer = adamw(groups_of(model, several))
        train(model, optimizer, group.rank)
        found.append((model, optimizer))
    return tuple(found)  # type: ignore[return-value]


def offloading(form: str, offload_to_cpu: bool) -> Any:
    """Our settings, which put optimizer state on the CPU by default, as torch's do."""
    kind, model_config, optimizer_config = settings_of(form)
    optimizer_config.offload_to_cpu = offload_to_cpu
    return kind, model_config, optimizer_config


@on_ranks(2, originals=BOTH, form=list(FORMS), several=BOTH)
def test_optimizer_state(group: Collectives, files: Files, originals: bool, form: str, several: bool) -> None:
    """S-090, S-095: the same names, groups, settings and, for each state, the same kind of tensor, shards and bits."""
    (model, optimizer), (their_model, their_optimizer) = trained_pair(group, originals, form, several)
    state = FSDP.optim_state_dict(model, optimizer)
    expected = TheirFSDP.optim_state_dict(their_model, their_optimizer)
    assert_same(state["state"], expected["state"])
    assert_same(by_sorted_names(state), by_sorted_names(expected))


def by_sorted_names(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups, each with its names in order."""
    return [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]


@on_ranks(2, 3, originals=BOTH)
def test_the_boxes_of_a_sharded_optimizer_state(group: Collectives, files: Files, originals: bool) -> None:
    """S-090, L-39: by default states lie in the boxes that the parameters lie in, and together they are the full state."""
    model = ours(build(originals), originals, "sharded")
    optimizer = adamw(model.parameters())
    restored(model, optimizer, originals)
    state = FSDP.optim_state_dict(model, optimizer)
    assert_optimizer(whole(state), trained(originals).optimizer)
    model_state = model.state_dict()
    for name, values in state["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert values[key].metadata().shards_metadata == model_state[name].metadata().shards_metadata
        assert values["step"].dim() == 0


@on_ranks(2, form=["full", "sharded", "chunked", "dtensor"], offload=BOTH, originals=BOTH)
def test_offload(group: Collectives, files: Files, form: str, offload: bool, originals: bool) -> None:
    """S-090: `offload_to_cpu`, on by default, changes no value; torch's full form then saves wrong ones."""
    model = ours(build(originals), originals, form)
    optimizer = adamw(model.parameters())
    restored(model, optimizer, originals)
    FSDP.set_state_dict_type(model, *offloading(form, offload))
    state = FSDP.optim_state_dict(model, optimizer)
    assert_optimizer(whole(state), trained(originals).optimizer)


@on_ranks(2, 3, originals=BOTH)
def test_rank0_only(group: Collectives, files: Files, originals: bool) -> None:
    """S-090: with `rank0_only` rank 0 gets the full state and the others an empty dict."""
    model = ours(build(originals), originals)
    optimizer = adamw(model.parameters())
    restored(model, optimizer, originals)
    config = flatparam.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, None, config):
        state = FSDP.optim_state_dict(model, optimizer)
    if group.rank == 0:
        assert_optimizer(state, trained(originals).optimizer)
    else:
        assert state == {}


@on_ranks(2, originals=BOTH, form=list(FORMS))
def test_of_a_given_state(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-090: the argument `optim_state_dict` is converted in place of the optimizer's own; entries of users are kept."""
    (model, optimizer), (their_model, their_optimizer) = trained_pair(group, originals, form)
    found = []
    for wrapper, m, o in ((FSDP, model, optimizer), (TheirFSDP, their_model, their_optimizer)):
        given = o.state_dict()
        given["state"] = {key: {**values, "step": values["step"] + 5} for key, values in given["state"].items()}
        given["state"]["of the user"] = {"beta": 3}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(wrapper.optim_state_dict(m, o, given)["state"])
        assert any("of the user" in str(w.message) for w in caught)
    assert_same(*found)
    assert found[0]["row"]["step"] == 7


@on_ranks(2, 3, originals=BOTH, form=["full", "sharded", "chunked", "dtensor"])
def test_to_load(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-091: the state of any form is loaded into an optimizer over the other exposure, at once with `load_directly`."""
    directly = not originals
    model = ours(build(True), originals, form)
    optimizer = adamw(model.parameters())
    restored(model, optimizer, True)
    state = FSDP.optim_state_dict(model, optimizer)
    other = ours(build(True), not originals, form)
    other_optimizer = adamw(other.parameters(), lr=0.5)
    loadable = FSDP.optim_state_dict_to_load(other, other_optimizer, state, load_directly=directly)
    if not directly:
        assert not other_optimizer.state
        other_optimizer.load_state_dict(loadable)
    assert_optimizer(full_optimizer_state(other, other_optimizer), trained(True).optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.01


@on_ranks(2, originals=BOTH, form=list(FORMS))
def test_torchs_state_in_ours_and_ours_in_torchs(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-091: each takes what the other's `optim_state_dict` returns, and goes on with the same bits."""
    (model, optimizer), (their_model, their_optimizer) = trained_pair(group, originals, form)
    mine = FSDP.optim_state_dict(model, optimizer)
    theirs = TheirFSDP.optim_state_dict(their_model, their_optimizer)
    restart = adamw(model.parameters(), lr=0.5), adamw(their_model.parameters(), lr=0.5)
    restart[0].load_state_dict(FSDP.optim_state_dict_to_load(model, restart[0], theirs))
    restart[1].load_state_dict(TheirFSDP.optim_state_dict_to_load(their_model, restart[1], mine))
    train(model, restart[0], group.rank, AFTER)
    train(their_model, restart[1], group.rank, AFTER)
    assert_optimizer(full_optimizer_state(model, restart[0]), trained(originals).end_optimizer)
    state = whole(TheirFSDP.optim_state_dict(their_model, restart[1]))
    assert_optimizer(state, trained(originals).end_optimizer)


# The five legacy methods


@on_ranks(2, originals=BOTH, rank0_only=[True, False, None])
def test_full_optim_state_dict(group: Collectives, files: Files, originals: bool, rank0_only: bool | None) -> None:
    """S-092: `full_optim_state_dict` returns what torch's does, by default on rank 0 only, and says what to use now.

    With use_orig_params=True torch's, which always offloads, returns exp_avg_sq for exp_avg on the CPU.
    """
    (model, optimizer), (their_model, their_optimizer) = trained_pair(group, originals, "full")
    settings = {} if rank0_only is None else {"rank0_only": rank0_only}
    with pytest.warns(FutureWarning, match="optim_state_dict"):
        state = FSDP.full_optim_state_dict(model, optimizer, **settings)
    expected = TheirFSDP.full_optim_state_dict(their_model, their_optimizer, **settings)
    if originals:
        expected = {**numbers_of(True), "param_groups": expected["param_groups"]} if expected else {}
    assert_same(state.get("state", {}), expected.get("state", {}))
    assert bool(state) == (rank0_only is False or group.rank == 0)
    if state:
        assert_same(by_sorted_names(state), by_sorted_names(expected))


@on_ranks(2, originals=BOTH)
def test_sharded_optim_state_dict(group: Collectives, files: Files, originals: bool) -> None:
    """S-092: `sharded_optim_state_dict` holds ShardedTensors: FSDP1's own where its chunks are asked for, else our boxes."""
    (model, optimizer), (their_model, their_optimizer) = trained_pair(group, originals, "chunked")
    expected = TheirFSDP.sharded_optim_state_dict(their_model, their_optimizer)
    with pytest.warns(FutureWarning, match="optim_state_dict"):
        state = FSDP.sharded_optim_state_dict(model, optimizer)
    assert_same(state["state"], expected["state"])
    FSDP.set_state_dict_type(model, *settings_of("full"))
    assert_same(whole(FSDP.sharded_optim_state_dict(model, optimizer)["state"]), whole(expected["state"]))


@on_ranks(2, originals=BOTH, named=BOTH)
def test_shard_full_optim_state_dict(group: Collectives, files: Files, originals: bool, named: bool) -> None:
    """S-093: every rank turns the full state into its own part, without the optimizer (or with it), as torch's does."""
    model = ours(build(originals), originals)
    optimizer = adamw(model.parameters())
    arguments: dict[str, Any] = {"optim": optimizer} if named else {}
    with pytest.warns(FutureWarning, match="optim_state_dict_to_load"):
        state = FSDP.shard_full_optim_state_dict(numbers_of(originals), model, **arguments)
    optimizer.load_state_dict(state)
    assert_optimizer(full_optimizer_state(model, optimizer), trained(originals).optimizer)


@on_ranks(2, 3, originals=BOTH)
def test_scatter_full_optim_state_dict(group: Collectives, files: Files, originals: bool) -> None:
    """S-093: only rank 0 has the full state; what the others pass is ignored."""
    model = ours(build(originals), originals)
    optimizer = adamw(model.parameters())
    given: Any = numbers_of(originals) if group.rank == 0 else (None if group.rank == 1 else {"wrong": 1})
    with pytest.warns(FutureWarning, match="optim_state_dict_to_load"):
        state = FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer)
    optimizer.load_state_dict(state)
    assert_optimizer(full_optimizer_state(model, optimizer), trained(originals).optimizer)


@on_ranks(2, originals=BOTH, form=["chunked", "sharded"])
def test_flatten_sharded_optim_state_dict(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-093: sharded states, torch's among them, become what the optimizer loads."""
    (model, optimizer), (their_model, their_optimizer) = trained_pair(
        group, originals, form.replace("sharded", "chunked")
    )
    state = TheirFSDP.sharded_optim_state_dict(their_model, their_optimizer)
    if form == "sharded":
        FSDP.set_state_dict_type(model, *settings_of("sharded"))
        state = FSDP.sharded_optim_state_dict(model, optimizer)
    again = adamw(model.parameters(), lr=0.5)
    with pytest.warns(FutureWarning, match="optim_state_dict_to_load"):
        loadable = FSDP.flatten_sharded_optim_state_dict(state, model, again)
    again.load_state_dict(loadable)
    assert_optimizer(full_optimizer_state(model, again), trained(originals).optimizer)


# Keys


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The unsharded model and its optimizer, after a step."""
    model = build(True)
    optimizer = adamw(groups_of(model, True))
    prime(optimizer)
    return model, optimizer


@on_ranks(2)
def test_rekeying(group: Collectives, files: Files) -> None:
    """S-094: numbers become names and names numbers as torch's do, with our members and torch's; one kind stays as it is."""
    model, optimizer = plain()
    numbered = optimizer.state_dict()
    by_name = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    expected = TheirFSDP.rekey_optim_state_dict(numbered, TheirKeyType.PARAM_NAME, model, optim=optimizer)
    assert_same(by_name, expected)
    assert_same(by_name["state"], named_state(model, optimizer))
    back = FSDP.rekey_optim_state_dict(by_name, TheirKeyType.PARAM_ID, model, optim=optimizer)
    assert_same(back, TheirFSDP.rekey_optim_state_dict(by_name, TheirKeyType.PARAM_ID, model, optim=optimizer))
    assert_same(back["state"], numbered["state"])
    assert FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_ID, model) is numbered
    assert FSDP.rekey_optim_state_dict(by_name, OptimStateKeyType.PARAM_NAME, model) is by_name


@on_ranks(2, originals=BOTH)
def test_a_plain_state_in_a_sharded_model_and_back(group: Collectives, files: Files, originals: bool) -> None:
    """S-094: the state of an unwrapped run, re-keyed, loads into the wrapped model; the wrapped one's into the unwrapped."""
    local = build(originals)
    local_optimizer = adamw(local.parameters())
    prime(local_optimizer)
    by_name = FSDP.rekey_optim_state_dict(
        local_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, local, optim=local_optimizer
    )
    model = ours(build(originals), originals)
    optimizer = adamw(model.parameters(), lr=0.5)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, by_name))
    state = full_optimizer_state(model, optimizer)
    assert_optimizer(state, named_state(local, local_optimizer))
    back = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, local, optim=local_optimizer)
    assert_same(back["state"], local_optimizer.state_dict()["state"])


@on_ranks(2)
def test_rekeying_mixed_keys(group: Collectives, files: Files) -> None:
    """S-094: a state with both kinds of key is a ValueError on every rank."""
    model, optimizer = plain()
    state = optimizer.state_dict()
    state["state"]["row"] = state["state"][0]
    with pytest.raises(ValueError, match="row"):
        FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)


@on_ranks(2)
def test_optim_input(group: Collectives, files: Files) -> None:
    """S-094: the deprecated `optim_input` is honoured, with a FutureWarning, as a list of parameters and as groups."""
    model, optimizer = plain()
    for optim_input in (list(model.parameters()), groups_of(model, True)):
        numbered = optimizer.state_dict()
        with pytest.warns(FutureWarning, match="optim_input"):
            by_name = FSDP.rekey_optim_state_dict(
                numbered, OptimStateKeyType.PARAM_NAME, model, optim_input=optim_input
            )
        assert_same(by_name["state"], named_state(model, optimizer))
    wrapped = ours(build(), False)
    found = adamw(wrapped.parameters())
    restored(wrapped, found)
    with pytest.warns(FutureWarning, match="optim_input"):
        state = FSDP.full_optim_state_dict(wrapped, found, optim_input=list(wrapped.parameters()))
    if group.rank == 0:
        assert_optimizer(state, trained().optimizer)
    else:
        assert state == {}
    with pytest.raises(ValueError, match=r"(?i)empty|optim_input"):
        FSDP.shard_full_optim_state_dict(numbers_of(False), wrapped, optim_input=[], optim=found)


# Optimizers with names for keys


class Keyed(torch.optim.AdamW):
    """An optimizer whose state dict has names for keys, as TorchRec's KeyedOptimizer and torch's NamedOptimizer have."""

    def __init__(self, named: Any, **settings: Any) -> None:
        found = list(named)
        self.names = [name for name, _ in found]
        super().__init__([parameter for _, parameter in found], **settings)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return self._renamed(state, self.names.__getitem__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        super().load_state_dict(self._renamed(state_dict, numbers.__getitem__))

    @staticmethod
    def _renamed(state: dict[str, Any], rename: Callable[[Any], Any]) -> dict[str, Any]:
        groups = [{**g, "params": [rename(p) for p in g["params"]]} for g in state["param_groups"]]
        return {"state": {rename(k): v for k, v in state["state"].items()}, "param_groups": groups}


@on_ranks(2, originals=BOTH, form=["full", "sharded", "chunked", "dtensor"])
def test_optimizers_with_names_for_keys(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-096: an optimizer with string keys saves the same state as torch's, and `is_named_optimizer` loads it by its keys."""
    model = ours(build(originals), originals, form)
    optimizer = Keyed(model.named_parameters(), lr=0.01, weight_decay=0.5)
    train(model, optimizer, group.rank)
    state = FSDP.optim_state_dict(model, optimizer)
    if form in FORMS:
        theirs = fsdp1(build(originals), originals, FORMS[form])
        their_optimizer = Keyed(theirs.named_parameters(), lr=0.01, weight_decay=0.5)
        train(theirs, their_optimizer, group.rank)
        expected = TheirFSDP.optim_state_dict(theirs, their_optimizer)
        assert set(state["state"]) == set(expected["state"])
        if group.size == 2:
            assert_same(state["state"], expected["state"])
    again = Keyed(model.named_parameters(), lr=0.5)
    prime(again)
    loadable = FSDP.optim_state_dict_to_load(model, again, state, is_named_optimizer=True)
    assert all(isinstance(key, str) for key in loadable["state"])
    again.load_state_dict(loadable)
    assert_same(whole(FSDP.optim_state_dict(model, again)), whole(state))


@on_ranks(2)
def test_torchs_named_optimizer(group: Collectives, files: Files) -> None:
    """S-096: torch's own `_NamedOptimizer` over our model saves and loads by name."""
    from torch.distributed.optim import _NamedOptimizer

    model = ours(build(True), True)

    def named() -> Any:
        trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return _NamedOptimizer(trainable, torch.optim.AdamW, module=model, lr=0.01, weight_decay=0.5)

    optimizer = named()
    for step in BEFORE:
        model.zero_grad()  # the optimizer has no zero_grad that works
        loss_of(model, step, group.rank).backward()
        optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    assert_optimizer(state, trained(True).optimizer)
    assert parameter_names(state) == [sorted(trained(True).optimizer)]


@on_ranks(2, originals=BOTH, form=["full", "sharded", "chunked", "dtensor"])
def test_parameters_without_state(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-095: an optimizer that has not stepped, and one whose parameters are partly unused, save and load as they are.

    In a sharded state, what was not stepped has zeros, so that programs can load into it, and training is the same.
    """
    model = ours(build(originals), originals, form)
    optimizer = adamw(model.parameters())
    state = FSDP.optim_state_dict(model, optimizer)
    assert parameter_names(state) == [sorted(name for name, _ in build().named_parameters())]
    again = adamw(model.parameters(), lr=0.5)
    again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
    assert not optimizer.state
    if form == "full":
        assert state["state"] == {}
        assert not again.state
    else:
        found = whole(state)["state"].values()
        assert found
        assert not any(value.any() for values in found for value in values.values())
    assert again.param_groups[0]["lr"] == 0.01
    model.module.codec(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()  # one unit only
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    whole_state = whole(state)["state"]
    trains = {name for name, parameter in build(originals).named_parameters() if parameter.requires_grad}
    assert set(state["state"]) == ({"codec.encode.weight"} if form == "full" else trains)
    for name in trains & set(whole_state) - {"codec.encode.weight"}:
        assert not any(value.any() for value in whole_state[name].values())
    again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
    assert_same(whole(FSDP.optim_state_dict(model, again)), whole(state))


@on_ranks(2)
def test_torchs_own_settings(group: Collectives, files: Files) -> None:
    """torch's and our enums and configurations mean the same to every method."""
    model = ours(build(), False)
    optimizer = adamw(model.parameters())
    restored(model, optimizer)
    FSDP.set_state_dict_type(model, *torch_files.settings_of("full"))
    assert_optimizer(FSDP.optim_state_dict(model, optimizer), trained().optimizer)
    FSDP.set_state_dict_type(model, *torch_files.settings_of("sharded"))
    assert_optimizer(whole(FSDP.optim_state_dict(model, optimizer)), trained().optimizer)
