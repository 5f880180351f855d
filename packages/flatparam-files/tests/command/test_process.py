"""The command as a process: what scripts see."""

import fcntl
import gc
import os
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from flatparam_files import FORMATS, open_source, write_dcp, write_hugging_face
from flatparam_files.checkpoint.lock import DirectoryLock
from flatparam_files.command import ckpt_arguments, ckpt_commands
from flatparam_files.disk.system import ByteFile

from .calling import entries, make_all
from .sparse import infos, sparse_run


def start(*arguments: object) -> subprocess.Popen[str]:
    """`python -m flatparam_files` with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "flatparam_files", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """A shell has what it starts in the background ignore them, and so all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_no_traceback_and_no_progress_in_a_pipe(tmp_path: Path) -> None:
    """What is wrong is one sentence on stderr; where stderr is no terminal, there is no progress bar."""
    make_all(tmp_path)
    process = start("ckpt", "verify", tmp_path / "gone")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert f": the path {tmp_path}/gone does not exist; check the path; see " in err
    assert err.count("\n") == 1
    process = start("ckpt", "export", tmp_path / "run", tmp_path / "new.pt", "--to", "torch")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")


SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("torch", signal.SIGINT),
        ("dcp", signal.SIGTERM),
        ("import", signal.SIGINT),
        *(
            pytest.param(*other, marks=pytest.mark.long)
            for other in [("torch", signal.SIGTERM), ("dcp", signal.SIGINT), ("import", signal.SIGTERM)]
        ),
    ],
)
@pytest.mark.slow
def test_interrupted(kind: str, sent: signal.Signals, tmp_path: Path) -> None:
    """An interrupt in the middle of writing leaves nothing half, and says so by the exit status."""
    sparse_run(tmp_path / "run", infos(100, (2560, 4096)), world_size=1)  # 4 GB: long enough
    before = entries(tmp_path)
    command = ("import",) if kind == "import" else ("export", "--to", kind)
    process = start("ckpt", command[0], tmp_path / "run", tmp_path / "new", *command[1:])
    while process.poll() is None and not _begun(tmp_path):
        os.sched_yield()
    process.send_signal(sent)
    _, err = process.communicate()
    status, said = SIGNALS[sent]
    assert process.returncode == status, err
    assert said in err
    assert "Traceback" not in err
    assert entries(tmp_path) == before


@pytest.mark.parametrize("kind", [ByteFile, DirectoryLock])
def test_interrupted_before_the_constructor(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object whose constructor has not begun goes without a traceback on stderr."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    made = object.__new__(kind)
    del made
    gc.collect()
    assert told == []


def test_interrupted_while_torch_is_imported(tmp_path: Path) -> None:
    """An interrupt in the first seconds, which importing torch takes, is the same sentence and status."""
    (tmp_path / "torch").mkdir()
    interrupting = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "torch" / "__init__.py").write_text(interrupting)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "flatparam_files", "ckpt", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=heed_interrupts,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "flatparam: interrupted; nothing was written\n")


def _begun(directory: Path) -> bool:
    """Whether there is a file with some megabytes of the output."""
    files = [*directory.glob(".new*"), *directory.glob(".new*/*"), *directory.glob("new/step-*.tmp-*/*")]
    return any(path.is_file() and path.stat().st_size > 0 for path in files)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """Output into a pipe that is closed early, as by `head`, is no error."""
    torch.save({f"w{index}": torch.zeros(1) for index in range(20000)}, tmp_path / "a.pt")
    process = start("ckpt", "inspect", tmp_path / "a.pt")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0


def test_a_closed_stdout(tmp_path: Path) -> None:
    """A process without a stdout, as after `>&-`, verifies in silence; the status is that of the checkpoint."""
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
    command = f'exec "{sys.executable}" -m flatparam_files ckpt verify "{tmp_path / "a.pt"}" >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal there is a progress bar in bytes on stderr, and none with --no-progress or FLATPARAM_PROGRESS=0."""
    make_all(tmp_path)
    code = (
        "from flatparam_files.disk import progress\n"
        "progress.DELAY = 0\n"
        "from flatparam_files.command import main\n"
        "main()"
    )
    cases: list[tuple[tuple[str, ...], str, bool]] = [
        ((), "", True),
        (("--no-progress",), "", False),
        (("--quiet",), "", False),
        ((), "0", False),
    ]
    for number, (extra, switch, shown) in enumerate(cases):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-c", code, "ckpt", "export", str(tmp_path / "run"), str(tmp_path / f"{number}.pt"),
             "--to", "torch", *extra],
            env={**os.environ, "FLATPARAM_PROGRESS": switch},
            stdout=subprocess.DEVNULL,
            stderr=theirs,
        )  # fmt: skip
        assert process.wait() == 0
        os.write(theirs, b"end")
        seen = os.read(ours, 10_000).decode()
        os.close(theirs)
        os.close(ours)
        assert ("B/s" in seen) == shown


def test_help_does_not_import_torch() -> None:
    """What only reads the arguments comes at once: nothing that takes seconds is imported, and formats are those there are."""
    code = (
        "import sys\n"
        "from flatparam_files.command import main\n"
        "for arguments in (['--help'], ['ckpt', 'export', '--help'], ['ckpt', 'inspect', '--depth', 'x']):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'flatparam_core')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    assert set(ckpt_arguments.FORMATS) == set(FORMATS)
    assert set(ckpt_arguments.EXPORTS) == set(ckpt_commands._EXPORTS)


ONLY_CORE = """
import sys
import torch
before = set(sys.modules)
from flatparam_files.command import main
status = main(sys.argv[1:])
added = {name for name in set(sys.modules) - before if name.split(".")[0] != "flatparam_core"}
ours = {name for name in added if name.startswith("flatparam") and name.split(".")[0] != "flatparam_files"}
print(status, sorted(ours), sorted(name for name in added if name.startswith("torch.distributed")), file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "reshard", "export", "import"])
@pytest.mark.parametrize("name", ["run", "a.pt", "dcp", "hf"])
def test_commands_import_the_core_alone(command: str, name: str, tmp_path: Path) -> None:
    """No command imports comm, the runtime or state, nor more of `torch.distributed` than `import torch` does."""
    make_all(tmp_path)
    source = open_source(tmp_path / "a.pt")
    write_dcp(source, tmp_path / "dcp")
    write_hugging_face(source, tmp_path / "hf")
    given = {
        "diff": [tmp_path / name],
        "reshard": [tmp_path / "new", "--world-size", "2"],
        "export": [tmp_path / "new", "--to", "torch", "--only", "model"],
        "import": [tmp_path / "new"],
    }.get(command, [])
    called = [sys.executable, "-c", ONLY_CORE, "ckpt", command, tmp_path / name, *given]
    done = subprocess.run(list(map(str, called)), capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "0 [] []", done.stderr
