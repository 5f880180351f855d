"""`nonfinite` of the wrapper and of `fully_shard`, with everything that decides about a step beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.sharded_grad_scaler import ShardedGradScaler
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_comm.testing import run_processes
from flatparam_runtime import NonfiniteError

from .models import mlp, seeded
from .worlds import on_ranks

HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "mixed": {"mixed_precision": HALF},
    "half_kept": {"mixed_precision": MixedPrecision(torch.float16, keep_low_precision_grads=True)},
}


def batch(rank: int, bad: bool) -> torch.Tensor:
    given = torch.ones(2, 3)
    return given * float("nan") if bad and rank == 1 else given


def train(ranks: Collectives, nonfinite: str, setting: str, use_orig_params: bool) -> list[float]:
    """The model's first full parameter after each step, with a bad batch on rank 1 in the second."""
    model = FSDP(
        seeded(mlp),
        process_group=ranks,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        nonfinite=nonfinite,
        **SETTINGS[setting],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    values = []
    for step in range(4):
        try:
            model(batch(ranks.rank, step == 1)).float().square().mean().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
        except NonfiniteError as error:
            assert "rank 1 has computed that of" in str(error)
        optimizer.zero_grad()
        with FSDP.summon_full_params(model):
            values.append(sum(float(p.double().sum()) for p in model.parameters()))
    assert model.skipped_steps == (nonfinite == "skip")
    return values


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_bad_step_is_as_if_it_had_not_been(setting: str, use_orig_params: bool) -> None:
    """`skip` and `raise` leave the bad step without effect, on all ranks alike; `ignore` loses the model."""
    found = {
        nonfinite: on_ranks(2, train, nonfinite, setting, use_orig_params) for nonfinite in ("skip", "raise", "ignore")
    }
    for nonfinite in ("skip", "raise"):
        first, second = found[nonfinite]
        assert first == second
        assert first[0] == first[1] != first[2] != first[3]
        assert first == found["skip"][0]
    assert all(value != value for value in found["ignore"][0][1:])


def hybrid(ranks: Collectives) -> tuple[list[float], int]:
    """The same on two groups of two ranks, each of which has a copy."""
    shard = [ranks.subgroup([0, 1]), ranks.subgroup([2, 3])]
    copies = [ranks.subgroup([0, 2]), ranks.subgroup([1, 3])]
    groups = tuple(next(group for group in found if group is not None) for found in (shard, copies))
    model = FSDP(
        seeded(mlp),
        process_group=groups,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        nonfinite="skip",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for step in range(3):
        model(batch(ranks.rank, step == 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with FSDP.summon_full_params(model):
            values.append(sum(float(p.sum()) for p in model.parameters()))
    return values, model.skipped_steps


@pytest.mark.filterwarnings("ignore")
def test_the_copies_of_a_shard_skip_too() -> None:
    """Rank 1's bad batch is known to the ranks that hold copies, and to those of the other shard group."""
    results = on_ranks(4, hybrid)
    assert len({str(each) for each in results}) == 1
    values, skipped = results[0]
    assert values[0] == values[1] != values[2]
    assert skipped == 1


def scaled(ranks: Collectives, nonfinite: str) -> tuple[list[float], list[float], int]:
    """The scale and a parameter after each step of a scaler."""
    model = FSDP(seeded(mlp), process_group=ranks, nonfinite=nonfinite)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=ranks)
    scales, values = [], []
    for step in range(3):
        scaler.scale(model(batch(ranks.rank, step == 1)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        with FSDP.summon_full_params(model):
            values.append(sum(float(p.sum()) for p in model.parameters()))
    return scales, values, model.skipped_steps


def test_a_scaler_stays_in_charge() -> None:
    """A step that the scaler leaves out is not counted, and the scale is halved as without `nonfinite`."""
    found = {nonfinite: on_ranks(2, scaled, nonfinite) for nonfinite in ("ignore", "skip")}
    assert found["ignore"] == found["skip"]
    scales, values, skipped = found["skip"][0]
    assert scales == [4.0, 2.0, 2.0]
    assert values[0] == values[1] != values[2]
    assert skipped == 0


def in_place(ranks: Collectives, nonfinite: str) -> tuple[list[float], int]:
    model = seeded(mlp)
    for child in model.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=ranks)
    fully_shard(model, mesh=ranks, nonfinite=nonfinite)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    values = []
    for step in range(3):
        model(batch(ranks.rank, step == 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(sum(float(p.double().sum()) for p in model.parameters()))
    return values, model.skipped_steps


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_takes_it() -> None:
    """The setting of the outermost module is that of the whole tree."""
    for values, skipped in on_ranks(2, in_place, "skip"):
        assert values[0] == values[1] != values[2]
        assert skipped == 1


def through_gloo(ranks: Collectives) -> tuple[list[float], str, int]:
    """A whole small job, with processes."""
    rank = ranks.rank
    model = FSDP(
        seeded(mlp),
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        nonfinite="raise",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, told = [], ""
    for step in range(4):
        loss = model(batch(rank, step == 1)).square().mean()
        try:
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        except NonfiniteError as error:
            told = str(error)
        optimizer.zero_grad()
    return losses, told, model.skipped_steps


def test_processes_raise_and_go_on() -> None:
    """All processes raise the same in the same pass, and train on: nobody is told that a rank has failed."""
    first, second = run_processes(2, through_gloo)
    assert first[0] == second[0]
    assert len(first[0]) == 3
    assert first[1].replace("rank 0:", "rank 1:", 1) == second[1]
    assert "rank 1 has computed that of '4.weight'" in first[1]


def test_other_values_are_refused() -> None:
    """The argument is named."""
    with pytest.raises(ValueError, match=r"nonfinite: expected 'raise', 'skip' or 'ignore', found True"):
        FSDP(seeded(mlp), SingleCollectives(), nonfinite=True)  # type: ignore[arg-type]  # that is the point
