"""Every reader against changed files, for a short while; `nox -s run -- fuzz` does so for as long as one likes."""

import json
import os
from pathlib import Path

import pytest

from flatparam_files import open_source
from flatparam_files.disk.checkpoint_error import CheckpointError

from .fuzzing import MAKE, Fuzzer, chain_of, limit_memory
from .saved import end_of, fork

CASES = int(os.environ.get("FLATPARAM_FUZZED_CHECKPOINTS", "60"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MAKE)
def test_changed_files(name: str, tmp_path: Path) -> None:
    """A reader returns or raises CheckpointError, whatever a file says, and takes less than a gibibyte of memory."""
    fuzzer = Fuzzer(tmp_path, 1, guided=False)

    def work() -> None:
        limit_memory()
        taken = sum(fuzzer.case(name, (number,)) for number in range(CASES))
        # What changes a comment, a padding or a name is taken.
        assert taken < CASES * 0.6

    assert end_of(fork(work)) == 0


def test_coverage_guides_the_search(tmp_path: Path) -> None:
    """A case that goes a new way is changed further, and each can be repeated by its chain."""
    fuzzer = Fuzzer(tmp_path, 1)
    sound = len(fuzzer.ways["safetensors"])
    chains = []
    for number in range(20):
        chains.append(fuzzer.chain("safetensors", number))
        fuzzer.case("safetensors", chains[-1])
    assert max(map(len, chains)) > 1
    found = [chain for chain in fuzzer.corpus["safetensors"] if chain]
    assert found
    assert len(fuzzer.ways["safetensors"]) > sound
    # What was new is not new again.
    fuzzer.case("safetensors", found[0])
    assert len(fuzzer.corpus["safetensors"]) == 1 + len(found)
    assert chain_of(",".join(map(str, chains[-1]))) == chains[-1]


@pytest.mark.parametrize(
    ("tag", "match"),
    [
        ("x" * 300, "should name a directory"),
        ("a\0b", "should name a directory"),
        ("", "should name a directory"),
    ],
)
def test_names_that_no_file_has(tag: str, match: str, tmp_path: Path) -> None:
    """A name that the system takes for none is a CheckpointError; one that is too long was an OSError."""
    fuzzer = Fuzzer(tmp_path, 1, guided=False)
    (fuzzer.paths["deepspeed"] / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match=match):
        open_source(fuzzer.paths["deepspeed"], format="deepspeed")
    index = fuzzer.paths["shards"] / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"0.weight": tag}}))
    with pytest.raises(
        CheckpointError,
        match=r"cannot be opened: File name too long|cannot be the name of a file|is not a file beside it",
    ):
        open_source(fuzzer.paths["shards"])
