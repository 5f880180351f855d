"""What torch's FSDP1 cannot do with state, or does wrongly: torch failing, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TheirFSDP

import flatparam
from flatparam import StateDictType
from flatparam_comm import Collectives
from flatparam_core import FlatParamError
from integration_tests.parity.meter import Meter
from integration_tests.state.comparing import (
    assert_model,
    assert_optimizer,
    assert_same,
    difference,
    parameter_names,
    whole,
)
from integration_tests.state.ours import (
    FSDP,
    full_optimizer_state,
    full_state,
    numbers_of,
    ours,
    restored,
    settings_of,
)
from integration_tests.state.sample import UNITS, adamw, build, named_state, train, trained
from integration_tests.state.test_errors import buffers
from integration_tests.state.torch_files import CPU, Files, fsdp1
from integration_tests.state.torch_files import settings_of as torchs_settings
from integration_tests.state.worlds import on_ranks

BOTH = [False, True]
SHARDED = ["sharded", "chunked", "dtensor"]


@on_ranks(2)
def test_local_state_of_originals(group: Collectives, files: Files) -> None:
    """L-37: torch cannot load the local state that it saved with `use_orig_params=True`; ours can."""
    theirs = fsdp1(build(), True, "local")
    with pytest.raises(RuntimeError, match="loading state_dict"):
        theirs.load_state_dict(theirs.state_dict())
    mine, other = ours(build(), True, "local"), ours(build(seed=1), True, "local")
    other.load_state_dict(mine.state_dict())
    assert_same(full_state(other), full_state(mine))


class Empty(nn.Module):
    """A parameter without rows, one without elements in a row, one of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.thin = nn.Parameter(torch.empty(3, 0))
        self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))


@on_ranks(2, 3, form=SHARDED, originals=BOTH)
def test_parameters_without_elements(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-38: parameters of zero rows, and of zero columns, are in a sharded state and load, where torch divides by zero."""
    if group.size == 2 and form == "chunked":
        theirs = TheirFSDP(Empty(), device_id=CPU, use_orig_params=originals)
        TheirFSDP.set_state_dict_type(theirs, *torchs_settings("sharded"))
        with pytest.raises(ZeroDivisionError):
            theirs.load_state_dict(theirs.state_dict())
    mine = ours(Empty(), originals, form, units=())
    state = mine.state_dict()
    assert_same(whole(state), dict(Empty().state_dict()))
    other = ours(Empty(), originals, form, units=())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    other.load_state_dict(state)
    assert_same(full_state(other), dict(Empty().state_dict()))


class Gained(nn.Linear):
    """A layer with a parameter of no dimension."""

    def __init__(self, fill: float) -> None:
        super().__init__(2, 3)
        self.gain = nn.Parameter(torch.tensor(fill))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@on_ranks(2, form=SHARDED, originals=BOTH)
def test_a_zero_dimensional_parameter(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-26: a 0-d parameter, which torch does not take, is in a sharded state, with its optimizer state, and loads."""

    mine = ours(Gained(3.0), originals, form, units=())
    optimizer = adamw(mine.parameters())
    mine(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state, optimizer_state = mine.state_dict(), FSDP.optim_state_dict(mine, optimizer)
    assert_same(whole(state["gain"]), full_state(mine)["gain"])
    other = ours(Gained(5.0), not originals, form, units=())
    other.load_state_dict(state)
    again = adamw(other.parameters())
    again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, optimizer_state))
    assert_same(full_state(other), full_state(mine))
    assert_same(full_optimizer_state(other, again)["state"], full_optimizer_state(mine, optimizer)["state"])


@on_ranks(2, form=SHARDED, originals=BOTH)
def test_a_missing_key(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-38: a key that a sharded state lacks is an error that changes nothing, or with `strict=False` in the report."""
    state = ours(build(), originals, form).state_dict()
    del state["row"]
    mine = ours(build(seed=1), originals, form)
    before = full_state(mine)
    with pytest.raises(RuntimeError, match="row"):
        mine.load_state_dict(dict(state))
    assert_model(full_state(mine), before, but=buffers())  # which torch itself has loaded before it raises
    told = mine.load_state_dict(dict(state), strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["row"], [])
    assert_model(full_state(mine), build().state_dict(), but=["row"])


# Rank 0 only


@on_ranks(2, 3, originals=BOTH)
def test_streaming_a_full_state(group: Collectives, files: Files, originals: bool) -> None:
    """L-40: with `rank0_only` only rank 0 passes a full state to `load_state_dict`; buffers come along."""
    mine = ours(build(originals, seed=1), originals)
    config = flatparam.FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(mine, StateDictType.FULL_STATE_DICT, config):
        told = mine.load_state_dict(dict(trained(originals).model) if group.rank == 0 else {})
    assert (told.missing_keys, told.unexpected_keys) == ([], [])
    assert_model(full_state(mine), trained(originals).model)


@on_ranks(2)
def test_torch_needs_the_full_state_everywhere(group: Collectives, files: Files) -> None:
    """L-40: torch's FSDP1 with the same configuration misses every key on the ranks that have none."""
    theirs = fsdp1(build(seed=1), True)
    config = torchs_settings("full")[1]
    config.rank0_only = True
    with TheirFSDP.state_dict_type(theirs, torchs_settings("full")[0], config):
        told = theirs.load_state_dict(dict(build().state_dict()) if group.rank == 0 else {}, strict=False)
    assert bool(told.missing_keys) == (group.rank != 0)


@on_ranks(2, originals=BOTH)
def test_streaming_a_state_that_does_not_fit(group: Collectives, files: Files, originals: bool) -> None:
    """L-40: what is wrong with rank 0's state is the same error on every rank, and no parameter is changed."""
    mine = ours(build(originals, seed=1), originals)
    before = full_state(mine)
    state = dict(trained(originals).model)
    del state["head.weight"]
    wrong = {**trained(originals).model, "row": torch.zeros(2, 3)}
    config = flatparam.FullStateDictConfig(rank0_only=True)
    for given, word in ((state, "head.weight"), (wrong, "row")):
        with (
            FSDP.state_dict_type(mine, StateDictType.FULL_STATE_DICT, config),
            pytest.raises(RuntimeError, match=word),
        ):
            mine.load_state_dict(given if group.rank == 0 else {})
        assert difference(full_state(mine), before) is None


@on_ranks(2, 3, originals=BOTH)
def test_streaming_the_optimizer(group: Collectives, files: Files, originals: bool) -> None:
    """L-40, S-091: with `rank0_only` the state that other ranks pass to `optim_state_dict_to_load` is ignored."""
    mine = ours(build(originals), originals)
    optimizer = adamw(mine.parameters(), lr=0.5)
    config = flatparam.FullOptimStateDictConfig(rank0_only=True)
    given: Any = numbers_of(originals) if group.rank == 0 else [{}, {"state": 3}, None][group.rank]
    with FSDP.state_dict_type(mine, StateDictType.FULL_STATE_DICT, None, config):
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(mine, optimizer, given))
    assert_optimizer(full_optimizer_state(mine, optimizer), trained(originals).optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01


# Several optimizers


def split(model: nn.Module, parts: int = 2) -> list[list[nn.Parameter]]:
    """Every n-th parameter."""
    found = list(model.parameters())
    return [found[start::parts] for start in range(parts)]


@on_ranks(2)
def test_torch_needs_a_whole_unit(group: Collectives, files: Files) -> None:
    """L-41: torch refuses an optimizer over some of a unit's parameters."""
    theirs = fsdp1(build(), True)
    optimizers = [adamw(part) for part in split(theirs)]
    train(theirs, optimizers, group.rank)
    with pytest.raises(RuntimeError, match="is not in the optimizer state"):
        TheirFSDP.optim_state_dict(theirs, optimizers[0])


@on_ranks(2, form=["full", *SHARDED], originals=BOTH)
def test_several_optimizers(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-41: each of two optimizers saves the states of its own parameters, and loads them; together they are the whole."""
    mine = ours(build(originals), originals, form)
    optimizers = [adamw(part) for part in split(mine)]
    train(mine, optimizers, group.rank)
    states = [FSDP.optim_state_dict(mine, optimizer) for optimizer in optimizers]
    merged = {name: values for state in states for name, values in whole(state["state"]).items()}
    assert_same(merged, trained(originals).optimizer)
    names = [set(parameter_names(state)[0]) for state in states]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name, _ in build().named_parameters()}
    again = [adamw(part, lr=0.5) for part in split(mine)]
    for optimizer, state in zip(again, states, strict=True):
        loadable = FSDP.optim_state_dict_to_load(mine, optimizer, state)
        optimizer.load_state_dict(loadable)
        assert_same(whole(FSDP.optim_state_dict(mine, optimizer)), whole(state))


@on_ranks(2)
def test_an_optimizer_of_two_kinds(group: Collectives, files: Files) -> None:
    """L-41: optimizers of different kinds, one over the matrices and one over the rest, have states of their own."""
    mine = ours(build(), True, "sharded")
    rows = [p for p in mine.parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(rows[:3], lr=0.1, momentum=0.9), adamw(rows[3:])]
    train(mine, optimizers, group.rank)
    first, second = (FSDP.optim_state_dict(mine, optimizer) for optimizer in optimizers)
    assert {key for values in first["state"].values() for key in values} == {"momentum_buffer"}
    assert {key for values in second["state"].values() for key in values} == {"step", "exp_avg", "exp_avg_sq"}


# States of any dtype and shape


class Odd(torch.optim.Optimizer):
    """Keeps states of many kinds, computed from the parameter, and changes nothing."""

    def __init__(self, parameters: Any, own: Callable[[], Tensor] | None = None) -> None:
        self.own = own
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    **odd(parameter.detach()),
                    **({"own": self.own()} if self.own else {}),
                }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's own would cast all states to the dtype of the parameter."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, values in state_dict["state"].items():
            self.state[parameters[number]] = values


def odd(value: Tensor) -> dict[str, Any]:
    """Element by element in three dtypes, and things of other shapes that are the same for any part of the value."""
    return {
        "bytes": (value * 10).to(torch.int8),
        "half": value.to(torch.bfloat16),
        "double": value.double() * 3,
        "sign": value > 0,
        "factors": torch.tensor([1.0, 2.0, 3.0]),
        "table": torch.arange(4, dtype=torch.int16).reshape(2, 2),
        "zero": torch.tensor(0.5, dtype=torch.float64),
        "word": "abc",
        "nothing": None,
        "nested": {"a": [1, 2.5], "b": ("x", True)},
        "number": 7,
    }


@on_ranks(2, form=["full", *SHARDED], originals=BOTH)
def test_states_of_any_kind(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-42: states of any dtype and shape are saved, whole where they are elementwise, and load into the other exposure."""
    mine = ours(build(), originals, form)
    optimizer = Odd(mine.parameters())
    optimizer.step()
    state = FSDP.optim_state_dict(mine, optimizer)
    expected = {name: odd(value.detach()) for name, value in build().named_parameters()}
    assert_same(whole(state["state"]), expected)
    other = ours(build(), not originals, form)
    again = Odd(other.parameters())
    again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, state))
    assert_same(full_optimizer_state(other, again)["state"], expected)


@on_ranks(2, form=["full", *SHARDED], originals=BOTH)
def test_states_of_one_rank(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-42: what differs between the ranks is kept for each; it loads where the ranks' parts are the same, else an error."""

    def own() -> Tensor:
        return torch.tensor([10.0, 20.0]) + group.rank

    mine = ours(build(), originals, form)
    optimizer = Odd(mine.parameters(), own)
    optimizer.step()
    state = FSDP.optim_state_dict(mine, optimizer)
    again = Odd(mine.parameters())
    again.load_state_dict(FSDP.optim_state_dict_to_load(mine, again, state))
    for parameter in mine.parameters():
        if parameter in again.state:
            assert_same(again.state[parameter]["own"], own())
    other = ours(build(), originals, form, units=UNITS[1:])
    elsewhere = Odd(other.parameters())
    with pytest.raises(FlatParamError, match="own"):
        FSDP.optim_state_dict_to_load(other, elsewhere, state)
    assert not elsewhere.state


# Memory


class Wide(nn.Module):
    """Eight equal matrices, which become one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


ONE_TENSOR = 64 * 64 * 4
#: How many tensors gloo may still hold that have arrived: each of its threads, of which it has two by default, lets go of
#: what it moved last after it has said that it is done.
HELD_BY_GLOO = 2
#: How many full tensors a load may take, beside its result.
AT_MOST = {"full": 1, "sharded": 1, "chunked": 1 + HELD_BY_GLOO, "dtensor": 1 + HELD_BY_GLOO}
SMALL = 4096  # counters, indices and what else does not grow with the model


def wide(originals: bool, form: str, gain: float) -> tuple[FSDP, torch.optim.Optimizer]:
    """`Wide` with an optimizer that has stepped."""
    module = Wide()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.fill_(gain + number)
    model = ours(module, originals, form, units=())
    optimizer = adamw(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def nbytes_of(tree: Any) -> int:
    """The bytes of all tensors, each storage once."""
    tensors = [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@on_ranks(2, form=["full", *SHARDED], originals=BOTH)
def test_memory_of_loading_an_optimizer(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-43: converting a state for loading takes the result and `AT_MOST` full tensors besides, of sixteen."""
    model, optimizer = wide(originals, form, 1.0)
    state = FSDP.optim_state_dict(model, optimizer)
    other, again = wide(not originals, form, 2.0)
    with Meter(other) as meter:
        loadable = FSDP.optim_state_dict_to_load(other, again, state)
    extra = meter.live_nbytes - nbytes_of(loadable)
    again.load_state_dict(loadable)
    assert_same(full_optimizer_state(other, again)["state"], full_optimizer_state(model, optimizer)["state"])
    assert extra <= AT_MOST[form] * ONE_TENSOR + SMALL, f"{extra} bytes, of which a tensor has {ONE_TENSOR}"


@on_ranks(2, form=["full", *SHARDED], originals=BOTH)
def test_memory_of_loading_a_model(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """L-43, L-38: loading parameters, which are there, takes `AT_MOST` full tensors, of eight."""
    state = wide(originals, form, 1.0)[0].state_dict()
    other, _ = wide(not originals, form, 2.0)
    with Meter(other) as meter:
        other.load_state_dict(state)
    assert_same(full_state(other), full_state(wide(originals, form, 1.0)[0]))
    extra = meter.live_nbytes
    assert extra <= AT_MOST[form] * ONE_TENSOR + SMALL, f"{extra} bytes, of which a tensor has {ONE_TENSOR}"


@on_ranks(2, originals=BOTH)
def test_memory_of_streaming(group: Collectives, files: Files, originals: bool) -> None:
    """L-40, L-43: streaming from rank 0 takes a tensor, and those that gloo holds, of eight, or of sixteen for states."""
    model, optimizer = wide(originals, "full", 1.0)
    state, optimizer_state = full_state(model), full_optimizer_state(model, optimizer)
    other, again = wide(not originals, "full", 2.0)
    configs = (
        flatparam.FullStateDictConfig(rank0_only=True),
        flatparam.FullOptimStateDictConfig(rank0_only=True),
    )
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT, *configs):
        with Meter(other) as meter:
            other.load_state_dict(state if group.rank == 0 else {})
        extra = meter.live_nbytes
        with Meter(other) as meter:
            loadable = FSDP.optim_state_dict_to_load(other, again, optimizer_state if group.rank == 0 else {})
    extras = extra, meter.live_nbytes - nbytes_of(loadable)
    again.load_state_dict(loadable)
    assert_same(full_state(other), state)
    assert_same(full_optimizer_state(other, again)["state"], optimizer_state["state"])
    assert max(extras) <= (1 + HELD_BY_GLOO) * ONE_TENSOR + SMALL, f"{extras} bytes, of which a tensor has {ONE_TENSOR}"


# Without units


@on_ranks(2)
def test_a_model_without_units(group: Collectives, files: Files) -> None:
    """L-57: the functions on a model without units name its states and number them again; torch has an IndexError."""
    model = build(True)
    optimizer = adamw(model.parameters())
    with pytest.raises((IndexError, AttributeError)):
        TheirFSDP.optim_state_dict(model, optimizer)
    assert FSDP.fsdp_modules(model) == []
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    assert_same(state["state"], named_state(model, optimizer))
    assert parameter_names(state) == [sorted(name for name, _ in model.named_parameters())]
    again = adamw(model.parameters(), lr=0.5)
    again.load_state_dict(FSDP.optim_state_dict_to_load(model, again, state))
    assert_same(again.state_dict(), optimizer.state_dict())
    assert_same(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"], state["state"])


@on_ranks(2, originals=BOTH)
def test_copies_save_and_load(group: Collectives, files: Files, originals: bool) -> None:
    """L-45: a deep copy of a wrapped model has a sharded state of its own."""
    import copy

    model = ours(build(), originals, "sharded")
    optimizer = adamw(model.parameters())
    restored(model, optimizer)
    copied = copy.deepcopy(model)
    FSDP.set_state_dict_type(copied, *settings_of("sharded"))
    train(model, optimizer, group.rank)
    assert_model(whole(copied.state_dict()), trained().model)
    copied.load_state_dict(model.state_dict())
    assert_same(full_state(copied), full_state(model))
