"""What travels when whole parameters are stepped: bytes by a formula, over every engine, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import (
    ByteLedger,
    Collectives,
    FaultyCollectives,
    NoStreams,
    RecordingCollectives,
    acting_as,
    current_collectives,
    run_threads,
    shared_memory,
)
from flatparam_comm.testing import run_processes
from flatparam_core import FlatParamError, all_thresholds
from flatparam_optim import Adafactor, Muon, Shampoo
from integration_tests.matrices.whole_cases import (
    HYBRID,
    Block,
    Case,
    assert_same,
    batch,
    build,
    few_cases,
    results,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LABELS = ("matrices to their owners", "updates of matrices", "updates to replicas")
BUCKET = next(each for each in all_thresholds() if each.name == "runtime.matrix_bucket_numel")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    optimizer.zero_grad()
    model(batch(0, number)).square().mean().backward()
    optimizer.step()


KINDS: dict[str, tuple[Any, int, int]] = {
    "Muon": (Muon, 2, 2),
    "Adafactor": (Adafactor, 8, 4),
    "Shampoo": (Shampoo, 4, 4),
}
"""The optimizers, and the bytes of an element that travel to the owner and back: float32 but Muon's, Adafactor's twice."""


@pytest.mark.parametrize(
    ("kind", "bucket"),
    [("Muon", 1), ("Muon", 300), ("Muon", 1 << 22), ("Adafactor", 300), ("Shampoo", 300)],
)
@pytest.mark.parametrize("case", few_cases(), ids=str)
def test_bytes_are_the_formula(case: Case, kind: str, bucket: int) -> None:
    """A rank sends its parts of cut matrices to their owners, and gets as much back, also replicas."""
    make, given, returned = KINDS[kind]
    streams = 2 if kind == "Adafactor" else 1

    def rank(world: Collectives) -> Any:
        ledger = ByteLedger()
        model = case.wrap(RecordingCollectives(world, ledger))
        optimizer = make(model.parameters())
        with BUCKET.set_to(bucket):
            step(model, optimizer)
        found = [ledger.by_label()[label].sent_nbytes if label in ledger.by_label() else 0 for label in LABELS]
        if not optimizer._stepper.routes:
            return found, found, found[:2]
        (routes,) = optimizer._stepper.routes
        shards, replicas = routes.ranks, routes.replicas
        assert shards * replicas == case.ranks
        replica, own = divmod(world.rank, shards)
        to_owners = from_owner = 0
        for number, matrix in enumerate(routes.matrices):
            at, owner = divmod(routes.owners[number], shards)
            if at != replica:
                continue
            for holder, span in matrix.spans.items():
                if holder == own != owner:
                    to_owners += span.numel * given
                if own == owner != holder:
                    from_owner += span.numel * returned
        numels = routes.sent_numels(world.rank, streams)
        nbytes = (given // streams, returned, returned)
        planned = [each * numel for each, numel in zip(nbytes, numels, strict=True)]
        return found, planned, [to_owners, from_owner]

    for found, planned, counted in run_threads(case.ranks, rank):
        assert found == planned
        assert found[:2] == counted
        if case.layout == "whole" and case.strategy != HYBRID:
            assert found == [0, 0, 0]


def test_parts_are_equal_for_replicas() -> None:
    """Without sharding, one bucket and equal matrices, each replica gives the others all of its updates: no padding."""

    def rank(world: Collectives) -> Any:
        ledger = ByteLedger()
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        wrapped = FSDP(model, RecordingCollectives(world, ledger), sharding_strategy=ShardingStrategy.NO_SHARD)
        optimizer = Muon(wrapped.parameters())
        wrapped(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return ledger.by_label()[LABELS[2]].sent_nbytes, optimizer.whole_steps

    assert run_threads(2, rank) == [(2 * 64 * 2, 2)] * 2


def test_buckets_change_nothing() -> None:
    """With one matrix in a bucket, with few, and with all, the bits are the same."""

    def rank(world: Collectives, numel: int) -> Any:
        model = Case(3, "one unit").wrap(world)
        optimizer = Muon(model.parameters(), lr=0.02)
        with BUCKET.set_to(numel):
            for number in range(2):
                step(model, optimizer, number)
        return results(model, optimizer)

    expected = run_threads(3, rank, 1 << 22)[0]
    for numel in (1, 300):
        assert_same(run_threads(3, rank, numel)[1], expected)


def test_the_next_bucket_is_under_way_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is issued before the one before it is stepped, and the vectors are stepped while the first is on its way."""
    from flatparam_optim import muon, whole_optimizer

    events: list[str] = []

    def note(event: str) -> None:
        if current_collectives().rank == 0:
            events.append(event)

    inner, others = muon.orthogonalised, whole_optimizer.step_in_segments

    def orthogonalised(*args: Any, **settings: Any) -> Tensor:
        note("step")
        return inner(*args, **settings)

    def step_others(optimizer: torch.optim.Optimizer) -> None:
        note("AdamW")
        others(optimizer)

    monkeypatch.setattr(muon, "orthogonalised", orthogonalised)
    monkeypatch.setattr(whole_optimizer, "step_in_segments", step_others)

    class Watched(FaultyCollectives):
        __slots__ = ()

        def all_to_all(self, *args: Any, **numels: Any) -> Any:
            note({LABELS[0]: "send", LABELS[1]: "back"}[numels["label"]])
            return super().all_to_all(*args, **numels)

    def rank(world: Collectives) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        wrapped = FSDP(model, Watched(world, []), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = Muon(wrapped.parameters())
        wrapped(torch.ones(1, 8)).sum().backward()
        with BUCKET.set_to(1):
            optimizer.step()

    run_threads(2, rank)
    sends = [at for at, event in enumerate(events) if event == "send"]
    backs = [at for at, event in enumerate(events) if event == "back"]
    assert len(sends) == len(backs) == 3
    assert events[:3] == ["send", "AdamW", "send"]
    for send, back in zip(sends[1:], backs, strict=False):
        assert send < back


# Engines


def on_engine(group: Collectives, through_memory: bool) -> Any:
    ranks = shared_memory(group) if through_memory else group
    model = Case(3, "blocks", use_orig_params=not through_memory).wrap(ranks)
    optimizer = Muon(model.parameters(), lr=0.02)
    with BUCKET.set_to(300):
        for number in range(3):
            step(model, optimizer, number)
    return results(model, optimizer), optimizer.whole_steps


@pytest.mark.processes
@pytest.mark.parametrize("through_memory", [False, True], ids=["gloo", "shared memory"])
def test_processes_have_the_bits_of_threads(through_memory: bool) -> None:
    """Over gloo and over shared memory the parameters and states are those of a world of threads."""
    expected, _ = run_threads(3, on_engine_of_threads)[0]
    found = run_processes(3, on_engine, through_memory)
    for each, _ in found:
        assert_same(each, expected)
    assert sum(count for _, count in found) == 3 * 6


def on_engine_of_threads(world: Collectives) -> Any:
    model = Case(3, "one unit").wrap(world)
    optimizer = Muon(model.parameters(), lr=0.02)
    for number in range(3):
        step(model, optimizer, number)
    return results(model, optimizer), optimizer.whole_steps


# Gradients that are not there


class Branches(nn.Module):
    """Two branches, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)

    def forward(self, x: Tensor, name: str) -> Tensor:
        out: Tensor = getattr(self, name)(x)
        return out


def test_matrices_without_a_gradient_are_left_alone(use_orig_params: bool) -> None:
    """As in one process: neither the parameter, nor its momentum, nor its decay."""
    uses = ["left", "right", "left", "left"]

    def rank(world: Collectives) -> Any:
        torch.manual_seed(0)
        model = FSDP(Branches(), world, use_orig_params=use_orig_params)
        optimizer = Muon(model.parameters(), lr=0.02)
        for number, name in enumerate(uses):
            # The module's own, which originals of a flat parameter do not see.
            (model if number % 2 else optimizer).zero_grad()
            model(torch.ones(2, 6), name).square().mean().backward()
            optimizer.step()
        return results(model, optimizer), optimizer.whole_steps

    torch.manual_seed(0)
    plain = Branches()
    optimizer = Muon(plain.parameters(), lr=0.02)
    for name in uses:
        optimizer.zero_grad()
        plain(torch.ones(2, 6), name).square().mean().backward()
        optimizer.step()
    expected = dict(plain.state_dict())
    for name, parameter in plain.named_parameters():
        expected |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    told = run_threads(4, rank)
    for found, _ in told:
        assert_same(found, expected)
    assert sum(count for _, count in told) == len(uses)


def test_frozen_matrices_do_not_travel(use_orig_params: bool) -> None:
    """What does not require a gradient is neither planned nor sent, also if it was frozen after a step."""

    def rank(world: Collectives) -> Any:
        ledger = ByteLedger()
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        wrapped = FSDP(model, RecordingCollectives(world, ledger), use_orig_params=use_orig_params)
        optimizer = Muon(wrapped.parameters())
        counts = []
        for number in range(2):
            if number and use_orig_params:
                wrapped.module[1].weight.requires_grad_(False)
            ledger.reset()
            wrapped(torch.ones(1, 8, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sum(ledger.by_label()[label].count for label in LABELS if label in ledger.by_label()))
        return counts

    assert run_threads(2, rank)[0] == ([2, 0] if use_orig_params else [2, 2])


class Dropped(nn.Module):
    """A matrix that loses its gradient on one rank, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.matrix(x)
        return out


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", HYBRID])
@pytest.mark.parametrize("kind", [Muon, Shampoo])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["CPU", "accelerator"])
def test_a_gradient_on_some_ranks_only_is_refused(kind: Any, strategy: str, runs_ahead: bool) -> None:
    """If somebody drops a gradient on one rank, every rank says so before anything changes; an accelerator's in the next step.

    States change neither, nor vectors.
    """

    def rank(world: Collectives) -> str:
        torch.manual_seed(0)
        model = Case(4, "one unit", strategy, use_orig_params=True).wrap(world, Dropped())
        optimizer = kind(model.parameters())
        step(model, optimizer)
        model(batch(0, 1)).square().mean().backward()
        matrix = model.module.matrix.weight
        if world.rank == 1:
            assert matrix.numel()
            matrix.grad = None
        if runs_ahead:
            optimizer.step()
        before = [each.clone() for each in [*model.parameters(), *states_of(optimizer)]]
        with pytest.raises(FlatParamError, match=rf"rank {world.rank}: parameter 'matrix.weight', .*") as caught:
            optimizer.step()
        assert all(map(torch.equal, before, [*model.parameters(), *states_of(optimizer)]))
        optimizer.zero_grad()
        step(model, optimizer)
        return str(caught.value)

    runs_ahead = runs_ahead or torch.get_default_device().type != "cpu"
    told = run_threads(4, acting(rank, runs_ahead))
    when = "the step before this one was wrong" if runs_ahead else "nothing was stepped"
    for number, message in enumerate(told):
        assert ("has no gradient on this rank" if number == 1 else "has a gradient on this rank") in message
        assert when in message


def acting(rank: Callable[..., Any], runs_ahead: bool = True) -> Callable[..., Any]:
    """The same function of a rank whose host does as that of an accelerator, if it runs ahead."""

    def on_rank(world: Collectives) -> Any:
        with acting_as(NoStreams(runs_ahead=runs_ahead)):
            return rank(world)

    return on_rank


def states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_saving_a_state_looks_at_the_last_step() -> None:
    """Where the host runs ahead, the state that a wrong step has left is not saved."""

    def rank(world: Collectives) -> None:
        model = FSDP(nn.Linear(8, 8, bias=False), world, use_orig_params=True)
        optimizer = Muon(model.parameters())
        model(torch.ones(1, 8)).sum().backward()
        if world.rank == 1:
            next(model.parameters()).grad = None
        optimizer.step()
        with pytest.raises(FlatParamError, match="the step before this one was wrong"):
            optimizer.state_dict()

    run_threads(2, acting(rank))


@pytest.mark.parametrize("kind", [Muon, Adafactor, Shampoo])
def test_a_host_that_runs_ahead_has_the_same_bits(kind: Any, use_orig_params: bool) -> None:
    """An owner that holds no part of a matrix does not know whether it has a gradient; that changes nothing."""
    uses = ["left", "right", "left", "right"]

    def rank(world: Collectives) -> Any:
        torch.manual_seed(0)
        model = FSDP(Branches(), world, use_orig_params=use_orig_params)
        optimizer = kind(model.parameters())
        for name in uses:
            optimizer.zero_grad()
            model(torch.ones(2, 6), name).square().mean().backward()
            optimizer.step()
        return results(model, optimizer)

    expected = run_threads(4, rank)
    for one, other in zip(run_threads(4, acting(rank)), expected, strict=True):
        assert_same(one, other)


def test_other_parameters_on_other_ranks_are_refused() -> None:
    """Optimizers that hold different matrices are an error on every rank, which names both."""

    def rank(world: Collectives) -> str:
        model = FSDP(build(), world, use_orig_params=True)
        parameters = [p for p in model.parameters() if p.numel()] if world.rank else list(model.parameters())
        optimizer = Muon(parameters)
        model(batch(0, 0)).square().mean().backward()
        with pytest.raises(FlatParamError, match="step different parameters as wholes: number") as caught:
            optimizer.step()
        return str(caught.value)

    for message in run_threads(4, rank):
        assert "also those of which a rank holds no element" in message


# Groups


def test_groups_keep_their_settings(use_orig_params: bool) -> None:
    """A group becomes one of matrices and one of the others; `adamw_` settings are the others'; names choose."""

    def rank(world: Collectives) -> Any:
        model = Case(2, "blocks", use_orig_params=use_orig_params).wrap(world)
        optimizer = Muon(
            [{"params": list(model.named_parameters()), "lr": 0.5, "adamw_lr": 0.25}],
            lr=0.1,
            matrices=lambda name, shape: len(shape) == 2 and not name.startswith("3."),
        )
        return [
            (group["rule"], group["lr"], sorted(group["param_names"])[:2], len(group["params"]))
            for group in optimizer.param_groups
        ]

    matrices, others = run_threads(2, rank)[0]
    assert matrices == ("muon", 0.5, ["0.weight", "1.down.weight"], 5)
    assert others == ("adamw", 0.25, ["0.bias", "1.down.bias"], 11)


def test_a_scheduler_scales_both_rates() -> None:
    """A scheduler of torch changes the rates of matrices and of the others alike."""
    model = Block()
    optimizer = Muon(model.parameters(), lr=0.4, adamw_lr=0.2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    model(torch.ones(1, 12)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Muon(p, lr=-1.0), "not negative, found -1.0"),
        (lambda p: Muon(p, momentum=-0.1), "momentum that is not negative"),
        (lambda p: Muon(p, weight_decay=-0.1), "weight decay that is not negative"),
        (lambda p: Muon(p, ns_steps=100), "fewer than 100 iterations"),
        (lambda p: Muon(p, ns_coefficients=(1.0, 2.0)), "three coefficients"),
        (lambda p: Muon(p, adjust_lr_fn="none"), "'original' or 'match_rms_adamw', found 'none'"),
        (
            lambda p: Muon(p, matrices=lambda name, shape: True),
            r"expected matrices, found .* of shape \(20,\)",
        ),
        (lambda p: Muon([{"params": p, "rule": "sgd"}]), "'muon' or 'adamw' as the rule of .*, found 'sgd'"),
        (lambda p: Muon([]), "empty parameter list"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    """The error says what was expected, and what was found."""
    with pytest.raises(ValueError, match=message):
        make(list(Block().parameters()))
