"""Add-ons: names and subcommands that are found when they are asked for, and what is said where one is lacking."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flatparam
import flatparam.layout
import flatparam.optim
import flatparam.wrap
from flatparam import addons
from flatparam.command import main
from flatparam_comm.testing import PATIENCE

PUBLISHING = (
    "GroupChannel",
    "Mailbox",
    "Published",
    "Publisher",
    "PublishError",
    "Receiver",
    "Slicing",
    "publish",
)
CHECKPOINTS = ("Checkpointer", "Loaded", "PretrainedReport", "load_pretrained")
LACKING = "expected the add-on {0}, which is not installed: pip install {0} (flatparam[all]: every add-on)"


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """No add-on is installed, but that of which every command has something."""
    for name in addons._ADDONS:
        if name != "flatparam_files":
            monkeypatch.setitem(sys.modules, name, None)
    for module in (flatparam, flatparam.wrap, flatparam.optim):
        for name in (
            "Installation",
            "install",
            "uninstall",
            "Plan",
            "PlanError",
            "plan",
            "PlannedPolicy",
            "planned",
            *PUBLISHING,
            *CHECKPOINTS,
            *flatparam.optim.__all__,
        ):
            monkeypatch.delitem(vars(module), name, raising=False)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages: one has a command that works and one that it forgot, the other cannot be imported."""
    (tmp_path / "greeting.py").write_text(
        "def add(groups):\n"
        "    added = groups.add_parser('greet', help='say a name')\n"
        "    added.add_argument('name')\n"
        "    added.set_defaults(run=lambda chosen: print(f'hello, {chosen.name}') or 0)\n"
    )
    (tmp_path / "broken.py").write_text("raise ImportError('it needs 100 % more')\n")
    for name, commands in (
        ("greeting", "greet = greeting:add\nmumble = greeting:nothing"),
        ("broken", "grumble = broken:add"),
    ):
        home = tmp_path / f"{name}-1.0.dist-info"
        home.mkdir()
        (home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (home / "entry_points.txt").write_text(f"[flatparam.commands]\n{commands}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_importing_imports_no_add_on() -> None:
    """Neither the package nor any module of it that users import brings an add-on along."""
    program = (
        "import sys, flatparam.wrap, flatparam.optim, flatparam.api, flatparam.command, flatparam.in_place.applying\n"
        "flatparam.FullyShardedDataParallel, flatparam.clip_grad_norm_\n"
        f"print([name for name in {addons._ADDONS!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize(
    ("module", "name", "addon"),
    [
        *((flatparam, name, "flatparam-clients") for name in ("Installation", "install", "uninstall")),
        (flatparam, "plan", "flatparam-plan"),
        (flatparam, "Plan", "flatparam-plan"),
        (flatparam.wrap, "planned", "flatparam-plan"),
        *((flatparam, name, "flatparam-publish") for name in PUBLISHING),
        *((flatparam, name, "flatparam-checkpoint") for name in CHECKPOINTS),
        *((flatparam.optim, name, "flatparam-optim") for name in flatparam.optim.__all__),
    ],
)
def test_a_name_of_an_add_on_that_is_lacking(module: object, name: str, addon: str) -> None:
    """It is promised all the same, and the error says what to install."""
    assert name in module.__all__  # type: ignore[attr-defined]
    with pytest.raises(ImportError) as caught:
        getattr(module, name)
    assert str(caught.value) == LACKING.format(addon)
    assert caught.value.name == addon.replace("-", "_")


def test_without_the_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Their error and the command say what to install."""
    monkeypatch.setitem(sys.modules, "flatparam_files", None)
    monkeypatch.delitem(vars(flatparam), "CheckpointError", raising=False)
    with pytest.raises(ImportError) as caught:
        flatparam.CheckpointError  # noqa: B018
    assert str(caught.value) == LACKING.format("flatparam-files")
    assert main(["trace", "draw"]) == 2
    assert capsys.readouterr() == ("", f"flatparam: error: {LACKING.format('flatparam-files')}\n")


@pytest.mark.usefixtures("lacking")
def test_the_layout_of_an_optimizer_without_the_add_on_that_knows_it() -> None:
    """`for_optimizer` says what to install."""
    with pytest.raises(ImportError) as caught:
        flatparam.layout.for_optimizer(torch.optim.AdamW)
    assert str(caught.value) == LACKING.format("flatparam-optim")


@pytest.mark.usefixtures("lacking")
def test_a_module_that_was_moved_to_an_add_on_that_is_lacking() -> None:
    """Its old name says what to install, too."""
    with pytest.raises(ImportError, match="pip install flatparam-plan"):
        import flatparam.planning  # noqa: F401


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("arguments", [[], ["--help"], ["a:b", "--world", "8", "--", "-x"]])
def test_a_command_of_an_add_on_that_is_lacking(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`flatparam plan` says in a line what to install, whatever its arguments, and the status is 2."""
    pytest.importorskip("flatparam_files")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *arguments])
    assert capsys.readouterr() == ("", f"flatparam plan: error: {LACKING.format('flatparam-plan')}\n")


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize("arguments", [["run", "x.py"], ["run", "-m", "x"], ["trace", "--out", "traces", "x.py"]])
def test_a_command_that_runs_a_program_without_the_add_on(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`flatparam run` and `flatparam trace --out` say in a line what to install, and run and change nothing."""
    before = dict(os.environ)
    assert main(arguments) == 2
    assert dict(os.environ) == before
    expected = f"flatparam {arguments[0]}: error: {LACKING.format('flatparam-clients')}\n"
    assert capsys.readouterr() == ("", expected)


WITHOUT_CLIENTS = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["flatparam_clients"] = None
import flatparam, torch
from flatparam_comm import SingleCollectives
model = flatparam.FullyShardedDataParallel(torch.nn.Linear(2, 2), SingleCollectives())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
model.load_state_dict(model.state_dict())
flat = model.params[0]

import os
for use in {0!r}:
    if os.fork():
        os.wait()
        continue
    try:
        exec(use)
    except (AttributeError, ImportError) as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
"""
"""A wrapper is made and trained without the add-on; then each use has a copy of the process, and says one line."""

USES = {
    "model._handle": "FullyShardedDataParallel._handle is in an add-on: ",
    "type('Mine', (type(model),), {})(model.module, SingleCollectives())._handle": "FullyShardedDataParallel._handle is in an add-on: ",
    "model.training_state": "FullyShardedDataParallel.training_state is in an add-on: ",
    "model._sync_gradients = True": "FullyShardedDataParallel._sync_gradients is in an add-on: ",
    "type(model).full_optim_state_dict": "FullyShardedDataParallel.full_optim_state_dict is in an add-on: ",
    "flat._local_shard": "FlatParameter._local_shard is in an add-on: ",
    "import flatparam._debug_utils": "",
    "from flatparam.compat.installing import install": "",
    "from flatparam.algorithms._comm_hooks.default_hooks import DefaultState": "",
}
"""What needs the add-on, and how its error begins."""


def test_an_attribute_of_an_add_on_that_is_lacking() -> None:
    """The wrapper works; FSDP1's private names, and modules that have moved, say what to install.

    An attribute that is nowhere is what it was, and `hasattr` tells the truth of both kinds.
    """
    honest = "print(hasattr(model, 'nothing'), hasattr(model, '_handle'), hasattr(flat, '_params'))"
    program = WITHOUT_CLIENTS.replace("{0!r}", repr([*USES, honest]))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    told = [f"{about}{LACKING.format('flatparam-clients')}" for about in USES.values()]
    assert (done.stdout.splitlines(), done.stderr) == ([*told, "False False False"], "")


@pytest.mark.usefixtures("lacking", "installed")
def test_other_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has what is installed and what is not; an installed package brings its command."""
    pytest.importorskip("flatparam_files")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    for line in (
        "greet +say a name",
        "plan +expected the add-on flatparam-plan, which",
        "run +expected the add-on flatparam-clients",
        "ckpt +inspect",
    ):
        assert re.search(rf"^ +{line}", said, re.MULTILINE), line
    assert main(["greet", "you"]) == 0
    assert capsys.readouterr().out == "hello, you\n"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("command", "error"),
    [("grumble", "it needs 100 % more"), ("mumble", "module 'greeting' has no attribute 'nothing'")],
)
def test_a_command_that_cannot_be_imported(command: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what it lacks, as the help does, and takes no other command with it."""
    pytest.importorskip("flatparam_files")
    with pytest.raises(SystemExit, match="2"):
        main([command, "now"])
    assert capsys.readouterr().err == f"flatparam {command}: error: {error}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert error in " ".join(capsys.readouterr().out.split())
    assert main(["greet", "you"]) == 0


@pytest.mark.usefixtures("installed")
def test_an_installed_command_comes_before_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of our own add-ons is for where nothing is installed."""
    assert addons.commands()["plan"].value == "flatparam_plan.command:add"
    monkeypatch.setattr(addons, "_KNOWN", {"greet": "elsewhere:add", "other": "elsewhere:add"})
    assert addons.commands()["greet"].value == "greeting:add"
    assert addons.commands()["other"].value == "elsewhere:add"


@pytest.mark.usefixtures("installed")
def test_errors_of_an_add_on_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An add-on that is installed and lacks something itself is not said to be lacking."""
    monkeypatch.setattr(addons, "_ADDONS", ("broken",))
    with pytest.raises(ImportError, match="100 %"):
        addons.load("broken")
