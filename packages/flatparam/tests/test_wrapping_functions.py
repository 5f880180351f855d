"""The functions beneath the policies, which other libraries call: alone, and where torch calls them."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as theirs
from each_row import each_row
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

import flatparam.wrap as ours

from .models import Block, Transformer, mlp, seeded


class Recorder(nn.Module):
    """A wrapper that keeps its arguments."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.inner = module
        self.arguments = arguments


def structure(module: nn.Module) -> list[Any]:
    """The names and classes of all modules, and what wrappers were given."""
    return [(name, type(child).__name__, getattr(child, "arguments", None)) for name, child in module.named_modules()]


def linear(wrap: Any) -> Any:
    return functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear))


def large(wrap: Any) -> Any:
    return functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60)


def blocks(wrap: Any) -> Any:
    return functools.partial(wrap._module_wrap_policy, module_classes={Block})


def either(wrap: Any) -> Any:
    return functools.partial(wrap._or_policy, policies=[blocks(wrap), wrap.ModuleWrapPolicy({nn.LayerNorm})])


def everything(wrap: Any) -> Any:
    return wrap.always_wrap_policy


@each_row("only_wrap_children", [False, True])
@each_row("policy", [linear, large, blocks, either, everything])
def test_recursive_wrap_is_torchs(policy: Any, only_wrap_children: bool) -> None:
    """S-002: the same modules are wrapped with the same arguments, and the same number of elements is reported."""
    found = []
    for wrap in (ours, theirs):
        model = seeded(Transformer)
        model.blocks[1]._wrap_overrides = {"depth": 9}
        ignored = {model.extras}
        wrapped, numel = wrap._recursive_wrap(
            model,
            policy(wrap),
            Recorder,
            ignored_modules=ignored,
            ignored_params=set(model.extras.parameters()),
            only_wrap_children=only_wrap_children,
            depth=1,
        )
        found.append((structure(wrapped), numel, wrapped is model))
    assert found[0] == found[1]


def test_recursive_wrap_refuses_what_is_wrapped() -> None:
    """S-002: a module inside that has the wrapper's class already is an AssertionError, unless it is ignored."""
    for wrap in (ours, theirs):
        for ignored in (False, True):
            model = nn.Sequential(Recorder(nn.Linear(2, 2)), nn.Linear(2, 2))
            arguments = (linear(wrap), Recorder, {model[0], model[0].inner} if ignored else set(), set())
            if ignored:
                wrap._recursive_wrap(model, *arguments)
                assert isinstance(model[1], Recorder)
            else:
                with pytest.raises(AssertionError, match="already"):
                    wrap._recursive_wrap(model, *arguments)
                assert isinstance(model[1], nn.Linear)


@each_row("missing", [0, 1])
def test_recursive_wrap_needs_a_policy_and_a_wrapper(missing: int) -> None:
    """S-002: without one of them it is an AssertionError, and nothing is wrapped."""
    arguments: list[Any] = [ours.always_wrap_policy, Recorder]
    arguments[missing] = None
    with pytest.raises(AssertionError, match="expected a policy and a wrapper"):
        ours._recursive_wrap(mlp(), *arguments, set(), set())


def test_classes_before_recurse() -> None:
    """S-002: `_wrap_module_cls_individually` takes the classes second; it looks into everything, wraps instances."""
    for function in (ours._wrap_module_cls_individually, theirs._wrap_module_cls_individually):
        assert function(nn.ReLU(), [nn.Linear], True) is True
        assert function(nn.ReLU(), [nn.Linear], False) is False
        assert function(nn.Linear(1, 1), [nn.Linear], recurse=False, nonwrapped_numel=3) is True


POLICIES = {
    "classes": ours.ModuleWrapPolicy({nn.Linear}),
    "custom": ours.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
    "custom without arguments": ours.CustomPolicy(lambda m: {} if isinstance(m, Block) else type(m) is nn.Linear),
    "function": linear(ours),
}


@each_row("name", POLICIES)
def test_policies_choose_what_is_checkpointed(name: str) -> None:
    """S-002: torch's `apply_activation_checkpointing` takes our policies, as it takes torch's."""
    model = mlp()
    apply_activation_checkpointing(model, auto_wrap_policy=POLICIES[name])
    assert [isinstance(module, CheckpointWrapper) for module in model] == [True, False, True, False, True]


def test_a_custom_policy_that_is_called_cannot_pass_arguments_on() -> None:
    """A dict of arguments would be lost where the policy is only called: it is a ValueError that names them."""
    policy = ours.CustomPolicy(lambda module: {"limit": 1} if isinstance(module, nn.Linear) else False)
    with pytest.raises(ValueError, match=re.escape("cannot pass ['limit'] on for Linear")):
        apply_activation_checkpointing(mlp(), auto_wrap_policy=policy)
