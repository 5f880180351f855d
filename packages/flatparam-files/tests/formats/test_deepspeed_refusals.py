"""What is refused of a DeepSpeed checkpoint, and that the error names the file and what to do."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_core import Span
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.formats.deepspeed import open_deepspeed

from .deepspeed_checkpoints import MODEL, OPTIM, classes_of_deepspeed, copied, edit


def refused(path: Path, *words: str) -> CheckpointError:
    """The error of opening `path`, which must say all of `words` and what to do."""
    with pytest.raises(CheckpointError) as caught:
        open_deepspeed(path)
    for word in words:
        assert word in str(caught.value)
    return caught.value


class Attack:
    """Unpickled by Python, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


@each_row("file", [OPTIM.format(1), MODEL.format(0)])
def test_attack(file: str, tmp_path: Path) -> None:
    """A pickle that would run a command is refused by the name of the function, and nothing runs."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    marker = tmp_path / "it-ran"
    edit(step / file, lambda content: content.update(note=Attack(marker)))
    refused(checkpoint, file, "system")
    assert not marker.exists()


def test_attack_by_an_admitted_name(tmp_path: Path) -> None:
    """An admitted class that is given arguments of an attacker is not made either: no module of it is imported."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    with classes_of_deepspeed() as classes:
        kind = classes["deepspeed.utils.tensor_fragment.fragment_address"]
        kind.__reduce__ = lambda self: (kind, ("rm -rf /", 2), {"numel": 3})
        content = torch.load(step / MODEL.format(0), weights_only=False)
        torch.save({**content, "note": kind()}, step / MODEL.format(0))
    before = set(sys.modules)
    assert open_deepspeed(checkpoint).values["extra"]["client_state"]["note"] is None
    assert not any(name.startswith("deepspeed") for name in set(sys.modules) - before)


def test_other_classes_of_deepspeed(tmp_path: Path) -> None:
    """A class of DeepSpeed that no checkpoint of it holds is refused by its name."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    with classes_of_deepspeed() as classes:
        engine = classes["deepspeed.runtime.engine.DeepSpeedEngine"]()
        content = torch.load(step / MODEL.format(0), weights_only=False)
        torch.save({**content, "note": engine}, step / MODEL.format(0))
    refused(checkpoint, MODEL.format(0), "deepspeed.runtime.engine.DeepSpeedEngine", "client_state")


@each_row(
    ("name", "file", "rank"),
    [
        ("stage3-three-ranks", OPTIM.format(0), 0),
        ("stage3-three-ranks", OPTIM.format(1), 1),
        ("stage3-three-ranks", OPTIM.format(2), 2),
        ("stage3-three-ranks", MODEL.format(1), 1),
        ("stage3-three-ranks", MODEL.format(2), 2),
        ("stage2-aligned", "bf16_" + OPTIM.format(1), 1),
    ],
)
def test_missing_rank(name: str, file: str, rank: int, tmp_path: Path) -> None:
    """Without the file of a rank, the error names that file and that rank."""
    checkpoint, step = copied(name, tmp_path)
    (step / file).unlink()
    error = refused(checkpoint, str(step / file), "is missing", "copy it")
    assert (error.rank, error.path) == (rank, str(step / file))


@pytest.mark.parametrize("file", [OPTIM.format(1), MODEL.format(0)])
@pytest.mark.parametrize("kept", [0, 100, 3000])
def test_truncated(file: str, kept: int, tmp_path: Path) -> None:
    """A file that was cut short is refused by its name when the checkpoint is opened."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    data = (step / file).read_bytes()
    (step / file).write_bytes(data[:kept])
    refused(checkpoint, str(step / file))


def test_truncated_later(tmp_path: Path) -> None:
    """A file that is cut short after it was opened is refused by its name when it is read."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    source = open_deepspeed(checkpoint)
    (step / OPTIM.format(1)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=OPTIM.format(1)):
        list(source.read("model/hidden.weight", Span(0, 35)))


@each_row("name", ["stage3-fp32", "stage1-fp32"])
def test_changed_byte(name: str, tmp_path: Path) -> None:
    """One changed bit among a rank's weights is found when any of them is read, and the file is named."""
    checkpoint, step = copied(name, tmp_path)
    source = open_deepspeed(checkpoint)
    weights = next(iter(source.read("model/out.weight", Span(34, 35)))).numpy().tobytes()
    data = (step / OPTIM.format(1)).read_bytes()
    assert data.count(weights) == 1
    at = data.index(weights)
    (step / OPTIM.format(1)).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CheckpointError, match=OPTIM.format(1)):
        list(open_deepspeed(checkpoint).read("model/out.weight", Span(0, 35)))


def test_other_stage(tmp_path: Path) -> None:
    """A stage that is not known is named, with those that are."""
    checkpoint, step = copied("stage3-fp32", tmp_path)

    def later(part: Any) -> None:
        part["optimizer_state_dict"]["zero_stage"] = type(part["optimizer_state_dict"]["zero_stage"])(4)

    edit(step / OPTIM.format(0), later)
    refused(checkpoint, OPTIM.format(0), "ZeRO stage 4", "stages 1, 2 and 3")


def test_without_zero(tmp_path: Path) -> None:
    """Stage 0 has no files of an optimizer, and the error says how to import its model."""
    checkpoint, step = copied("stage1-fp32", tmp_path)
    for rank in range(2):
        (step / OPTIM.format(rank)).unlink()
    refused(checkpoint, str(step), "stage 0", "mp_rank_00_model_states.pt")


@each_row(
    ("name", "word"),
    [
        ("layer_00-model_00-model_states.pt", "pipeline"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "pipeline"),
        ("expert_1_mp_rank_00_model_states.pt", "MoE"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "MoE"),
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero", "universal"),
    ],
)
def test_other_parallelism(name: str, word: str, tmp_path: Path) -> None:
    """Files of other kinds of parallelism are refused, by the file that tells it."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    (step / name).touch()
    refused(checkpoint, str(step / name), word)


@each_row(
    ("latest", "words"),
    [
        (None, ["has no file `latest`", "global_step2"]),
        ("../other/global_step2", ["should name a directory beside it"]),
        ("", ["should name a directory beside it"]),
        ("global_step7", ["global_step7", "not beside it"]),
    ],
)
def test_latest(latest: str | None, words: list[str], tmp_path: Path) -> None:
    """`latest` must name a directory of this checkpoint, and no other place."""
    checkpoint, _ = copied("stage3-fp32", tmp_path)
    copied("stage3-fp32", tmp_path / "other")
    if latest is None:
        (checkpoint / "latest").unlink()
    else:
        (checkpoint / "latest").write_text(latest)
    refused(checkpoint, *words)


def test_a_step_elsewhere(tmp_path: Path) -> None:
    """The directory of the step may be a link to another disk, as long as `latest` names it beside itself."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    shutil.move(step, tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    assert open_deepspeed(checkpoint).facts["stage"] == 3


def test_no_directory(tmp_path: Path) -> None:
    """A file, or nothing, in place of the directory is refused with the directory to give."""
    refused(tmp_path / "none", "engine.save_checkpoint")


def test_file_too_many(tmp_path: Path) -> None:
    """A file of a rank that took no part in the save is named."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    shutil.copy(step / OPTIM.format(1), step / OPTIM.format(2))
    refused(checkpoint, str(step / OPTIM.format(2)), "does not belong to the same save")


def test_file_of_another_dtype(tmp_path: Path) -> None:
    """Two files of a rank, of an fp32 and of a bf16 save, are not guessed about."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    shutil.copy(step / OPTIM.format(1), step / ("bf16_" + OPTIM.format(1)))
    refused(checkpoint, OPTIM.format(1), "does not belong to the same save")


@each_row("file", [OPTIM.format(1), MODEL.format(1)])
def test_file_of_another_save(file: str, tmp_path: Path) -> None:
    """A file of a different save is named: of more ranks, or of a different step."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    _, other_step = copied("stage3-three-ranks", tmp_path)
    edit(other_step / MODEL.format(1), lambda model: model.update(global_steps=3))
    shutil.copy(other_step / file, step / file)
    refused(checkpoint, str(step / file), "does not belong to the same save")


def resize(part: Any, more: int) -> None:
    """Make each flat group of a rank larger or smaller."""
    groups = part["optimizer_state_dict"]["fp32_flat_groups"]
    part["optimizer_state_dict"]["fp32_flat_groups"] = [torch.zeros(max(0, len(each) + more)) for each in groups]


@each_row("more", [-1, 1, -1000])
def test_flat_groups_of_another_size(more: int, tmp_path: Path) -> None:
    """Flat groups that the parameters do not fill exactly are refused, and states on NVMe are thought of."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    for rank in range(2):
        edit(step / OPTIM.format(rank), lambda part: resize(part, more))
    refused(checkpoint, "flat group", "NVMe")


@each_row(
    ("file", "change"),
    [
        (MODEL, lambda model: model.pop("module")),
        (MODEL, lambda model: model.update(param_shapes=None)),
        (MODEL, lambda model: model.update(shared_params=3)),
        (MODEL, lambda model: model["param_shapes"][0].update({"hidden.weight": (-5, -7)})),
        (MODEL, lambda model: model["param_shapes"][0].update({"hidden.weight": (2**62, 2**62)})),
        (MODEL, lambda model: model["param_shapes"][0].update({"hidden.weight": "57"})),
        (MODEL, lambda model: model["frozen_param_fragments"].pop("adapter.bias")),
        (OPTIM, lambda part: part.pop("optimizer_state_dict")),
        (OPTIM, lambda part: part["optimizer_state_dict"].update(partition_count="two")),
        (OPTIM, lambda part: part["optimizer_state_dict"].update(fp32_flat_groups=[1, 2])),
        (OPTIM, lambda part: part["optimizer_state_dict"].update(optimizer_state_dict=[])),
        (OPTIM, lambda part: part["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"].pop()),
        (OPTIM, lambda part: part["optimizer_state_dict"]["optimizer_state_dict"]["state"].update({0: 5})),
    ],
)
def test_strange_contents(file: str, change: Any, tmp_path: Path) -> None:
    """Contents that DeepSpeed does not write end in an error that names a file of the checkpoint, never in another."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    edit(step / file.format(0), change)
    refused(checkpoint, str(step))
