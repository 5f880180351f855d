"""`flatparam.trace` and `flatparam trace`: what a run and a plan did, drawn and compared."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel, plan, trace
from flatparam.command import main
from flatparam.observing.picture import Picture
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def make() -> nn.Module:
    """Three units and a root."""
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(3)))


def record(world: Collectives, directory: str) -> None:
    """Train two steps, and trace the second."""
    model = FullyShardedDataParallel(make(), process_group=world, auto_wrap_policy=ModuleWrapPolicy({Block}))
    model(torch.ones(2, 8)).sum().backward()
    with trace(model, Path(directory, f"rank{world.rank}.json")):
        model(torch.ones(2, 8)).sum().backward()


def test_a_run_is_traced_drawn_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank's file has every unit; two ranks are one picture; a plan has the same collectives."""
    run_threads(2, record, str(tmp_path))
    paths = [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    picture = Picture.read(Path(paths[0]).read_text())
    assert {piece.unit for piece in picture.pieces if piece.lane == "computing"} == {"(root)", "1", "2", "3"}
    gathers = [piece.unit for piece in picture.pieces if piece.name.startswith("all_gather")]
    assert sorted(gathers) == ["(root)", "1", "1", "2", "2", "3"]
    assert all(piece.end >= piece.begin for piece in picture.pieces)
    assert picture.curve is not None
    assert picture.curve.points[-1][1] == 0
    drawn = tmp_path / "both.svg"
    assert main(["trace", "draw", str(drawn), *paths]) == 0
    assert "computing, rank1" in drawn.read_text()
    assert main(["trace", "diff", *paths]) == 0
    planned = plan(make, torch.ones(2, 8), world_size=2, wrap=("Block",), profile="h100").prediction
    assert planned is not None
    twin = tmp_path / "plan.json"
    twin.write_text(planned.picture("json"))
    capsys.readouterr()
    main(["trace", "diff", paths[0], str(twin)])
    said = capsys.readouterr().out
    for line in said.splitlines():
        assert not ("all_gather" in line and "beside" in line and "wait" not in line), line


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its path."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"events": []}))
    assert main(["trace", "draw", str(tmp_path / "x.svg"), str(wrong)]) == 2
    assert "wrong.json" in capsys.readouterr().err
