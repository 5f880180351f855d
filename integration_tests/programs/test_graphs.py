"""Random graphs of units: several inputs and outputs, parts, caches, checkpoints, frozen and nested units, calls again.

The random programs of this folder are chains of layers, whose numbers are exact in any order. A graph adds up gradients of
one tensor from several units, so here numbers are close, to a millionth.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads

WIDTH = 4
STEPS = 2
RANKS = 2


@attrs.frozen
class Call:
    """A call of unit `unit` with the tensors `inputs`, counted among all that there are by then."""

    unit: int
    inputs: tuple[int, ...]
    checkpoint: str
    """ "no", "reentrant" or "plain"."""
    has_cache: bool


@attrs.frozen
class Graph:
    """What is called in a pass, and how the model is sharded."""

    kinds: tuple[str, ...]
    calls: tuple[Call, ...]
    loss: tuple[int, ...]
    frozen: tuple[int, ...]
    input_is_leaf: bool
    use_orig_params: bool
    strategy: str
    wraps_nests: bool

    @classmethod
    def drawn(cls, seed: int) -> Graph:
        """The graph of a seed; most calls take the newest tensor, as layers do."""
        draw = random.Random(seed)
        units = draw.randint(2, 5)
        kinds = tuple(draw.choice(("plain", "passes on", "parts", "leaves", "nest")) for _ in range(units))
        calls = tuple(
            Call(
                draw.randrange(units) if draw.random() < 0.3 else number % units,
                tuple(-1 if draw.random() < 0.6 else draw.randrange(30) for _ in range(draw.randint(1, 3))),
                draw.choice(("no", "no", "no", "no", "reentrant", "plain")),
                draw.random() < 0.5,
            )
            for number in range(draw.randint(2, 7))
        )
        return cls(
            kinds,
            calls,
            (-1, *(draw.randrange(30) for _ in range(draw.randint(0, 2)))),
            tuple(number for number in range(units) if draw.random() < 0.3),
            draw.random() < 0.4,
            draw.random() < 0.5,
            draw.choice(("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP")),
            draw.random() < 0.5,
        )


class Cache:
    """Tensors of all units so far, in an object."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


class Leaf(nn.Module):
    """A unit that reads its first input and every second of the others, and returns one tensor or more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kind = kind

    def forward(self, inputs: Sequence[Tensor], cache: Cache | None = None) -> tuple[Any, ...]:
        x = inputs[0]
        y = self.down(torch.tanh(self.up(x)))
        if self.kind == "leaves":
            y = torch.sin(x @ self.up.weight.t()) @ self.down.weight
        for other in inputs[1::2]:
            y = y + 0.5 * other
        y = y / (1 + y.detach().abs().max())
        if self.kind == "passes on":
            return y, inputs[-1]
        if self.kind == "parts":
            return (y, *torch.cat([y, 2 * x], 0).chunk(2, 0))
        if cache is not None:
            cache.tensors.append(0.3 * y)
            return y, cache
        return (y,)


class Nest(nn.Module):
    """A unit with a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Leaf("plain")

    def forward(self, inputs: Sequence[Tensor], cache: Cache | None = None) -> tuple[Any, ...]:
        return (self.inner([self.first(inputs[0]), *inputs[1:]])[0],)


class Model(nn.Module):
    """The units of a graph, and a layer of its own."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Nest() if kind == "nest" else Leaf(kind) for kind in graph.kinds)
        for number in graph.frozen:
            self.units[number].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        there, cache = [self.stem(x), x], Cache()
        for call in self.graph.calls:
            inputs = [there[index % len(there)] for index in call.inputs]
            there += [each for each in self._called(call, inputs, cache) if isinstance(each, Tensor)]
        total = sum(there[index % len(there)].square().mean() for index in self.graph.loss)
        kept: Tensor = total + 0.1 * sum(each.sum() for each in cache.tensors)
        return kept

    def _called(self, call: Call, inputs: list[Tensor], cache: Cache) -> tuple[Any, ...]:
        unit = self.units[call.unit]
        if call.checkpoint == "no":
            outputs: tuple[Any, ...] = unit(inputs, cache if call.has_cache else None)
            return outputs
        reentrant = call.checkpoint == "reentrant"
        return (checkpoint(lambda *given: unit(list(given))[0], *inputs, use_reentrant=reentrant),)


def batch(graph: Graph, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator).requires_grad_(graph.input_is_leaf)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


Found = tuple[list[Tensor | None], dict[str, Tensor]]


def on_a_rank(ranks: Collectives, graph: Graph) -> Found:
    """The gradients of the inputs, and the parameters after all steps."""
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Model(graph),
        ranks,
        auto_wrap_policy=ModuleWrapPolicy({Leaf, Nest} if graph.wraps_nests else {Leaf}),
        use_orig_params=graph.use_orig_params,
        sharding_strategy=ShardingStrategy[graph.strategy],
    )
    optimizer, gradients = trained(model), []
    for step in range(STEPS):
        x = batch(graph, step, ranks.rank)
        model(x).backward()
        gradients.append(x.grad)
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        return gradients, {name: each.detach().clone() for name, each in model.named_parameters()}


def in_one_process(graph: Graph) -> tuple[list[list[Tensor | None]], dict[str, Tensor]]:
    """What `on_a_rank` returns, for each rank, of a model that is trained on the mean of the ranks' losses."""
    torch.manual_seed(0)
    model = Model(graph)
    optimizer, gradients = trained(model), [[] for _ in range(RANKS)]
    for step in range(STEPS):
        batches = [batch(graph, step, rank) for rank in range(RANKS)]
        (sum(model(x) for x in batches) / RANKS).backward()
        for rank, x in enumerate(batches):
            gradients[rank].append(None if x.grad is None else x.grad * RANKS)
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: each.detach() for name, each in model.named_parameters()}


def can_run(graph: Graph) -> bool:
    """Whether plain torch takes it: a checkpoint may have an input that is changed by recomputing, or no gradient."""
    try:
        in_one_process(graph)
    except Exception:  # torch's own, of several classes
        return False
    return True


GRAPHS = 40


@pytest.mark.parametrize(
    "seed", [*range(GRAPHS), *(pytest.param(n, marks=pytest.mark.long) for n in range(GRAPHS, 1000))]
)
def test_a_graph_trains_as_in_one_process(seed: int) -> None:
    """Parameters after two steps, and gradients of the inputs, are those of one process on the mean of the losses."""
    graph = Graph.drawn(seed)
    if not can_run(graph):
        pytest.skip("torch does not take it in one process")
    gradients, parameters = in_one_process(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run_threads(RANKS, on_a_rank, graph)
    for rank, (given, values) in enumerate(found):
        torch.testing.assert_close(values, parameters, rtol=1e-5, atol=1e-6, msg=lambda text: f"{graph}\n{text}")
        for ours, theirs in zip(given, gradients[rank], strict=True):
            assert (ours is None) == (theirs is None), graph
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
