"""Forward hooks that a program registers on a wrapped module after wrapping, as most programs do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, Topology
from flatparam_runtime import UnitPlan, shard_module

from .models import seeded
from .worlds import on_ranks


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def norm_of(weight: torch.Tensor) -> float:
    return float(weight.detach().float().norm())


@pytest.mark.parametrize("copied", [False, True], ids=["first", "copied"])
def test_hooks_see_full_parameters(use_orig_params: bool, copied: bool) -> None:
    """The hook of the first registration and of any later one sees the whole weight in every pass, copies too."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        layer = module[0]
        model = FSDP(
            nn.Sequential(FSDP(layer, use_orig_params=use_orig_params), *module[1:]),
            use_orig_params=use_orig_params,
        )
        if copied:
            model = copy.deepcopy(model)
            layer = model.module[0].module
        found: list[float] = []
        for _ in range(2):
            layer.register_forward_hook(lambda mod, inputs, output: found.append(norm_of(mod.weight)))
            model(torch.ones(1, 3)).sum().backward()
        return found

    expected = norm_of(seeded(make)[0].weight)
    for found in on_ranks(2, rank):
        assert found == [expected] * 3


def test_what_a_hook_returns_is_what_autograd_sees(use_orig_params: bool) -> None:
    """A hook that changes the output by the weight has the outputs and the gradients of one process."""

    def scaled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        return output + inputs[0] @ weight.t()

    def output_of(model: nn.Module) -> torch.Tensor:
        output: torch.Tensor = model(torch.ones(2, 3))
        output.square().sum().backward()
        return output.detach()

    reference = seeded(make)
    reference[2].register_forward_hook(scaled)
    expected = output_of(reference)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        last = module[2]
        model = FSDP(
            nn.Sequential(*module[:2], FSDP(last, use_orig_params=use_orig_params)),
            use_orig_params=use_orig_params,
        )
        last.register_forward_hook(scaled)
        return output_of(model), model.clip_grad_norm_(float("inf"))

    for found in on_ranks(2, rank):
        torch.testing.assert_close(found, (expected, norm))


def test_a_hook_sees_the_dtype_of_computation() -> None:
    """With mixed precision a late hook sees the dtype of computation, as the module has it."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        seen: list[torch.dtype] = []
        model = FSDP(module, mixed_precision=MixedPrecision(torch.bfloat16))
        module.register_forward_hook(lambda mod, inputs, output: seen.append(output.dtype))
        model(torch.ones(1, 3))
        return seen

    assert on_ranks(2, rank) == [[torch.bfloat16]] * 2


def test_hooks_of_a_module_in_place() -> None:
    """A forward hook that is registered after `fully_shard` sees full parameters too, in every pass."""

    def rank(ranks: Collectives) -> Any:
        model = seeded(make)
        fully_shard(model[0])
        fully_shard(model)
        found: list[float] = []
        for _ in range(2):
            model[0].register_forward_hook(lambda mod, inputs, output: found.append(norm_of(mod.weight)))
            model(torch.ones(1, 3)).sum().backward()
        return found

    expected = norm_of(seeded(make)[0].weight)
    for found in on_ranks(2, rank):
        assert found == [expected] * 3


def test_hooks_do_not_keep_a_wrapper_of_a_sharded_module_apart() -> None:
    """A module that `shard_module` made a unit may be wrapped then: it is called once, and trains as in one process."""
    reference = seeded(make)
    reference(torch.ones(1, 3)).sum().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))

    def rank(ranks: Collectives) -> Any:
        module = seeded(make)
        unit = shard_module(module, UnitPlan(Topology(ranks)))
        with pytest.warns(UserWarning, match="was wrapped before"):
            model = FSDP(module, use_orig_params=True)
        calls: list[int] = []
        module.register_forward_hook(lambda *_: calls.append(len(unit.calls)))
        model(torch.ones(1, 3)).sum().backward()
        return calls, model.clip_grad_norm_(float("inf"))

    for calls, norm in on_ranks(2, rank):
        assert calls == [1]
        torch.testing.assert_close(norm, expected)


def test_a_later_error_does_not_hide_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """If freeing fails too after a pass has raised, the pass's error propagates, and a warning tells the other one."""

    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("the first error")

    def fails(*args: Any) -> None:
        raise RuntimeError("the second error")

    def rank(ranks: Collectives) -> None:
        model = FSDP(Refuses())
        monkeypatch.setattr("flatparam_runtime.passes.forward.after_forward", fails)
        with (
            pytest.warns(UserWarning, match="follows from the one in the forward pass: the second error"),
            pytest.raises(KeyError, match="the first error"),
        ):
            model(torch.ones(3))

    on_ranks(1, rank)


def test_the_module_in_the_wrapper_now_is_called(use_orig_params: bool) -> None:
    """Activation checkpointing that is applied after wrapping runs each forward twice, with the same gradients."""

    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x).tanh()

    def rank(ranks: Collectives, checkpointed: bool) -> Any:
        module = seeded(lambda: nn.Sequential(Counted(3, 3), Counted(3, 3)))
        policy = ModuleWrapPolicy({Counted})
        model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        if checkpointed:
            apply_activation_checkpointing(model, check_fn=lambda child: isinstance(child, Counted))
        model(torch.ones(1, 3)).sum().backward()
        calls = [child.calls for child in model.modules() if isinstance(child, Counted)]
        with FSDP.summon_full_params(model, with_grads=True):
            return calls, [parameter.grad.clone() for parameter in model.parameters()]

    for (once, expected), (twice, found) in zip(on_ranks(2, rank, False), on_ranks(2, rank, True), strict=True):
        assert (once, twice) == ([1, 1], [2, 2])
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine, other)
