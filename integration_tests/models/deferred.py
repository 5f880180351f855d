"""Models that are made on the meta device, and get their values when they are wrapped."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from integration_tests.models.checks import advance, in_full
from integration_tests.models.described import BLOCKS, Model
from integration_tests.models.every import named
from integration_tests.models.training import RANKS, adamw
from integration_tests.parity.runs import Named, assert_same_tensors


def unit_by_unit(
    model: nn.Module, blocks: tuple[type[nn.Module], ...], start: Callable[[nn.Module], object]
) -> Callable[[nn.Module], None]:
    """A `param_init_fn` that makes all of a unit at once and has `start` give its modules values, children first.

    A model may say in a parent what its children begin with, as most of transformers do.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}

    def members(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if not isinstance(child, FSDP):
                yield from members(child)

    def make(module: nn.Module) -> None:
        while module in parents and not isinstance(module, blocks):
            module = parents[module]
        unit, made = list(members(module)), {}
        for each in unit:
            before = {name: parameter for name, parameter in each._parameters.items() if parameter is not None}
            each.to_empty(device="cpu", recurse=False)
            for name, old in before.items():  # what was tied is tied again
                each._parameters[name] = made.setdefault(old, each._parameters[name])
        for each in reversed(unit):
            start(each)

    return make


def seeded_start(model: Any) -> Callable[[nn.Module], None]:
    """The model's own way to begin, with random numbers that depend on the module's name alone."""
    names = {module: name for name, module in model.named_modules()}

    def start(module: nn.Module) -> None:
        torch.manual_seed(zlib.crc32(names[module].encode()))
        with torch.no_grad():
            model._init_weights(module)

    return start


def on_meta(model: Model) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return model.make().train()


def wrapped_from(group: Collectives, name: str, module: nn.Module, original: bool, **arguments: Any) -> FSDP:
    """The module, sharded by blocks."""
    policy = ModuleWrapPolicy(named(name).classes(module, BLOCKS))
    return FSDP(module, group, auto_wrap_policy=policy, use_orig_params=original, **arguments)


def seen(group: Collectives, name: str, sharded: FSDP) -> tuple[Named, Named]:
    """The full state and the buffers; then it is trained for a step, which must go."""
    with in_full(sharded):
        state = {key: value.clone() for key, value in sharded.state_dict().items()}
    buffers = {key.replace("_fsdp_wrapped_module.", ""): buffer.clone() for key, buffer in sharded.named_buffers()}
    advance(group, named(name), sharded, adamw(sharded), 0)
    return state, buffers


def check_first_rank_has_values(name: str, original: bool) -> None:
    """Rank 0 has the model, the others build it on the meta device: all have rank 0's parameters and buffers."""

    def of_rank(group: Collectives) -> tuple[Named, Named]:
        module = named(name).build() if group.rank == 0 else on_meta(named(name))
        sharded = wrapped_from(
            group,
            name,
            module,
            original,
            sync_module_states=True,
            param_init_fn=lambda each: each.to_empty(device="cpu", recurse=False),
        )
        return seen(group, name, sharded)

    plain = named(name).build()
    assert_all_have(run_threads(RANKS, of_rank, timeout=None), plain)


def check_own_start(name: str, original: bool) -> None:
    """All ranks build it on the meta device: they have what the model's own `_init_weights` gives."""

    def of_rank(group: Collectives) -> tuple[Named, Named]:
        module = on_meta(named(name))
        blocks = tuple(named(name).classes(module, BLOCKS))
        make = unit_by_unit(module, blocks, seeded_start(module))
        return seen(group, name, wrapped_from(group, name, module, original, param_init_fn=make))

    plain: Any = on_meta(named(name))
    start, modules = seeded_start(plain), list(plain.modules())
    for module in modules:
        module.to_empty(device="cpu", recurse=False)
    plain.tie_weights()
    for module in reversed(modules):
        start(module)
    assert_all_have(run_threads(RANKS, of_rank, timeout=None), plain)


def assert_all_have(of_ranks: list[tuple[Named, Named]], plain: nn.Module) -> None:
    expected: dict[str, Tensor] = plain.state_dict()
    for state, buffers in of_ranks:
        assert list(state) == list(expected)
        assert_same_tensors(state, expected, "state")
        assert_same_tensors(buffers, dict(plain.named_buffers()), "buffer")
