"""Reading what DeepSpeed wrote: the files of `deepspeed_fixture`, and what DeepSpeed said was in them."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from each_row import each_row

from flatparam_core import Span
from flatparam_files import open_source, write_checkpoint
from flatparam_files.disk.source import Source
from flatparam_files.disk.system import ByteFile
from flatparam_files.formats.deepspeed import is_deepspeed, open_deepspeed

from .deepspeed_checkpoints import (
    MODEL,
    NAMES,
    OPTIM,
    WRITTEN,
    classes_of_deepspeed,
    copied,
    edit,
    read_whole,
)

DECAYED = ["embedding.weight", "hidden.weight", "out.weight"]
OTHERS = ["scale", "hidden.bias", "out.bias"]


@each_row("name", NAMES)
def test_every_tensor(name: str) -> None:
    """Weights, frozen and tied parameters, buffers and states are bit-equal to those that DeepSpeed had."""
    source = open_deepspeed(WRITTEN / name)
    expected = safetensors.torch.load_file(WRITTEN / f"{name}.safetensors")
    assert {path for path in source.tensors if not path.startswith("extra/")} == set(expected)
    for path, tensor in expected.items():
        found = read_whole(source, path)
        assert found.dtype == tensor.dtype, path
        assert torch.equal(found, tensor), path


def test_there_are_fixtures() -> None:
    """All three stages, one, two and three ranks, fp32 and bf16 are among the checkpoints that DeepSpeed wrote."""
    facts = [open_deepspeed(WRITTEN / name).facts for name in NAMES]
    assert {(fact["stage"], fact["world_size"]) for fact in facts} == {(1, 2), (2, 2), (3, 1), (3, 2), (3, 3)}
    assert {fact["ds_version"] for fact in facts} == {"0.19.8"}


@pytest.mark.parametrize("name", ["stage3-three-ranks", "stage2-aligned"])
@pytest.mark.parametrize("path", ["model/hidden.weight", "model/adapter.weight", "optimizer/state/out.bias/exp_avg"])
def test_every_span(name: str, path: str) -> None:
    """Any span of a tensor is that part of it, wherever the ranks' parts meet."""
    source = open_deepspeed(WRITTEN / name)
    flat = read_whole(source, path).flatten()
    for start in range(flat.numel() + 1):
        for stop in range(start, flat.numel() + 1):
            found = [torch.empty(0, dtype=flat.dtype), *source.read(path, Span(start, stop))]
            assert torch.equal(torch.cat(found), flat[start:stop])


@pytest.mark.parametrize("name", ["stage3-fp32", "stage1-fp32"])
def test_only_the_span_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the parts' checksums were compared, a span costs a read of its bytes in each part, and no other byte."""
    source = open_deepspeed(WRITTEN / name)
    read_whole(source, "optimizer/state/hidden.weight/exp_avg")
    asked: list[int] = []
    read = ByteFile.read

    def observed(self: ByteFile, offset: int, nbytes: int) -> bytearray:
        asked.append(nbytes)
        return read(self, offset, nbytes)

    monkeypatch.setattr(ByteFile, "read", observed)
    list(source.read("optimizer/state/hidden.weight/exp_avg", Span(5, 33)))
    assert sum(asked) == 28 * 4
    assert len(asked) <= 2


@each_row("name", ["stage3-fp32", "stage2-aligned", "stage1-bf16"])
def test_parameter_groups(name: str) -> None:
    """The groups have the optimizer's options as they were, and their parameters by name, in order."""
    decayed, others = open_deepspeed(WRITTEN / name).values["optimizer"]["param_groups"]
    assert (decayed["params"], others["params"]) == (DECAYED, OTHERS)
    assert (decayed["lr"], others["lr"]) == (0.0025, 0.005)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.8, 0.9)


def test_groups_of_an_elastic_checkpoint() -> None:
    """`elastic_checkpoint` keeps no options, so the groups have only their parameters."""
    groups = open_deepspeed(WRITTEN / "stage2-elastic").values["optimizer"]["param_groups"]
    assert groups == [{"params": DECAYED}, {"params": OTHERS}]


@each_row("name", NAMES)
def test_the_rest(name: str) -> None:
    """The client state, the scheduler's state and the counters of steps are under `extra`, tensors among them."""
    source = open_deepspeed(WRITTEN / name)
    extra = source.values["extra"]
    assert extra["client_state"] == {"epoch": 3, "note": "written by the test"}
    assert (extra["global_steps"], extra["skipped_steps"]) == (2, 0)
    assert extra["lr_scheduler"]["last_epoch"] == 2
    assert read_whole(source, "extra/client_state/permutation").tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert source.facts["left_out"] == []
    assert source.facts["shared_parameters"] == {"head.weight": "embedding.weight"}


def test_model_is_in_the_order_of_the_module() -> None:
    """The model's tensors come in the order of the module's own state dict."""
    paths = [path for path in open_deepspeed(WRITTEN / "stage3-fp32").tensors if path.startswith("model/")]
    assert paths[:4] == ["model/scale", "model/running", "model/calls", "model/embedding.weight"]
    assert paths[-1] == "model/head.weight"


def test_directory_of_a_step() -> None:
    """The directory of a step can be given in place of the one with `latest`, and both are told to be DeepSpeed's."""
    step = WRITTEN / "stage3-fp32" / "global_step2"
    assert open_deepspeed(step).tensors == open_deepspeed(step.parent).tensors
    assert is_deepspeed(step)
    assert is_deepspeed(step.parent)
    assert not is_deepspeed(WRITTEN)
    assert not is_deepspeed(step / MODEL.format(0))


def test_is_a_source() -> None:
    """What is opened is a `Source` of the format `deepspeed`."""
    source = open_deepspeed(WRITTEN / "stage3-bf16")
    assert isinstance(source, Source)
    assert source.format == "deepspeed"


def test_into_a_checkpoint_of_ours(tmp_path: Path) -> None:
    """Found out by looking and written as ours, it has the same tensors and values, and tied ones once."""
    source = open_source(WRITTEN / "stage3-bf16")
    assert source.format == "deepspeed"
    write_checkpoint(source, tmp_path, world_size=3, step=source.facts["step"])
    ours = open_source(tmp_path)
    assert (ours.values, ours.tensors, ours.facts["step"]) == (source.values, source.tensors, 2)
    assert ours.facts["aliases"] == {"model/head.weight": "model/embedding.weight"}
    for path in source.tensors:
        assert torch.equal(read_whole(ours, path), read_whole(source, path)), path


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    """A checkpoint that was saved with `exclude_frozen_parameters` has all the others."""
    checkpoint, step = copied("stage3-fp32", tmp_path)

    def exclude(model: Any) -> None:
        model["frozen_param_shapes"] = model["frozen_param_fragments"] = None
        for name in ("adapter.weight", "adapter.bias"):
            del model["module"][name]

    for rank in range(2):
        edit(step / MODEL.format(rank), exclude)
    missing = open_deepspeed(WRITTEN / "stage3-fp32").tensors.keys() - open_deepspeed(checkpoint).tensors.keys()
    assert missing == {"model/adapter.weight", "model/adapter.bias"}


def test_foreign_objects_are_left_out(tmp_path: Path) -> None:
    """An admitted object that is no plain value is not made: it is None, and the facts say where it was."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    edit(step / MODEL.format(0), lambda model: model.update(args=argparse.Namespace(lr=1)))
    source = open_deepspeed(checkpoint)
    assert source.values["extra"]["client_state"]["args"] is None
    assert source.facts["left_out"] == ["extra/client_state/args, of the class argparse.Namespace"]


def test_loss_scale(tmp_path: Path) -> None:
    """The state of fp16's dynamic loss scaler is read as plain values, without DeepSpeed's class."""
    checkpoint, step = copied("stage3-fp32", tmp_path)
    with classes_of_deepspeed() as classes:
        scaler = classes["deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"]()
        scaler.cur_scale, scaler.dtype = 512.0, torch.float16

        def use(part: Any) -> None:
            part["optimizer_state_dict"]["loss_scaler"] = scaler

        torch.save(with_change(step / OPTIM.format(0), use), step / OPTIM.format(0))
    assert open_deepspeed(checkpoint).values["extra"]["loss_scaler"]["cur_scale"] == 512.0


def with_change(file: Path, change: Any) -> Any:
    """What is in a file, changed."""
    content = torch.load(file, weights_only=False)
    change(content)
    return content


def test_step_of_the_group(tmp_path: Path) -> None:
    """Where an optimizer counts its steps in the group, the parameters of the group have that step."""
    checkpoint, step = copied("stage3-fp32", tmp_path)

    def count_in_group(part: Any) -> None:
        optimizer = part["optimizer_state_dict"]["optimizer_state_dict"]
        for states in optimizer["state"].values():
            del states["step"]
        for group in optimizer["param_groups"]:
            group["step"] = 2

    for rank in range(2):
        edit(step / OPTIM.format(rank), count_in_group)
    source = open_deepspeed(checkpoint)
    assert source.values["optimizer"]["state"]["hidden.bias"] == {"step": 2}
    assert "optimizer/state/hidden.bias/exp_avg" in source.tensors
