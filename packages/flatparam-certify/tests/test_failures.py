"""An engine that fails ends its certificate: which rank, how, and where, and no process is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import faults
import programs
import pytest
from torch import nn

from flatparam.command import main
from flatparam_certify import Certificate, certify, watched_ranks
from flatparam_comm.testing import PATIENCE, longer_and_longer

HERE = Path(__file__).parent


class Died(faults.ByHand):
    """Rank 1 is killed."""

    def finish(self) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        super().finish()


def at_once(model: nn.Module, mesh: object) -> nn.Module:
    """Every rank fails alike."""
    raise KeyError("no such layer")


def certificate_of(engine: object, timeout: float = PATIENCE) -> Certificate:
    return certify(
        programs.CASE,
        engine,  # type: ignore[arg-type]
        "dp_shard=2",
        precisions=["fp32"],
        optimizers=["sgd"],
        groups_of_one=False,
        timeout=timeout,
        steps=1,
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "code", "ranks", "text"),
    [
        (faults.Raised, "raised", (1,), "raised: ValueError: rank 1 has had enough"),
        (Died, "died", (1,), "died: its process ended by signal 9"),
        (at_once, "raised", (), "raised: KeyError: 'no such layer'"),
    ],
)
def test_an_engine_that_fails(
    engine: object, code: str, ranks: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that failed is told, and not those that waited for it; a world that is lost is followed by one more."""
    if not ranks:
        monkeypatch.setattr(watched_ranks, "_GRACE_SECONDS", PATIENCE)
    found = certificate_of(engine)
    assert {(each.about, each.code, each.ranks, each.text) for each in found.findings} == {("run", code, ranks, text)}
    # Where every rank fails alike, the world goes on.
    assert len(found.findings) == (6 if code == "raised" and not ranks else 2)
    assert "wrong: " in found.table()
    assert not multiprocessing.active_children()


@pytest.mark.long
@pytest.mark.processes
def test_an_engine_that_hangs() -> None:
    """After the limit, the table says in which line the rank was that waits, and that the other one had finished."""
    for limit in longer_and_longer(6):
        found = certificate_of(faults.Hung, timeout=limit)
        (first, *_) = found.findings
        # On a busy machine, neither rank may have come that far.
        if "had finished" in first.text and "in reduce" in first.text:
            break
    assert (first.code, first.ranks) == ("hung", (0,))
    assert f'"{HERE / "faults.py"}", line' in first.text
    assert "in reduce" in first.text
    assert first.text.endswith("; rank 1 had finished")
    assert [run.skipped for run in found.runs if run.skipped] == [
        "because the engine ended the ranks of two settings before"
    ] * 4


# The command

SHORT = (
    "--timeout",
    str(PATIENCE),
    "--precision",
    "fp32",
    "--optimizer",
    "sgd",
    "--no-groups-of-one",
    "--steps",
    "1",
)


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "status"), [("ByHand", 0), ("Summed", 1)])
def test_the_command(
    engine: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exits with 0 if all is right, and with 1 if not; `--quiet` writes if something is wrong; `--json` is JSON."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    arguments = ["certify", str(HERE / "programs.py"), "--engine", f"{HERE / 'faults.py'}:{engine}", *SHORT]
    assert main([*arguments, "--quiet"]) == status
    said = capsys.readouterr().out
    assert bool(said) == bool(status)
    assert main([*arguments, "--json"]) == status
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == 1
    assert facts["right"] == (status == 0)
    assert facts["parameters"]["up.weight"] == [8, 6]
    assert len(facts["runs"]) == 6
    assert {run["right"] for run in facts["runs"]} == {status == 0}
    codes = {each["code"] for run in facts["runs"] for each in run["findings"]}
    assert codes == ({"factor"} if status else set())


def test_arguments_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 2, and one line says why."""
    assert main(["certify", str(HERE / "programs.py"), "--mesh", "dp_shard=none"]) == 2
    assert capsys.readouterr().err.startswith("flatparam: mesh: expected NAME=SIZE")
    assert main(["certify", str(HERE / "programs.py"), "--micro-batches", "0"]) == 2
    assert "expected at least 1 micro-batch and 1 step, found 0 and 2" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    """The parser is there without torch, for help and for the completion of shells."""
    program = (
        "import argparse, sys; from flatparam_certify.certify_command import add; "
        "add(argparse.ArgumentParser().add_subparsers()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
