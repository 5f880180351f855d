"""`flatparam run`: a program runs as Python runs it, and its FSDP1 is ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from flatparam.command import main
from flatparam_clients.children import patch_of_reruns
from flatparam_clients.programs import CannotRun, Program
from flatparam_comm.testing import PATIENCE

pytestmark = pytest.mark.processes

FACTS = """
import pickle, sys, threading
import __main__
import sibling

class Here:
    pass

def act(what):
    if what == "fail":
        raise ValueError("no such thing")
    if what == "exit":
        sys.exit(7)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "thread":
        threading.Thread(target=lambda: print(__main__.Here is Here)).start()

print(sys.argv, sys.path[0], __name__, __file__, __package__, getattr(__spec__, "name", None))
print(sorted(set(globals()) - {"__annotations__"}))
print(__main__.Here is Here, type(pickle.loads(pickle.dumps(Here()))) is Here, sibling.NAME)
act(sys.argv[-1])
"""

TRAINING = """
import sys
import torch
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def train(rank):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model = FSDP(
        module,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.full((2, 3), rank + 1.0)).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank}: {type(model).__module__} {loss.item():.6f}\\n", end="", flush=True)

def of_process(rank, file):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    train(rank)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    if len(sys.argv) > 1:
        mp.spawn(of_process, (sys.argv[1],), nprocs=2)
    else:
        torch.distributed.init_process_group("gloo")
        train(torch.distributed.get_rank())
        torch.distributed.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the programs, one of them in a package."""
    (tmp_path / "sibling.py").write_text("NAME = __name__\n")
    (tmp_path / "facts.py").write_text(FACTS)
    (tmp_path / "broken.py").write_text("x = 1\nif\n")
    (tmp_path / "train.py").write_text(TRAINING)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "from .inner import NAME\nimport sys\nprint(NAME, __package__, sys.argv[1:])\n"
    )
    (package / "inner.py").write_text("NAME = __name__\n")
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "sibling.py").write_text("NAME = __name__\n")
    (whole / "__main__.py").write_text(FACTS)
    zipapp.create_archive(whole, tmp_path / "whole.pyz")
    return tmp_path


def outcome(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit status, the output and the errors of a Python process."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        # Each form of a program, and each end of one; those that have been seen in another row are long.
        ("facts.py", "--help", "--", "-m", "thread"),
        ("-m", "package", "--help"),
        ("whole.pyz", "exit"),
        *(
            pytest.param(program, marks=pytest.mark.long)
            for program in [
                ("package/../facts.py", "fail"),
                ("package/../facts.py", "exit"),
                ("./facts.py", "interrupt"),
                ("-m", "facts", "exit"),
                ("./whole/", "thread"),
                ("whole", "exit"),
                ("whole.pyz", "thread"),
                ("broken.py",),
            ]
        ),
    ],
)
def test_a_program_runs_as_python_runs_it(folder: Path, program: tuple[str, ...]) -> None:
    """Arguments, paths, `__main__`, output, traceback and exit status are those of the program without us."""
    assert outcome(folder, "-m", "flatparam", "run", *program) == outcome(folder, *program)


@pytest.mark.long
def test_two_dashes_before_the_program(folder: Path) -> None:
    """What is behind them is the program, and the dashes after it are its own."""
    assert outcome(folder, "-m", "flatparam", "run", "--", "facts.py", "--", "x") == outcome(
        folder, "facts.py", "--", "x"
    )


def test_programs_that_are_not_there(folder: Path) -> None:
    """They are named, and the status is 2."""
    status, _, errors = outcome(folder, "-m", "flatparam", "run", "nothing.py")
    assert (status, errors) == (
        2,
        f"flatparam: can't open file '{folder / 'nothing.py'}': No such file or directory\n",
    )


def test_what_is_no_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without `__main__`, and a module that is not there, or inside of what is no package, are refused by name."""
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(CannotRun, match=re.escape(f"can't find '__main__' module in '{folder / 'empty'}'")):
        Program.script("empty")
    for module in ("nothing", "sibling.inside"):
        with pytest.raises(CannotRun, match=f"no module named {module!r} that can be run"):
            Program.module(module)


def test_no_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a program the command says what it takes."""
    assert main(["run"]) == 2
    assert "expected a script, or -m and a module" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`flatparam run --help` shows what it takes."""
    pytest.importorskip("flatparam_files")
    with pytest.raises(SystemExit) as exit:
        main(["run", "--help"])
    assert exit.value.code == 0
    assert "torchrun --nproc-per-node 8 -m flatparam run train.py" in capsys.readouterr().out


@pytest.mark.long
def test_a_program_that_starts_itself(folder: Path) -> None:
    """Ranks that a program starts by its own command line, as Lightning does, have ours, in an environment of their own too."""
    (folder / "again.py").write_text(AGAIN)
    status, output, errors = outcome(folder, "-m", "flatparam", "run", "again.py")
    assert (status, output.split()) == (0, ["flatparam", "torch"]), errors


AGAIN = """
import os, subprocess, sys
from torch.distributed.fsdp import CPUOffload
if len(sys.argv) > 1:
    print(CPUOffload.__module__.split(".")[0], flush=True)
else:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(env["PYTHONPATH"].split(os.pathsep)[1:])
    subprocess.run([sys.executable, "-u", os.path.abspath(sys.argv[0]), "rank"], check=True, env=env)
    other = "from torch.distributed.fsdp import CPUOffload; print(CPUOffload.__module__.split('.')[0])"
    subprocess.run([sys.executable, "-c", other], check=True, env=env)
"""


@pytest.mark.long
def test_processes_of_any_kind_that_a_program_starts(folder: Path) -> None:
    """A driver's workers have ours, whatever starts them and at any distance, and import what they would otherwise."""
    (folder / "driver.py").write_text(DRIVER)
    (folder / "worker.py").write_text(WORKER)
    (folder / "before").mkdir()
    (folder / "before" / "sitecustomize.py").write_text("import builtins; builtins.before = 'imported too'")
    status, output, errors = outcome(folder, "-m", "flatparam", "run", "driver.py")
    assert status == 0, errors
    assert sorted(output.splitlines()) == ["flatparam imported too"] * 7
    assert "FSDP1 is torch's" not in errors


DRIVER = """
import multiprocessing, os, subprocess, sys

def by_multiprocessing():
    import worker

if __name__ == "__main__":
    if len(sys.argv) == 1:
        path = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([path[0], os.path.abspath("before"), *path[1:]])
    worker = [sys.executable, "worker.py"]
    subprocess.run(worker, check=True)
    subprocess.run(" ".join(worker), shell=True, check=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "worker.py"]
    subprocess.run(launcher, check=True)
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=by_multiprocessing)
        process.start()
        process.join()
        assert process.exitcode == 0, method
    os.execv(sys.executable, worker)
"""
WORKER = """
import builtins, sys
from torch.distributed.fsdp import FullyShardedDataParallel
assert not [folder for folder in sys.path if folder.endswith("startup")]
print(f"{FullyShardedDataParallel.__module__.split('.')[0]} {builtins.before}\\n", end="", flush=True)
"""


NOT_REACHED = "flatparam run: no FullyShardedDataParallel was made in this process"
WORKERS = """
import os, subprocess, sys
import torch.multiprocessing as mp

def wrap(rank=0):
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    print(type(FSDP(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))).__module__, flush=True)
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    ways = sys.argv[1:]
    for way in ways:
        if way == "wrap":
            wrap()
        elif way == "spawn":
            mp.spawn(wrap)
        elif way == "ray":
            sys.modules["ray"] = sys
        elif way == "fail":
            sys.exit(3)
        elif way == "end":
            sys.exit()
        elif way == "git":
            subprocess.run(["true", "python-like"], check=True)
        else:
            options, _, inner = way.partition(" ")
            command = [sys.executable, options, os.path.abspath("worker.py" if inner else "driver.py"), *inner.split()]
            subprocess.run(command, check=True)
"""


@pytest.mark.parametrize(
    ("ways", "is_told"),
    [
        pytest.param(["-I wrap", "end"], True, marks=pytest.mark.long),
        pytest.param(["ray"], True, marks=pytest.mark.long),
        # The program itself, which runs by `flatparam run` again, and says nothing twice.
        (["-u "], True),
        pytest.param(["-I wrap", "fail"], False, marks=pytest.mark.long),
        pytest.param(["-u wrap"], False, marks=pytest.mark.long),
        pytest.param(["-I wrap", "spawn"], False, marks=pytest.mark.long),
        pytest.param(["wrap", "ray"], False, marks=pytest.mark.long),
        pytest.param(["git"], False, marks=pytest.mark.long),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_a_driver_whose_workers_are_not_reached(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ways: list[str], is_told: bool
) -> None:
    """One line at the end says that no model was wrapped, if the program started workers and ended well."""
    for name in ("driver.py", "worker.py"):
        (folder / name).write_text(WORKERS)
    monkeypatch.setenv("TMPDIR", str(folder))
    status, _, errors = outcome(folder, "-m", "flatparam", "run", "driver.py", *ways)
    assert status == (3 if "fail" in ways else 0), errors
    assert errors.count(NOT_REACHED) == is_told, errors
    assert list(folder.glob("flatparam-run-*")) == []


@pytest.mark.long
def test_processes_that_are_none_of_fsdps(folder: Path) -> None:
    """A process that imports no torch imports nothing of ours; one that cannot have ours says so, and goes on."""
    (folder / "driver.py").write_text(f"import subprocess, sys\nfor code in {CODES}:\n    {STARTS}")
    status, output, errors = outcome(folder, "-m", "flatparam", "run", "driver.py")
    assert (status, output.split()) == (
        0,
        ["[]", "torch.distributed.fsdp.api", "torch.distributed.fsdp.api"],
    ), errors
    assert errors.count("which the program has started, FSDP1 is torch's: ") == 1


CODES = [
    "import sys; print([name for name in sys.modules if name.startswith(('torch', 'flatparam'))])",
    "import sys; sys.modules['flatparam'] = None; import torch.distributed.fsdp as f; print(f.CPUOffload.__module__)",
    "import flatparam.api, torch.distributed.fsdp as f; print(f.CPUOffload.__module__)",
]
STARTS = "subprocess.run([sys.executable, '-c', code], check=True)"


RUN = ["-m", "flatparam", "run"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["train.py", "-m", "x"], [*RUN, "train.py", "-m", "x"]),
        (["-u", "train.py"], ["-u", *RUN, "train.py"]),
        (["-W", "ignore", "train.py"], ["-W", "ignore", *RUN, "train.py"]),
        (["-Wignore", "-uX", "dev", "train.py"], ["-Wignore", "-uX", "dev", *RUN, "train.py"]),
        (
            ["--check-hash-based-pycs", "never", "train.py"],
            ["--check-hash-based-pycs", "never", *RUN, "train.py"],
        ),
        (["-m", "train", "1"], [*RUN, "-m", "train", "1"]),
        (["-mtrain", "1"], [*RUN, "-m", "train", "1"]),
        (["-um", "train"], ["-u", *RUN, "-m", "train"]),
        (["-m", "other", "train"], None),
        (["-c", "pass", "train.py"], None),
        (["-", "train.py"], None),
        (["other.py", "train.py"], None),
        (["-m"], None),
        ([], None),
    ],
)
def test_the_program_in_a_command(
    monkeypatch: pytest.MonkeyPatch, command: list[str], expected: list[str] | None
) -> None:
    """A command that runs the program anew gets `-m flatparam run` after the interpreter's options; no other one does."""
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda self, args: ran.append(args))
    is_script = "train.py" in command
    program = os.path.abspath("train.py") if is_script else "train"
    patch = patch_of_reruns(program, is_module=not is_script)
    patch.value(None, [sys.executable, *command])
    assert ran == [[sys.executable, *(command if expected is None else expected)]]


@pytest.mark.long
def test_ranks_that_the_program_starts(folder: Path) -> None:
    """Ranks that an unchanged program starts by `spawn` train with our wrapper."""
    status, output, errors = outcome(folder, "-m", "flatparam", "run", "train.py", str(folder / "meeting"))
    assert status == 0, errors
    assert sorted(line.rpartition(" ")[0] for line in output.splitlines()) == [
        "rank 0: flatparam.fully_sharded_data_parallel",
        "rank 1: flatparam.fully_sharded_data_parallel",
    ]


def test_under_torchrun(folder: Path) -> None:
    """Under torchrun an unchanged program trains with our wrapper, to the losses that it has with torch's FSDP1."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ours = outcome(folder, *torchrun, "-m", "flatparam", "run", "train.py")
    assert ours[0] == 0, ours[2]
    # On a busy machine a process with torch's FSDP1 is now and then aborted while it ends: a thread of gloo is not joined.
    tries = (outcome(folder, *torchrun, "train.py") for _ in range(5))
    theirs = next(each for each in tries if each[0] == 0)
    expected = theirs[1].replace("torch.distributed.fsdp", "flatparam")
    assert sorted(ours[1].splitlines()) == sorted(expected.splitlines())
    assert len(ours[1].splitlines()) == 2
