"""Loading what does not fit: torch's report, in the user's names, and a model that still works."""

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives

from .models import Batch, mlp, seeded
from .worlds import assert_same_state, on_ranks

HERE = SingleCollectives()
WRAPPERS = ("_fsdp_wrapped_module", "_flat_param", "_checkpoint")


def wrapped(make: Any = Batch, **how: Any) -> nn.Module:
    return FSDP(seeded(make), HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **how)


def in_parent() -> nn.Module:
    return nn.ModuleDict({"net": wrapped(), "other": nn.Linear(1, 1)})


CHANGES = {
    "a parameter is missing": lambda state, prefix: state.pop(prefix + "first.weight"),
    "a buffer is missing": lambda state, prefix: state.pop(prefix + "norm.running_mean"),
    "a name is unknown": lambda state, prefix: state.update({prefix + "first.gain": torch.ones(1)}),
    "a module is unknown": lambda state, prefix: state.update({prefix + "third.weight": torch.ones(1)}),
    "a parameter has another shape": lambda state, prefix: state.update({prefix + "second.weight": torch.ones(2)}),
    "a buffer has another shape": lambda state, prefix: state.update({prefix + "norm.running_var": torch.ones(7)}),
}


@each_row("prefix", ["", "net."], ids=["root", "plain parent"])
@each_row("change", CHANGES)
def test_strict_errors_are_in_clean_names(change: str, prefix: str, use_orig_params: bool) -> None:
    """S-086: the error names what torch names for the unwrapped model, and no wrapper's part of a name."""
    model = wrapped(use_orig_params=use_orig_params) if not prefix else in_parent()
    reference = seeded(Batch) if not prefix else nn.ModuleDict({"net": Batch(), "other": nn.Linear(1, 1)})
    state = reference.state_dict()
    CHANGES[change](state, prefix)
    with pytest.raises(RuntimeError) as expected:
        reference.load_state_dict(dict(state))
    with pytest.raises(RuntimeError) as found:
        model.load_state_dict(dict(state))
    message = str(found.value)
    assert not [part for part in WRAPPERS if part in message]
    for name in {*state} ^ {*reference.state_dict()} or {
        prefix + "second.weight",
        prefix + "norm.running_var",
    }:
        if name in str(expected.value):
            assert name in message


@each_row("prefix", ["", "net."], ids=["root", "plain parent"])
def test_not_strict(prefix: str) -> None:
    """With `strict=False` missing and unexpected names are returned clean, and the rest is loaded."""
    model = wrapped() if not prefix else in_parent()
    state = {prefix + name: value for name, value in seeded(Batch, 8).state_dict().items()}
    for gone in ("first.bias", "norm.running_mean"):
        del state[prefix + gone]
    state[prefix + "first.gain"] = state["more"] = torch.ones(1)
    report = model.load_state_dict(dict(state), strict=False)
    others = ["other.weight", "other.bias"] if prefix else []
    assert sorted(report.missing_keys) == sorted([prefix + "first.bias", prefix + "norm.running_mean", *others])
    assert sorted(report.unexpected_keys) == sorted([prefix + "first.gain", "more"])
    now, before = model.state_dict(), seeded(Batch).state_dict()
    for name, value in seeded(Batch, 8).state_dict().items():
        assert torch.equal(now[prefix + name], before[name] if prefix + name not in state else value), name


def test_a_wrong_shape_changes_no_parameter(use_orig_params: bool) -> None:
    """One shape that does not fit: every sharded parameter of every unit keeps its values, on every rank."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
        state = seeded(mlp, 8).state_dict()
        state["4.weight"] = torch.ones(2, 2)
        with pytest.raises(RuntimeError, match=r"4\.weight"):
            model.load_state_dict(state)
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert_same_state(state, seeded(mlp).state_dict())


def test_the_callers_state_is_left_as_it_was() -> None:
    """Loading takes nothing out of the dict that it is given, whether it fits or not."""
    state = seeded(Batch, 8).state_dict()
    names = list(state)
    wrapped().load_state_dict(state)
    assert list(state) == names
    state["first.weight"] = torch.ones(1)
    with pytest.raises(RuntimeError):
        wrapped().load_state_dict(state)
    assert list(state) == names


class Picky(nn.Module):
    """Raises while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def set_extra_state(self, state: Any) -> None:
        raise ZeroDivisionError

    def get_extra_state(self) -> Any:
        return 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("plain_parent", [False, True])
def test_an_exception_while_loading_leaves_a_model_that_works(use_orig_params: bool, plain_parent: bool) -> None:
    """A module that raises while it is loaded: the parameters are shown again, and the model can be used and saved."""

    def rank(ranks: Collectives) -> Any:
        model: nn.Module = FSDP(
            nn.Sequential(nn.Linear(2, 2), Picky()),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )
        if plain_parent:
            model = nn.Sequential(model)
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(ZeroDivisionError):
            model.load_state_dict(model.state_dict())
        assert [name for name, _ in model.named_parameters()] == names
        model(torch.ones(1, 2)).sum().backward()
        return len(model.state_dict())

    assert on_ranks(2, rank) == [5, 5]


def test_a_loading_after_one_that_raised(use_orig_params: bool) -> None:
    """After a loading that raised in the middle, a wrapper inside and then the whole model load what they are given."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(
            nn.Sequential(nn.Linear(2, 2), Picky()),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )
        state = {name: value.clone() for name, value in model.state_dict().items() if "extra" not in name}
        doubled = {name: 2 * value for name, value in state.items()}
        with pytest.raises(ZeroDivisionError):
            model.load_state_dict({**doubled, "1._extra_state": 1})
        unchanged = all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
        model.module[0].load_state_dict({name: doubled[f"0.{name}"] for name in ("weight", "bias")})
        inner = {name: (doubled if name.startswith("0.") else state)[name] for name in state}
        loaded_inside = all(torch.equal(model.state_dict()[name], value) for name, value in inner.items())
        model.load_state_dict(doubled, strict=False)
        loaded = all(torch.equal(model.state_dict()[name], value) for name, value in doubled.items())
        return unchanged, loaded_inside, loaded

    assert on_ranks(2, rank) == [(True, True, True)] * 2


MISFITS: dict[str, Any] = {
    "a shape": (lambda state: state.update({"4.weight": torch.ones(2, 2)}), r"4\.weight"),
    "a missing key": (lambda state: state.pop("0.bias"), r"missing key '0\.bias'"),
    "an unexpected key": (lambda state: state.update(more=torch.ones(1)), "unexpected key 'more'"),
    "no dict": (lambda state: None, "TypeError: Expected state_dict to be dict-like"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(what: str, use_orig_params: bool) -> None:
    """Every rank raises, and tells what does not fit and where; all of them can load afterwards."""
    change, message = MISFITS[what]

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
        state: Any = seeded(mlp, 8).state_dict()
        good = dict(state)
        if ranks.rank == 1:
            change(state)
            with pytest.raises((RuntimeError, TypeError)):
                model.load_state_dict(7 if what == "no dict" else state)
        else:
            with pytest.raises(RuntimeError, match=f"rank 1: .*{message}"):
                model.load_state_dict(state)
        before = model.state_dict()
        model.load_state_dict(good)
        return before, model.state_dict()

    for before, after in on_ranks(2, rank):
        assert_same_state(before, seeded(mlp).state_dict())
        assert_same_state(after, seeded(mlp, 8).state_dict())
