"""Files that torch wrote on 2 ranks, loaded into ours: at 1, 2 and 3 ranks, in both exposures, under other units."""

from __future__ import annotations

import torch

import integration_tests.state.torch_files as torch_files
from flatparam import ShardingStrategy
from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model, assert_optimizer, assert_same
from integration_tests.state.ours import FSDP, full_optimizer_state, full_state, load_distributed, ours
from integration_tests.state.sample import AFTER, OF_RANK, UNITS, Frozen, Normed, adamw, build, train, trained
from integration_tests.state.torch_files import Files
from integration_tests.state.worlds import on_ranks

WRAPPINGS = {"same units": UNITS, "other units": (Normed, Frozen), "one unit": ()}
BOTH = [False, True]


def assert_restored(
    group: Collectives,
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    mixed: bool,
    buffers_differ: bool = True,
) -> None:
    """Demand the state of the checkpoint and, on 2 ranks, that training goes on with torch's bits."""
    expected = trained(mixed)
    assert_model(full_state(model), expected.model, but=OF_RANK if buffers_differ else ())
    assert_optimizer(full_optimizer_state(model, optimizer), expected.optimizer)
    train(model, optimizer, group.rank, AFTER)
    if group.size == 2:
        assert_model(full_state(model), expected.end, but=OF_RANK)
        assert_optimizer(full_optimizer_state(model, optimizer), expected.end_optimizer)


@on_ranks(2, 3, file_originals=BOTH, originals=BOTH, wrapping=list(WRAPPINGS))
def test_a_full_checkpoint_of_fsdp1(
    group: Collectives, files: Files, file_originals: bool, originals: bool, wrapping: str
) -> None:
    """A .pt file of FSDP1's full states loads, bit for bit, and training goes on as torch's does."""
    checkpoint = torch.load(files.torchs("full", file_originals) / "full.pt", weights_only=True)
    model = ours(build(mixed=file_originals, seed=1), originals, units=WRAPPINGS[wrapping])
    optimizer = adamw(model.parameters())
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optim"]))
    assert_restored(group, model, optimizer, file_originals, buffers_differ=False)


@on_ranks(2, kind=["sharded", "dtensor"], file_originals=BOTH, form=["sharded", "chunked", "dtensor"])
def test_a_distributed_checkpoint_of_fsdp1(
    group: Collectives, files: Files, kind: str, file_originals: bool, form: str
) -> None:
    """S-085, S-091: FSDP1's ShardedTensors and DTensors that `dcp.save` wrote load into each of our forms by `dcp.load`."""
    model = ours(build(mixed=file_originals, seed=1), not file_originals, form)
    optimizer = adamw(model.parameters())
    load_distributed(FSDP, model, optimizer, files.torchs(kind, file_originals), chunked=form == "chunked")
    assert_restored(group, model, optimizer, file_originals)


@on_ranks(1, 3, kind=["sharded", "dtensor"], form=["sharded", "dtensor"])
def test_a_distributed_checkpoint_of_fsdp1_on_other_ranks(
    group: Collectives, files: Files, kind: str, form: str
) -> None:
    """S-091: and at other numbers of ranks than the two that wrote them."""
    originals = kind == form
    model = ours(build(mixed=originals, seed=1), not originals, form)
    optimizer = adamw(model.parameters())
    load_distributed(FSDP, model, optimizer, files.torchs(kind, originals))
    assert_restored(group, model, optimizer, originals)


@on_ranks(2, 3, wrapping=["other units", "one unit"], form=["sharded", "dtensor"])
def test_a_distributed_checkpoint_under_other_units(group: Collectives, files: Files, wrapping: str, form: str) -> None:
    """What FSDP1 saved with three units and a root loads into two units and a root, and into one."""
    model = ours(build(mixed=True, seed=1), form == "sharded", form, WRAPPINGS[wrapping])
    optimizer = adamw(model.parameters())
    load_distributed(FSDP, model, optimizer, files.torchs("sharded"))
    assert_restored(group, model, optimizer, mixed=True)


@on_ranks(2, strategy=["SHARD_GRAD_OP", "NO_SHARD"], kind=["sharded", "dtensor"], originals=BOTH)
def test_a_distributed_checkpoint_with_another_strategy(
    group: Collectives, files: Files, strategy: str, kind: str, originals: bool
) -> None:
    """FSDP1's fully sharded checkpoint goes on, with the same bits, under the other strategies."""
    model = ours(build(mixed=True, seed=1), originals, "sharded", sharding_strategy=ShardingStrategy[strategy])
    optimizer = adamw(model.parameters())
    load_distributed(FSDP, model, optimizer, files.torchs(kind))
    assert_restored(group, model, optimizer, mixed=True)


@on_ranks(1, 2, 3, originals=BOTH, form=["sharded", "dtensor"])
def test_a_checkpoint_of_fsdp2(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """What FSDP2 saved by `get_state_dict` and `dcp.save` loads, bit for bit, and training goes on as torch's does."""
    model = ours(build(mixed=True, seed=1), originals, form)
    optimizer = adamw(model.parameters())
    load_distributed(FSDP, model, optimizer, files.torchs("fsdp2"))
    assert_restored(group, model, optimizer, mixed=True)


@on_ranks(2, 3, kind=["sharded", "dtensor", "fsdp2"], originals=BOTH)
def test_files_of_torch_by_set_state_dict(group: Collectives, files: Files, kind: str, originals: bool) -> None:
    """S-097: `get_state_dict`, `dcp.load`, `set_state_dict` of ours read what torch wrote."""
    import torch.distributed.checkpoint as dcp

    from flatparam.checkpoint.state_dict import get_state_dict, set_state_dict

    model = ours(build(mixed=True, seed=1), originals)
    optimizer = adamw(model.parameters())
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": optimizer_state}, checkpoint_id=files.torchs(kind))
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert_restored(group, model, optimizer, mixed=True)


@on_ranks(2)
def test_a_local_checkpoint_of_fsdp1(group: Collectives, files: Files) -> None:
    """FSDP1's flat shards load into the same units on the same ranks, with use_orig_params=False."""
    path = files.torchs("local", False) / f"rank{group.rank}.pt"
    checkpoint = torch.load(path, weights_only=False)  # this test's own file
    model = ours(build(seed=1), False, "local")
    optimizer = adamw(model.parameters())
    model.load_state_dict(checkpoint["model"])
    assert_model(full_state(model), trained().model, but=OF_RANK)
    optimizer.load_state_dict(checkpoint["optim"])
    assert_restored(group, model, optimizer, mixed=False)


@on_ranks(1, 2, 3, file_originals=BOTH)
def test_the_optimizer_of_a_distributed_checkpoint_by_torchs_reader(
    group: Collectives, files: Files, file_originals: bool
) -> None:
    """torch's `load_sharded_optimizer_state_dict`, which takes its layout from our model state, feeds ours."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    model = ours(build(mixed=file_originals, seed=1), file_originals, "chunked")
    optimizer = adamw(model.parameters())
    reader = FileSystemReader(files.torchs("sharded", file_originals))
    loaded = load_sharded_optimizer_state_dict(model.state_dict(), "optim", reader)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, loaded["optim"]))
    assert_optimizer(full_optimizer_state(model, optimizer), trained(file_originals).optimizer)


@on_ranks(2, use_orig_params=BOTH)
def test_what_torch_wrote(group: Collectives, files: Files, use_orig_params: bool) -> None:
    """torch's own wrapper reads the same files and goes on to the same bits: what is demanded of ours is possible."""
    wrapper = torch_files.FullyShardedDataParallel
    for form in ("sharded", "dtensor"):
        model = torch_files.fsdp1(build(use_orig_params, seed=1), use_orig_params, form)
        optimizer = adamw(model.parameters())
        load_distributed(wrapper, model, optimizer, files.torchs(form, use_orig_params), chunked=form == "sharded")
        train(model, optimizer, group.rank, AFTER)
        wrapper.set_state_dict_type(model, *torch_files.settings_of("full"))
        state = {k: v for k, v in model.state_dict().items() if k not in OF_RANK}
        end = {k: v for k, v in trained(use_orig_params).end.items() if k not in OF_RANK}
        assert_same(state, end)
