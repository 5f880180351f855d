"""`flatparam.trace` and `flatparam trace`: what a run did, drawn and compared."""

import functools
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam import FullyShardedDataParallel, ShardingStrategy, trace
from flatparam.command import main
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives, run_threads
from flatparam_comm.testing import PATIENCE
from flatparam_plan.picture import Picture, Piece
from flatparam_runtime import units_in

from .traced import Block, make, record

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_run_is_traced_drawn_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank's file has every unit; two ranks are one picture, and differ in nothing."""
    pytest.importorskip("flatparam_files")
    run_threads(2, record, str(tmp_path))
    paths = [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    picture = Picture.read(Path(paths[0]).read_text())
    assert {piece.unit for piece in picture.pieces if piece.lane == "computing"} == {"(root)", "1", "2", "3"}
    gathers = [piece.unit for piece in picture.pieces if piece.name.startswith("all_gather")]
    assert sorted(gathers) == ["(root)", "1", "1", "2", "2", "3"]
    assert all(piece.end >= piece.begin for piece in picture.pieces)
    assert picture.curve is not None
    assert picture.curve.points[-1][1] == 0
    waits = [piece.name for piece in picture.pieces if piece.lane == "waiting"]
    assert waits.count("wait for all_gather 1") == 2
    assert waits.count("wait for reduce_scatter (root)") == 1
    drawn = tmp_path / "both.svg"
    assert main(["trace", "draw", str(drawn), *paths]) == 0
    assert "computing, rank1" in drawn.read_text()
    assert main(["trace", "diff", *paths]) == 0
    said = capsys.readouterr().out
    assert "all_gather" in said
    assert " beside " not in said


def train_and_trace(world: Collectives, directory: str, steps: int) -> None:
    """Trace steps of an optimizer from the first one on, with two micro-batches each."""
    model = FullyShardedDataParallel(make(), process_group=world, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace(model, Path(directory, f"rank{world.rank}.json")):
        for _ in range(steps):
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
            optimizer.step()


def test_phases_and_steps(tmp_path: Path) -> None:
    """The phases of each step follow one another, and each unit's backward pass is within one, once."""
    run_threads(2, train_and_trace, str(tmp_path), 3)
    picture = Picture.read((tmp_path / "rank1.json").read_text())
    phases = [piece for piece in picture.pieces if piece.lane == "phase"]
    assert [piece.name for piece in phases] == ["forward", "backward", "forward", "backward", "optimizer"] * 3
    assert all(before.end <= after.begin for before, after in pairwise(phases))
    assert len(picture.steps) == 3
    backwards = [piece for piece in picture.pieces if piece.name.startswith("backward ")]
    assert sorted(piece.unit for piece in backwards) == sorted(["(root)", "1", "2", "3"] * 6)
    for piece in backwards:
        assert any(phase.begin <= piece.begin <= piece.end <= phase.end for phase in phases)


def test_a_picture_leaves_the_first_of_several_steps_out(tmp_path: Path) -> None:
    """It begins with the second, unless all are asked for; its time is from there on, and so is its curve."""
    pytest.importorskip("flatparam_files")
    run_threads(2, train_and_trace, str(tmp_path), 3)
    traces = [str(tmp_path / f"rank{rank}.json") for rank in range(2)]
    whole = Picture.read(Path(traces[0]).read_text())
    rest = whole.after_first_step()
    assert rest.begin == whole.steps[1]
    assert rest.length < whole.length
    assert rest.curve is not None
    assert rest.curve.points[0][0] >= rest.begin
    assert rest.after_first_step().begin == whole.steps[2]
    for options, title in ([], "rank0, steps 2 to 3; rank1, steps 2 to 3:"), (["--all"], "rank0; rank1:"):
        path = tmp_path / f"{len(options)}.svg"
        assert main(["trace", "draw", *options, str(path), *traces]) == 0
        assert f">{title} " in path.read_text()


def test_a_picture_has_an_axis_and_a_legend(tmp_path: Path) -> None:
    """Round numbers from zero on, and each unit beside its colour, which is its own; many units are counted."""
    pieces = [Piece("computing", f"u{n}", f"forward u{n}", 1 + n, 2 + n) for n in range(30)]
    text = Picture("run", pieces).svg()
    assert [f">{told}<" in text for told in ("0", "5 s", "30 s", "35 s")] == [True, True, True, False]
    assert ">u23<" in text
    assert ">u24<" not in text
    assert ">and 6 more: each piece has its name<" in text
    colours = re.findall(r'fill="(hsl[^"]*)"', text)
    assert len(set(colours)) == 30
    assert "stroke-opacity" not in text
    assert Picture("run", [Piece("computing", "u", "backward u", 0, 1)]).svg().count("stroke-opacity") == 1


def test_perfetto_shows_names(tmp_path: Path) -> None:
    """A trace names its process and its lanes, and their order."""
    run_threads(1, train_and_trace, str(tmp_path), 1)
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    named = {(each["name"], each.get("tid")): each["args"] for each in events if each["ph"] == "M"}
    assert named["process_name", None] == {"name": "rank0"}
    assert named["thread_name", 0] == {"name": "phase"}
    assert named["thread_sort_index", 1] == {"sort_index": 1}


def heights(world: Collectives, directory: str, **arguments: Any) -> tuple[int, int, int]:
    """The peak of a second step's curve, its line, and the line by hand, of three equal blocks and a root."""
    model = FullyShardedDataParallel(
        make(), process_group=world, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments
    )
    model(torch.ones(2, 8)).sum().backward()
    path = Path(directory, f"rank{world.rank}.json")
    with trace(model, path):
        model(torch.ones(2, 8)).sum().backward()
    curve = Picture.read(path.read_text()).curve
    assert curve is not None
    return max(height for _, height in curve.points), curve.line, units_in(model)[0].unsharded_nbytes


@each_row(
    ("arguments", "others"),
    [
        ({}, 2),
        ({"backward_prefetch": None}, 1),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, 3),
    ],
)
def test_the_line_is_the_formula(tmp_path: Path, arguments: dict[str, Any], others: int) -> None:
    """The root, its flat gradients, and some blocks at once; the curve does not go above that."""
    most, line, one = run_threads(2, functools.partial(heights, **arguments), str(tmp_path))[0]
    assert line == (2 + others) * one
    assert 0 < most <= line


PROGRAM = """
import sys
import torch
import flatparam
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import run_threads

class Block(torch.nn.Linear):
    pass

def train(world):
    model = torch.nn.Sequential(Block(4, 4), Block(4, 4))
    wrapped = flatparam.FullyShardedDataParallel(
        model, process_group=world, auto_wrap_policy=ModuleWrapPolicy({Block}), sync_module_states=True
    )
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()

run_threads(2, train)
print(sys.argv[1:])
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["--out", "--out=", "FLATPARAM_TRACE"])
def test_a_whole_program_is_traced(tmp_path: Path, how: str) -> None:
    """The command, or the variable, leaves a trace of each rank with every step."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM, encoding="utf-8")
    folder = tmp_path / "traces"
    command, environment = [sys.executable, str(script), "--fast"], dict(os.environ)
    if how.startswith("--out"):
        words = [f"{how}{folder}"] if how.endswith("=") else [how, str(folder)]
        command[1:1] = ["-m", "flatparam", "trace", *words]
    else:
        environment["FLATPARAM_TRACE"] = str(folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "['--fast']" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json"]
    picture = Picture.read((folder / "rank0.json").read_text())
    assert {piece.unit for piece in picture.pieces if piece.lane != "phase"} == {"(root)", "0", "1"}
    assert {piece.lane for piece in picture.pieces} == {"phase", "computing", "communication", "waiting"}
    gathers = [piece.unit for piece in picture.pieces if piece.name.startswith("all_gather")]
    assert gathers.count("0") == 4
    assert picture.curve is not None
    assert 0 < max(height for _, height in picture.curve.points) <= picture.curve.line


def test_a_file_where_traces_should_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused when the first unit is made, and not when the program ends."""
    file = tmp_path / "traces"
    file.write_text("mine")
    monkeypatch.setenv("FLATPARAM_TRACE", str(file))
    with pytest.raises(ValueError, match="expected a folder for the traces .* FLATPARAM_TRACE"):
        FullyShardedDataParallel(make(), process_group=SingleCollectives())
    assert file.read_text() == "mine"


def test_a_lacking_argument_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the command."""
    pytest.importorskip("flatparam_files")
    with pytest.raises(SystemExit, match="2"):
        main(["trace", "diff", __file__])
    said = capsys.readouterr().err
    assert said.startswith("flatparam trace diff: error: the following arguments are required: B")
    assert said.count("\n") == 1


def test_a_picture_replaces_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the name of a picture no trace is overwritten, nor is a picture that is there."""
    pytest.importorskip("flatparam_files")
    traces = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    picture = tmp_path / "both.svg"
    for path in (*traces, picture):
        path.write_text("kept")
    assert main(["trace", "draw", *map(str, traces)]) == 2
    assert "expected the name of the picture first" in capsys.readouterr().err
    assert main(["trace", "draw", str(picture), *map(str, traces)]) == 2
    assert "both.svg is there already" in capsys.readouterr().err
    assert {path.read_text() for path in (*traces, picture)} == {"kept"}


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its path."""
    pytest.importorskip("flatparam_files")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"events": []}))
    assert main(["trace", "draw", str(tmp_path / "x.svg"), str(wrong)]) == 2
    assert "wrong.json" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["trace", "diff", str(tmp_path / "none.json"), str(wrong)])
    assert f"the path {tmp_path / 'none.json'} does not exist" in capsys.readouterr().err
