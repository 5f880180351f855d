"""Inputs that several units share: keys of earlier layers in a cache, and the output of an encoder.

Their gradients come when the first of these units is done, and the others do not wait for that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flatparam_comm import Collectives
from flatparam_runtime import EventLog, observe
from flatparam_runtime.autograd import latest

from .models import WIDTH, batch
from .worlds import check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded

LAYERS = 4
UNITS = [f"layers.{number}" for number in range(LAYERS)]


class Cache:
    """The keys of all layers so far, in an object, as libraries for text have one."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Layer(nn.Module):
    """Attention to its own keys, which it leaves in the cache, and a part of the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None, memory: Tensor | None) -> tuple[Tensor, Cache | None]:
        keys = self.key(x)
        if cache is not None:
            cache.keys.append(keys)
        x = x + self.out(torch.tanh(self.query(x) * keys))
        return (x if memory is None else x + memory * 0.5), cache


class Decoder(nn.Module):
    """Layers with what they share: `shared` names some of "cache", "returned" (the cache is an output), "memory"."""

    shared: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        cache = Cache() if "cache" in self.shared else None
        memory = torch.tanh(x) if "memory" in self.shared else None
        for layer in self.layers:
            x, cache = layer(x, cache, memory)
        out = self.head(x)
        return (out, cache) if "returned" in self.shared else out


def loss(module: nn.Module, rank: int) -> Tensor:
    out = module(batch(rank, near=module))
    value: Tensor = (out[0] if isinstance(out, tuple) else out).square().mean()
    return value


def schedule(ranks: Collectives, shared: str, plan: dict[str, Any], frozen: bool) -> list[str]:
    """The events of the third backward pass."""
    module = sharded(Decoder, ranks, units=UNITS, **plan)
    module.shared = frozenset(shared.split())  # type: ignore[assignment]
    if frozen:
        for layer in module.layers:
            layer.requires_grad_(False)
    for _ in range(2):
        loss(module, ranks.rank).backward()
    value, log = loss(module, ranks.rank), EventLog()
    with observe(module, log):
        value.backward()
    check_at_rest(module)
    return log.lines()


SHARED = ("cache", "memory", "cache memory", "cache returned", "cache memory returned")


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_units_do_not_wait_for_each_other(shared: str, frozen: bool, use_orig_params: bool) -> None:
    """Units are freed and reduced in the same order as those of a model in which they share nothing."""
    plan = {"use_orig_params": use_orig_params}
    assert run(2, schedule, shared, plan, frozen) == run(2, schedule, "", plan, frozen)


@each_row("shared", SHARED)
def test_gradients_are_those_of_one_process(shared: str, use_orig_params: bool) -> None:
    """A unit that is complete before its shared inputs have their gradients has collected all of its own."""

    def make() -> Decoder:
        made = Decoder()
        made.shared = frozenset(shared.split())
        return made

    def rank(ranks: Collectives) -> Any:
        module = sharded(make, ranks, units=UNITS, use_orig_params=use_orig_params)
        loss(module, ranks.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make), loss, 2)
    for found in run(2, rank):
        check_same(found, expected)


def test_the_latest_node_and_all_leaves() -> None:
    """Of nodes that forward made, the last tells for all; a node that accumulates a leaf's gradient, for itself only."""
    leaf, other = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH, requires_grad=True)
    early = torch.tanh(leaf)
    late = torch.tanh(early)
    tensors = {"late": late, "leaf": leaf, "early": early, "other": other}
    nodes = {name: get_gradient_edge(tensor).node for name, tensor in tensors.items()}
    assert sorted(latest(nodes)) == ["late", "leaf", "other"]
    assert latest({"early": nodes["early"]}) == ["early"]
    assert sorted(latest({name: nodes[name] for name in ("leaf", "other")})) == ["leaf", "other"]


def test_a_part_without_a_gradient() -> None:
    """A unit takes both parts that `chunk` made and uses one: autograd tells of the other that its gradient is None."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, used: Tensor, unused: Tensor) -> Tensor:
            out: Tensor = torch.tanh(self.linear(used))
            return out

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, 2 * WIDTH)
            self.one = One()

        def forward(self, x: Tensor) -> Tensor:
            used, unused = self.stem(x).chunk(2, -1)
            out: Tensor = self.one(used, unused)
            return out

    def rank(ranks: Collectives) -> Any:
        module = sharded(Root, ranks, units=["one"])
        loss(module, ranks.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Root), loss, 2)
    for found in run(2, rank):
        check_same(found, expected)
