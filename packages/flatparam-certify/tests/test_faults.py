"""Seeded faults: each is found, and by its name, and nothing that is right is called wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faults
import programs
import pytest
from attrs import frozen

from flatparam_certify import Certificate, certify

EVERYTHING = tuple(name for name, _ in programs.build().named_parameters())
EXPERTS = tuple(name for name in EVERYTHING if "experts" in name)
NORM = ("norm.weight", "norm.bias")


@frozen
class Fault:
    """An engine with a fault, the mesh where it shows, and what must be said about it, of which parameters.

    `text` is how the diagnosis begins, and `about` what it is of.
    """

    engine: Callable[..., Any]
    mesh: str
    code: str
    text: str
    parameters: tuple[str, ...] = EVERYTHING
    about: str = "gradient"

    def __str__(self) -> str:
        return self.engine.__name__


FAULTS = (
    Fault(faults.ExpertsDividedTwice, "ep=2", "factor", "1/2 (1/the size of ep) times", EXPERTS),
    Fault(faults.DoubledInGroupsOfOne, "dp_shard=2", "weights", "the micro-batches count 8, 4, 2 times"),
    Fault(faults.OnlyLast, "dp_shard=2", "only-last", "only the last micro-batch"),
    Fault(faults.WithoutLast, "dp_shard=2", "without-last", "the last micro-batch is missing"),
    Fault(
        faults.FirstStageSkipsLast,
        "pp=2",
        "without-last",
        "rank 0: the last micro-batch is missing",
        tuple(name for name in EVERYTHING if "experts" not in name),
    ),
    Fault(faults.SummedInBf16, "dp_shard=2", "low-precision", "summed in bf16"),
    Fault(faults.TpSumsInBf16, "tp=2", "low-precision", "", NORM),
    Fault(faults.DividedByMicroBatches, "dp_shard=2", "factor", "1/3 (1/the number of micro-batches) times"),
    Fault(faults.NoSyncWithoutEffect, "dp_shard=2", "no-sync-without-effect", "without effect", ("",), "no_sync"),
    Fault(
        faults.ReplicasNotReduced,
        "dp_replicate=2,dp_shard=2",
        "not-reduced",
        "not reduced over dp_replicate:",
    ),
    Fault(
        faults.NothingReducedInGroupsOfOne,
        "dp_replicate=2,dp_shard=2",
        "not-reduced",
        "not reduced over dp_replicate: each rank has its own",
    ),
    Fault(faults.NormOfTpNotReduced, "tp=2", "not-reduced", "not reduced over tp: each rank has a part", NORM),
    Fault(faults.Summed, "dp_shard=2", "factor", "2 (the size of dp_shard) times"),
    Fault(faults.SummedOverCp, "cp=2", "factor", "2 (the size of cp) times"),
    Fault(faults.WithoutRankOne, "dp_shard=3", "rank-missing", "the data of data rank 1 is not in the sum"),
    Fault(faults.LastShardLost, "dp_shard=2", "zero", "zero, in 24 of 48 elements", ("up.weight",)),
    Fault(faults.ZeroOnRankOne, "dp_shard=2", "zero", "rank 1: zero", ("up.bias",)),
    Fault(faults.Detached, "dp_shard=2", "missing", "no gradient", ("up.bias",)),
    Fault(
        faults.OwnWeights,
        "dp_shard=2",
        "not-as-built",
        "rank 1: not those that build() made",
        ("down.weight",),
        "weights",
    ),
    Fault(
        faults.OwnUpdates,
        "dp_shard=2",
        "replicas-differ",
        "rank 1: replicas differ over dp_shard",
        ("up.bias",),
        "weights",
    ),
    Fault(faults.NeverUpdated, "dp_shard=2", "not-updated", "not updated", ("norm.weight",), "weights"),
    Fault(
        faults.LossScaled,
        "dp_shard=3",
        "factor",
        "0.5 times the right one; its gradient is right",
        ("",),
        "loss",
    ),
    Fault(faults.Stale, "dp_shard=2", "stale", "that of the step before is added"),
    Fault(
        faults.NormOfCopies,
        "dp_shard=2",
        "factor",
        "1.4142 (the root of the size of dp_shard) times",
        ("",),
        "clip norm",
    ),
    Fault(faults.NormOfPart, "dp_shard=2", "not-reduced", "not summed over dp_shard", ("",), "clip norm"),
    Fault(faults.NotClipped, "dp_shard=2", "not-clipped", "not clipped", EVERYTHING, "clipped gradient"),
)


def certificate_of(engine: Callable[..., Any], mesh: str) -> Certificate:
    return certify(programs.CASE, engine, mesh, precisions=("fp32",), optimizers=("sgd",))


@pytest.mark.processes
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_found_by_its_name(fault: Fault) -> None:
    """The first thing that is said of each parameter with the fault is the right one, and of no other one is any."""
    found = certificate_of(fault.engine, fault.mesh)
    assert not found.is_right
    assert {each.about for each in found.findings} == {fault.about}, found.table()
    told = {}
    for each in found.findings:
        told.setdefault(each.parameter, set()).add((each.code, each.told()))
    assert set(told) == set(fault.parameters), found.table()
    for name, diagnoses in told.items():
        assert any(code == fault.code and text.startswith(fault.text) for code, text in diagnoses), (
            name,
            diagnoses,
        )


RIGHT = (
    (faults.ByHand, "dp_replicate=2,dp_shard=2"),
    *(
        pytest.param(engine, mesh, marks=pytest.mark.long)
        for engine, mesh in [
            (faults.ByHand, "ep=3"),
            (faults.ByRows, "dp_shard=2,cp=2"),
            (faults.ByColumns, "tp=2"),
            (faults.ByStages, "pp=2"),
        ]
    ),
)


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "mesh"), RIGHT, ids=lambda each: str(getattr(each, "__name__", each)))
def test_the_same_engines_without_a_fault(engine: Callable[..., Any], mesh: str) -> None:
    """They are right, parameter by parameter, on that mesh and on those with groups of one rank."""
    found = certificate_of(engine, mesh)
    assert found.is_right, found.table()
    assert {name for run in found.runs for name in run.agreements} == set(EVERYTHING)
    assert not any(run.skipped for run in found.runs)
