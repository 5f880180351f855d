"""`flatparam.checkpoint.state_dict` beside `torch.distributed.checkpoint.state_dict`: on plain models, and on FSDP1."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn

from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model, assert_optimizer, assert_same, whole
from integration_tests.state.ours import FSDP, full_optimizer_state, full_state, ours, prime, restored
from integration_tests.state.sample import (
    AFTER,
    OF_RANK,
    Sample,
    adamw,
    build,
    copied,
    named_state,
    train,
    trained,
)
from integration_tests.state.torch_files import Files, fsdp1, mesh_of_world
from integration_tests.state.worlds import on_ranks

BOTH = [False, True]
NAMES = (
    "get_model_state_dict",
    "set_model_state_dict",
    "get_optimizer_state_dict",
    "set_optimizer_state_dict",
    "get_state_dict",
    "set_state_dict",
)


def mine() -> Any:
    """Our module of functions."""
    import flatparam.checkpoint.state_dict as module

    return module


def options(kind: str = "ours", **fields: Any) -> Any:
    """The options as an object of ours, or of torch's."""
    return (mine() if kind == "ours" else theirs).StateDictOptions(**fields)


def wrapped(originals: bool, mesh: bool = False, mixed: bool | None = None, seed: int = 0) -> FSDP:
    """Our sample; with `mesh` its sharded state is of DTensors."""
    mixed = originals if mixed is None else mixed
    arguments: dict[str, Any] = {"device_mesh": mesh_of_world()} if mesh else {}
    return ours(build(mixed, seed), originals, "full", **arguments)


def at_checkpoint(originals: bool, mesh: bool = False) -> tuple[FSDP, torch.optim.Optimizer]:
    """Our sample and its optimizer with the state of `trained`."""
    model = wrapped(originals, mesh)
    optimizer = adamw(model.parameters())
    restored(model, optimizer, originals)
    return model, optimizer


@on_ranks(1)
def test_names_and_signatures(group: Collectives, files: Files) -> None:
    """S-097: the six functions have torch's parameters, and the options torch's fields and defaults."""
    for name in NAMES:
        found = inspect.signature(getattr(mine(), name)).parameters.values()
        expected = inspect.signature(getattr(theirs, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected]
    assert {**vars(mine().StateDictOptions())} == {**vars(theirs.StateDictOptions())}


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full-cpu": {"full_state_dict": True, "cpu_offload": True},
    "trained": {"ignore_frozen_params": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "flat-trained": {"flatten_optimizer_state_dict": True, "ignore_frozen_params": True},
}


@on_ranks(1, option=list(OPTIONS), kind=["ours", "torch's"])
def test_a_plain_model(group: Collectives, files: Files, option: str, kind: str) -> None:
    """Without any wrapper they return what torch's return, with every option, as an object of ours and of torch's."""
    model = build(True)
    optimizer = adamw(model.parameters())
    prime(optimizer)
    found = mine().get_state_dict(model, optimizer, options=options(kind, **OPTIONS[option]))
    expected = theirs.get_state_dict(model, optimizer, options=options("torch's", **OPTIONS[option]))
    assert_same(found, expected)
    other = build(True, seed=1)
    other_optimizer = adamw(other.parameters(), lr=0.5)
    mine().set_state_dict(
        other,
        other_optimizer,
        model_state_dict=found[0],
        optim_state_dict=found[1],
        options=options(kind, strict=False, **OPTIONS[option]),
    )
    assert_same(named_state(other, other_optimizer), named_state(model, optimizer))
    assert_same(dict(other.named_buffers())["shift"], model.shift)


@on_ranks(2, option=list(OPTIONS), originals=BOTH, mesh=BOTH)
def test_beside_fsdp1(group: Collectives, files: Files, option: str, originals: bool, mesh: bool) -> None:
    """S-097: of our wrapper they return what torch's return of FSDP1: bit for bit, with a mesh shard for shard.

    torch cannot do two of these on the CPU (offloading a full state crashes it; flattening what `use_orig_params=False`
    flattened fails): there the same function on the unsharded model says what is right.
    """
    model, optimizer = at_checkpoint(originals, mesh)
    found, found_optimizer = mine().get_state_dict(model, optimizer, options=options(**OPTIONS[option]))
    local, local_optimizer = restored_plain(originals)
    plain = theirs.get_state_dict(local, local_optimizer, options=options("torch's", **OPTIONS[option]))
    if option == "full-cpu" and group.rank != 0:
        assert (found, found_optimizer) == ({}, {})
        return
    assert_model(whole(found), plain[0])
    assert_same(whole(without_groups(found_optimizer)), without_groups(plain[1]))
    if option in ("default", "full", "trained"):
        model = fsdp1(build(originals), originals, "dtensor" if mesh else "full")
        optimizer = adamw(model.parameters())
        theirs.set_state_dict(
            model,
            optimizer,
            model_state_dict=trained(originals).model,
            optim_state_dict=theirs.get_optimizer_state_dict(local, local_optimizer),
            options=options("torch's", full_state_dict=True),
        )
        expected = theirs.get_state_dict(model, optimizer, options=options("torch's", **OPTIONS[option]))
        if mesh:
            assert_same((found, without_groups(found_optimizer)), (expected[0], without_groups(expected[1])))
        assert set(found) == set(expected[0])
        assert_same(sorted_groups(found_optimizer), sorted_groups(expected[1]))


def restored_plain(mixed: bool) -> tuple[Sample, torch.optim.Optimizer]:
    """The unsharded model and its optimizer with the state of `trained`."""
    model = build(mixed)
    model.load_state_dict(trained(mixed).model)
    optimizer = adamw(model.parameters())
    for name, parameter in model.named_parameters():
        if name in trained(mixed).optimizer:
            optimizer.state[parameter] = copied(trained(mixed).optimizer[name])
    return model, optimizer


def without_groups(state: Any) -> Any:
    """An optimizer state but for its settings."""
    return {key: value for key, value in state.items() if not key.startswith("param_groups")}


def sorted_groups(state: Any) -> Any:
    """The settings, the names in order."""
    return [{**group, "params": sorted(group["params"])} for group in state.get("param_groups", [])]


@on_ranks(2, option=list(OPTIONS), originals=BOTH, mesh=BOTH)
def test_round_trip(group: Collectives, files: Files, option: str, originals: bool, mesh: bool) -> None:
    """What they get with any option they set, with the same option, into another seed's model of the other exposure."""
    if OPTIONS[option].get("cpu_offload") and group.size > 1:
        return  # only rank 0 gets it; see `test_broadcast_from_rank_0`
    model, optimizer = at_checkpoint(originals, mesh)
    state, optimizer_state = mine().get_state_dict(model, optimizer, options=options(**OPTIONS[option]))
    other = wrapped(not originals, mesh, mixed=originals, seed=1)
    other_optimizer = adamw(other.parameters(), lr=0.5)
    told = mine().set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state,
        optim_state_dict=optimizer_state,
        options=options(**{**OPTIONS[option], "strict": "trained" not in option}),
    )
    frozen = [name for name, p in build(originals).named_parameters() if not p.requires_grad]
    left = frozen if "trained" in option else []
    assert sorted(told.missing_keys) == sorted(left)
    assert_model(full_state(other), trained(originals).model, but=left)
    assert_optimizer(full_optimizer_state(other, other_optimizer), trained(originals).optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.01


@on_ranks(2, 3, originals=BOTH, mesh=BOTH)
def test_broadcast_from_rank_0(group: Collectives, files: Files, originals: bool, mesh: bool) -> None:
    """L-40: with `broadcast_from_rank0` only rank 0 has the full state of model and optimizer; the others pass nothing."""
    local, local_optimizer = restored_plain(originals)
    state = local.state_dict() if group.rank == 0 else {}
    optimizer_state = theirs.get_optimizer_state_dict(local, local_optimizer) if group.rank == 0 else {}
    model = wrapped(originals, mesh, seed=1)
    optimizer = adamw(model.parameters(), lr=0.5)
    how = options(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=originals)
    mine().set_model_state_dict(model, state, options=how)
    mine().set_optimizer_state_dict(model, optimizer, optimizer_state, options=how)
    assert_model(full_state(model), trained(originals).model)
    assert_optimizer(full_optimizer_state(model, optimizer), trained(originals).optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, group.rank, AFTER)
    if group.size == 2:
        assert_model(full_state(model), trained(originals).end, but=OF_RANK)


@on_ranks(2)
def test_broadcast_needs_full(group: Collectives, files: Files) -> None:
    """`broadcast_from_rank0` without `full_state_dict` is a ValueError, as in torch."""
    model = wrapped(False)
    with pytest.raises(ValueError, match="full_state_dict"):
        mine().set_model_state_dict(model, {}, options=options(broadcast_from_rank0=True))


@on_ranks(2, originals=BOTH, keep=BOTH)
def test_submodules(group: Collectives, files: Files, originals: bool, keep: bool) -> None:
    """`submodules` gives the state of these only, with their prefix or (`keep_submodule_prefixes`) without, as torch's."""
    model, _ = at_checkpoint(originals)
    part = model.module.normed
    how = {"full_state_dict": True, "keep_submodule_prefixes": keep}
    found = mine().get_model_state_dict(model, submodules={part}, options=options(**how))
    local, _ = restored_plain(originals)
    expected = theirs.get_model_state_dict(local, submodules={local.normed}, options=options("torch's", **how))
    assert_same(found, expected)
    other = wrapped(originals, seed=1)
    given: Any = found if keep else {other.module.normed: found}
    mine().set_model_state_dict(other, given, options=options(full_state_dict=True, strict=False))
    state = full_state(other)
    assert_same(
        {k: v for k, v in state.items() if k.startswith("normed")},
        {k: v for k, v in trained(originals).model.items() if k.startswith("normed")},
    )
    assert_same(state["row"], build(originals, seed=1).state_dict()["row"])


@on_ranks(2, originals=BOTH)
def test_strict(group: Collectives, files: Files, originals: bool) -> None:
    """`strict=False` reports missing and unexpected keys by their plain names and loads the rest; strict refuses."""
    state = trained(originals).model
    partial = {**{k: v for k, v in state.items() if k != "row"}, "stranger": torch.zeros(2)}
    model = wrapped(originals, seed=1)
    with pytest.raises(RuntimeError, match="row"):
        mine().set_model_state_dict(model, partial, options=options(full_state_dict=True))
    told = mine().set_model_state_dict(model, partial, options=options(full_state_dict=True, strict=False))
    assert (told.missing_keys, told.unexpected_keys) == (["row"], ["stranger"])
    assert_model(full_state(model), state, but=["row"])


@on_ranks(2, 3, originals=BOTH, how=["full", "flattened", "broadcast"])
def test_an_optimizer_state_that_lacks_a_parameter(group: Collectives, files: Files, originals: bool, how: str) -> None:
    """Every rank refuses a state without a trained parameter, as torch does, and nothing is loaded; unless not strict."""
    local, local_optimizer = restored_plain(originals)
    given = {"flatten_optimizer_state_dict": how == "flattened"}
    state = theirs.get_optimizer_state_dict(local, local_optimizer, options=options("torch's", **given))
    if how == "flattened":
        state = {key: value for key, value in state.items() if not key.startswith("state.gain.")}
    else:
        del state["state"]["gain"]
        with pytest.raises(RuntimeError, match="gain"):
            theirs.set_optimizer_state_dict(local, local_optimizer, state)
    given |= {"full_state_dict": True, "broadcast_from_rank0": how == "broadcast"}
    model = wrapped(originals, seed=1)
    optimizer = adamw(model.parameters(), lr=0.5)
    prime(optimizer)
    before = full_optimizer_state(model, optimizer)
    mine_given = {} if how == "broadcast" and group.rank else state
    with pytest.raises(RuntimeError, match="nothing for the trained parameters 'gain';"):
        mine().set_optimizer_state_dict(model, optimizer, mine_given, options=options(**given))
    assert_optimizer(full_optimizer_state(model, optimizer), before["state"])
    assert optimizer.param_groups[0]["lr"] == 0.5
    mine().set_optimizer_state_dict(model, optimizer, mine_given, options=options(**given, strict=False))
    assert optimizer.param_groups[0]["lr"] == 0.01


@on_ranks(2, originals=BOTH)
def test_an_optimizer_state_that_does_not_fit_one_rank(group: Collectives, files: Files, originals: bool) -> None:
    """If one rank's state does not fit, every rank raises, and nothing is loaded anywhere."""
    local, local_optimizer = restored_plain(originals)
    state = theirs.get_optimizer_state_dict(local, local_optimizer)
    if group.rank == 1:
        state["state"]["gain"]["exp_avg"] = torch.zeros(3)
    model = wrapped(originals, seed=1)
    optimizer = adamw(model.parameters(), lr=0.5)
    with pytest.raises(RuntimeError, match="gain" if group.rank else "rank 1: .*gain"):
        mine().set_optimizer_state_dict(model, optimizer, state, options=options(full_state_dict=True))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


@on_ranks(2, originals=BOTH)
def test_states_are_loaded_together(group: Collectives, files: Files, originals: bool) -> None:
    """If the state of the model or that of its optimizer does not fit, `set_state_dict` loads neither."""
    local, local_optimizer = restored_plain(originals)
    weights, moments = theirs.get_state_dict(local, local_optimizer)
    other = copy.deepcopy(moments)
    other["state"]["gain"]["exp_avg"] = torch.zeros(3)
    model = wrapped(originals, seed=1)
    optimizer = adamw(model.parameters(), lr=0.5)
    before = full_state(model)
    lacking = {name: value for name, value in weights.items() if name != "gain"}
    for of_model, of_optimizer in ((weights, other), (lacking, moments)):
        with pytest.raises(RuntimeError, match="gain"):
            mine().set_state_dict(
                model,
                optimizer,
                model_state_dict=of_model,
                optim_state_dict=of_optimizer,
                options=options(full_state_dict=True),
            )
        assert_model(full_state(model), before)
        assert not optimizer.state


@on_ranks(2, originals=BOTH)
def test_a_compiled_model(group: Collectives, files: Files, originals: bool) -> None:
    """What `torch.compile` has returned is loaded and saved as the model inside."""
    state = trained(originals).model
    model = wrapped(originals, seed=1)
    compiled = torch.compile(model, backend="eager")
    told = mine().set_model_state_dict(compiled, state, options=options(full_state_dict=True, strict=False))
    assert (told.missing_keys, told.unexpected_keys) == ([], [])
    assert_model(full_state(model), state)
    again = mine().get_model_state_dict(compiled, options=options(full_state_dict=True))
    assert_model(again, state)
    mine().set_model_state_dict(compiled, again, options=options(full_state_dict=True))
    inside = nn.Sequential(torch.compile(wrapped(originals, seed=2), backend="eager"))
    named = {f"0.{name}": value for name, value in state.items()}
    mine().set_model_state_dict(inside, named, options=options(full_state_dict=True))
    assert_model(mine().get_model_state_dict(inside, options=options(full_state_dict=True)), named)


@on_ranks(2, originals=BOTH)
def test_models_and_optimizers_that_torch_has_patched(group: Collectives, files: Files, originals: bool) -> None:
    """`_patch_model_state_dict` and its sibling have methods call these functions, which then ask the methods' class."""
    model = wrapped(originals, seed=1)
    optimizer = adamw(model.parameters())
    prime(optimizer)
    how = options(full_state_dict=True)
    given = {model: (mine().get_model_state_dict, mine().set_model_state_dict, (model,))}
    given[optimizer] = (mine().get_optimizer_state_dict, mine().set_optimizer_state_dict, (model, optimizer))
    for owner, (get, put, of) in given.items():
        expected = get(*of, options=how)
        calls = {
            "state_dict": functools.partial(get, *of, options=how),
            "load_state_dict": functools.partial(put, *of, options=how),
        }
        for name, call in calls.items():
            setattr(owner, name, call)
            theirs._patched_state_dict.add(call)
        try:
            found = owner.state_dict()
            assert list(found) == list(expected)
            owner.load_state_dict(found)
            assert vars(owner)["state_dict"] is calls["state_dict"]
        finally:
            theirs._patched_state_dict.difference_update(calls.values())


class Renaming(nn.Module):
    """A module whose state dict leaves out the name of a child, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.register_state_dict_post_hook(self._shorten)
        self.register_load_state_dict_pre_hook(self._lengthen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}

    @staticmethod
    def _shorten(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}inner.")]:
            state[prefix + key[len(prefix) + 6 :]] = state.pop(key)

    @staticmethod
    def _lengthen(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        for key in [k for k in state if k.startswith(prefix) and "." not in k[len(prefix) :]]:
            state[f"{prefix}inner.{key[len(prefix) :]}"] = state.pop(key)


@on_ranks(1)
def test_modifiers_of_names(group: Collectives, files: Files) -> None:
    """The method that `dsd_fqn_modifiers` names says which names a module's hooks leave out, as in torch.

    Another name than the default does not work in torch 2.13, which does not pass it on to where it is needed.
    """
    model = nn.Sequential(nn.Linear(2, 3), Renaming())
    how = options(dsd_fqn_modifiers="_fqn_modifiers")
    found = mine().get_model_state_dict(model, options=how)
    assert_same(found, theirs.get_model_state_dict(model))
    assert "1.weight" in found
    other = nn.Sequential(nn.Linear(2, 3), Renaming())
    mine().set_model_state_dict(other, found, options=how)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@on_ranks(2, originals=BOTH, flat=BOTH)
def test_several_optimizers(group: Collectives, files: Files, originals: bool, flat: bool) -> None:
    """L-41, S-097: a state of two optimizers, each over some of the parameters, is one state; it loads into both."""
    model = wrapped(originals)
    made = [adamw(part) for part in halves(model)]
    train(model, made, group.rank)
    how = options(full_state_dict=True, flatten_optimizer_state_dict=flat)
    state = mine().get_optimizer_state_dict(model, made, options=how)
    again = [adamw(part, lr=0.5) for part in halves(model)]
    mine().set_optimizer_state_dict(model, again, state, options=how)
    assert [o.param_groups[0]["lr"] for o in again] == [0.01, 0.01]
    found: dict[str, Any] = {}
    for optimizer in again:
        found.update(full_optimizer_state(model, optimizer)["state"])
    assert_same(found, trained(originals).optimizer)


class Counting(dict[str, Any]):
    """A state that counts how often all its entries are read."""

    reads = 0

    def items(self) -> Any:
        self.reads += 1
        return super().items()


@on_ranks(2, originals=BOTH)
def test_a_flattened_state_is_read_as_often_for_every_model(group: Collectives, files: Files, originals: bool) -> None:
    """A large model has many parameters and many entries: looking at all entries for each parameter takes minutes."""
    model, optimizer = at_checkpoint(originals)
    how = options(flatten_optimizer_state_dict=True)
    state = Counting(mine().get_optimizer_state_dict(model, optimizer, options=how))
    again = adamw(model.parameters())
    mine().set_optimizer_state_dict(model, again, state, options=how)
    assert 0 < state.reads <= 2 < len(list(model.parameters()) if originals else trained(originals).optimizer)
    assert_same(full_optimizer_state(model, again)["state"], full_optimizer_state(model, optimizer)["state"])


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every second parameter, and the others."""
    parameters = list(model.parameters())
    return parameters[::2], parameters[1::2]


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The head of the embedding."""
        out: torch.Tensor = self.head(self.embedding(x))
        return out


@on_ranks(2, originals=BOTH)
def test_a_full_state_may_have_one_name_of_a_tied_parameter(group: Collectives, files: Files, originals: bool) -> None:
    """Files of Hugging Face have the head under the embedding's name; torch loads that with `full_state_dict=True`."""
    whole_state = {name: torch.full((5, 3), 7.0) for name in ("embedding.weight", "head.weight")}
    for known in whole_state:
        model = FSDP(Tied(), group, use_orig_params=originals)
        state = {known: whole_state[known]}
        incompatible = mine().set_model_state_dict(model, state, options=options(full_state_dict=True))
        assert (incompatible.missing_keys, incompatible.unexpected_keys) == ([], [])
        assert_same(full_state(model), whole_state)
        with pytest.raises(RuntimeError, match="embedding"):
            mine().set_model_state_dict(model, {"other": torch.zeros(1)}, options=options(full_state_dict=True))


@on_ranks(2, originals=BOTH)
def test_the_optimizer_is_made_ready(group: Collectives, files: Files, originals: bool) -> None:
    """The state of an optimizer that has not stepped is torch's, but no step is counted; the optimizer stays as it is."""
    model = wrapped(originals)
    optimizer = adamw(model.parameters())
    state = mine().get_optimizer_state_dict(model, optimizer)
    local = build(originals)
    expected = theirs.get_optimizer_state_dict(local, adamw(local.parameters()))
    for values in expected["state"].values():
        assert values["step"] == 1
        values["step"] -= 1
    assert_same(whole(without_groups(state)), without_groups(expected))
    assert not optimizer.state
    assert_model(full_state(model), build(originals).state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_the_settings_of_the_model_stay(group: Collectives, files: Files) -> None:
    """They do not leave another state dict type behind, also where they fail."""
    model, optimizer = at_checkpoint(False)
    before = FSDP.get_state_dict_type(model)
    mine().get_state_dict(model, optimizer)
    with pytest.raises(RuntimeError):
        mine().set_model_state_dict(model, {"wrong": torch.zeros(1)}, options=options(full_state_dict=True))
    after = FSDP.get_state_dict_type(model)
    assert (after.state_dict_type, vars(after.state_dict_config)) == (
        before.state_dict_type,
        vars(before.state_dict_config),
    )
