"""The command as a process: what scripts see."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from importlib import metadata
from pathlib import Path

import pytest
import torch

import flatparam
from flatparam.command import arguments, converting
from flatparam_state import FORMATS

from .calling import entries, make_all
from .sparse import infos, sparse_run


def start(*arguments: object) -> subprocess.Popen[str]:
    """`python -m flatparam` with these arguments."""
    return subprocess.Popen(
        [sys.executable, "-m", "flatparam", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """A shell has what it starts in the background ignore them, and so all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_version() -> None:
    """--version says which versions of flatparam and torch are installed."""
    out, err = start("--version").communicate()
    assert (out, err) == (f"flatparam {flatparam.__version__}, torch {metadata.version('torch')}\n", "")


def test_no_traceback_and_no_progress_in_a_pipe(tmp_path: Path) -> None:
    """What is wrong is one sentence on stderr; where stderr is no terminal, there is no progress bar."""
    make_all(tmp_path)
    process = start("ckpt", "verify", tmp_path / "gone")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == f"flatparam: {tmp_path}/gone does not exist; check the path\n"
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


def test_interrupted_while_torch_is_imported(tmp_path: Path) -> None:
    """An interrupt in the first seconds, which importing torch takes, is the same sentence and status."""
    (tmp_path / "torch").mkdir()
    interrupting = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "torch" / "__init__.py").write_text(interrupting)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "flatparam", "ckpt", "verify", str(tmp_path)],
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
    command = f'exec "{sys.executable}" -m flatparam ckpt verify "{tmp_path / "a.pt"}" >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    """On a terminal there is a progress bar in bytes on stderr, and none with --no-progress."""
    make_all(tmp_path)
    cases: list[tuple[tuple[str, ...], bool]] = [((), True), (("--no-progress",), False)]
    for number, (extra, shown) in enumerate(cases):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "flatparam", "ckpt", "export", str(tmp_path / "run"), str(tmp_path / f"{number}.pt"),
             "--to", "torch", *extra],
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
    """What only reads the arguments comes at once: nothing that takes seconds is imported, and formats are those of state."""
    code = (
        "import sys\n"
        "from flatparam.command import main\n"
        "for arguments in (['--help'], ['ckpt', 'export', '--help'], ['--version'], ['ckpt', 'inspect', '--depth', 'x']):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'flatparam_core')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    assert set(arguments.FORMATS) == set(FORMATS)
    assert set(arguments.EXPORTS) == set(converting._EXPORTS)


def test_everything_exported_is_there() -> None:
    """Each name of the package is listed, its modules are found when they are asked for, and no other is."""
    assert {*flatparam.__all__} <= {*dir(flatparam)}
    assert flatparam.wrap.ModuleWrapPolicy is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = flatparam.no_such_thing
