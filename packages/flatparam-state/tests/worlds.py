"""Sharding a model by hooks on every rank of a world of threads, and what its state is compared with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flatparam_comm import Collectives, Topology
from flatparam_comm.testing import run_threads
from flatparam_runtime import UnitPlan, clean_fqn, shard_module
from flatparam_state import load_model_state, model_state_dict, optimizer_state_dict
from flatparam_state.places import fragment_of, places_in, shard_of

from .models import Case


def shard(
    model: nn.Module,
    ranks: Collectives,
    units: Sequence[str] = ("",),
    *,
    use_orig_params: bool = False,
    ignored: Sequence[str] = (),
    early: bool = True,
) -> nn.Module:
    """Make the named submodules of `model` units, in the order given; `early` is FULL_SHARD, else SHARD_GRAD_OP."""
    plan = UnitPlan(
        Topology(ranks),
        free_after_forward=early,
        free_after_unsynced_backward=early,
        use_orig_params=use_orig_params,
    )
    modules = [model.get_submodule(name) for name in units]
    left_whole = [model.get_submodule(name) for name in ignored]
    left_whole += [below for module in left_whole for below in module.modules()]
    for module in modules:
        shard_module(module, plan, ignored_modules=left_whole)
    return model


def shard_case(
    case: Case, ranks: Collectives, *, use_orig_params: bool = False, seed: int = 7, early: bool = True
) -> nn.Module:
    """The model of `case`, sharded."""
    return shard(
        case.build(seed),
        ranks,
        case.units,
        use_orig_params=use_orig_params,
        ignored=case.ignored,
        early=early,
    )


def same_on_all(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(ranks, *args)` returns on each rank of a world of threads."""
    return run_threads(world_size, fn, *args)


def assert_same_tensor(found: Any, expected: Any, name: str = "") -> None:
    """Assert equality bit for bit, in dtype, shape and memory order."""
    assert type(found) is type(expected), f"{name}: {type(found)} and {type(expected)}"
    if not isinstance(expected, torch.Tensor):
        assert found == expected, name
        return
    facts = [(t.dtype, tuple(t.shape), tuple(t.stride()), t.requires_grad) for t in (found, expected)]
    assert facts[0] == facts[1], name
    assert torch.equal(found, expected), name


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert the same keys in the same order, and the same tensors."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_same_tensor(found[name], value, name)


def load(model: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Load a full state the way a caller does; returns missing names, what nothing took, and errors."""
    try:
        result = load_model_state(model, state, strict=False)
    except RuntimeError as error:
        return [], [], str(error).splitlines()[1:]  # the first line says whose state it is
    return result.missing_keys, result.unexpected_keys, []


# Optimizers


def made_up_gradients(model: nn.Module, seed: int, without: Collection[str] = ()) -> dict[str, torch.Tensor | None]:
    """A gradient for each trainable parameter of the unsharded `model` (in its memory order), except `without`."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            values = torch.randn(parameter.shape, generator=generator)
            clean = clean_fqn(name)
            found[clean] = None if clean in without else torch.empty_like(parameter.data).copy_(values)
    return found


def give_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Set `.grad` of a sharded or unsharded model, without a backward pass."""
    model.zero_grad()
    sharded = set()
    for place in places_in(model):
        full = [gradients.get(name) for name in place.fqns]
        sharded.update(place.fqns)
        if any(gradient is not None for gradient in full):
            part = shard_of(
                place,
                [None if each is None else fragment_of(place, index, each)[1] for index, each in enumerate(full)],
                place.handle.flat_param.detach(),
            )
            place.handle.accumulate(part, [gradient is not None for gradient in full])
    for name, parameter in model.named_parameters():
        gradient = gradients.get(clean_fqn(name))
        if gradient is not None and clean_fqn(name) not in sharded:
            parameter.grad = gradient.clone()


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: Mapping[str, torch.Tensor | None],
) -> None:
    """One step of the optimizer with these gradients."""
    give_gradients(model, gradients)
    optimizer.step()


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A plain optimizer's state dict over an unsharded model, with names in place of numbers."""
    names = {id(parameter): clean_fqn(name) for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    plain = optimizer.state_dict()
    return {
        "state": {order[number]: values for number, values in plain["state"].items()},
        "param_groups": [
            {**group, "params": [order[number] for number in group["params"]]} for group in plain["param_groups"]
        ],
    }


def assert_same_optimizer(found: Mapping[str, Any], expected: Mapping[str, Any], *, ordered: bool = True) -> None:
    """Assert the same names, values and groups; the order of names in a group too where `ordered`."""
    assert set(found["state"]) == set(expected["state"])
    for fqn, values in expected["state"].items():
        assert set(found["state"][fqn]) == set(values), fqn
        for name, value in values.items():
            assert_same_tensor(found["state"][fqn][name], value, f"{fqn} {name}")
    assert len(found["param_groups"]) == len(expected["param_groups"])
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert set(mine) == set(theirs)
        for key, value in theirs.items():
            if key == "params" and not ordered:
                assert set(mine[key]) == set(value)
            else:
                assert mine[key] == value, key


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """The model's full state, copied, and the optimizer's where one is given."""
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in model_state_dict(model).items()
    }
    return state if optimizer is None else (state, optimizer_state_dict(model, optimizer))
