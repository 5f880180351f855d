"""The engines with a name are right in every setting; one of torch's is not, on one mesh, which nobody seeded."""

from __future__ import annotations

import sys
from pathlib import Path

import faults
import programs
import pytest
from each_row import each_row
from torch import nn

from flatparam_certify import CertifyError, certify

HERE = Path(__file__).parent


@pytest.mark.processes
@pytest.mark.parametrize(
    "engine",
    [
        *("flatparam", "torch-fsdp2"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("fully_shard", "torch-fsdp1", "torch-ddp")),
    ],
)
def test_engines_with_a_name(engine: str) -> None:
    """Each runs every setting, in fp32 and in bf16, and is right; in fp32 by what the order of sums can do."""
    found = certify(programs.CASE, engine, "dp_shard=2", wrap=("Linear",), optimizers=["adamw"], steps=1)
    assert found.is_right, found.table()
    assert [run.setting for run in found.runs if run.mesh == "dp_shard=2"] == [
        f"{accumulated}{clipped}, {precision}, adamw"
        for precision in ("fp32", "bf16")
        for clipped in ("", ", clipped")
        for accumulated in (
            "1 micro-batch",
            "3 micro-batches without no_sync",
            "3 micro-batches with no_sync",
        )
    ]
    assert [run.mesh for run in found.runs[12:]] == ["1 rank"] * 3
    assert not any(run.skipped for run in found.runs)
    agreements = {how for run in found.runs for how, _ in run.agreements.values() if "fp32" in run.setting}
    assert agreements <= {"equal", "order"}


def test_one_process_beside_itself() -> None:
    """It has the same bits, if nothing is accumulated."""
    found = certify(programs.CASE, "plain", precisions=["fp32"], optimizers=["sgd"])
    assert found.is_right
    alone = [run for run in found.runs if "1 micro-batch" in run.setting]
    assert {how for run in alone for how, _ in run.agreements.values()} == {"equal"}
    assert {run.skipped for run in found.runs if "with no_sync" in run.setting} == {"with no_sync: the engine has none"}


@pytest.mark.processes
def test_torch_fsdp1_with_shard_groups_of_one() -> None:
    """FSDP1 takes a shard group of one rank for a world of one rank, and does not reduce over the copies."""
    found = certify(programs.CASE, "torch-fsdp1", "dp_replicate=2", precisions=["fp32"], optimizers=["sgd"], steps=1)
    told = {(each.code, each.text) for each in found.findings if each.setting.startswith("1 micro-batch,")}
    assert told == {("not-reduced", "not reduced over dp_replicate: each rank has a part, and their sum is right")}, (
        found.table()
    )


@pytest.mark.processes
def test_dtensors_of_torch() -> None:
    """A module whose parameters are DTensors beside plain tensors needs no trainer; torch cannot clip them, as told."""
    found = certify(
        programs.CASE, faults.by_torch, "tp=2", precisions=["fp32"], optimizers=["sgd"], groups_of_one=False
    )
    assert found.is_right, found.table()
    assert [run.setting for run in found.runs if not run.skipped] == [
        "1 micro-batch, fp32, sgd",
        "3 micro-batches without no_sync, fp32, sgd",
    ]
    assert {run.skipped for run in found.runs if "clipped" in run.setting} == {
        "with clipping: torch's clip_grad_norm_ takes no DTensors beside plain tensors; override Trainer.clip"
    }


@pytest.mark.processes
def test_functions_by_name() -> None:
    """A case and an engine are found in files, as they are in modules."""
    found = certify(
        str(HERE / "programs.py"),
        f"{HERE / 'faults.py'}:Summed",
        "dp_shard=2",
        precisions=["fp32"],
        optimizers=["sgd"],
        groups_of_one=False,
        steps=1,
    )
    assert {each.code for each in found.findings} == {"factor"}


def not_a_module(model: nn.Module, mesh: object) -> str:
    return "trained"


@pytest.mark.processes
def test_an_engine_that_returns_neither() -> None:
    """The error says what an engine returns, and comes from every rank."""
    found = certify(programs.CASE, not_a_module, "dp_shard=2", precisions=["fp32"], groups_of_one=False)
    assert {(each.about, each.code, each.ranks) for each in found.findings} == {("run", "raised", ())}
    assert "expected a torch.nn.Module or a flatparam_certify.Trainer, found str" in found.findings[0].text


@each_row(
    ("case", "engine", "mesh", "told"),
    [
        (programs.CASE, "torch-ddp", "tp=2", "expected a mesh of dp_replicate and dp_shard, found tp=2"),
        (programs.CASE, "plain", "dp_shard=2", "expected a mesh of one rank"),
        (programs.CASE, "fsdp", "dp_shard=2", "engine: expected one of flatparam, "),
        (programs.CASE, "flatparam", "dp=2", "mesh: expected dimensions of pp, dp_replicate"),
        (programs.CASE, "flatparam", "dp_shard=0", "expected at least 1 rank along dp_shard, found 0"),
        (
            programs.CASE,
            "flatparam",
            "dp_shard",
            "expected NAME=SIZE,... with each name once, found 'dp_shard'",
        ),
        ("nowhere", "flatparam", "dp_shard=2", "can be imported, found 'nowhere': ModuleNotFoundError"),
        ("nowhere.py", "flatparam", "dp_shard=2", "expected a file, found none at nowhere.py"),
        (
            "json",
            "flatparam",
            "dp_shard=2",
            "json: expected functions build, batch and loss, found none named build",
        ),
        ("json:nothing", "flatparam", "dp_shard=2", "expected 'nothing' in json, found none"),
        (
            programs.CASE,
            "json:__name__",
            "dp_shard=2",
            "expected a function of a model and a mesh, found str",
        ),
        (programs.CASE, lambda model, mesh: model, "dp_shard=2", "functions at the top level of a module"),
    ],
)
def test_what_cannot_be_used(case: object, engine: object, mesh: str, told: str) -> None:
    """The error says what was expected, what was found, and what to do, before any rank runs."""
    with pytest.raises(CertifyError) as raised:
        certify(case, engine, mesh)  # type: ignore[arg-type]
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("what", "value", "told"),
    [
        ("build", lambda: 1, "build: expected a torch.nn.Module, found int"),
        ("build", lambda: nn.Linear(2, 2).double(), "found weight in torch.float64"),
        ("build", lambda: nn.Linear(2), "build raised TypeError"),
        ("batch", lambda *_: 1 / 0, "batch raised ZeroDivisionError: division by zero"),
        (
            "loss",
            lambda model, batch: model(batch[0]),
            "loss: expected a tensor of one element, found a tensor of shape",
        ),
        ("loss", lambda model, batch: 1.0, "loss: expected a tensor of one element, found float"),
    ],
)
def test_cases_that_are_none(what: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a case that raise, or return something else, are named."""
    monkeypatch.setattr(programs, what, value)
    monkeypatch.setitem(sys.modules, "a_case", programs)
    with pytest.raises(CertifyError) as raised:
        certify("a_case", "plain")
    assert told in str(raised.value)


def test_units_of_a_class_that_the_model_has_not() -> None:
    """A wrapping that would never be is refused before any rank runs, with the classes that there are."""
    with pytest.raises(CertifyError, match=r"wrap: expected classes of the model \(.*Linear.*\), found \['Nope'\]"):
        certify(programs.CASE, "flatparam", "dp_shard=2", wrap=("Linear", "Nope"))
