"""Files that ours wrote on 2 and on 3 ranks, loaded by torch's FSDP1 and FSDP2, by the plain model, and by ours."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import integration_tests.state.torch_files as torch_files
from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model, assert_optimizer, assert_same, whole
from integration_tests.state.ours import (
    FSDP,
    OUR_WRITERS,
    full_state,
    load_distributed,
    ours,
    written_by_ours,
)
from integration_tests.state.sample import AFTER, OF_RANK, adamw, build, named_state, train, trained
from integration_tests.state.test_torch_files import assert_restored
from integration_tests.state.torch_files import Files, FullyShardedDataParallel, fsdp1, fsdp2
from integration_tests.state.worlds import on_ranks

#: The distributed checkpoints.
KINDS = ["sharded", "chunked", "dtensor", "async", "dsd"]


@on_ranks(1, writer=OUR_WRITERS, kind=KINDS)
def test_what_ours_wrote(group: Collectives, files: Files, writer: str, kind: str) -> None:
    """A distributed checkpoint of ours holds, under plain names, the tensors of the unsharded model and optimizer."""
    originals = writer.endswith("originals")
    path = written_by_ours(files, writer, kind)
    read = as_torch_save(path)
    expected = trained(mixed=originals)
    assert_model(read["model"], expected.model, but=OF_RANK)
    assert_optimizer(read["optim"], expected.optimizer)
    names = sorted(name for name, _ in build(originals).named_parameters())
    assert [sorted(group["params"]) for group in read["optim"]["param_groups"]] == [names]


def as_torch_save(path: Path) -> dict:
    """A distributed checkpoint as one nested dict of full tensors, by torch's converter."""
    file = path / "converted.pt"
    dcp_to_torch_save(path, file)
    return torch.load(file, weights_only=False)  # this test's own file


@on_ranks(1, writer=OUR_WRITERS)
def test_a_full_checkpoint_in_the_plain_model(group: Collectives, files: Files, writer: str) -> None:
    """Ours' full states, the optimizer's re-keyed to numbers, load into the unwrapped model and its optimizer."""
    originals = writer.endswith("originals")
    path = written_by_ours(files, writer, "full") / "full.pt"
    checkpoint = torch.load(path, weights_only=True)
    model = build(originals, seed=1)
    optimizer = adamw(model.parameters())
    model.load_state_dict(checkpoint["model"])
    numbered = FSDP.rekey_optim_state_dict(checkpoint["optim"], torch_files_key("PARAM_ID"), model, optim=optimizer)
    optimizer.load_state_dict(numbered)
    assert_model(model.state_dict(), trained(originals).model, but=OF_RANK)
    assert_same(named_state(model, optimizer), trained(originals).optimizer)


def torch_files_key(name: str) -> object:
    """torch's own member, which ours accepts."""
    from torch.distributed.fsdp import OptimStateKeyType

    return OptimStateKeyType[name]


@on_ranks(2, writer=OUR_WRITERS, kind=[*KINDS, "full"])
def test_in_torchs_fsdp1(group: Collectives, files: Files, writer: str, kind: str) -> None:
    """torch's FSDP1 loads what ours wrote, in its own forms, and goes on with the bits of the unsharded model."""
    originals = writer.endswith("originals")
    path = written_by_ours(files, writer, kind)
    form = {"full": "full", "chunked": "sharded", "sharded": "sharded"}.get(kind, "dtensor")
    model = fsdp1(build(originals, seed=1), originals, form)
    optimizer = adamw(model.parameters())
    if kind == "full":
        checkpoint = torch.load(path / "full.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        converted = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, checkpoint["optim"])
        optimizer.load_state_dict(converted)
    else:
        load_distributed(FullyShardedDataParallel, model, optimizer, path, chunked=form == "sharded")
    train(model, optimizer, group.rank, AFTER)
    FullyShardedDataParallel.set_state_dict_type(model, *torch_files.settings_of("full"))
    assert_model(model.state_dict(), trained(originals).end, but=OF_RANK)
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert_optimizer(state, trained(originals).end_optimizer)


@on_ranks(2, writer=OUR_WRITERS, kind=KINDS)
def test_in_torchs_fsdp2(group: Collectives, files: Files, writer: str, kind: str) -> None:
    """torch's FSDP2 loads what ours wrote, by `get_state_dict` and `dcp.load`, and goes on with the same bits."""
    originals = writer.endswith("originals")
    model = fsdp2(build(originals, seed=1))
    optimizer = adamw(model.parameters())
    state, optimizer_state = get_state_dict(model, optimizer)
    path = written_by_ours(files, writer, kind)
    dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    train(model, optimizer, group.rank, AFTER)
    assert_model(whole(model.state_dict()), trained(originals).end, but=OF_RANK)


@on_ranks(1, 2, 3, writer=["2-originals", "3-flat"], kind=KINDS)
def test_in_ours(group: Collectives, files: Files, writer: str, kind: str) -> None:
    """Every distributed checkpoint of ours loads at 1, 2 and 3 ranks into another form and the other exposure."""
    originals = writer.endswith("originals")
    path = written_by_ours(files, writer, kind)
    model = ours(build(originals, seed=1), not originals, "dtensor" if kind == "sharded" else "sharded")
    optimizer = adamw(model.parameters())
    load_distributed(FSDP, model, optimizer, path)
    assert_restored(group, model, optimizer, originals)


@on_ranks(2, writer=["2-flat", "2-originals"])
def test_a_local_checkpoint_in_ours(group: Collectives, files: Files, writer: str) -> None:
    """L-37: flat shards load on as many ranks, with use_orig_params=False and True."""
    originals = writer.endswith("originals")
    path = written_by_ours(files, writer, "local") / f"rank{group.rank}.pt"
    checkpoint = torch.load(path, weights_only=False)  # this test's own file
    model = ours(build(mixed=originals, seed=1), originals, "local")
    model.load_state_dict(checkpoint["model"])
    assert_model(full_state(model), trained(originals).model, but=OF_RANK)


@on_ranks(1, 2, 3, writer=OUR_WRITERS)
def test_the_module_itself_as_a_stateful(group: Collectives, files: Files, writer: str) -> None:
    """`dcp.save({"model": module})` and `dcp.load` of the same save and load a wrapped module in place."""
    originals = writer.endswith("originals")
    path = written_by_ours(files, writer, "stateful")
    model = ours(build(mixed=originals, seed=1), not originals, "sharded")
    dcp.load({"model": model}, checkpoint_id=path)
    assert_model(full_state(model), trained(originals).model, but=OF_RANK)
