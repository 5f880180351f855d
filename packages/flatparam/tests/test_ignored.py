"""Modules and parameters that are left whole."""

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, RankError, SingleCollectives

from .models import mlp, seeded
from .worlds import assert_same_state, on_ranks

HERE = SingleCollectives()


@each_row("argument", ["ignored_modules", "ignored_states"])
@each_row("kind", [list, set, iter], ids=["list", "set", "iterator"])
def test_ignored_modules(argument: str, kind: Any, use_orig_params: bool) -> None:
    """S-017, S-024: parameters of the module and of what is in it keep identity, shape and memory, in any iterable."""
    module = nn.Sequential(nn.Linear(2, 2), mlp())
    inside = list(module[1].parameters())
    model = FSDP(module, HERE, use_orig_params=use_orig_params, **{argument: kind([module[1]])})
    assert all(a is b for a, b in zip(module[1].parameters(), inside, strict=True))
    assert [tuple(p.shape) for p in inside] == [tuple(p.shape) for p in mlp().parameters()]
    assert model._unit.handles
    assert model._unit.handles[0].layout.fqns == ("0.weight", "0.bias")


def test_ignored_parameters(use_orig_params: bool) -> None:
    """S-024: single parameters are left whole; the rest of their module is sharded."""
    module = mlp()
    kept = [module[0].weight, module[4].bias]
    model = FSDP(module, HERE, use_orig_params=use_orig_params, ignored_states=kept)
    assert module[0].weight is kept[0]
    assert module[4].bias is kept[1]
    assert model._unit.handles
    assert sorted(model._unit.handles[0].layout.fqns) == ["0.bias", "2.bias", "2.weight", "4.weight"]


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Sequential, nn.Linear})], ids=["whole", "policy"])
def test_ignored_parts_are_not_reduced_and_are_saved(policy: Any, use_orig_params: bool) -> None:
    """Each rank has its own gradient of an ignored parameter; the state has it beside the others, in place."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(mlp)
        model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params, ignored_modules=[module[2]])
        model(torch.full((2, 3), float(ranks.rank + 1))).sum().backward()
        return module[2].weight.grad, model.state_dict()

    for number, (gradient, state) in enumerate(on_ranks(2, rank)):
        reference = seeded(mlp)
        reference(torch.full((2, 3), float(number + 1))).sum().backward()
        assert torch.equal(gradient, reference[2].weight.grad)
        assert_same_state(state, reference.state_dict())


def test_ranks_that_ignore_different_modules() -> None:
    """What is sharded may have different names then, which is a warning, and trains; otherwise it is an error."""

    def rank(ranks: Collectives, ignores: bool) -> torch.Tensor:
        layers = [
            nn.Linear(2, 2, bias=False),
            *(nn.Linear(2, 2, bias=False) for _ in range(ranks.rank)),
            nn.Linear(2, 1),
        ]
        module = seeded(lambda: nn.Sequential(*layers))
        nn.init.ones_(module[-1].weight)
        others = [*module[1:-1]] if ignores else []
        module.append(nn.Linear(1, 1))
        model = FSDP(module, ignored_modules=[*others, module[-1]])
        model(torch.ones(2, 2)).sum().backward()
        assert model.params[0].grad is not None
        return model.params[0].grad

    with pytest.warns(UserWarning, match="nothing but names differs"):
        found = on_ranks(2, functools.partial(rank, ignores=True))
    assert all(gradient.count_nonzero() for gradient in found)

    def renamed(ranks: Collectives) -> None:
        module = nn.Sequential(OrderedDict({"kept": nn.Linear(2, 2), f"expert {ranks.rank}": nn.Linear(2, 2)}))
        FSDP(module, ignored_modules=[module.kept])(torch.ones(1, 2))

    for wrong in (functools.partial(rank, ignores=False), renamed):
        with pytest.raises(RankError, match="the ranks have different models"):
            on_ranks(2, wrong)


def test_ignored_modules_of_nested_wrappers_stay_ignored() -> None:
    """S-017: what an inner wrapper was told to leave whole is not taken by an outer one."""
    inner = mlp()
    module = nn.Sequential(FSDP(inner, HERE, ignored_modules=[inner[2]]), nn.Linear(1, 1))
    weight = inner[2].weight
    model = FSDP(module, HERE)
    assert inner[2].weight is weight
    assert weight.dim() == 2
    assert model._unit.handles
    assert model._unit.handles[0].layout.fqns == ("1.weight", "1.bias")


def test_ignoring_the_module_itself_is_warned_of() -> None:
    """S-017: everything is ignored then, and the user is told."""
    module = mlp()
    with pytest.warns(UserWarning, match="ignored_modules"):
        model = FSDP(module, HERE, ignored_modules=[module])
    assert not model._unit.handles


def test_a_wrapper_among_the_ignored_is_refused() -> None:
    """S-017: a wrapped module cannot be left whole any more; the error says so."""
    module = mlp()
    module[2] = FSDP(module[2], HERE)
    for ignored in (module[2], module[2].module):
        with pytest.raises(ValueError, match="ignored_modules"):
            FSDP(module, HERE, ignored_modules=[ignored])


def test_units_below_an_ignored_module_stay_units(use_orig_params: bool) -> None:
    """S-017: what a unit holds is not ignored with a module around it; it trains, the rest of that module is whole."""
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 1))
    whole = module[0][1].weight
    unit = module[0][0] = FSDP(module[0][0], HERE, use_orig_params=use_orig_params)
    model = FSDP(module, HERE, ignored_modules=[module[0]], use_orig_params=use_orig_params)
    model(torch.ones(2, 3)).sum().backward()
    assert module[0][1].weight is whole
    assert FSDP.fsdp_modules(model) == [model, unit]
    assert all(parameter.grad is not None for parameter in unit.parameters())


def test_modules_and_parameters_mixed_are_refused() -> None:
    """S-024: `ignored_states` takes all modules or all parameters."""
    module = mlp()
    for mixed in ([module[0], module[2].weight], [module[2].weight, module[0]]):
        with pytest.raises(ValueError, match="both"):
            FSDP(module, HERE, ignored_states=mixed)


def test_parameters_as_modules_are_refused() -> None:
    """S-017: `ignored_modules` takes modules only."""
    module = mlp()
    with pytest.raises(ValueError, match="ignored_modules"):
        FSDP(module, HERE, ignored_modules=list(module.parameters()))


def test_ignoring_nothing_and_strangers() -> None:
    """An empty list ignores nothing, and so does a module from elsewhere."""
    for ignored in ([], [nn.Linear(2, 2)]):
        model = FSDP(mlp(), HERE, ignored_modules=ignored)
        assert model._unit.handles
        assert len(model._unit.handles[0].layout.fqns) == 6


@each_row("policy", [None, ModuleWrapPolicy({nn.Sequential})], ids=["whole", "policy"])
def test_buffers_of_ignored_modules_are_left_alone(policy: Any) -> None:
    """S-017: neither the parameters nor the buffers of an ignored module are taken from rank 0."""

    def rank(ranks: Collectives) -> Any:
        module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        ignored = module[1][1]
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(ranks.rank)
        FSDP(module, auto_wrap_policy=policy, ignored_modules=[ignored], sync_module_states=True)
        return [
            float(ignored.weight.detach()[0]),
            float(ignored.running_mean[0]),
            float(ignored.num_batches_tracked),
        ]

    assert on_ranks(2, rank) == [[0.0] * 3, [1.0] * 3]
