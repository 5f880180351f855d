"""A checkpoint that is not what was written is refused: the error has the file, and nothing has changed on any rank."""

import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_comm.testing import run_threads
from flatparam_files import CheckpointError, verify_checkpoint
from flatparam_files.checkpoint.fields import read_sealed, seal
from flatparam_runtime import UnitPlan, shard_module
from flatparam_state import optimizer_state_dict

from .beneath import Setup, assert_equal_state, full_state
from .runs import saved

BIT_FLIPS = int(os.environ.get("FLATPARAM_BIT_FLIPS", "1000"))
SETUP = Setup(2)
FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def refusals(root: Path, damages: Iterator[tuple[Path, bytes | None]], setup: Setup = SETUP) -> list[str]:
    """Write each damage (None deletes the file), load on every rank, undo it; returns what was said each time.

    The error must be the same on all ranks, with the file's name; the model and the optimizer must be as before.
    """

    def rank(world: Collectives) -> list[str]:
        model, optimizer = setup.build(world, seed=8)
        setup.train(model, optimizer, range(1))
        checkpointer = Checkpointer(root, model, optimizer, ranks=world)
        before = full_state(model, optimizer)
        said = []
        while world.exchange(begin() if world.rank == 0 else True)[0]:
            said.append(told(checkpointer))
            world.barrier()
            if world.rank == 0:
                undo()
        fell_back = any("is used instead" in text for text in said)  # told on rank 0
        if not any(world.exchange(fell_back)):
            assert_equal_state(full_state(model, optimizer), before)
        return said

    now: list[tuple[Path, bytes]] = []

    def begin() -> bool:
        path, data = next(damages, (None, None))
        if path is None:
            return False
        now[:] = [(path, path.read_bytes())]
        path.unlink() if data is None else path.write_bytes(data)
        return True

    def undo() -> None:
        for path, data in now:
            path.write_bytes(data)

    def told(checkpointer: Checkpointer) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                checkpointer.load()
            except CheckpointError as error:
                assert error.path is not None
                return str(error)
        return " ".join(str(warning.message) for warning in caught)

    found = run_threads(setup.world_size, rank)
    # Warnings are the process's: the rank that has come last records them.
    return [next(filter(None, said), "") for said in zip(*found, strict=True)]


def one(root: Path, path: Path, data: bytes | None) -> str:
    """The refusal of one damage."""
    (said,) = refusals(root, iter([(path, data)]))
    return said


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory with one checkpoint of two ranks."""
    root = tmp_path_factory.mktemp("run")
    saved(SETUP, root)
    return root


@pytest.fixture
def checkpoint(root: Path) -> Path:
    """That checkpoint."""
    return root / "step-00000003"


@pytest.mark.parametrize("bits", [BIT_FLIPS // 5, pytest.param(BIT_FLIPS, marks=pytest.mark.long)])
def test_every_flipped_bit_is_seen(bits: int, root: Path, checkpoint: Path) -> None:
    """Random single bits over every file: each is refused by name, none changes a number.

    One in `latest` is seen, too: then the newest sound checkpoint is loaded, with a warning.
    """
    generator = random.Random(3)
    paths = [checkpoint / name for name in FILES]

    def flips() -> Iterator[tuple[Path, bytes]]:
        for number in range(bits):
            path = paths[number % len(paths)]
            data = bytearray(path.read_bytes())
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            yield path, bytes(data)

    said = refusals(root, flips())
    assert len(said) == bits
    for number, text in enumerate(said):
        assert FILES[number % len(FILES)] in text


@pytest.mark.parametrize("name", FILES)
def test_every_wrong_size_is_seen(name: str, root: Path, checkpoint: Path) -> None:
    """Cut at every sixteenth, one byte short, extra bytes, empty, missing: the error has the file and the sizes."""
    path = checkpoint / name
    data = path.read_bytes()
    cuts = [data[: len(data) * part // 16] for part in range(16)]
    damages = [*cuts, data[:-1], data + b"\0", data + data, None]
    for said in refusals(root, iter([(path, each) for each in damages])):
        assert name in said
        assert "rank" in said or "manifest" in said


def test_a_directory_in_the_place_of_a_file(root: Path, tmp_path: Path) -> None:
    """What cannot be read is a clear error too."""
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    path = copy / "step-00000003" / FILES[1]
    size = path.stat().st_size
    path.unlink()
    path.mkdir()
    assert size
    report = verify_checkpoint(copy)
    assert FILES[1] in report.problems[0]


def test_verification_lists_every_problem(root: Path, tmp_path: Path) -> None:
    """`verify_checkpoint` goes on after the first: it names each bad file and block."""
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert verify_checkpoint(copy).is_sound
    for name in FILES[1:]:
        path = copy / "step-00000003" / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    report = verify_checkpoint(copy)
    assert not report.is_sound
    assert [any(name in problem for problem in report.problems) for name in FILES[1:]] == [True, True]
    (copy / "step-00000003" / FILES[2]).unlink()
    assert any("No such file" in problem for problem in verify_checkpoint(copy).problems)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two checkpoints of one run, steps 3 and 5, with files of equal names and sizes."""

    def rank(world: Collectives) -> None:
        model, optimizer = SETUP.build(world)
        with Checkpointer(tmp_path, model, optimizer, ranks=world) as checkpointer:
            SETUP.train(model, optimizer, range(3))
            checkpointer.save(3)
            SETUP.train(model, optimizer, range(3, 5))
            checkpointer.save(5)

    run_threads(2, rank)
    return tmp_path


def test_files_of_another_save_are_refused(two: Path) -> None:
    """A stale shard of the same name and size, and two renamed ones: the error says of which save and rank they are."""
    old, new = two / "step-00000003", two / "step-00000005"
    said = one(two, new / FILES[1], (old / FILES[1]).read_bytes())
    assert read_sealed(old / "manifest.json")["save_id"] in said
    assert FILES[1] in said
    said = one(two, new / FILES[1], (new / FILES[2]).read_bytes())
    assert "it says that it is of rank 1 of 2" in said


def test_a_manifest_of_another_save_is_refused(two: Path) -> None:
    """`latest` names a save id: with another manifest there, the newest sound checkpoint is used, with a warning."""
    old, new = two / "step-00000003", two / "step-00000005"
    said = one(two, new / "manifest.json", (old / "manifest.json").read_bytes())
    assert FILES[1] in said or "step-00000005" in said


def test_another_version_is_refused(root: Path, checkpoint: Path) -> None:
    """A sealed manifest of a future version says which version it is."""
    content = read_sealed(checkpoint / "manifest.json")
    said = one(root, checkpoint / "manifest.json", seal({**content, "version": 2}))
    assert "version 2" in said


@pytest.mark.parametrize("damage", ["broken", "missing", "names nothing"])
def test_a_bad_latest_falls_back_with_a_warning(damage: str, two: Path) -> None:
    """The newest sound checkpoint is loaded, and a warning says so."""
    latest = two / "latest"
    data = {
        "broken": b"rubbish",
        "missing": None,
        "names nothing": seal({"name": "step-00000009", "save_id": "0"}),
    }
    said = one(two, latest, data[damage])
    assert "step-00000005, is used instead" in said


def test_a_bad_manifest_falls_back_to_the_checkpoint_before(two: Path) -> None:
    """`latest` is right, and what it names is damaged: the one before it is loaded, with a warning; asked for, refused."""

    def rank(world: Collectives) -> Any:
        model, optimizer = SETUP.build(world)
        checkpointer = Checkpointer(two, model, optimizer, ranks=world)
        with pytest.raises(CheckpointError, match=r"step-00000005.manifest.json: damaged"):
            checkpointer.load(5)
        with pytest.raises(CheckpointError, match=r"a checkpoint of step 4, found none.*there are those of \[3, 5\]"):
            checkpointer.load(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = checkpointer.load()
        assert loaded is not None
        return loaded.step

    path = two / "step-00000005" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-2] + b"!\n")
    with pytest.warns(UserWarning, match="step-00000003, is used instead"):
        Checkpointer(two, ranks=SingleCollectives()).load()
    assert run_threads(2, rank) == [3, 3]


def test_another_model_is_refused(root: Path) -> None:
    """Names that lack on either side, and shapes, are named; `strict=False` loads what is there."""

    def rank(world: Collectives) -> Any:
        model, _ = SETUP.build(world)
        model.register_buffer("more", torch.ones(2))
        checkpointer = Checkpointer(root, model, ranks=world)
        with pytest.raises(CheckpointError, match="the checkpoint lacks 'more'"):
            checkpointer.load()
        loaded = checkpointer.load(strict=False)
        assert loaded is not None
        assert (loaded.missing, loaded.unexpected) == (("more",), ())
        smaller = torch.nn.Sequential(torch.nn.Linear(3, 4))
        with pytest.raises(CheckpointError, match=r"'0.weight': expected shape \(4, 3\), found \(5, 3\)"):
            Checkpointer(root, smaller, ranks=world).load()
        with pytest.raises(CheckpointError, match="the model lacks '2.weight'"):
            Checkpointer(root, torch.nn.Sequential(torch.nn.Linear(3, 5)), ranks=world).load()

    run_threads(2, rank)


@each_row("own_group", [False, True])
def test_new_parameters_have_no_optimizer_state_yet(own_group: bool, tmp_path: Path) -> None:
    """`strict=False` with an optimizer: what was saved is loaded, new parameters have their group's settings."""

    def grown(world: Collectives, *, head: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(world.rank if head else 3)
        model = nn.Sequential(nn.Linear(4, 4), *([nn.Linear(4, 4)] if head else []))
        shard_module(model, UnitPlan(Topology(world), use_orig_params=True))
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2]}]
        if head:
            groups = [*groups, {"params": parameters[2:]}] if own_group else [{"params": parameters}]
        return model, torch.optim.AdamW(groups, lr=0.5 if head else 0.25)

    def save(world: Collectives) -> Any:
        model, optimizer = grown(world, head=False)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(1)
        return optimizer_state_dict(model, optimizer)["state"]

    def load(world: Collectives) -> Any:
        model, optimizer = grown(world, head=True)
        loaded = Checkpointer(tmp_path, model, optimizer, ranks=world).load(strict=False)
        assert loaded is not None
        assert loaded.missing == ("1.weight", "1.bias")
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == ([0.25, 0.5] if own_group else [0.25])
        states = optimizer_state_dict(model, optimizer)["state"]
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        return states

    saved = run_threads(2, save)[0]
    for states in run_threads(2, load):
        assert states.keys() == saved.keys()
        for name, values in saved.items():
            for key, value in values.items():
                assert torch.equal(states[name][key], value), (name, key)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_states_are_converted_with_their_parameters(root: Path, dtype: torch.dtype) -> None:
    """Moments get the dtype that the parameters have now, counters keep theirs, and the next step works."""

    def rank(world: Collectives) -> Any:
        model, optimizer = SETUP.build(world)
        Checkpointer(root, model, optimizer, ranks=world).load()
        saved = optimizer_state_dict(model, optimizer)["state"]
        model, optimizer = SETUP.build(world)
        model.to(dtype)
        Checkpointer(root, model, optimizer, ranks=world).load(convert_dtype=True)
        states = optimizer_state_dict(model, optimizer)["state"]
        assert states.keys() == saved.keys()
        for name, values in saved.items():
            for key, value in values.items():
                expected = value if key == "step" else value.to(dtype)
                assert states[name][key].dtype == expected.dtype, (name, key)
                assert torch.equal(states[name][key], expected), (name, key)
        model(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()
        return {key for values in saved.values() for key in values}

    for keys in run_threads(2, rank):
        assert "exp_avg" in keys


def test_dtypes_are_converted_on_request_only(root: Path) -> None:
    """The error names the parameter, both dtypes and the argument."""

    def rank(world: Collectives) -> None:
        model, _ = SETUP.build(world)
        expected = full_state(*loaded_plainly(world))[0]
        model.double()
        checkpointer = Checkpointer(root, model, ranks=world)
        with pytest.raises(
            CheckpointError, match=r"expected torch.float64, found torch.float32 .load.convert_dtype=True"
        ):
            checkpointer.load()
        checkpointer.load(convert_dtype=True)
        optimizer = torch.optim.SGD(model.parameters())
        for name, tensor in full_state(model, optimizer)[0].items():
            assert torch.equal(tensor, expected[name].double())

    def loaded_plainly(world: Collectives) -> Any:
        model, optimizer = SETUP.build(world)
        Checkpointer(root, model, optimizer, ranks=world).load()
        return model, optimizer

    run_threads(2, rank)
