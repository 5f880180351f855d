"""The state of optimizers that step whole parameters: saved, resharded and resumed in every form, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import Checkpointer, FullStateDictConfig, StateDictType
from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import run_processes
from flatparam_optim import Adafactor, MatrixOptimizer, Muon, Shampoo, TransformersAdafactor
from integration_tests.matrices.whole_cases import (
    HYBRID,
    Case,
    Results,
    Sign,
    assert_same,
    batch,
    build,
    plain_results,
    results,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "muon": (
        lambda parameters: Muon(parameters, lr=0.02, adamw_lr=0.01),
        lambda matrices, others: [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)],
    ),
    "adafactor": (
        lambda parameters: Adafactor(parameters, lr=0.05),
        lambda matrices, others: [torch.optim.Adafactor([*matrices, *others], lr=0.05)],
    ),
    "transformers": (
        lambda parameters: TransformersAdafactor(parameters, beta1=0.9),
        lambda matrices, others: [TransformersAdafactor([*matrices, *others], beta1=0.9)],
    ),
    "shampoo": (
        lambda parameters: Shampoo(parameters, every=3),
        lambda matrices, others: [Shampoo([*matrices, *others], every=3)],
    ),
    "own": (
        lambda parameters: MatrixOptimizer(parameters, Sign(), lr=0.1),
        lambda matrices, others: [MatrixOptimizer([*matrices, *others], Sign(), lr=0.1)],
    ),
}
"""For each kind, what makes the optimizer, and what makes the plain ones."""
SOURCES = [
    Case(2, "one unit", "FULL_SHARD", False),
    Case(4, "blocks", HYBRID, True),
    Case(2, "layers", "FULL_SHARD", True, "whole"),
]
TARGETS = [
    Case(4, "blocks", "FULL_SHARD", True),
    Case(1, "one unit", "NO_SHARD", False),
    Case(4, "one unit", "FULL_SHARD", False, "whole"),
    Case(2, "layers", "SHARD_GRAD_OP", True, "row"),
]


def is_short(at: int, number: int) -> bool:
    """Whether a way is one of those that have each source once, and over the kinds each target."""
    return at % len(TARGETS) == (at // len(TARGETS) + number) % len(TARGETS)


BETWEEN = [
    pytest.param(
        *(kind, source, target),
        id=f"{kind}: {source} to {target}",
        marks=[] if is_short(at, number) else pytest.mark.long,
    )
    for number, kind in enumerate(OPTIMIZERS)
    for at, (source, target) in enumerate(itertools.product(SOURCES, TARGETS))
    if not number or is_short(at, number)
]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, start: int = 0, stop: int = 4) -> None:
    """Train on batches that are the same on every rank: the mean of 2 or 4 equal gradients rounds nothing."""
    for step in range(start, stop):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(0, step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def plain(kind: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = build()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return model, OPTIMIZERS[kind][1](matrices, others)


def expected(kind: str) -> Results:
    model, optimizers = plain(kind)
    train(model, *optimizers)
    return plain_results(model, *optimizers)


def wrapped(kind: str, case: Case, world: Collectives) -> tuple[FSDP, Any]:
    model = case.wrap(world)
    return model, OPTIMIZERS[kind][0](model.parameters())


@pytest.mark.parametrize(("kind", "source", "target"), BETWEEN)
def test_directories(kind: str, source: Case, target: Case, tmp_path: Path) -> None:
    """Saved half-way in a checkpoint directory, training goes on in another setting as if it had not stopped."""

    def save(world: Collectives) -> None:
        model, optimizer = wrapped(kind, source, world)
        train(model, optimizer, stop=2)
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=2)

    def resume(world: Collectives) -> Results:
        model, optimizer = wrapped(kind, target, world)
        assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        train(model, optimizer, start=2)
        return results(model, optimizer)

    run_threads(source.ranks, save)
    for found in run_threads(target.ranks, resume):
        assert_same(found, expected(kind))


@pytest.mark.parametrize(("kind", "source", "target"), BETWEEN)
@pytest.mark.parametrize("rank0_only", [False, True])
def test_full_states(kind: str, source: Case, target: Case, rank0_only: bool) -> None:
    """The same with full states, which all ranks have, or the first one alone."""
    config = FullStateDictConfig(rank0_only=rank0_only)

    def save(world: Collectives) -> Any:
        model, optimizer = wrapped(kind, source, world)
        train(model, optimizer, stop=2)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            return dict(model.state_dict()), FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0_only)

    values, states = run_threads(source.ranks, save)[0]

    def resume(world: Collectives) -> Results:
        model, optimizer = wrapped(kind, target, world)
        model.load_state_dict(values)
        if rank0_only:
            loaded = FSDP.scatter_full_optim_state_dict(states if world.rank == 0 else None, model, optim=optimizer)
        else:
            loaded = FSDP.optim_state_dict_to_load(model, optimizer, states)
        optimizer.load_state_dict(loaded)
        train(model, optimizer, start=2)
        return results(model, optimizer)

    for found in run_threads(target.ranks, resume):
        assert_same(found, expected(kind))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("case", SOURCES, ids=str)
def test_states_of_plain_optimizers(kind: str, case: Case) -> None:
    """The state has the names and shapes of the plain optimizers', and theirs is loaded: training goes on exactly."""
    model, optimizers = plain(kind)
    train(model, *optimizers, stop=2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    given = {
        "state": {names[p]: dict(state) for each in optimizers for p, state in each.state.items()},
        "param_groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for each in optimizers
            for group in each.param_groups
        ],
    }
    half_way = {name: value.clone() for name, value in model.state_dict().items()}

    def resume(world: Collectives) -> Any:
        model, optimizer = wrapped(kind, case, world)
        model.load_state_dict(half_way)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
        exported = FSDP.optim_state_dict(model, optimizer)
        train(model, optimizer, start=2)
        return exported["state"], results(model, optimizer)

    for exported, found in run_threads(case.ranks, resume):
        assert exported.keys() == given["state"].keys()
        for name, states in given["state"].items():
            assert exported[name].keys() == states.keys(), name
            for key, value in states.items():
                assert torch.equal(exported[name][key], value), (name, key)
        assert_same(found, expected(kind))


# Over process groups: what `torch.distributed.checkpoint` writes


def in_shards(kind: str, case: Case) -> tuple[FSDP, Any]:
    model, optimizer = wrapped(kind, case, None)  # type: ignore[arg-type]
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, optimizer


#: Each optimizer with each source and each target of two or more ranks.
SHARDED = [
    (kind, source, target)
    for kind in OPTIMIZERS
    for source, target in itertools.product((SOURCES[0], SOURCES[2]), TARGETS)
    if target.strategy != "NO_SHARD"
]


def save_each(ranks: Collectives, root: Path, sources: list[tuple[str, Case]]) -> None:
    import torch.distributed.checkpoint as dcp

    for kind, source in sources:
        model, optimizer = in_shards(kind, source)
        train(model, optimizer, stop=2)
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=root / f"{kind}-{source}")


def resume_each(ranks: Collectives, root: Path, cases: list[tuple[str, Case, Case]]) -> list[tuple[str, Results]]:
    import torch.distributed.checkpoint as dcp

    found = []
    for kind, source, target in cases:
        model, optimizer = in_shards(kind, target)
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=root / f"{kind}-{source}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
        train(model, optimizer, start=2)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        found.append((kind, results(model, optimizer)))
    return found


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "cases",
    # Every fifth: each optimizer, and each source with each target.
    [pytest.param(SHARDED[::5], id="some"), pytest.param(SHARDED, marks=pytest.mark.long, id="all")],
)
def test_distributed_checkpoints(cases: list[tuple[str, Case, Case]], tmp_path: Path) -> None:
    """What `dcp.save` wrote on two ranks, `dcp.load` gives four before their first step, and they go on exactly."""
    run_processes(2, save_each, tmp_path, list(dict.fromkeys((kind, source) for kind, source, _ in cases)))
    for each in run_processes(4, resume_each, tmp_path, cases):
        for kind, found in each:
            assert_same(found, expected(kind))


# Where state is that owners keep


def kept_by(optimizer: Any) -> list[int]:
    """The parameters that are stepped as wholes, by number, of which this rank has more than each part has."""
    parts = optimizer._rule.part_states
    (group,) = (group for group in optimizer.param_groups if group["rule"] != "adamw")
    return [number for number, each in enumerate(group["params"]) if set(optimizer.state.get(each, ())) - parts]


@pytest.mark.parametrize("case", [Case(4, "blocks", HYBRID, True), Case(2, "one unit", "NO_SHARD", False)], ids=str)
@pytest.mark.parametrize("kind", ["adafactor", "shampoo", "own"])
def test_replicas_share_state(kind: str, case: Case) -> None:
    """One rank in the world keeps what belongs to a matrix; after a load, which all have, the same is so after a step."""

    def rank(world: Collectives) -> Any:
        model, optimizer = wrapped(kind, case, world)
        train(model, optimizer, stop=2)
        first, steps = kept_by(optimizer), optimizer.whole_steps
        state = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        loaded = kept_by(optimizer)
        train(model, optimizer, start=2)
        assert_same(results(model, optimizer), expected(kind))
        return first, loaded, kept_by(optimizer), steps

    told = run_threads(case.ranks, rank)
    matrices = [number for numbers in told for number in numbers[0]]
    assert len(matrices) == len(set(matrices)) == 6
    assert sum(steps for *_, steps in told) == 2 * (16 if kind == "adafactor" else 6)
    assert all(set(loaded) >= set(first) for first, loaded, _, _ in told)
    again = [number for numbers in told for number in numbers[2]]
    assert sorted(again) == sorted(matrices)


def test_state_of_one_rank_stays_with_its_owner() -> None:
    """Each rank's own `state_dict()` goes on in a new optimizer, though its matrices would be dealt out otherwise."""

    def make(world: Collectives) -> tuple[FSDP, list[nn.Parameter]]:
        model = Case(3, "layers", "NO_SHARD").wrap(world)
        return model, [parameter for parameter in model.parameters() if parameter.dim() == 2]

    def some(model: FSDP, optimizer: Any, start: int, stop: int) -> None:
        train(model, optimizer, start=start, stop=stop)

    def rank(world: Collectives, resumes: bool) -> Any:
        model, (first, *others) = make(world)
        optimizer = Shampoo([first])
        some(model, optimizer, 0, 2)
        optimizer.add_param_group({"params": others})
        some(model, optimizer, 2, 4)
        if resumes:
            values, state = dict(model.state_dict()), optimizer.state_dict()
            model, (first, *others) = make(world)
            model.load_state_dict(values)
            optimizer = Shampoo([{"params": others}, {"params": [first]}][::-1])
            optimizer.load_state_dict(state)
        some(model, optimizer, 4, 6)
        return dict(model.state_dict())

    assert_same(run_threads(3, rank, True)[0], run_threads(3, rank, False)[0])
