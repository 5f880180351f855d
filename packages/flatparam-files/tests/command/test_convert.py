"""`flatparam ckpt reshard`, `export` and `import`."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from each_row import each_row

from flatparam_files import open_source, split_path, write_checkpoint
from flatparam_files.command.ckpt_arguments import nbytes_of
from flatparam_files.formats.whole_sources import stored_source

from .calling import Caller, entries, tree

FIXTURES = Path(__file__).parents[1] / "formats" / "deepspeed_fixture"


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_reshard(world_size: int, flatparam: Caller) -> None:
    """There is one file for each rank, the step is kept, and everything in it is equal."""
    found = flatparam("reshard", "@run", "@other", "--world-size", world_size)
    assert (found.status, found.err) == (0, "")
    files = entries(flatparam.directory / "other" / "step-00000004")
    assert len([name for name in files if name.startswith("rank-")]) == world_size
    assert flatparam("diff", "@run", "@other").status == 0
    assert flatparam("verify", "@other").status == 0


def test_import_and_back(flatparam: Caller) -> None:
    """Each format that is exported is imported again, and equal; --step names the new step."""
    for kind in ("torch", "dcp"):
        assert flatparam("export", "@run", f"@{kind}", "--to", kind).status == 0
        assert flatparam("import", f"@{kind}", "@back", "--step", {"torch": 1, "dcp": 2}[kind]).status == 0
        assert flatparam("diff", "@run", "@back").status == 0
    assert {"step-00000001", "step-00000002"} <= entries(flatparam.directory / "back")


def test_import_of_two_files(flatparam: Caller) -> None:
    """A model's file and an optimizer's are given by name."""
    root = tree()
    torch.save(root["model"], flatparam.directory / "m.bin")
    torch.save(root["optimizer"], flatparam.directory / "o.bin")
    assert flatparam("import", "@new", "--model", "@m.bin", "--optimizer", "@o.bin").status == 0
    assert flatparam("diff", "@new", "@run", "--only", "model", "--only", "optimizer").status == 0


def test_a_file_that_is_given_as_what_it_is_not(flatparam: Caller) -> None:
    """A model's file that is given as the optimizer's, and the other way round, is refused by its path."""
    root = tree()
    torch.save(root["model"], flatparam.directory / "m.bin")
    torch.save(root["optimizer"], flatparam.directory / "o.bin")
    for wrong in (("--model", "@o.bin"), ("--optimizer", "@m.bin")):
        found = flatparam("import", *wrong, "@new")
        assert (found.status, found.out) == (2, "")
        assert f"{wrong[1][1:]}, which was given as {wrong[0]}, has none" in found.err
    found = flatparam("import", "--optimizer", "@o.bin", "@new")
    assert "o.bin says no step, so it is 0" in found.err


def test_options_between_the_paths(flatparam: Caller) -> None:
    """Options may stand before, between and after the paths, and a wrong one is named with the command's own help."""
    for number, order in enumerate(
        (["--step", 7, "@run", "@{}"], ["@run", "--step", 7, "@{}"], ["@run", "@{}", "--step", 7])
    ):
        assert flatparam("import", *(f"@to{number}" if each == "@{}" else each for each in order)).status == 0
        assert entries(flatparam.directory / f"to{number}") >= {"step-00000007"}
    found = flatparam("export", "@run", "--to", "hf", "@out", "--nonsense")
    assert found.status == 2
    assert "unrecognized arguments: --nonsense; see flatparam" in found.err
    assert "DEST" in flatparam("export", "--to", "hf").err


def test_averages_and_what_ranks_have_come_back(flatparam: Caller) -> None:
    """An export to torch or DCP is imported with its averages, and with what each rank had, as they were."""
    saved = tree()
    root = {
        "extra": {"epoch": saved.pop("epoch")},
        **saved,
        "averages": {"model": {"w": torch.ones(3)}, "updates": 4},
        "rank_extra": {"0": {"seed": 1}, "1": {"seed": 2, "noise": torch.ones(2)}},
    }
    torch.save(root, flatparam.directory / "all.pt")
    assert flatparam("import", "@all.pt", "@first").status == 0
    for kind in ("torch", "dcp"):
        assert flatparam("export", "@first", f"@{kind}", "--to", kind).status == 0
        assert flatparam("diff", "@first", f"@{kind}").status == 0
        assert flatparam("import", f"@{kind}", f"@back-{kind}").status == 0
        found = open_source(flatparam.directory / f"back-{kind}")
        assert {split_path(path)[0] for path in found.tensors} == {*saved, "averages", "rank_extra"}
        assert found.values["averages"]["updates"] == 4
        assert found.values["rank_extra"]["1"]["seed"] == 2
    # What the user has saved besides may be anything.
    for number, extra in enumerate((None, 5, [1, 2], {"extra": 3})):
        write_checkpoint(
            attrs.evolve(stored_source(found), values={**found.values, "extra": extra}),
            flatparam.directory / f"e{number}",
        )
        for kind in ("torch", "dcp"):
            assert flatparam("export", f"@e{number}", f"@{kind}{number}", "--to", kind).status == 0
            assert flatparam("diff", f"@e{number}", f"@{kind}{number}").status == 0
    # Of a program that has a part of this name, and others that are no part of ours, both stay its own.
    torch.save({**root, "args": {"lr": 1}}, flatparam.directory / "theirs.pt")
    assert flatparam("import", "@theirs.pt", "@theirs").status == 0
    assert "averages" in open_source(flatparam.directory / "theirs").values["extra"]


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3-three-ranks"])
def test_import_from_deepspeed(name: str, flatparam: Caller) -> None:
    """A checkpoint of ZeRO becomes one of ours with the same tensors."""
    found = sorted(path.name for path in FIXTURES.glob("*") if path.is_dir() and path.name.startswith(name))
    if not found:
        pytest.skip(f"there is no {name}")
    source = FIXTURES / found[0]
    assert flatparam("import", source, "@zero").status == 0
    assert flatparam("diff", source, "@zero").status == 0


def test_export_to_hugging_face(flatparam: Caller) -> None:
    """Only the model is written, in shards of the size, in the dtype."""
    found = flatparam("export", "@run", "@hf", "--to", "hf", "--max-shard-size", "70B", "--dtype", "bfloat16")
    assert found.status == 0
    index = json.loads((flatparam.directory / "hf" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(tree()["model"])
    assert index["metadata"]["total_size"] == 108
    for info in open_source(flatparam.directory / "hf").tensors.values():
        assert info.dtype == torch.bfloat16


def test_what_a_command_that_was_killed_has_left(flatparam: Caller) -> None:
    """Nobody else removes it, so the same command names it when it is run again."""
    left = flatparam.directory / ".y.pt.1.incomplete"
    left.write_bytes(b"half")
    found = flatparam("export", "@run", "@y.pt", "--to", "torch")
    assert found.status == 0
    assert f"warning: {left} is of a command that was killed: remove it" in found.err
    assert left.exists()


def test_elements_that_a_dtype_cannot_hold(flatparam: Caller) -> None:
    """Finite elements that become infinite are a warning that names each tensor, on one line; others are none."""
    large, small = torch.tensor([1e6, torch.inf, 1.0]), torch.tensor([6e4, -torch.inf, torch.nan])
    torch.save({"large": large, "small": small, "whole": torch.tensor([10**6])}, flatparam.directory / "x.pt")
    found = flatparam("export", "@x.pt", "@y.pt", "--to", "torch", "--dtype", "fp16")
    assert (found.status, found.err.count("warning")) == (0, 1)
    assert "'model/large' has elements that are finite, and too large for torch.float16" in found.err
    assert flatparam("export", "@x.pt", "@z.pt", "--to", "torch", "--dtype", "bf16").err == ""


def test_torch_loads_an_export(flatparam: Caller) -> None:
    """A model alone is what `load_state_dict` takes."""
    assert flatparam("export", "@run", "@m.pt", "--to", "torch", "--only", "model").status == 0
    found = torch.load(flatparam.directory / "m.pt", weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in tree()["model"].items())


@pytest.mark.parametrize(
    "arguments",
    [
        ("reshard", "@run", "@new", "--world-size", 2),
        ("import", "@a.pt", "@new"),
        ("export", "@run", "@new", "--to", "hf", "--max-shard-size", "100B"),
        ("export", "@run", "@new", "--to", "torch"),
        ("export", "@run", "@new", "--to", "dcp", "--world-size", 2),
    ],
)
def test_a_dry_run(arguments: tuple[object, ...], flatparam: Caller) -> None:
    """It says which files would be written, of which size, and writes nothing; then it is so."""
    before = entries(flatparam.directory)
    planned = flatparam(*arguments, "--dry-run")
    assert planned.status == 0
    assert "would write" in planned.out
    assert entries(flatparam.directory) == before
    done = flatparam(*arguments)
    assert done.out == planned.out.replace("would write", "wrote")
    for line in done.out.splitlines()[:-1]:
        assert Path(line.removeprefix("wrote ").rpartition(":")[0]).is_file()


@pytest.mark.parametrize("extra", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    "arguments",
    [
        ("reshard", "@run", "@run", "--world-size", 2),
        ("export", "@run", "@a.pt", "--to", "torch"),
        ("export", "@run", "@run", "--to", "dcp"),
        ("export", "@run", "@run", "--to", "hf"),
    ],
)
def test_nothing_is_overwritten(arguments: tuple[object, ...], extra: tuple[str, ...], flatparam: Caller) -> None:
    """A destination that exists is refused, and stays as it is; a dry run says so too."""
    before = (flatparam.directory / "a.pt").read_bytes(), entries(flatparam.directory / "run")
    found = flatparam(*arguments, *extra)
    assert found.status == 2
    assert "exists already" in found.err
    assert before == ((flatparam.directory / "a.pt").read_bytes(), entries(flatparam.directory / "run"))


@pytest.mark.parametrize(
    "arguments", [("import", "@a.pt", "@run"), ("reshard", "@run", "@run", "--step", 3, "--world-size", 1)]
)
def test_an_older_step_is_refused(arguments: tuple[object, ...], flatparam: Caller) -> None:
    """A run keeps its latest checkpoint: one of an older step, which step 0 is by default, is not written beside it."""
    before = entries(flatparam.directory / "run")
    found = flatparam(*arguments)
    assert found.status == 2
    assert "a run with a checkpoint of step 4" in found.err
    assert entries(flatparam.directory / "run") == before
    assert flatparam("import", "@a.pt", "@run", "--step", 5).status == 0


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "flatparam"])
def test_damage_leaves_nothing(kind: str, flatparam: Caller) -> None:
    """Where the source turns out to be damaged while it is read, the status is 2 and no output is left."""
    file = flatparam.directory / "run" / "step-00000004" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    for at in range(len(data) - 200, len(data)):
        data[at] ^= 1
    file.write_bytes(data)
    before = entries(flatparam.directory)
    if kind == "flatparam":
        found = flatparam("reshard", "@run", "@new", "--world-size", 3)
    else:
        found = flatparam("export", "@run", "@new", "--to", kind)
    assert found.status == 2
    assert "rank-00001.safetensors" in found.err
    assert entries(flatparam.directory) == before


def test_states_that_nothing_else_can_hold(flatparam: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that differ between ranks without being cut like their parameter are not left out without a word."""
    facts = {"per_rank": ("optimizer/state/head.weight/rows",)}
    source = attrs.evolve(open_source(flatparam.directory / "a.pt"), facts=facts)
    monkeypatch.setattr("flatparam_files.command.ckpt_commands.open_source", lambda *paths, format, prefix: source)
    found = flatparam("export", "@run", "@new.pt", "--to", "torch")
    assert found.status == 2
    assert "'optimizer/state/head.weight/rows'" in found.err
    assert "--only model" in found.err
    assert flatparam("export", "@run", "@new.pt", "--to", "torch", "--only", "model").status == 0


def test_no_space(flatparam: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit on the disk is not begun."""
    monkeypatch.setattr("flatparam_files.command.ckpt_commands.free_nbytes", lambda path: 0)
    found = flatparam("export", "@run", "@new", "--to", "torch")
    assert found.status == 2
    assert "needs 444 B, and 0 B are free" in found.err


@each_row(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("1.5 MB", 1_500_000),
        ("2GiB", 2 << 30),
        ("1000", 1000),
        ("3k", 3000),
        ("1KiB", 1024),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    """Sizes are given as people write them: GB is 10^9 bytes, GiB 2^30."""
    assert nbytes_of(text) == nbytes


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "@run", "@x", "--to", "hf", "--max-shard-size", "big"),
        ("export", "@run", "@x", "--to", "hf", "--max-shard-size", "0"),
        ("export", "@run", "@x"),
        ("export", "@run", "@x", "--to", "keras"),
        ("export", "@run", "@x", "--to", "torch", "--max-shard-size", "1MB"),
        ("export", "@run", "@x", "--to", "hf", "--world-size", "8"),
        ("export", "@run", "@x", "--to", "hf", "--averages", "--only", "optimizer"),
        ("export", "@run", "@x", "--to", "hf", "--dtype", "int8"),
        ("reshard", "@run", "@x"),
        ("reshard", "@run", "@x", "--world-size", "0"),
        ("reshard", "@run", "@x", "--world-size", "2000000000"),
        ("import", "@a.pt", "@x", "--step", "-1"),
        ("import", "@x"),
        ("export", "@run", "@no/where/x", "--to", "torch"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], flatparam: Caller) -> None:
    """What cannot be is refused with the status 2 before anything is written."""
    before = entries(flatparam.directory)
    found = flatparam(*arguments)
    assert found.status == 2
    assert found.err
    assert entries(flatparam.directory) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "@run/step-00000004", "@run/step-00000004/new", "--to", "hf"),
        ("reshard", "@run/step-00000004", "@run/step-00000004", "--world-size", 2),
        ("import", "@dcp", "@dcp"),
        ("export", "@dcp", "@dcp/new", "--to", "torch"),
        ("import", "@a.pt", "@a.pt"),
    ],
)
def test_nothing_is_written_into_what_is_read(arguments: tuple[object, ...], flatparam: Caller) -> None:
    """A destination in the checkpoint that is read is refused; a run of ours may get a different step."""
    assert flatparam("export", "@run", "@dcp", "--to", "dcp").status == 0
    found = flatparam(*arguments)
    assert found.status == 2
    assert "is in the checkpoint that is read" in found.err
    assert flatparam("reshard", "@run", "@run", "--world-size", 3, "--step", 5).status == 0
    assert {"step-00000004", "step-00000005"} <= entries(flatparam.directory / "run")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kind", ["torch", "dcp", "hf", "flatparam"])
def test_a_disk_that_fills_up(kind: str, tiny_disk: Path, flatparam: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full in the middle, that is one sentence with the status 2, and nothing is left."""
    torch.save({"a": torch.ones(100), "w": torch.rand(200_000)}, flatparam.directory / "big.pt")
    monkeypatch.setattr("flatparam_files.command.ckpt_commands.free_nbytes", lambda path: 10**9)
    if kind == "flatparam":
        found = flatparam("import", "@big.pt", "@disk/new")
    else:
        found = flatparam("export", "@big.pt", "@disk/new", "--to", kind)
    assert found.status == 2, found
    assert found.err.count("\n") == 1
    assert entries(tiny_disk) == set()
