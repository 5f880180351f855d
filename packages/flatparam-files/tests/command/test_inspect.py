"""`flatparam ckpt inspect`."""

import json

import pytest
import torch

from .calling import Caller


def test_a_tree(flatparam: Caller) -> None:
    """It shows format, writer, and a tree of names with shapes, dtypes and bytes; parts add up."""
    found = flatparam("inspect", "@run", "--depth", 99)
    assert (found.status, found.err) == (0, "")
    lines = found.out.splitlines()
    assert lines[0] == "flatparam, 9 tensors, 444 B"
    assert {"step: 4", "world_size: 2", f"torch: {torch.__version__}"} <= set(lines)
    assert "model: 3 tensors, 216 B" in lines
    assert "  blocks.0: 2 tensors, 144 B" in lines
    assert "    weight: [6, 5] float32, 120 B" in lines
    assert "    betas: (0.9, 0.99)" in lines
    assert "extra.epoch: 3" in lines


def test_a_summary(flatparam: Caller) -> None:
    """By default two levels are shown: the parts, and what is in them, but no tensor of a block."""
    found = flatparam("inspect", "@run").out
    assert "\n  blocks.0: 2 tensors, 144 B\n  head.weight: [3, 6]" in found
    assert "    weight" not in found


def test_fewer_levels(flatparam: Caller) -> None:
    """With --depth 1 there is one line for each part, and with 0 no tree."""
    lines = flatparam("inspect", "@a.pt", "--depth", 1).out.splitlines()
    assert lines[-3:] == ["model: 3 tensors, 216 B", "optimizer: 6 tensors, 228 B", "extra.epoch: 3"]
    assert len(flatparam("inspect", "@a.pt", "--depth", 0).out.splitlines()) == 2


def test_json(flatparam: Caller) -> None:
    """With --json everything is one object: tensors by path, values as a tree."""
    found = json.loads(flatparam("inspect", "@run", "--json").out)
    assert found["format"] == "flatparam"
    assert found["nbytes"] == 444
    assert found["facts"]["world_size"] == 2
    assert found["tensors"]["model/head.weight"] == {"shape": [3, 6], "dtype": "float32", "nbytes": 72}
    assert found["values"]["optimizer"]["param_groups"][0]["betas"] == [0.9, 0.99]


def test_a_part(flatparam: Caller) -> None:
    """With --only the other parts are left out; a part that is not there is an error."""
    assert "optimizer" not in flatparam("inspect", "@run", "--only", "model").out
    flatparam("export", "@run", "@m.pt", "--to", "torch", "--only", "model")
    found = flatparam("inspect", "@m.pt", "--only", "optimizer")
    assert (found.status, found.err) == (2, "flatparam: the checkpoint has no optimizer\n")


@pytest.mark.parametrize("name", ["@gone", "@"])
def test_no_checkpoint(name: str, flatparam: Caller) -> None:
    """Where there is nothing, or nothing that is known, it says so in one sentence, with the status 2."""
    (flatparam.directory / "a.pt").unlink()
    (flatparam.directory / "run").rename(flatparam.directory / "other")
    found = flatparam("inspect", name)
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith(("flatparam: ", "flatparam ckpt inspect: error: argument PATH: "))
    assert found.err.count("\n") == 1
    assert ("does not exist" in found.err) == (name == "@gone")


def test_a_wrong_format_by_name(flatparam: Caller) -> None:
    """A format that is named and wrong is an error of that format."""
    found = flatparam("inspect", "@a.pt", "--from", "safetensors")
    assert found.status == 2
    assert "safetensors" in found.err


@pytest.mark.parametrize("arguments", [[], ["inspect", "@run", "--model", "@a.pt"], ["inspect"], ["nonsense"]])
def test_wrong_arguments(arguments: list[str], flatparam: Caller) -> None:
    """Arguments that say too little or too much are refused with the status 2."""
    assert flatparam(*arguments).status == 2


def test_help_has_examples(flatparam: Caller) -> None:
    """--help shows examples and the exit status."""
    found = flatparam("--help")
    assert found.status == 0
    assert "flatparam ckpt export runs/a" in found.out
    assert "exit status:" in found.out


def test_names_that_would_command_a_terminal(flatparam: Caller) -> None:
    """Control characters and halves of surrogate pairs in names are shown escaped, by every command."""
    torch.save({"\x1b[31m\n": torch.ones(1), "\ud800": torch.ones(1)}, flatparam.directory / "x.pt")
    shown = flatparam("inspect", "@x.pt").out
    assert "  \\x1b[31m\\n: [1] float32, 4 B\n" in shown
    assert "  \\ud800: [1] float32" in shown
    assert "\\x1b[31m" in flatparam("diff", "@x.pt", "@run").out
    found = flatparam("export", "@x.pt", "@hf", "--to", "hf")
    assert found.status == 2
    assert "expected text as the name of a tensor, found '\\ud800" in found.err


def test_numbers_that_json_lacks(flatparam: Caller) -> None:
    """Infinity and NaN are text in what --json prints, which any reader of JSON takes."""
    torch.save({"model": {"w": torch.ones(1)}, "best": float("inf")}, flatparam.directory / "x.pt")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads(flatparam("inspect", "@x.pt", "--json").out, parse_constant=refuse)
    assert found["values"]["extra"]["best"] == "inf"
