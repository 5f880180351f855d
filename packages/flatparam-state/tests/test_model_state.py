"""The full state of a sharded model is the state of the unsharded model."""

import copy
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives
from flatparam_runtime import summon_full_params
from flatparam_state import StateForm, model_state_dict
from flatparam_state.model.collect import state_shown
from flatparam_state.places import places_in

from .models import CASES, Buffers, Case, Tied, mlp
from .worlds import assert_same_state, same_on_all, shard, shard_case


@each_row("world_size", [1, 2, 3])
@each_row("name", CASES)
def test_state_is_that_of_the_unsharded_model(name: str, world_size: int, use_orig_params: bool) -> None:
    """On every rank: the same keys in the same order, and tensors equal in bits, dtype, shape and memory order."""
    case = CASES[name]

    def rank(ranks: Collectives) -> Any:
        return model_state_dict(shard_case(case, ranks, use_orig_params=use_orig_params))

    expected = case.build().state_dict()
    for state in same_on_all(world_size, rank):
        assert_same_state(state, expected)


def test_more_ranks_than_elements(use_orig_params: bool) -> None:
    """Ranks that hold nothing of a parameter get its full value too."""

    def rank(ranks: Collectives) -> Any:
        return model_state_dict(
            shard(nn.Linear(1, 2).requires_grad_(ranks.rank >= 0), ranks, use_orig_params=use_orig_params)
        )

    states = same_on_all(7, rank)
    assert all(list(state) == ["weight", "bias"] for state in states)
    assert all(state["weight"].shape == (2, 1) and state["bias"].shape == (2,) for state in states)
    assert all(torch.equal(state["weight"], states[0]["weight"]) for state in states)


def test_module_versions_are_under_clean_names(use_orig_params: bool) -> None:
    """`_metadata`, by which torch recognises old states, is that of the unsharded model."""

    def rank(ranks: Collectives) -> Any:
        case = Case(Buffers, ("layer", "norm", ""))
        return model_state_dict(shard_case(case, ranks, use_orig_params=use_orig_params))._metadata  # type: ignore[attr-defined]

    assert same_on_all(2, rank) == [Buffers().state_dict()._metadata] * 2  # type: ignore[attr-defined]


def test_state_after_training_is_the_trained_state(use_orig_params: bool) -> None:
    """What is saved is what the optimizer made of the shards, not what an earlier pass gathered."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["every layer a unit"], ranks, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        return model_state_dict(model)

    reference = CASES["every layer a unit"].build()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    reference(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    for state in same_on_all(2, rank):
        assert_same_state(state, reference.state_dict())


def test_full_parameters_kept_after_a_forward_are_not_what_is_saved(use_orig_params: bool) -> None:
    """SHARD_GRAD_OP keeps full parameters after the forward; when the shards then change, the shards are saved."""

    def rank(ranks: Collectives) -> Any:
        case = CASES["every layer a unit"]
        model = shard_case(case, ranks, use_orig_params=use_orig_params, early=False)
        held = list(model.parameters())
        model(torch.ones(4, 3))
        assert any(place.handle.is_unsharded for place in places_in(model)), "the test needs stale parameters"
        with torch.no_grad():
            for parameter in held:
                parameter.fill_(0.25)
        return model_state_dict(model)

    for state in same_on_all(2, rank):
        assert all(bool((value == 0.25).all()) for value in state.values())


@pytest.mark.parametrize("early", [True, False], ids=["full-shard", "shard-grad-op"])
def test_saving_between_forward_and_backward_changes_no_gradient(use_orig_params: bool, early: bool) -> None:
    """A checkpoint that is written in the middle of a step does not disturb the step."""

    def rank(ranks: Collectives, save: bool) -> Any:
        case = CASES["every layer a unit"]
        model = shard_case(case, ranks, use_orig_params=use_orig_params, early=early)
        loss = model(torch.ones(4, 3)).sum()
        if save:
            model_state_dict(model)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    for disturbed, quiet in zip(same_on_all(2, rank, True), same_on_all(2, rank, False), strict=True):
        assert [g is None for g in disturbed] == [g is None for g in quiet]
        assert all(a is None or torch.equal(a, b) for a, b in zip(disturbed, quiet, strict=True))
        assert any(a is not None for a in disturbed)


def test_rank0_only(use_orig_params: bool) -> None:
    """The other ranks take part and get what is not sharded: buffers, and parameters that no unit holds."""

    def rank(ranks: Collectives) -> Any:
        case = Case(lambda: nn.Sequential(nn.Linear(3, 3), Buffers(), nn.Linear(3, 2)), ("0", "1"))
        return model_state_dict(shard_case(case, ranks, use_orig_params=use_orig_params), rank0_only=True)

    first, second, third = same_on_all(3, rank)
    whole = ["1.before", "1.count", "1.norm.running_mean", "1.norm.running_var", "1.norm.num_batches_tracked"]
    assert "0.weight" in first
    assert "1.layer.weight" in first
    assert {*second} == {*third} == {*whole, "1._extra_state", "2.weight", "2.bias"}


def test_offload_to_cpu_puts_parameters_on_the_cpu(use_orig_params: bool) -> None:
    """`offload_to_cpu` names the device of every sharded parameter in the state."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["nested units"], ranks, use_orig_params=use_orig_params)
        return model_state_dict(model, offload_to_cpu=True)

    for state in same_on_all(2, rank):
        assert_same_state(state, CASES["nested units"].build().state_dict())
        assert all(value.device == torch.device("cpu") for value in state.values())


def test_each_parameter_owns_its_memory(use_orig_params: bool) -> None:
    """No two entries share memory, except those of one tied parameter; and none more than its own bytes."""

    def rank(ranks: Collectives) -> Any:
        return model_state_dict(shard_case(CASES["tied around a unit"], ranks, use_orig_params=use_orig_params))

    for state in same_on_all(2, rank):
        pointers = {name: value.untyped_storage().data_ptr() for name, value in state.items()}
        assert pointers["embed.weight"] == pointers["head.weight"]
        assert len({*pointers.values()}) == len(state) - 1
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())


def test_the_state_and_the_model_do_not_touch_each_other(use_orig_params: bool) -> None:
    """Changing the saved parameters does not change the model, and training the model does not change them."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["every layer a unit"], ranks, use_orig_params=use_orig_params)
        first = model_state_dict(model)
        kept = copy.deepcopy(first)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert_same_state(first, kept)
        for value in first.values():
            value.zero_()
        return model_state_dict(model)

    expected = {name: value + 1.0 for name, value in mlp_state().items()}
    for state in same_on_all(2, rank):
        assert_same_state(state, expected)


def mlp_state() -> dict[str, torch.Tensor]:
    return dict(CASES["every layer a unit"].build().state_dict())


def test_inside_of_summoned_parameters_the_state_has_what_was_changed(use_orig_params: bool) -> None:
    """What is written to full parameters is in a state that is collected there, and stays after the context."""
    case = CASES["every layer a unit"]

    def rank(ranks: Collectives) -> Any:
        model = shard_case(case, ranks, use_orig_params=use_orig_params)
        with summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
            inside = model_state_dict(model)
        return inside, model_state_dict(model)

    expected = case.build().state_dict()
    for inside, after in same_on_all(2, rank):
        for name, value in expected.items():
            doubled = (
                value * 2 if value.is_floating_point() and name in dict(case.build().named_parameters()) else value
            )
            assert torch.equal(inside[name], doubled), name
        assert_same_state(after, inside)


def test_frozen_and_trainable_look_alike_in_the_state(use_orig_params: bool) -> None:
    """Entries are plain tensors that need no gradient, as in any `state_dict()`."""

    def rank(ranks: Collectives) -> Any:
        return model_state_dict(shard_case(CASES["frozen in units"], ranks, use_orig_params=use_orig_params))

    for state in same_on_all(2, rank):
        assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())


def test_a_module_shows_its_shards_again_afterwards(use_orig_params: bool) -> None:
    """Saving leaves the same parameter objects in the same order, and the model can be called and trained."""

    def rank(ranks: Collectives) -> None:
        model = shard_case(CASES["nested units"], ranks, use_orig_params=use_orig_params)
        before = list(model.named_parameters())
        model_state_dict(model)
        after = list(model.named_parameters())
        assert [name for name, _ in after] == [name for name, _ in before]
        assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
        model(torch.ones(2, 3)).sum().backward()
        assert all((p.grad is not None) == (p.numel() > 0) for p in model.parameters())

    same_on_all(2, rank)


def test_torch_collects_a_submodules_state_in_the_context(use_orig_params: bool) -> None:
    """`state_shown` serves any `state_dict()` call within it, with a prefix or of a submodule."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["nested units"], ranks, use_orig_params=use_orig_params)
        with state_shown(model, StateForm()):
            with state_shown(model.inner, StateForm()):  # inside already: left alone
                inner = model.inner.state_dict(prefix="x.")
            return inner, list(model.state_dict())

    reference = CASES["nested units"].build()
    for inner, keys in same_on_all(2, rank):
        assert_same_state(inner, reference.inner.state_dict(prefix="x."))
        assert keys == list(reference.state_dict())


def test_state_of_a_unit_below_the_root(use_orig_params: bool) -> None:
    """A part of the model can be saved alone, before and after the root has run."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["nested units"], ranks, use_orig_params=use_orig_params)
        first = model_state_dict(model.inner[1])
        model(torch.ones(2, 3)).sum().backward()
        return first, model_state_dict(model.inner[1])

    reference = CASES["nested units"].build().inner[1].state_dict()
    for first, second in same_on_all(2, rank):
        assert_same_state(first, reference)
        assert_same_state(second, reference)


def test_model_without_units_is_saved_as_it_is() -> None:
    """The functions take a model that is not sharded at all."""
    model = Tied()
    assert_same_state(model_state_dict(model), model.state_dict())


def test_exception_inside_restores_the_sharded_form(use_orig_params: bool) -> None:
    """An exception while the full state is shown leaves every unit sharded, idle and usable."""

    def rank(ranks: Collectives) -> Any:
        model = shard_case(CASES["nested units"], ranks, use_orig_params=use_orig_params)
        before = list(model.parameters())
        with pytest.raises(ZeroDivisionError), state_shown(model, StateForm()):
            raise ZeroDivisionError
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        model(torch.ones(2, 3)).sum().backward()
        return model_state_dict(model)

    for state in same_on_all(2, rank):
        assert_same_state(state, CASES["nested units"].build().state_dict())


def test_state_dict_hooks_of_the_user_see_full_parameters(use_orig_params: bool) -> None:
    """A hook that a user put on a submodule renames and reads full parameters, as in the unsharded model."""

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight").t().contiguous()

    def make() -> nn.Module:
        model = mlp()
        model[2]._register_state_dict_hook(rename)
        return model

    def rank(ranks: Collectives) -> Any:
        return model_state_dict(shard_case(Case(make, ("2", "")), ranks, use_orig_params=use_orig_params))

    for state in same_on_all(2, rank):
        assert_same_state(state, Case(make).build().state_dict())
