"""Training with optimizers that step whole parameters, in every setting, and in one process given equal gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, layout
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, gather_shards, run_threads
from flatparam_comm.testing import rectangle
from flatparam_optim.whole_optimizer import WholeOptimizer
from flatparam_runtime import no_sync
from flatparam_state.places import places_in

Results = dict[str, Tensor]
STEPS = 3


class Block(nn.Module):
    """Matrices, wide and tall, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def build() -> nn.Module:
    """Six matrices, of sizes that few numbers of ranks divide; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), Block(), Block(), nn.Linear(12, 5))


class Sign:
    """A rule of one's own: an average of gradients in the matrix's shape, divided by the matrix's largest value."""

    def __call__(self, matrix: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(gradient))
        state["average"] = average.lerp(gradient, 0.5)
        state["largest"] = matrix.abs().amax(1)
        return state["average"] / state["largest"].max()


WRAPPINGS: Mapping[str, Any] = {
    "one unit": None,
    "blocks": ModuleWrapPolicy({Block}),
    "layers": ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
}
LAYOUTS: Mapping[str, Any] = {
    "element": None,
    "whole": layout.by({}, otherwise=layout.whole),
    "row": layout.by({}, otherwise=layout.row),
}
HYBRID = "HYBRID_SHARD"


@attrs.frozen
class Case:
    """One setting."""

    ranks: int = 2
    wrapping: str = "blocks"
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    layout: str = "element"
    accumulation: int = 1
    clips: bool = False

    def __str__(self) -> str:
        exposure = "originals" if self.use_orig_params else "flat"
        more = f"-{self.accumulation}{'-clip' if self.clips else ''}"
        return f"{self.ranks}-{self.wrapping}-{self.strategy}-{exposure}-{self.layout}{more}"

    def wrap(self, world: Collectives, model: nn.Module | None = None) -> FSDP:
        """The model, wrapped so."""
        ranks: Any = world
        if self.strategy == HYBRID:
            topology = rectangle(world, 2)
            ranks = (topology.shard, topology.replicate)
        return FSDP(
            model or build(),
            ranks,
            sharding_strategy=ShardingStrategy[self.strategy],
            auto_wrap_policy=WRAPPINGS[self.wrapping],
            use_orig_params=self.use_orig_params,
            layout=LAYOUTS[self.layout],
        )


def all_cases() -> Iterator[Case]:
    """Every setting that the exactness of these optimizers is claimed for."""
    for case in itertools.starmap(
        Case,
        itertools.product(
            (1, 2, 3, 4, 8),
            WRAPPINGS,
            ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", HYBRID),
            (False, True),
            ("element", "whole"),
            (1, 4),
            (False, True),
        ),
    ):
        if case.strategy != HYBRID or case.ranks in (4, 8):
            yield case


def few_cases() -> list[Case]:
    """A few, in which every value of every axis occurs."""
    return [
        Case(1, "one unit", "NO_SHARD", False),
        Case(2, "blocks", "FULL_SHARD", True, accumulation=4, clips=True),
        Case(2, "layers", "NO_SHARD", True, "element", 4),
        Case(3, "one unit", "FULL_SHARD", False, "element", 1, True),
        Case(3, "layers", "SHARD_GRAD_OP", True, "whole", 4),
        Case(4, "blocks", HYBRID, False, "element", 4, True),
        Case(4, "one unit", HYBRID, True, "whole"),
        Case(4, "layers", "NO_SHARD", False, "element", 1, True),
        Case(8, "blocks", HYBRID, True, "element"),
        Case(8, "one unit", "FULL_SHARD", True, "row"),
        Case(8, "blocks", "SHARD_GRAD_OP", False, "whole", 1, True),
    ]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def full_gradients(model: nn.Module) -> Results:
    """The gradients that the optimizer is given, in full; every rank calls it."""
    found = {}
    for place in places_in(model):
        handle = place.handle
        shard = torch.zeros_like(handle.flat_param)
        if handle.exposure.parameters()[0] is handle.flat_param:
            shard.copy_(handle.flat_param.grad)
        else:
            for fragment, parameter in zip(
                handle.layout.fragments(handle.rank), handle.exposure.parameters(), strict=True
            ):
                if parameter.grad is not None:
                    shard[fragment.in_shard.as_slice()] = parameter.grad.reshape(-1)
        flat = torch.empty(handle.layout.numel)
        gather_shards(place.unit.plan.topology.shard, handle.layout, flat, shard).wait()
        for fqn, slot in zip(place.fqns, handle.layout.slots, strict=True):
            found[fqn] = flat[slot.span.as_slice()].view(slot.spec.shape).clone()
    return found


def one_step(case: Case, model: FSDP, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Results:
    """Make a step; returns the gradients that the optimizer was given."""
    optimizer.zero_grad()
    for micro in range(case.accumulation - 1):
        with no_sync(model):
            model(batch(rank, step + 10 * micro)).square().mean().backward()
    model(batch(rank, step + 1000)).square().mean().backward()
    if case.clips:
        model.clip_grad_norm_(0.05)
    gradients = full_gradients(model)
    optimizer.step()
    return gradients


def results(model: FSDP, optimizer: torch.optim.Optimizer) -> Results:
    """The full parameters and states, by name; every rank calls it."""
    found = dict(model.state_dict())
    for fqn, states in FSDP.optim_state_dict(model, optimizer)["state"].items():
        found |= {f"{fqn}/{name}": torch.as_tensor(value) for name, value in states.items()}
    return found


def plain_results(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Results:
    """The same of a plain model and the optimizers that share its parameters."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            states = optimizer.state.get(parameter, {})
            found |= {f"{name}/{key}": torch.as_tensor(value) for key, value in states.items()}
    return found


def assert_same(found: Results, expected: Results) -> None:
    """Every difference is zero."""
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(value.shape), value), name


def check(
    case: Case,
    make: Callable[[Any], WholeOptimizer],
    make_plain: Callable[[nn.Module], list[torch.optim.Optimizer]],
    whole: int,
) -> None:
    """Check that training in this setting ends with the bits of one process that is given the same gradients.

    Args:
        case: the setting.
        make: makes the optimizer of a wrapped model's parameters.
        make_plain: makes those of the plain model.
        whole: how many parameters are stepped as wholes; each is to be, once a step in the world.
    """

    def rank(world: Collectives) -> Any:
        model = case.wrap(world)
        optimizer = make(model.parameters())
        gradients = [one_step(case, model, optimizer, world.rank, step) for step in range(STEPS)]
        return results(model, optimizer), gradients, optimizer.whole_steps

    told = run_threads(case.ranks, rank)
    model = build()
    optimizers = make_plain(model)
    for gradients in told[0][1]:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
    expected = plain_results(model, *optimizers)
    for found, _, _ in told:
        assert_same(found, expected)
    assert sum(count for _, _, count in told) == STEPS * whole
