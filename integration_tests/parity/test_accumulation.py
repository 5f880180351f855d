"""Gradient accumulation and unusual orders of forward and backward passes, against one process that does the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, run_threads
from flatparam_runtime import no_sync
from integration_tests.parity.local import reduce_by_rule, share_zeros
from integration_tests.parity.programs import PROGRAMS, Loss, at_once
from integration_tests.parity.runs import OPTIMIZERS, Named, Run, assert_same, gradients_of, parameters_of
from integration_tests.parity.sharded import (
    RankRun,
    Setting,
    held_gradients,
    held_parameters,
    join,
    optimizer_of,
    shard,
    wrap,
)
from integration_tests.parity.zoo import Case, named

STEPS = 2
MICRO_BATCHES = 10


def micro_batches(case: Case, model: nn.Module, step: int, rank: int) -> Loss:
    return lambda number: case.loss(model, MICRO_BATCHES * step + number, rank)


@functools.cache
def local_run(name: str, program: str, ranks: int, flat: bool) -> Run:
    """What one process gets that runs each rank's program by itself and reduces by the rule wherever it yields."""
    case = named(name)
    model = case.build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run = Run([], [], [])
    for step in range(STEPS):
        going = [PROGRAMS[program](model, micro_batches(case, model, step, rank), at_once) for rank in range(ranks)]
        total = dict.fromkeys(gradients_of(model))
        while reduced := _next_reduction(model, going):
            for parameter_name, gradient in reduced.items():
                before = total[parameter_name]
                if gradient is not None:
                    total[parameter_name] = gradient if before is None else before + gradient
        for parameter_name, parameter in model.named_parameters():
            parameter.grad = total[parameter_name]
        if flat:
            share_zeros(model, case)
        run.gradients.append(gradients_of(model))
        optimizer.step()
        run.parameters.append(parameters_of(model))
    return run


def _next_reduction(model: nn.Module, going: list[Iterator[None]]) -> Named | None:
    of_ranks = []
    for program in going:
        model.zero_grad()
        if next(program, "over") == "over":
            continue
        of_ranks.append(gradients_of(model))
    if not of_ranks:
        return None
    return {name: reduce_by_rule([gradients[name] for gradients in of_ranks]) for name in of_ranks[0]}


def sharded_run(group: Collectives, name: str, program: str, setting: Setting, wrapped: bool) -> RankRun:
    case = named(name)
    model = (wrap if wrapped else shard)(case, setting, group)
    optimizer = optimizer_of(model, setting)
    run = RankRun([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = micro_batches(case, model, step, group.rank)
        for _ in PROGRAMS[program](model, loss, functools.partial(quiet, model)):
            pass
        run.gradients.append(held_gradients(model))
        optimizer.step()
        run.parameters.append(held_parameters(model))
    return run


def quiet(model: nn.Module) -> AbstractContextManager[None]:
    return model.no_sync() if isinstance(model, FullyShardedDataParallel) else no_sync(model)


@pytest.mark.parametrize(
    ("program", "name", "strategy", "ranks"),
    [
        # Each program with each model and in each way, and each model in each way; the other combinations are long.
        pytest.param(program, name, *way, marks=() if (a + b + c) % 3 == 0 else pytest.mark.long)
        for a, program in enumerate(PROGRAMS)
        for b, name in enumerate(("nested", "transformer", "checkpoint-around-unit"))
        for c, way in enumerate((("FULL_SHARD", 2), ("SHARD_GRAD_OP", 2), ("SHARD_GRAD_OP", 3)))
    ],
)
def test_bits_of_unusual_steps(program: str, name: str, strategy: str, ranks: int) -> None:
    """Each program leaves the gradients and parameters that local gradients, reduced where it says, leave: bit for bit.

    What is collected in no_sync is a sum of gradients divided by 2, which is exact; so is the reference's division of
    the sum by 2. On two ranks the optimizer holds flat parameters, on three the originals; wrapped and by hooks alone.
    """
    flat = ranks == 2
    setting = Setting(strategy, not flat, "adamw", forward_prefetch=flat)
    of_ranks = run_threads(ranks, sharded_run, name, program, setting, strategy == "FULL_SHARD")
    assert_same(join(of_ranks), local_run(name, program, ranks, flat))
