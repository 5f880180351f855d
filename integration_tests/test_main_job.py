"""The main job, ``tools/train.py``: every layer at once, on real text, as its user starts and stops it.

Most runs are ranks forked from a server that has torch imported already, with the environment that torchrun would
give them; the launcher and torchrun themselves are each started once. All runs share a tiny model on 60 kB of text.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatparam_comm.testing import PATIENCE

TRAIN = Path(__file__).resolve().parent.parent / "tools" / "train.py"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * PATIENCE)]

LAYERS, WIDTH, CONTEXT, STEPS = 2, 32, 32, 12
TINY = [
    "--size", "tiny", "--layers", str(LAYERS), "--width", str(WIDTH), "--heads", "2", "--context", str(CONTEXT),
    "--batch", "8", "--warmup", "4", "--eval-every", "4", "--eval-batches", "2", "--checkpoint-every", "6",
    "--steps", str(STEPS), "--sample-bytes", "40", "--threads", "1",
]  # fmt: skip
BLOCKS_NUMEL = LAYERS * (12 * WIDTH**2 + 4 * WIDTH)
ROOT_NUMEL = 258 * WIDTH
NUMEL = BLOCKS_NUMEL + ROOT_NUMEL

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = ["torch", "torch.distributed", "matplotlib.figure", "tqdm", "flatparam"]
_RANK = """
import os, runpy, sys
os.environ.update(environment)
with open(output, "a") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
sys.path.insert(0, os.path.dirname(arguments[0]))
sys.argv = arguments
runpy.run_path(arguments[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, what it wrote on the terminal, its ranks' exit statuses."""

    out: Path
    output: str
    statuses: list[int | None]

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) of every step and of every evaluation, in order."""
        records = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], record.get("loss", record.get("held_out_loss"))) for record in records]

    def sample(self) -> str:
        """The generated text."""
        return self.output.split("The model goes on from")[1].split("this run")[0]

    def row(self, name: str) -> list[int]:
        """The whole numbers in a row of the table, without its last column."""
        line = next(line for line in self.output.splitlines() if line.startswith(name))
        cells = re.split(r"\s{2,}", line)[1:-1]
        return [int(re.sub(r"\D", "", cell)) for cell in cells]


def start(arguments: Sequence[object], out: Path, ranks: int) -> list[multiprocessing.process.BaseProcess]:
    """Start ``train.py`` on ``ranks`` ranks; what they write goes to ``<out>.txt``."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(ranks):
        environment = {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [str(TRAIN), *map(str, arguments), "--out", str(out)] + (["--ranks", "1"] if ranks == 1 else [])
        names = {"environment": environment, "output": f"{out}.txt", "arguments": command}
        processes.append(_CONTEXT.Process(target=exec, args=(_RANK, names)))
    for process in processes:
        process.start()
    return list(processes)


def finish(processes: list[multiprocessing.process.BaseProcess], out: Path) -> Run:
    """Wait for the ranks to end, and end those that do not."""
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
    return Run(out, Path(f"{out}.txt").read_text(), [process.exitcode for process in processes])


def train(arguments: Sequence[object], out: Path, ranks: int) -> Run:
    """Run ``train.py`` to its end, which must be a good one."""
    run = finish(start(arguments, out, ranks), out)
    assert run.statuses == [0] * ranks, run.output
    return run


def refuse(arguments: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    """Call ``train.py`` in this process with what it must refuse before it starts anything; returns its sentence."""
    from gpt.main import run

    assert run([str(argument) for argument in arguments], script=str(TRAIN)) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1, "one sentence, no traceback"
    return complaint


def newest_checkpoint(out: Path) -> Path:
    """The checkpoint that ``latest`` names."""
    pointer = json.loads((out / "checkpoints" / "latest").read_text())
    return out / "checkpoints" / str(pointer["content"]["name"])


def at_half_way(run: Run, out: Path) -> Path:
    """A copy of a finished run's folder, without the checkpoint of its last step: that at half of the steps is there."""
    shutil.copytree(run.out, out)
    shutil.rmtree(newest_checkpoint(out))
    return out


def wait_for_steps(out: Path, steps: int) -> None:
    """Wait until ``steps`` steps are in the metrics."""
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not metrics.exists() or metrics.read_text().count('"loss"') < steps:
        assert time.monotonic() < deadline, f"no {steps} steps in {metrics} after {PATIENCE} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 kB of Python source."""
    path = tmp_path_factory.mktemp("text") / "source.py"
    sources = [Path(module.__file__ or "").read_bytes() for module in (textwrap, subprocess)]
    path.write_bytes(b"".join(sources)[:60_000])
    return path


@pytest.fixture(scope="module")
def two_ranks(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole job on two ranks, as the user's own torchrun starts them."""
    out = tmp_path_factory.mktemp("two") / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, str(TRAIN), *TINY, "--data", str(text), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    return Run(out, ended.stdout, [ended.returncode])


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The reference: one process, an ordinary module, each half of the batch on its own."""
    out = tmp_path_factory.mktemp("plain") / "run"
    return train([*TINY, "--data", text, "--plain", "--accumulate", 2], out, ranks=1)


def test_two_ranks_compute_the_losses_of_one_process(two_ranks: Run, plain: Run) -> None:
    """Every training and held-out loss of two sharded ranks is bit-equal, in fp32, to an ordinary module's.

    The reference takes the same global batch, and computes the loss of each rank's half on its own, with a backward
    of half that loss: then every matrix product has the same operands, and each gradient is the sum of the same two
    halves. Computed in one piece, a product sums over the rows in another order; see the next test.
    """
    assert two_ranks.losses() == plain.losses()
    assert len([step for step, _ in plain.losses()]) == STEPS + STEPS // 4 + 1


def test_one_piece_differs_by_rounding_only(two_ranks: Run, text: Path, tmp_path: Path) -> None:
    """One FSDP rank that takes the global batch in one piece has the same losses up to the order of summation.

    The bound is 64 ulps of fp32 at 8.0: rounding grows with the steps, and here 12 of them are taken.
    """
    whole = train([*TINY, "--data", text], tmp_path / "run", ranks=1)
    largest = max(abs(a - b) for (_, a), (_, b) in zip(two_ranks.losses(), whole.losses(), strict=True))
    assert largest <= 64 * 2.0**-21


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(["--strategy", "shard_grad_op", "--use-orig-params"], id="shard_grad_op-originals"),
        pytest.param(
            ["--checkpoint-activations", "--use-orig-params"], id="recomputed-originals", marks=pytest.mark.long
        ),
    ],
)
def test_the_loss_curve_does_not_depend_on_how_it_is_computed(
    choice: list[str], two_ranks: Run, text: Path, tmp_path: Path
) -> None:
    """Strategy, exposure and recomputed activations do not change one bit of the losses."""
    other = train([*TINY, "--data", text, *choice], tmp_path / "run", ranks=2)
    assert other.losses() == two_ranks.losses()


@pytest.mark.parametrize(
    ("ranks", "choice"),
    [
        pytest.param(1, [], id="one rank", marks=pytest.mark.long),
        pytest.param(2, ["--use-orig-params"], id="two ranks"),
        pytest.param(4, [], id="four ranks", marks=pytest.mark.long),
    ],
)
def test_muon_has_the_losses_of_one_process(ranks: int, choice: list[str], text: Path, tmp_path: Path) -> None:
    """With ``--optimizer muon`` the losses of 1, 2 and 4 ranks are bit-equal to an ordinary module's with Muon."""
    muon = [*TINY, "--data", text, "--optimizer", "muon"]
    sharded = train([*muon, *choice], tmp_path / "sharded", ranks)
    plain = train([*muon, "--plain", "--accumulate", ranks], tmp_path / "plain", ranks=1)
    assert sharded.losses() == plain.losses()


@pytest.mark.long
def test_exact_sums_have_one_hash(text: Path, tmp_path: Path) -> None:
    """With ``--reduction exact``, four parts on 1, 2 and 4 ranks end with one hash of the parameters."""
    hashes = set()
    for ranks, parts in ((1, 4), (2, 2), (4, 1)):
        exact = ["--reduction", "exact", "--accumulate", parts, "--clip", 0.5]
        output = train([*TINY, "--data", text, *exact], tmp_path / str(ranks), ranks).output
        [shown] = re.findall(r"hash +([0-9a-f]{64})", output)
        hashes.add(shown)
    assert len(hashes) == 1


@pytest.mark.parametrize("wires", [("int8", "int8"), pytest.param(("mxfp8", "bf16"), marks=pytest.mark.long)])
def test_a_narrow_wire_learns_as_well(wires: tuple[str, str], two_ranks: Run, text: Path, tmp_path: Path) -> None:
    """With gradients and parameters of a quarter or half of the bytes, each loss is within 1 % of that without."""
    narrow = train([*TINY, "--data", text, "--wire", wires[0], "--gather-wire", wires[1]], tmp_path / "narrow", ranks=2)
    for (_, ours), (_, plain) in zip(narrow.losses(), two_ranks.losses(), strict=True):
        assert ours == pytest.approx(plain, rel=0.01)
    assert narrow.losses() != two_ranks.losses()


def test_accumulating_without_reduction_matches_plain(text: Path, tmp_path: Path) -> None:
    """Two parts on each of two ranks, gradients reduced once, clipped: the losses of four parts in one process.

    Not bit-equal: (a + b) + (c + d) is not ((a + b) + c) + d, and the norm is summed shard by shard.
    """
    choice = [*TINY, "--data", text, "--clip", 0.5]
    sharded = train([*choice, "--accumulate", 2, "--no-sync"], tmp_path / "sharded", ranks=2)
    plain = train([*choice, "--accumulate", 4, "--plain"], tmp_path / "plain", ranks=1)
    for (_, ours), (_, theirs) in zip(sharded.losses(), plain.losses(), strict=True):
        assert ours == pytest.approx(theirs, abs=64 * 2.0**-21)


@pytest.mark.parametrize(
    ("ranks", "choice"),
    [
        pytest.param(2, [], id="2-to-2"),
        pytest.param(1, ["--accumulate", "2"], id="2-to-1"),
        pytest.param(1, ["--accumulate", "2", "--plain"], id="2-to-plain"),
    ],
)
def test_a_resumed_run_goes_on_bit_exactly(
    ranks: int, choice: list[str], two_ranks: Run, text: Path, tmp_path: Path
) -> None:
    """From the checkpoint at half way, the second half has the same losses and ends in the same text.

    At the same world size, on one rank and without sharding; one process takes each rank's half of the batch on its
    own, so that equality is bit for bit there too.
    """
    out = at_half_way(two_ranks, tmp_path / "run")
    resumed = train([*TINY, "--data", text, "--resume", *choice], out, ranks)
    assert f"{STEPS // 2} steps done on 2 ranks" in resumed.output
    assert resumed.losses() == two_ranks.losses()
    assert resumed.sample() == two_ranks.sample()


def test_a_run_of_one_process_is_resumed_on_two_ranks(plain: Run, text: Path, tmp_path: Path) -> None:
    """1 -> 2: a checkpoint of an unsharded run, loaded into two shards, goes on with the same losses."""
    out = at_half_way(plain, tmp_path / "run")
    resumed = train([*TINY, "--data", text], out, ranks=2)
    assert f"{STEPS // 2} steps done on 1 rank" in resumed.output
    assert resumed.losses() == plain.losses()


def test_a_finished_run_only_shows_its_sample(two_ranks: Run, text: Path, tmp_path: Path) -> None:
    """Starting a finished run again trains nothing, says how to go on, and changes no checkpoint."""
    out = Path(shutil.copytree(two_ranks.out, tmp_path / "run"))
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    again = train([*TINY, "--data", text], out, ranks=1)
    assert f"all {STEPS} steps are done already" in again.output
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before
    assert again.losses() == two_ranks.losses()


def test_the_table_holds_the_formulas(two_ranks: Run) -> None:
    """The table's formulas are those of the literature, and what was measured is within 1 % of them.

    At rest 16 bytes per parameter over the ranks (DDP: 16 on each); moved, by rings, half of each gathered or reduced
    buffer: blocks are gathered twice but for the last, the root once, everything is reduced once (DDP: an all-reduce of
    all). What is moved is exactly the formula.
    """
    assert two_ranks.row("parameters")[0] == NUMEL
    at_rest, formula, ddp = two_ranks.row("bytes per rank at rest")
    assert (formula, ddp) == (16 * NUMEL // 2, 16 * NUMEL)
    assert at_rest == pytest.approx(formula, rel=0.01)
    moved, formula, ddp = two_ranks.row("bytes moved per step")
    flags = 8 * 2 + 3 + 16  # a byte for each parameter of two blocks and the root, and 16, there and back
    gathered = 2 * BLOCKS_NUMEL - BLOCKS_NUMEL // 2 + ROOT_NUMEL
    assert (formula, ddp) == (4 * (gathered + NUMEL) // 2 + flags, 4 * NUMEL)
    assert moved == formula


def test_peak_memory_lies_between_rest_and_everything(two_ranks: Run, plain: Run) -> None:
    """Recorded peaks are above rest, and sharding lowers them; the process holds more than its tensors."""
    peak = two_ranks.row("bytes per rank at peak")[0]
    assert two_ranks.row("bytes per rank at rest")[0] < peak < plain.row("bytes per rank at peak")[0]
    assert two_ranks.row("process memory at peak")[0] > peak


def test_the_plan_stands_beside_what_the_run_costs(two_ranks: Run) -> None:
    """Before the run was planned what it takes: bytes at rest and moved are equal; gloo's thread may move the peak."""
    planned = re.split(r" plan +this run +error", two_ranks.output)[1]
    for name in ("bytes per rank at rest", "bytes per rank at peak", "bytes moved per step"):
        found = re.search(rf"^{name} +([\d,]+) +([\d,]+) +([+-][\d,]+)", planned, flags=re.MULTILINE)
        assert found is not None
        assert "peak" in name or (found[1] == found[2] and found[3] == "+0")
    assert re.search(r"^milliseconds per step +[\d.]+ +[\d.]+ +[+-]\d+ %", planned, flags=re.MULTILINE)


def test_plots_and_words_are_there(two_ranks: Run, text: Path) -> None:
    """A run leaves three PNG pictures, and says what text it read (with its hash) and where its files are."""
    pytest.importorskip("matplotlib")
    for name in ("loss.png", "memory.png", "plan.png"):
        assert (two_ranks.out / name).read_bytes().startswith(b"\x89PNG")
        assert str(two_ranks.out / name) in two_ranks.output
    assert f"{text}: 1 file, {text.stat().st_size:,} bytes" in two_ranks.output
    assert re.search(r"sha256 [0-9a-f]{64}", two_ranks.output)


def test_ctrl_c_leaves_a_loadable_checkpoint(text: Path, tmp_path: Path) -> None:
    """SIGINT to the launcher ends both ranks after the same step, with a checkpoint that one rank goes on from.

    The launcher ends with status 130, names the checkpoint, and no process writes a traceback.
    """
    out = tmp_path / "run"
    command = [sys.executable, str(TRAIN), *TINY, "--steps", "100000", "--data", str(text), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            wait_for_steps(out, 2)
            launcher.send_signal(signal.SIGINT)
            output, _ = launcher.communicate(timeout=PATIENCE)
        finally:
            launcher.kill()
    assert launcher.returncode == 130, output
    assert "Traceback" not in output
    newest = newest_checkpoint(out)
    assert f"checkpoint {newest}" in output
    done = int(newest.name.removeprefix("step-"))
    more = train([*TINY, "--data", text, "--steps", done + 1], out, ranks=1)
    assert more.losses()[-1][0] == done + 1


def test_sigterm_leaves_a_checkpoint_without_a_launcher(text: Path, tmp_path: Path) -> None:
    """SIGTERM to a single process ends it with status 143 after the running step, with a checkpoint of it."""
    out = tmp_path / "run"
    processes = start([*TINY, "--data", text, "--steps", 100_000, "--plain"], out, ranks=1)
    wait_for_steps(out, 2)
    os.kill(processes[0].pid or 0, signal.SIGTERM)
    run = finish(processes, out)
    assert run.statuses == [143], run.output
    assert int(newest_checkpoint(out).name.removeprefix("step-")) == run.losses()[-1][0]


def test_stopping_before_the_first_step_says_that_there_is_no_checkpoint(text: Path, tmp_path: Path) -> None:
    """Ranks that are asked to stop before their first step say so, and leave no checkpoint."""
    from gpt.control import Control

    control = Control(tmp_path)
    control.open()
    control.request_stop(signal.SIGINT)
    run = train([*TINY, "--data", text, "--control", tmp_path], tmp_path / "run", ranks=2)
    assert "there is no checkpoint of this run" in run.output
    assert not (run.out / "checkpoints").exists()
    assert control.stopped_by() == signal.SIGINT


def test_ranks_whose_launcher_is_gone_stop_by_themselves(text: Path, tmp_path: Path) -> None:
    """Ranks do not train on for ever when the launching process was killed: they stop, with a checkpoint if due."""
    from gpt.control import Control

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "launcher.pid").write_text(str(gone.pid))
    train([*TINY, "--data", text, "--control", tmp_path], tmp_path / "run", ranks=1)
    assert Control(tmp_path).stopped_by() == signal.SIGTERM


def test_bad_data_is_refused_with_a_sentence(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, empty and too small --data is refused before any rank is started, with what to do about it."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"too short")
    (tmp_path / "folder").mkdir()
    assert "does not exist" in refuse(["--data", tmp_path / "missing"], capsys)
    assert "holds no text" in refuse(["--data", tmp_path / "empty.txt"], capsys)
    assert "no files in it" in refuse(["--data", tmp_path / "folder"], capsys)
    assert "too little" in refuse(["--data", tmp_path / "short.txt"], capsys)
    assert "smaller --context" in refuse(["--data", text, "--context", 4000], capsys)


def test_bad_options_are_refused_with_a_sentence(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that cannot work together are refused, with the option to change."""
    assert "multiple of --heads" in refuse(["--width", 30, "--heads", 4], capsys)
    assert "multiple of 3" in refuse(["--data", text, "--batch", 8, "--ranks", 3], capsys)
    assert "exclude each other" in refuse(["--resume", "--fresh"], capsys)
    assert "holds no checkpoint" in refuse(["--data", text, "--resume", "--out", tmp_path], capsys)
    assert "--out" in refuse(["--data", text, "--out", text], capsys)
    assert "--plain" in refuse(["--data", text, "--plain", "--ranks", 2], capsys)
    assert "at least 1" in refuse(["--steps", 0], capsys)


def test_another_runs_checkpoint_is_refused(
    two_ranks: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of another recipe is neither resumed nor written over; the differences are named."""
    complaint = refuse([*TINY, "--data", text, "--out", two_ranks.out, "--width", 64], capsys)
    assert f"width {WIDTH} there, 64 here" in complaint
    assert "--fresh" in complaint


def test_a_damaged_checkpoint_is_refused(
    two_ranks: Run, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One changed byte in a checkpoint's tensors is found before anything is trained from it."""
    out = Path(shutil.copytree(two_ranks.out, tmp_path / "run"))
    damaged = newest_checkpoint(out) / "rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    arguments = [*TINY, "--data", text, "--out", out]
    assert "damaged" in refuse(arguments, capsys)
    alone = finish(start(arguments, out, ranks=1), out)
    assert (alone.statuses, alone.losses()) == ([2], two_ranks.losses())
    assert f"error: rank 0: {damaged}" in alone.output
    assert "Traceback" not in alone.output


def test_a_fresh_run_takes_the_place_of_another(two_ranks: Run, text: Path, tmp_path: Path) -> None:
    """``--fresh`` starts over in a folder with checkpoints of another recipe: only its own are there afterwards."""
    out = Path(shutil.copytree(two_ranks.out, tmp_path / "run"))
    fresh = train([*TINY, "--data", text, "--fresh", "--seed", 1, "--steps", 7], out, ranks=1)
    assert [step for step, _ in fresh.losses()] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 7]
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["latest", "lock", "step-00000006", "step-00000007"]
    assert newest_checkpoint(out).name == "step-00000007"


def test_the_standard_library_is_read_the_same_way_each_time() -> None:
    """The default text is several MB of source without tests, and its hash is the same at every reading."""
    from gpt.corpus import read_corpus

    first, second = read_corpus(None), read_corpus(None)
    assert first == second
    assert first.files > 300
    assert len(first.text) > 5_000_000


def test_the_presets_have_the_sizes_they_promise() -> None:
    """``--size`` means about 0.2, 1, 10, 30 and over 100 million parameters, and the formula counts them exactly."""
    from gpt.model import GPT
    from gpt.shape import PRESETS

    numels = {name: preset.shape.numel for name, preset in PRESETS.items()}
    assert sum(parameter.numel() for parameter in GPT(PRESETS["tiny"].shape).parameters()) == numels["tiny"]
    for name, millions in {"tiny": 0.2, "small": 1.0, "medium": 10.0, "large": 32.0, "xl": 106.0}.items():
        assert numels[name] == pytest.approx(millions * 1e6, rel=0.1)
