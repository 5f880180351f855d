"""The methods for optimizer state, called in every documented way; `integration_tests/state` compares their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from integration_tests.fsdp1.asking import Library, alike, unlike, warned
from integration_tests.fsdp1.subjects import batch, blocks, full, rank, seeded

BOTH = [False, True]


def trained(library: Library, originals: bool, form: str = "FULL_STATE_DICT", seed: int = 0) -> tuple[Any, Any]:
    """The net and its optimizer after two steps; states stay where they are, since FSDP1 saves others from the CPU."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals)
    kind = form.split("_")[0].title()
    library.FSDP.set_state_dict_type(
        model,
        library.StateDictType[form],
        getattr(library, f"{kind}StateDictConfig")(),
        getattr(library, f"{kind}OptimStateDictConfig")(offload_to_cpu=False),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(seed + step + rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def form_of(state: Any) -> Any:
    """Keys, shapes and dtypes of a state, without its values."""
    if isinstance(state, Mapping):
        return {str(key): form_of(state[key]) for key in sorted(state, key=str)}
    if isinstance(state, ShardedTensor):
        return "ShardedTensor", tuple(state.metadata().size), str(state.dtype)
    if isinstance(state, torch.Tensor):
        return type(state).__name__, tuple(state.shape), str(state.dtype)
    if isinstance(state, (list, tuple)):
        return [form_of(each) for each in (sorted(state, key=str) if all_names(state) else state)]
    return state


def numbers(loaded: Any, originals: bool) -> list[Any]:
    """The keys of a state to load, and how many each group has.

    Of originals this rank may hold nothing, and then FSDP1 has no state for them.
    """
    return [
        None if originals else sorted(map(str, loaded["state"])),
        sorted(loaded),
        [len(group["params"]) for group in loaded["param_groups"]],
    ]


def all_names(values: Any) -> bool:
    """Whether the names of a group, of which FSDP1's order is another."""
    return all(isinstance(value, str) for value in values)


@alike(ranks=2, originals=BOTH, form=["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_optim_state_dict(library: Library, originals: bool, form: str) -> Any:
    """By position and by name, with the optimizer's state or without, with the group or without."""
    model, optimizer = trained(library, originals, form)
    ask = library.FSDP.optim_state_dict
    return [
        form_of(state)
        for state in (
            ask(model, optimizer),
            ask(model, optimizer, None),
            ask(model, optimizer, optimizer.state_dict()),
            ask(model, optimizer, optimizer.state_dict(), None),
            ask(model, optimizer, None, dist.group.WORLD),
            ask(model=model, optim=optimizer, optim_state_dict=optimizer.state_dict(), group=None),
        )
    ]


@alike(ranks=2, originals=BOTH)
def test_full_values(library: Library, originals: bool) -> Any:
    """The full state has the same values."""
    model, optimizer = trained(library, originals)
    state = library.FSDP.optim_state_dict(model, optimizer)
    return {name: state["state"][name] for name in sorted(state["state"])}


@alike(ranks=2, originals=BOTH, how=["position", "name", "directly", "named_optimizer_off", "group"])
def test_optim_state_dict_to_load(library: Library, originals: bool, how: str) -> Any:
    """The state of one goes into another's optimizer, by itself or directly; both go on to the same values."""
    model, optimizer = trained(library, originals)
    state = library.FSDP.optim_state_dict(model, optimizer)
    other, target = trained(library, originals, seed=5)
    convert = library.FSDP.optim_state_dict_to_load
    loaded = {
        "position": lambda: convert(other, target, state),
        "name": lambda: convert(model=other, optim=target, optim_state_dict=state),
        "directly": lambda: convert(other, target, state, False, True),
        "named_optimizer_off": lambda: convert(other, target, state, is_named_optimizer=False, load_directly=False),
        "group": lambda: convert(other, target, state, group=dist.group.WORLD),
    }[how]()
    if how != "directly":
        target.load_state_dict(loaded)
    other.load_state_dict(model.state_dict())
    other(batch(9)).square().mean().backward()
    target.step()
    return [numbers(loaded, originals), full(library, other)]


@alike(ranks=2, originals=BOTH, how=["none", "all", "first", "names", "group"])
def test_full_optim_state_dict(library: Library, originals: bool, how: str) -> Any:
    """Rank 0 has the state, or all have; what is warned of."""
    model, optimizer = trained(library, originals)
    ask = library.FSDP.full_optim_state_dict
    with warned() as found:
        state = {
            "none": lambda: ask(model, optimizer),
            "all": lambda: ask(model, optimizer, None, False),
            "first": lambda: ask(model, optimizer, rank0_only=True),
            "names": lambda: ask(model=model, optim=optimizer, optim_input=None, rank0_only=False, group=None),
            "group": lambda: ask(model, optimizer, group=dist.group.WORLD),
        }[how]()
    return [form_of(state), "FutureWarning" in found]


@alike(ranks=2, originals=BOTH, how=["parameters", "list", "groups"])
def test_optim_input(library: Library, originals: bool, how: str) -> Any:
    """The deprecated argument: parameters or groups; FSDP1 says that it is one."""
    model, optimizer = trained(library, originals)
    given = {
        "parameters": lambda: model.parameters(),
        "list": lambda: list(model.parameters()),
        "groups": lambda: [{"params": list(model.parameters())}],
    }[how]
    with warned() as found:
        state = library.FSDP.full_optim_state_dict(model, optimizer, given(), False)
        loaded = library.FSDP.shard_full_optim_state_dict(state, model, given())
    return [form_of(state), numbers(loaded, originals), "FutureWarning" in found]


@alike(ranks=2, originals=BOTH, how=["nothing", "optim", "names"])
def test_shard_full_optim_state_dict(library: Library, originals: bool, how: str) -> Any:
    """Every rank makes its part, with the optimizer or without."""
    model, optimizer = trained(library, originals)
    state = library.FSDP.optim_state_dict(model, optimizer)
    ask = library.FSDP.shard_full_optim_state_dict
    with warned() as found:
        loaded = {
            "nothing": lambda: ask(state, model),
            "optim": lambda: ask(state, model, None, optimizer),
            "names": lambda: ask(full_optim_state_dict=state, model=model, optim=optimizer),
        }[how]()
    optimizer.load_state_dict(loaded)
    return [numbers(loaded, originals), found]


@alike(ranks=2, originals=BOTH, how=["nothing", "optim", "group", "others_pass_none"])
def test_scatter_full_optim_state_dict(library: Library, originals: bool, how: str) -> Any:
    """Rank 0's state goes to all."""
    model, optimizer = trained(library, originals)
    state = library.FSDP.optim_state_dict(model, optimizer)
    ask = library.FSDP.scatter_full_optim_state_dict
    mine = state if rank() == 0 or how != "others_pass_none" else None
    loaded = {
        "nothing": lambda: ask(state, model),
        "optim": lambda: ask(state, model, None, optimizer),
        "group": lambda: ask(state, model, optim=optimizer, group=dist.group.WORLD),
        "others_pass_none": lambda: ask(mine, model=model, optim=optimizer),
    }[how]()
    optimizer.load_state_dict(loaded)
    return numbers(loaded, originals)


@alike(ranks=2, originals=BOTH)
def test_sharded_and_flattened(library: Library, originals: bool) -> Any:
    """The two sharded ones, one after the other, give back what the optimizer had."""
    model, optimizer = trained(library, originals, "SHARDED_STATE_DICT")
    with warned() as found:
        state = library.FSDP.sharded_optim_state_dict(model, optimizer, group=None)
        loaded = library.FSDP.flatten_sharded_optim_state_dict(
            sharded_optim_state_dict=state, model=model, optim=optimizer
        )
    before = optimizer.state_dict()
    same = [
        torch.equal(loaded["state"][key]["exp_avg"].flatten(), value["exp_avg"].flatten())
        for key, value in before["state"].items()
        if value["exp_avg"].numel()
    ]
    return [form_of(state), all(same), "FutureWarning" in found]


def rekeyed(library: Library, how: str) -> Any:
    """A plain model's optimizer state in the other kind of keys."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    ask, kinds = library.FSDP.rekey_optim_state_dict, library.OptimStateKeyType
    named = ask(state, kinds.PARAM_NAME, model, None, optimizer)
    return {
        "names": lambda: named,
        "names_of_parameters": lambda: ask(state, kinds.PARAM_NAME, model),
        "names_of_input": lambda: ask(state, kinds.PARAM_NAME, model, list(model.parameters())),
        "names_of_groups": lambda: ask(
            state, kinds.PARAM_NAME, model, optim_input=[{"params": list(model.parameters())}]
        ),
        "numbers": lambda: ask(named, kinds.PARAM_ID, model, optim=optimizer),
        "numbers_of_parameters": lambda: ask(optim_state_dict=named, optim_state_key_type=kinds.PARAM_ID, model=model),
        "as_they_are": lambda: [
            ask(state, kinds.PARAM_ID, model) is state,
            ask(named, kinds.PARAM_NAME, model, optim=optimizer) is named,
        ],
        "mixed": lambda: ask({**state, "state": {0: {}, "a": {}}}, kinds.PARAM_ID, model),
    }[how]()


@alike(
    how=[
        "names",
        "names_of_parameters",
        "names_of_input",
        "names_of_groups",
        "numbers",
        "numbers_of_parameters",
        "as_they_are",
        "mixed",
    ]
)
def test_rekey_optim_state_dict(library: Library, how: str) -> Any:
    """Numbers to names and names to numbers, with each way to say what the numbers are."""
    with warned() as found:
        state = rekeyed(library, how)
    return [state, found]


@unlike("A model without wrappers", ours=[["0.bias", "0.weight"], [0, 1]])
def test_a_plain_model(library: Library) -> Any:
    """FSDP1 cannot say anything of a model without wrappers."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 2)))
    optimizer = torch.optim.Adam(model.parameters())
    model(batch()).sum().backward()
    optimizer.step()
    state = library.FSDP.optim_state_dict(model, optimizer)
    return [
        sorted(state["state"]),
        sorted(library.FSDP.optim_state_dict_to_load(model, optimizer, state)["state"]),
    ]
