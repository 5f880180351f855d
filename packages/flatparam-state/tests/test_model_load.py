"""A full state goes back into a sharded model, whatever its world size, its units and its exposure."""

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives
from flatparam_runtime import no_sync
from flatparam_state import load_model_state, model_state_dict
from flatparam_state.model.load import ModelLoad
from flatparam_state.places import places_in

from .models import CASES, Buffers, Case, Nested, mlp
from .worlds import assert_same_state, load, same_on_all, shard, shard_case, snapshot

UNITS_OF_NESTED = [("",), ("inner.1.0", "inner.1", "inner", ""), ("inner",), ("last", "inner.0", "")]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_saved_state_is_what_is_saved_after_loading_it(name: str, world_size: int, use_orig_params: bool) -> None:
    """Every kind of model takes the unsharded model's state over bit for bit; nothing is missing or left over."""
    case = CASES[name]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        before = snapshot(model)
        report = load(model, case.build(seed=7).state_dict())
        return before, report, model_state_dict(model)

    for before, report, state in same_on_all(world_size, rank):
        assert report == ([], [], [])
        assert_same_state(state, case.build(seed=7).state_dict())
        assert any(not torch.equal(value, before[key]) for key, value in state.items() if torch.is_tensor(value))


@each_row("target", UNITS_OF_NESTED, ids=["root", "deep", "no root", "others"])
@each_row("sizes", [(2, 1), (1, 2), (3, 4)], ids=str)
def test_other_world_size_other_units_other_exposure(
    sizes: tuple[int, int], target: tuple[str, ...], use_orig_params: bool
) -> None:
    """A state that one sharded model saved is loaded by another that is sharded in every respect differently."""

    def save(ranks: Collectives) -> Any:
        return model_state_dict(shard(Case(Nested).build(), ranks, ("inner", ""), use_orig_params=use_orig_params))

    saved = same_on_all(sizes[0], save)[0]

    def restore(ranks: Collectives) -> Any:
        model = shard(Case(Nested).build(seed=8), ranks, target, use_orig_params=not use_orig_params)
        assert load(model, copy.deepcopy(saved)) == ([], [], [])
        return model_state_dict(model)

    for state in same_on_all(sizes[1], restore):
        assert_same_state(state, Case(Nested).build().state_dict())


def test_what_is_loaded_is_newer_than_data_that_was_given(use_orig_params: bool) -> None:
    """A parameter that was given other data before has the loaded values, in the state and in the next forward pass."""
    case = CASES["every layer a unit"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
        load(model, case.build().state_dict())
        return model(torch.ones(4, 3)).detach(), model_state_dict(model)

    for output, state in same_on_all(2, rank):
        assert torch.equal(output, case.build()(torch.ones(4, 3)))
        assert_same_state(state, case.build().state_dict())


class Scaled(nn.Linear):
    """A layer that loads itself: it multiplies what it loads."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        with torch.no_grad():
            self.weight.mul_(3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_modules_own_code_has_loaded_is_undone(world_size: int, use_orig_params: bool) -> None:
    """If something else does not fit, a module that loads itself has the values again that it had before."""

    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(Scaled(3, 3), nn.Linear(3, 3))

    def rank(ranks: Collectives) -> Any:
        model = shard(build(), ranks, ("0", ""), use_orig_params=use_orig_params)
        ones = {name: torch.ones_like(value) for name, value in build().state_dict().items()}
        with pytest.raises(RuntimeError, match=r"1\.weight"):
            load_model_state(model, {name: value for name, value in ones.items() if name != "1.weight"})
        before = model_state_dict(model)
        load_model_state(model, ones)
        return before, model_state_dict(model)

    for before, after in same_on_all(world_size, rank):
        assert_same_state(before, build().state_dict())
        assert torch.equal(after["0.weight"], torch.full((3, 3), 3.0))


def test_loading_replaces_parameters_that_a_forward_left_unsharded(use_orig_params: bool) -> None:
    """SHARD_GRAD_OP keeps full parameters after a forward; what is loaded counts from the next forward on."""
    case = CASES["every layer a unit"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8, early=False)
        model(torch.ones(4, 3))
        assert any(place.handle.is_unsharded for place in places_in(model)), "the test needs stale parameters"
        load(model, case.build().state_dict())
        return model(torch.ones(4, 3)).detach(), model_state_dict(model)

    for output, state in same_on_all(2, rank):
        assert torch.equal(output, case.build()(torch.ones(4, 3)).detach())
        assert_same_state(state, case.build().state_dict())


def test_loading_replaces_parameters_that_are_kept_for_the_next_forward(use_orig_params: bool) -> None:
    """After an unsynchronised backward SHARD_GRAD_OP uses the full parameters again, but not once others are loaded."""
    case = CASES["every layer a unit"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8, early=False)
        with no_sync(model):
            model(torch.ones(4, 3)).sum().backward()
            assert all(place.handle.is_unsharded for place in places_in(model)), "the test needs stale parameters"
            load(model, case.build().state_dict())
            assert not any(place.handle.is_unsharded for place in places_in(model)), "nobody reads the old values"
            return model(torch.ones(4, 3)).detach()

    for output in same_on_all(2, rank):
        assert torch.equal(output, case.build()(torch.ones(4, 3)).detach())


def test_optimizers_hold_the_same_parameters_after_loading(use_orig_params: bool) -> None:
    """Loading writes into the shards; the parameter objects stay, so an optimizer trains on what was loaded."""
    case = CASES["every layer a unit"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        load(model, case.build().state_dict())
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        return model_state_dict(model)

    reference = case.build()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    reference(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for state in same_on_all(2, rank):
        assert_same_state(state, reference.state_dict())


def test_wrong_shapes_change_nothing(use_orig_params: bool) -> None:
    """One parameter of the wrong shape: no parameter is loaded, and the error has its name and both shapes."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["every layer a unit"], ranks, use_orig_params=use_orig_params, seed=8)
        before = snapshot(model)
        state = CASES["every layer a unit"].build().state_dict()
        state["2.weight"] = state["2.weight"].t()
        _, _, errors = load(model, state)
        assert_same_state(model_state_dict(model), before)
        return errors

    for errors in same_on_all(2, rank):
        (error,) = errors
        assert "'2.weight'" in error
        assert "(7, 5)" in error
        assert "(5, 7)" in error


def test_all_errors_are_told_at_once(use_orig_params: bool) -> None:
    """Every parameter that does not fit is named, also one that is no tensor."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["every layer a unit"], ranks, use_orig_params=use_orig_params)
        state: dict[str, Any] = {**CASES["every layer a unit"].build().state_dict()}
        state["0.bias"], state["4.weight"] = [1.0, 2.0], torch.zeros(())
        return load(model, state)[2]

    for errors in same_on_all(2, rank):
        assert len(errors) == 2
        assert "'0.bias'" in errors[0]
        assert "list" in errors[0]
        assert "'4.weight'" in errors[1]


def test_shape_errors_name_the_parameter_with_its_prefix() -> None:
    """Where the state's names begin with a prefix, so do those in errors and among the missing."""

    def rank(ranks: Collectives) -> Any:
        model = nn.ModuleDict({"net": shard(mlp(), ranks)})
        missing, _, _ = load(model, {})
        _, _, errors = load(model, {"net.0.weight": torch.zeros(2)})
        return missing, errors

    for missing, errors in same_on_all(2, rank):
        assert missing[:2] == ["net.0.weight", "net.0.bias"]
        assert "'net.0.weight'" in errors[0]


def test_missing_parameters_keep_their_values(use_orig_params: bool) -> None:
    """Names that are not in the state are reported, tied ones with each of their names; the rest is loaded."""

    def rank(ranks: Collectives) -> Any:
        case = CASES["tied around a unit"]
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        state = case.build().state_dict()
        for name in ("embed.weight", "head.weight", "body.bias"):
            del state[name]
        return load(model, state), model_state_dict(model)

    old, new = (CASES["tied around a unit"].build(seed).state_dict() for seed in (8, 7))
    for (missing, unexpected, errors), state in same_on_all(2, rank):
        assert sorted(missing) == ["body.bias", "embed.weight", "head.weight"]
        assert (unexpected, errors) == ([], [])
        assert_same_state(state, {**old, "body.weight": new["body.weight"]})


def test_unknown_names_are_left_in_the_state() -> None:
    """What no parameter takes stays in the dict, for torch to report."""

    def rank(ranks: Collectives) -> Any:
        model = shard(mlp(), ranks, ("2", ""))
        return load(model, {**mlp().state_dict(), "2.gain": torch.ones(1), "5.weight": torch.ones(1)})

    for missing, unexpected, errors in same_on_all(2, rank):
        assert (missing, errors) == ([], [])
        assert sorted(unexpected) == ["2.gain", "5.weight"]


def test_values_are_cast_as_torch_casts_them(use_orig_params: bool) -> None:
    """A state in a different dtype is rounded to the parameter's, as `load_state_dict` of the unsharded model does."""
    state = {name: value.double() * (1 + 1e-9) for name, value in CASES["one unit"].build().state_dict().items()}

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["one unit"], ranks, use_orig_params=use_orig_params, seed=8)
        load(model, state)
        return model_state_dict(model)

    reference = CASES["one unit"].build(seed=8)
    reference.load_state_dict(state)
    for found in same_on_all(3, rank):
        assert_same_state(found, reference.state_dict())


def test_values_in_any_memory_order(use_orig_params: bool) -> None:
    """The elements of a state tensor are taken by their place in the shape, not in memory."""
    case = CASES["odd shapes"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        state = case.build().state_dict()
        for name in ("transposed", "conv.weight"):
            assert not state[name].is_contiguous(), "the test needs values in another order"
            state[name] = state[name].contiguous()
        load(model, state)
        return model_state_dict(model)

    for found in same_on_all(3, rank):
        assert_same_state(found, case.build().state_dict())


def test_loading_sends_no_tensor(use_orig_params: bool) -> None:
    """Each rank copies its own part; the ranks only tell each other, once, whether everything fits."""

    def rank(ranks: Collectives) -> Any:
        ledger = ByteLedger(keep=True)
        recording = RecordingCollectives(ranks, ledger)
        model = shard_case(CASES["every layer a unit"], recording, use_orig_params=use_orig_params, seed=8)
        ledger.reset()
        load(model, CASES["every layer a unit"].build().state_dict())
        # An exchange of words is no transfer of tensors.
        assert ledger.transfers == ()
        return model_state_dict(model)

    for state in same_on_all(2, rank):
        assert_same_state(state, CASES["every layer a unit"].build().state_dict())


@pytest.mark.parametrize("strict", [False, True])
def test_a_shape_that_is_wrong_on_one_rank(use_orig_params: bool, strict: bool) -> None:
    """Every rank raises, naming the rank and the parameter, and nothing is changed on any."""
    case = CASES["every layer a unit"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params, seed=8)
        state = case.build().state_dict()
        name = next(name for name in state if name.endswith("weight"))
        if ranks.rank == 1:
            state[name] = torch.ones(7)
        with pytest.raises(RuntimeError, match=f"{'' if ranks.rank == 1 else 'rank 1: '}parameter '{name}'"):
            load_model_state(model, state, strict=strict)
        return model_state_dict(model)

    for state in same_on_all(2, rank):
        assert_same_state(state, case.build(seed=8).state_dict())


def test_loading_takes_nothing_of_the_callers_tensors(use_orig_params: bool) -> None:
    """The shards are copies: training afterwards does not change the loaded tensors."""
    saved = mlp().state_dict()
    kept = copy.deepcopy(saved)

    def rank(ranks: Collectives) -> None:
        model = shard_case(CASES["one unit"], ranks, use_orig_params=use_orig_params)
        load(model, saved)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)

    same_on_all(1, rank)
    assert_same_state(saved, kept)


@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_loading_that_ends_early_leaves_the_sharded_form(use_orig_params: bool, moment: str) -> None:
    """One that is given up, or ends with an exception, leaves each unit its parameters and values, idle and usable."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["buffers"], ranks, use_orig_params=use_orig_params)
        before = list(model.parameters())
        state = dict(Buffers().state_dict())
        loading = ModelLoad.begin(places_in(model))
        if moment == "within":
            state["_extra_state"] = "not what the module takes"
            with pytest.raises(AssertionError), contextlib.closing(loading):
                model.load_state_dict(state, strict=False)
        else:
            loading.close()
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        return model_state_dict(model)

    for state in same_on_all(2, rank):
        assert list(state) == list(Buffers().state_dict())
        assert torch.equal(state["layer.weight"], CASES["buffers"].build().state_dict()["layer.weight"])


def test_loading_by_a_function_of_the_callers() -> None:
    """A model whose class has a `load_state_dict` of its own is loaded by the one that is passed."""

    class Refusing(nn.Sequential):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("it is not called")

    def rank(ranks: Collectives) -> Any:
        model = shard(Refusing(nn.Linear(3, 4), nn.Linear(4, 2)), ranks, use_orig_params=True)
        state = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
        wanted = {name: torch.ones_like(value) for name, value in state.items()}
        load_model_state(model, wanted, load=functools.partial(nn.Module.load_state_dict, model))
        return model_state_dict(model)

    for state in same_on_all(2, rank):
        assert all(value.eq(1).all() for value in state.values())
