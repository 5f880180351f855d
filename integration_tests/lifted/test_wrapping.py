"""What may be wrapped, by whom and how: rows L-33, L-34, L-44, L-53, L-59 and L-60 of the specification."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import wrap as torch_wrap

from flatparam import MixedPrecision
from flatparam.wrap import ModuleWrapPolicy, enable_wrap, wrap
from flatparam_comm import Collectives, run_threads
from integration_tests.lifted.our_half import (
    FSDP,
    assert_trains_as_one,
    batch,
    blocks,
    seeded,
    sgd,
    train,
    train_alone,
)
from integration_tests.lifted.torch_half import Half, Outcomes, fsdp1
from integration_tests.parity.models import Block
from integration_tests.parity.runs import assert_same_tensors

X = torch.ones(3, 4)


def torch_l33(group: Collectives) -> None:
    model: Any = blocks()
    model[0].up = fsdp1(model[0].up)
    fsdp1(model, auto_wrap_policy=torch_wrap.ModuleWrapPolicy({Block}))


def test_l33_torch_refuses_a_policy_over_what_is_wrapped(processes: Outcomes) -> None:
    """Torch raises ValueError where a policy is to wrap around a module that is wrapped by hand."""
    processes.assert_raised(torch_l33, "ValueError", "to not already have FSDP applied but found 0.up")


def test_l33_by_hand_and_by_policy() -> None:
    """A policy goes over a model in which one layer is wrapped already, and leaves that one as it is."""

    def both(model: Any, group: Collectives) -> nn.Module:
        model[0].up = FSDP(model[0].up, use_orig_params=True)
        made = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}))
        assert made.module[0].module.up is FSDP.fsdp_modules(made)[2]
        assert len(FSDP.fsdp_modules(made)) == 1 + 2 + 4 + 1, "the root, two blocks, their layers and the last"
        return made

    assert_trains_as_one(blocks, both)


def torch_l34(group: Collectives) -> None:
    child = fsdp1(nn.Linear(4, 4))
    child(X).sum().backward()
    fsdp1(nn.Sequential(child, nn.Linear(4, 4)))(X)


def test_l34_torch_has_one_root_for_ever(processes: Outcomes) -> None:
    """Torch raises AssertionError where a wrapper has run before another is put around it."""
    processes.assert_raised(torch_l34, "AssertionError", "Non-root FSDP instance's `_is_root`")


def test_l34_a_root_becomes_a_child() -> None:
    """A part is trained by itself, then as part of a larger model: the same bits as unsharded."""

    def part() -> nn.Module:
        return seeded(lambda: Block(4), 1)

    def rank(group: Collectives) -> Any:
        child = FSDP(part())
        train(child, sgd(child.parameters()), group.rank)
        model: Any = FSDP(nn.Sequential(child, blocks()))
        train(model, sgd(model.parameters()), group.rank, steps=range(3, 6))
        return model.check_is_root(), child.check_is_root(), model.state_dict()

    expected = train_alone(nn.Sequential(train_alone(part(), 2), blocks()), 2, range(3, 6)).state_dict()
    for is_root, child_is_root, state in run_threads(2, rank):
        assert (is_root, child_is_root) == (True, False)
        assert_same_tensors(state, expected, "after training:")


def torch_l44_use_orig_params(group: Collectives) -> None:
    fsdp1(nn.Sequential(fsdp1(nn.Linear(4, 4), use_orig_params=True), nn.Linear(4, 4)))(X)


def torch_l44_limit_all_gathers(group: Collectives) -> None:
    fsdp1(nn.Sequential(fsdp1(nn.Linear(4, 4), limit_all_gathers=False), nn.Linear(4, 4)))(X)


@pytest.mark.parametrize("half", [torch_l44_use_orig_params, torch_l44_limit_all_gathers])
def test_l44_torch_wants_one_value_for_a_tree(processes: Outcomes, half: Half) -> None:
    """Torch raises ValueError at the first forward where wrappers of a model differ in one of two arguments."""
    processes.assert_raised(half, "ValueError", "one homogeneous value")


@each_row("original", [(True, False, False), (False, True, True)])
def test_l44_each_unit_as_it_was_wrapped(original: tuple[bool, bool, bool]) -> None:
    """The units of one model may differ in use_orig_params and limit_all_gathers; it trains to the same bits."""

    def mixed(model: Any, group: Collectives) -> nn.Module:
        for place in range(2):
            model[place] = FSDP(model[place], use_orig_params=original[place], limit_all_gathers=not place)
        return FSDP(model, use_orig_params=original[2])

    assert_trains_as_one(blocks, mixed)


class Layers(nn.Module):
    """Runs the layers of a list."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # type: ignore[attr-defined]
            x = layer(x)
        return x


def layers() -> nn.Module:
    return seeded(lambda: Layers(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])))


def torch_l53_nested(group: Collectives) -> None:
    context = functools.partial(torch_wrap.enable_wrap, wrapper_cls=FullyShardedDataParallel)
    with context(), context():
        pass


def torch_l53_list(group: Collectives) -> None:
    policy = torch_wrap.ModuleWrapPolicy({nn.ModuleList})
    fsdp1(layers(), auto_wrap_policy=policy)(X).sum().backward()


def test_l53_torch_refuses_nested_contexts_and_lists(processes: Outcomes) -> None:
    """Torch raises NotImplementedError for nested contexts; a wrapped list ends in an error about views."""
    processes.assert_raised(torch_l53_nested, "NotImplementedError", "nested autowrap")
    processes.assert_raised(torch_l53_list, "RuntimeError", "is a view and its base")


def test_l53_nested_contexts() -> None:
    """An inner context adds its arguments to those of the outer one, and the model trains to the same bits."""

    def nested(model: Any, group: Collectives) -> nn.Module:
        with enable_wrap(wrapper_cls=FSDP, use_orig_params=True, process_group=group):
            model[0] = wrap(model[0])
            with enable_wrap(wrapper_cls=FSDP, use_orig_params=False):
                model[1] = wrap(model[1])
            made = wrap(model)
        units = [made._unit, made.module[0]._unit, made.module[1]._unit]
        assert [unit.plan.use_orig_params for unit in units] == [True, True, False]
        return made

    assert_trains_as_one(blocks, nested)


@each_row("by_policy", [False, True])
def test_l53_a_list_is_named_in_a_warning(by_policy: bool) -> None:
    """Wrapping a ModuleList warns and says what to wrap instead; its layers still train to the same bits."""

    def around(model: Any, group: Collectives) -> nn.Module:
        policy = ModuleWrapPolicy({nn.ModuleList}) if by_policy else None
        with pytest.warns(UserWarning, match="a ModuleList has no forward pass.*wrap those"):
            made = FSDP(model if by_policy else model.layers, auto_wrap_policy=policy)
        if by_policy:
            return made
        model.layers = made
        return FSDP(model)

    assert_trains_as_one(layers, around)


def torch_l59(group: Collectives) -> Any:
    model = fsdp1(blocks(), use_orig_params=True)
    return [name for name, _ in model.named_parameters()], list(model.state_dict())


def test_l59_torch_puts_its_prefix_into_names(processes: Outcomes) -> None:
    """Torch's named_parameters() has a prefix that its state_dict() has not."""
    names = [name for name, _ in blocks().named_parameters()]
    assert processes.values(torch_l59) == [([f"_fsdp_wrapped_module.{name}" for name in names], names)] * 2


def test_l59_clean_names() -> None:
    """With clean_names, parameters, buffers and state_dict() have the names that the unwrapped model has."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def rank(group: Collectives) -> Any:
        policy = ModuleWrapPolicy({nn.Linear, nn.Sequential})
        model = FSDP(make(), auto_wrap_policy=policy, use_orig_params=True, clean_names=True)
        before = _names(model)
        model(batch(0, group.rank)).sum().backward()
        return before, _names(model)

    for found in run_threads(2, rank):
        assert found == (_names(make()), _names(make()))


def _names(model: nn.Module) -> tuple[list[str], ...]:
    return (
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        list(model.state_dict()),
    )


def torch_l60(group: Collectives) -> list[bool]:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    root: dict[str, Any] = {"mixed_precision": "of the root"}
    override = torch_wrap._run_mixed_precision_override_policy
    targets = override(model, [nn.BatchNorm1d], set(), root, {})
    return [
        targets[model[0]] is targets[model[1]],
        targets[model[0]] is root,
        root["mixed_precision"] is None,
    ]


def test_l60_torch_shares_one_dict_of_arguments(processes: Outcomes) -> None:
    """Torch gives the modules that only the precision override wraps the root's own dict, and changes it."""
    assert processes.values(torch_l60) == [[True, True, True]] * 2


class Kept(ModuleWrapPolicy):
    """Keeps the root's arguments, of which each chosen module gets a copy."""

    def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: dict[str, Any]) -> Any:
        self.root_kwargs = root_kwargs
        return super()._run_policy(root_module, ignored_modules, root_kwargs)


def test_l60_the_roots_arguments_stay_as_they_are() -> None:
    """Units that the precision override makes compute in fp32; the root's own arguments, and the others', are kept."""
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.BatchNorm1d, nn.LayerNorm))

    def rank(group: Collectives) -> Any:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
        policy = Kept({nn.Linear})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which modules it leaves out
            made = FSDP(model, mixed_precision=bf16, auto_wrap_policy=policy)
        made(batch(0, group.rank)).sum().backward()
        dtypes = [unit._unit.plan.precision.param_dtype for unit in FSDP.fsdp_modules(made)]
        return dtypes, policy.root_kwargs["mixed_precision"]

    for dtypes, of_root in run_threads(2, rank):
        assert dtypes == [torch.bfloat16, None, torch.bfloat16, None, None]
        assert of_root is bf16
