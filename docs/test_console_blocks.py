"""Every command in a console block of the documentation is executed, in its order, or it is said here why not.

The blocks of a page are run in one folder, where the files are that the page speaks of. A mark
`<!-- not-run: reason -->` right before a block leaves it out; `ELSEWHERE` leaves out kinds of commands.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from each_row import each_row

from docs.test_code_blocks import ROOT, Block, blocks_of, documents
from flatparam.command import main
from flatparam_comm.testing import PATIENCE
from flatparam_state import open_source, write_checkpoint, write_dcp

#: Commands that are not run here, by how they begin, and who runs them.
ELSEWHERE = {
    r"git clone": "it needs the repository's address",
    r"cd flatparam$": "into what was cloned",
    r"(my-venv/bin/|\.venv/bin/)?pip (install|freeze)": "it changes an environment; the session `release` does",
    r"python3 -m venv": "it makes an environment; the session `release` does",
    r"my-venv/bin/": "it needs that environment; the session `release` makes one and runs in it",
    r"python3 tools/run\.py": "it installs first; integration_tests/test_run_tool.py, and CI itself",
    r"(\w+=\S+ )?(\.venv/bin/)?nox\b": "a session of its own; integration_tests/test_ci_files.py looks for its name",
    r"(\w+=\S+ )?python tools/busy\.py": "a test command beside other work; integration_tests/test_busy_tool.py",
    r"(bash|python) tools/gpu": "integration_tests/gpu runs it on the CPU",
    r"python tools/structure": "integration_tests/test_structure_tool.py; --page writes into the documentation",
    r"(\.venv/bin/python -m )?pytest packages/": "the tests themselves",
}
#: Pages whose commands take long, or are such as another page's.
LONG = (
    "docs/complaints.md",
    "docs/faq.md",
    "docs/guides/command.md",
    "docs/guides/from-fsdp2.md",
    "docs/guides/is-my-gradient-right.md",
    "docs/guides/several-hosts.md",
    "docs/guides/will-it-fit.md",
    "examples/README.md",
    "packages/flatparam/README.md",
)
ZERO3 = ROOT / "packages/flatparam-files/tests/formats/deepspeed_fixture/stage3-three-ranks"
#: Commands are run on one host with two ranks.
HERE = {"--nproc-per-node 8": "--nproc-per-node 2", "--nnodes 2": "--nnodes 1", "host-0:29500": "localhost:0"}
HERE |= {"/shared/run": "run"}
CONTINUED = re.compile(r" \\\n +")
SAVED_AS = re.compile(
    r"[Ss]ave (?:this|it) as `(\w+\.py)`.*?```python\n(.*?)```|```python\n# (\w+\.py)\n(.*?)```", re.S
)

TRAIN = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
assert FSDP.__module__.startswith("flatparam") == ("flatparam" in sys.modules)
model = FSDP(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
model(torch.ones(1, 4)).sum().backward()
print(f"rank {dist.get_rank()} waits for nobody", file=sys.stderr)
dist.destroy_process_group()
"""
MODELS = """
from torch import nn


class Block(nn.Linear):
    pass


def make():
    return nn.Sequential(nn.Embedding(100, 8), Block(8, 8), Block(8, 8))
"""
CASE = """
import torch
from torch import nn


def build():
    return nn.Linear(4, 2)


def batch(step, micro_batch, data_rank):
    return torch.randn(3, 4)


def loss(model, batch):
    return model(batch).square().mean()
"""


def pages() -> list[Path]:
    """Return the Markdown files that have commands."""
    return [*documents(), ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def console_blocks(page: Path) -> list[Block]:
    """Return the console blocks of a page; every block of a shell has to be one."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    assert not {block.language for block in blocks} & {"sh", "shell", "bat"}, f"{name_of(page)}: write ```console"
    return [block for block in blocks if block.language == "console"]


def commands_of(block: Block) -> list[str]:
    """Return the commands of a block, each on one line; comments stay."""
    text = CONTINUED.sub(" ", "\n".join(block.lines))
    lines = [line for line in text.splitlines() if line.strip()]
    assert all(line.startswith("$ ") for line in lines), f"line {block.first_line}: every line is a command: $ ..."
    return [line.removeprefix("$ ") for line in lines]


def whose(command: str) -> str | None:
    """Return why a command is not run here; None if it is."""
    return next((why for begin, why in ELSEWHERE.items() if re.match(begin, command)), None)


@functools.cache
def commands_to_run(page: Path) -> list[list[str]]:
    """Return the commands of a page that are run here, block by block."""
    blocks = [block for block in console_blocks(page) if block.not_run is None]
    commands = [[command for command in commands_of(block) if whose(command) is None] for block in blocks]
    return [each for each in commands if each]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that pages speak of."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    shapes = {"blocks.0.weight": (6, 5), "blocks.0.bias": (6,), "head.weight": (3, 6)}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    state = {name: {"step": torch.tensor(4.0), "exp_avg": torch.randn(shape)} for name, shape in shapes.items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(shapes)}]}
    torch.save({"model": model, "optimizer": optimizer}, folder / "model.pt")
    torch.save(model, folder / "pytorch_model_fsdp.bin")
    torch.save(optimizer, folder / "optimizer.bin")
    for name, text in {"train.py": TRAIN, "models.py": MODELS, "case.py": CASE}.items():
        (folder / name).write_text(text, encoding="utf-8")
    source = open_source(folder / "model.pt")
    for run in ("runs/a", "runs/gpt/checkpoints"):
        (folder / run).parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(source, folder / run, world_size=2, step=4)
    write_dcp(source, folder / "dcp")
    for copy in ("zero3", "DIRECTORY"):
        shutil.copytree(ZERO3, folder / copy)
    return folder


@pytest.fixture
def at_work(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to work in: a copy of `files`, with links to what a checkout has."""
    folder = tmp_path / "work"
    shutil.copytree(files, folder)
    for name in ("tools", "packages", "examples", "integration_tests"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=pytest.mark.long if name_of(page) in LONG else ())
        for page in pages()
        if commands_to_run(page)
    ],
)
def test_commands_run(page: Path, at_work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a page shows works when it is typed, on the ranks of `HERE`; each exit status is 0."""
    for this, content, that, other in SAVED_AS.findall(page.read_text(encoding="utf-8")):
        (at_work / (this or that)).write_text(content or other, encoding="utf-8")
    for block in commands_to_run(page):
        if all(command.startswith("flatparam ckpt") for command in block):
            for command in block:  # in this process, which has torch
                assert main(shlex.split(command, comments=True)[1:]) == 0, (command, capfd.readouterr().err)
        else:
            script = "\n".join(block)
            for there, here in HERE.items():
                script = script.replace(there, here)
            run_as_typed(script)


def run_as_typed(script: str) -> None:
    """Run commands in a shell, where flatparam is installed."""
    python = sys.executable
    programs = {"flatparam": "-m flatparam", "torchrun": "-m torch.distributed.run", "python": ""}
    head = ["set -e", *(f'{name}() {{ {python} {how} "$@"; }}' for name, how in programs.items())]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*head, script])],
        # As `torchrun --standalone`: two tests at once would meet at one port.
        env={"OMP_NUM_THREADS": "1", "PET_STANDALONE": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"


def test_the_tree_of_the_guide_is_what_the_command_prints(at_work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`flatparam ckpt inspect` prints each line that the guide to the command shows."""
    main(["ckpt", "inspect", "runs/a"])
    shown = capsys.readouterr().out.splitlines()
    guide = (ROOT / "docs" / "guides" / "command.md").read_text(encoding="utf-8")
    printed = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)[0].splitlines()
    assert [line for line in printed if line != "..." and line not in shown] == []


@each_row("page", pages(), ids=name_of)
def test_what_commands_name_is_there(page: Path) -> None:
    """Each file of the repository and each package that a command names exists, also if the command is not run."""
    packages = {path.name for path in (ROOT / "packages").iterdir()}
    for command in (command for block in console_blocks(page) for command in commands_of(block)):
        words = shlex.split(command, comments=True)
        paths = [word.split("[")[0] for word in words if re.match(r"(\.\./)?(tools|packages|examples|docs)/", word)]
        assert [path for path in paths if not (ROOT / path).exists()] == [], command
        if words[:3] == ["python3", "tools/run.py", "install"]:
            named = [word.split("[")[0] for word in words[3:] if not word.startswith("-")]
            chosen = [word for word in named if word not in ("my-venv", "wheelhouse")]
            assert [name for name in chosen if f"flatparam-{name}" not in packages] == [], command


def test_nothing_is_left_out_in_vain() -> None:
    """Each kind of command that is run elsewhere is on some page, and each mark stands before what would be run."""
    blocks = [block for page in pages() for block in console_blocks(page)]
    commands = [command for block in blocks for command in commands_of(block)]
    assert [begin for begin in ELSEWHERE if not any(re.match(begin, command) for command in commands)] == []
    marked = [block for block in blocks if block.not_run]
    assert [block for block in marked if all(map(whose, commands_of(block)))] == []
