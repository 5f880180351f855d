"""Model state, key by key, beside torch's FSDP1 in the same processes: every form, every field of its configuration."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TheirFSDP
from torch.distributed.tensor import DTensor

import flatparam
import integration_tests.state.torch_files as torch_files
from flatparam import StateDictType
from flatparam_comm import Collectives
from flatparam_core import ALIGNMENT_NBYTES, CPU_ALIGNMENT_NBYTES
from flatparam_runtime import units_in
from integration_tests.state.comparing import assert_model, assert_same, boxes_of, whole
from integration_tests.state.ours import FSDP, full_state, ours, settings_of
from integration_tests.state.sample import OF_RANK, adamw, build, copied, train
from integration_tests.state.torch_files import CPU, Files, fsdp1
from integration_tests.state.worlds import on_ranks

BOTH = [False, True]
#: Our form and torch's.
FORMS = {"full": "full", "chunked": "sharded", "dtensor": "dtensor"}


def pair(originals: bool, form: str, **arguments: Any) -> tuple[FSDP, Any]:
    """The sample in ours and in torch's wrapper, in the same form of state."""
    mine = ours(build(originals), originals, form, **arguments)
    return mine, fsdp1(build(originals), originals, FORMS.get(form, form))


@on_ranks(2, 3, originals=BOTH, form=list(FORMS))
def test_model_state(group: Collectives, files: Files, originals: bool, form: str) -> None:
    """S-083, S-085: after two steps, the same names and, for each, the same kind of tensor, shards and bits as torch's."""
    mine, theirs = pair(originals, form)
    for model in (mine, theirs) if group.size == 2 else ():  # 3 ranks round in another order
        train(model, adamw(model.parameters()), group.rank)
    assert_same(dict(mine.state_dict()), dict(theirs.state_dict()))


@on_ranks(2, 3, originals=BOTH)
def test_the_boxes_of_a_sharded_state(group: Collectives, files: Files, originals: bool) -> None:
    """S-085, L-39: by default the ranks' local shards tile each tensor, and taking them moves no bytes of parameters."""
    model = ours(build(originals), originals, "sharded")
    before = {name: value.clone() for name, value in model.named_parameters()}
    state = model.state_dict()
    for name, value in state.items():
        if name in ("shift", *OF_RANK, "normed.norm.num_batches_tracked"):
            assert type(value) is torch.Tensor
        else:
            assert isinstance(value, ShardedTensor)
            assert all(list(s.tensor.shape) == list(s.metadata.shard_sizes) for s in value.local_shards())
    assert_model(whole(state), build(originals).state_dict())
    assert_same(dict(model.named_parameters()), before)


@on_ranks(2)
def test_a_sharded_state_moves_nothing(group: Collectives, files: Files) -> None:
    """L-39: a sharded state gathers nothing, neither at save nor at load; torch gathers the whole unit at save."""
    model = ours(build(), False, "sharded")
    train(model, adamw(model.parameters()), group.rank)
    with counting_gathers() as ours_moved:
        state = model.state_dict()
        model.load_state_dict(state)
    theirs = fsdp1(build(), False, "sharded")
    with counting_gathers() as torch_moved:
        theirs.state_dict()
    assert ours_moved == []
    assert sum(torch_moved) > 0


class counting_gathers:
    """Within this, the numbers of elements of the outputs of all tensor collectives."""

    def __enter__(self) -> list[int]:
        from torch.utils._python_dispatch import TorchDispatchMode

        moved: list[int] = []

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "c10d" or "all_gather" in str(func):
                    tensors = [t for t in _leaves(args) if isinstance(t, torch.Tensor)]
                    floats = [t.numel() for t in tensors if t.is_floating_point()]
                    moved.extend(floats)
                return func(*args, **(kwargs or {}))

        self.mode = Count()
        self.mode.__enter__()
        return moved

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


@on_ranks(2, form=["full", "sharded", "chunked", "dtensor", "local"], originals=BOTH)
def test_saved_and_loaded_at_once(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """A full state is a copy, that training does not change; loading what was saved changes nothing, in every form."""
    model = ours(build(originals), originals, form)
    optimizer = adamw(model.parameters())
    saved = full_state(model)
    kept = copied(saved)
    state = model.state_dict()
    model.load_state_dict(state)
    assert_same(full_state(model), kept)
    train(model, optimizer, group.rank)
    # Buffers are torch's own entries.
    assert_model(saved, kept, but=(*OF_RANK, "normed.norm.num_batches_tracked"))


@on_ranks(2, 3, alignment=[0, 16, 64])
def test_local_state(group: Collectives, files: Files, alignment: int) -> None:
    """S-084: a unit's flat shard is one ShardedTensor of one dimension without padding, with torch's offsets and bits.

    So it is however parameters and shards are aligned in memory, and each of the two loads what the other has saved.
    """
    with CPU_ALIGNMENT_NBYTES.set_to(alignment):
        mine, theirs = pair(False, "local")
        assert any(unit.handles[0].layout.gaps for unit in units_in(mine) if unit.handles) or not alignment
    state, expected = mine.state_dict(), theirs.state_dict()
    assert set(state) == set(expected)
    for name, value in expected.items():
        if name.endswith("_flat_param"):
            assert len(state[name].metadata().size) == 1
            assert boxes_of(state[name]) == boxes_of(value)
        assert_same(whole(state[name]), whole(value))
    with CPU_ALIGNMENT_NBYTES.set_to(alignment):
        other = ours(build(seed=1), False, "local")
    other.load_state_dict(expected)
    assert_model(full_state(other), full_state(mine))
    theirs_too = fsdp1(build(seed=1), False, "local")
    theirs_too.load_state_dict(state)
    assert_same(dict(theirs_too.named_parameters()), dict(theirs.named_parameters()))


@on_ranks(2, originals=BOTH)
def test_a_local_state_of_summoned_parameters(group: Collectives, files: Files, originals: bool) -> None:
    """What was changed in the full parameters is in a local state, also if a rank saves what others hold."""
    with CPU_ALIGNMENT_NBYTES.set_to(16):
        model, other = (ours(build(seed=seed), originals, "local") for seed in (0, 1))
    with FSDP.summon_full_params(model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        state = model.state_dict()
    other.load_state_dict(state)
    assert_model(full_state(other), full_state(model))


@on_ranks(2, originals=BOTH, alignments=[(16, 16), (0, 64), (64, 0), (64, 16)])
def test_local_state_of_several_flat_parameters(
    group: Collectives, files: Files, originals: bool, alignments: tuple[int, int]
) -> None:
    """S-084: frozen parameters of a trained unit are a flat parameter of their own, `_flat_param_1`, and it loads too.

    It loads at a different alignment in memory, too.
    """
    threshold = ALIGNMENT_NBYTES if originals else CPU_ALIGNMENT_NBYTES
    with threshold.set_to(alignments[0]):
        model = ours(build(mixed=True), originals, "local")
    state = model.state_dict()
    assert {"_flat_param", "_flat_param_1", "codec._flat_param", "frozen._flat_param"} <= set(state)
    assert not {"head.weight", "head.bias", "row"} & set(state)
    with threshold.set_to(alignments[1]):
        other = ours(build(mixed=True, seed=1), originals, "local")
    other.load_state_dict(state)
    assert_model(full_state(other), full_state(model))


@on_ranks(2, form=["full", "sharded", "chunked", "dtensor"])
def test_offload(group: Collectives, files: Files, form: str) -> None:
    """`offload_to_cpu=True` gives the same state, on the CPU, where torch's full form crashes the process."""
    model = ours(build(True), True, form)
    state = model.state_dict()
    fields = {"_use_dtensor": True} if form == "dtensor" else {}
    with FSDP.state_dict_type(model, *settings_of(form, offload_to_cpu=True, **fields)):
        offloaded = model.state_dict()
    assert_same(dict(offloaded), dict(state))


@on_ranks(2, originals=BOTH)
def test_rank0_only(group: Collectives, files: Files, originals: bool) -> None:
    """S-083: `rank0_only` gives rank 0 all and the others only what is not sharded, as torch does."""
    mine, theirs = pair(originals, "full")
    with FSDP.state_dict_type(mine, StateDictType.FULL_STATE_DICT, flatparam.FullStateDictConfig(rank0_only=True)):
        state = mine.state_dict()
    config = torch_files.FullStateDictConfig(rank0_only=True)
    with TheirFSDP.state_dict_type(theirs, torch_files.StateDictType.FULL_STATE_DICT, config):
        expected = theirs.state_dict()
    assert_same(dict(state), dict(expected))
    assert ("row" in state) == (group.rank == 0)


@on_ranks(2, form=["full", "sharded", "chunked", "dtensor"], originals=BOTH)
def test_shared_parameters(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """S-083, S-104: both names of a tied weight are in the state, with the same bits, and load tied."""
    model = ours(build(originals), originals, form)
    state = model.state_dict()
    assert_same(whole(state["codec.encode.weight"]), whole(state["codec.decode.weight"]))
    other = ours(build(originals, seed=1), originals, form)
    other.load_state_dict(state)
    assert other.module.codec.module.encode.weight is other.module.codec.module.decode.weight
    assert_model(full_state(other), full_state(model))


@on_ranks(2, form=["full", "chunked", "dtensor", "sharded"], originals=BOTH)
def test_activation_checkpoint_prefixes(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """S-088: names have no prefix of an activation-checkpointing wrapper inside a unit, and load from the plain model."""

    def with_checkpoints(module: Any) -> Any:
        module.codec = checkpoint_wrapper(module.codec)
        module.head = checkpoint_wrapper(module.head)
        return module

    model = ours(with_checkpoints(build(originals, seed=1)), originals, form)
    plain = ours(build(originals), originals, form).state_dict()
    assert set(model.state_dict()) == set(plain)
    model.load_state_dict(plain)
    assert_model(full_state(model), build(originals).state_dict())
    if form in FORMS:
        theirs = fsdp1(with_checkpoints(build(originals)), originals, FORMS[form])
        assert_same(dict(model.state_dict()), dict(theirs.state_dict()))


class Parent(nn.Module):
    """A module that is not sharded around two that are, with a parameter and a buffer of its own."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(3, 5))
        self.plain = nn.Linear(5, 2)
        self.second = nn.Sequential(wrap(nn.Linear(2, 3)), nn.Tanh())
        self.register_buffer("offset", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.plain(self.first(x))) + self.offset


@on_ranks(2, 3, form=["full", "chunked", "dtensor", "sharded", "local"], originals=BOTH)
def test_non_fsdp_parents(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """A plain module around units: its own tensors are whole, the units' in their form, as torch's; and both load."""

    def make(wrap: Any) -> Parent:
        torch.manual_seed(0)
        return Parent(wrap)

    mesh = torch_files.mesh_of_world() if form == "dtensor" else None
    mine = make(lambda m: FSDP(m, use_orig_params=originals, device_mesh=mesh))
    FSDP.set_state_dict_type(mine, *settings_of(form))
    state = mine.state_dict()
    if form in FORMS:
        theirs = make(lambda m: TheirFSDP(m, use_orig_params=originals, device_mesh=mesh, device_id=CPU))
        TheirFSDP.set_state_dict_type(theirs, *torch_files.settings_of(FORMS[form]))
        assert_same(dict(state), dict(theirs.state_dict()))
    assert type(state["plain.weight"]) is torch.Tensor
    other = make(lambda m: FSDP(m, use_orig_params=originals, device_mesh=mesh))
    FSDP.set_state_dict_type(other, *settings_of(form))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    other.load_state_dict(state)
    for model in (mine, other):
        FSDP.set_state_dict_type(model, *settings_of("full"))
    assert_same(dict(other.state_dict()), dict(mine.state_dict()))


@on_ranks(2, form=["full", "chunked", "dtensor", "sharded"])
def test_buffers_in_low_precision(group: Collectives, files: Files, form: str) -> None:
    """S-088, S-048: buffers of a `buffer_dtype` are saved in their own dtype; in the local form as they are; no scratch."""
    mine = ours(build(), False, form, mixed_precision=flatparam.MixedPrecision(buffer_dtype=torch.bfloat16))
    train(mine, adamw(mine.parameters()), group.rank, [0])
    state = mine.state_dict()
    expected = build().state_dict()
    for name in ("shift", "normed.norm.running_mean", "normed.norm.num_batches_tracked"):
        assert state[name].dtype == expected[name].dtype, name
    assert "scratch" not in state
    FSDP.set_state_dict_type(mine, *settings_of("local")) if form != "dtensor" else None
    if form != "dtensor":
        assert mine.state_dict()["shift"].dtype == torch.bfloat16


@on_ranks(2, form=["full", "chunked", "sharded", "dtensor"])
def test_parameters_in_low_precision(group: Collectives, files: Files, form: str) -> None:
    """S-046: with a `param_dtype` the state is in full precision, equal to torch's, and loads so."""
    mine = ours(
        build(),
        False,
        form,
        mixed_precision=flatparam.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    state = mine.state_dict()
    assert all(v.dtype in (torch.float32, torch.int64) for v in state.values())
    assert_model(whole(state), build().state_dict())


@on_ranks(2, form=["full", "sharded", "chunked", "dtensor", "local"])
def test_no_shard(group: Collectives, files: Files, form: str) -> None:
    """S-087: NO_SHARD gives the full state whatever form is asked, with a warning that says so, as torch does."""
    model = ours(build(), False, "full", sharding_strategy=flatparam.ShardingStrategy.NO_SHARD)
    FSDP.set_state_dict_type(model, *settings_of(form))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = model.state_dict()
    assert_same(dict(state), dict(build().state_dict()))
    told = [str(w.message) for w in caught if "NO_SHARD" in str(w.message)]
    assert form == "full" or told
    if form != "dtensor":
        model.load_state_dict(build(seed=1).state_dict())
        assert_model(full_state(model), build(seed=1).state_dict())


@on_ranks(4, form=["full", "dtensor"])
def test_hybrid(group: Collectives, files: Files, form: str) -> None:
    """A hybrid strategy on a mesh of 2 x 2: the DTensors are replicated, then sharded by rows, bit for bit torch's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mine = ours(build(), False, form, device_mesh=mesh, sharding_strategy=flatparam.ShardingStrategy.HYBRID_SHARD)
    theirs = fsdp1(
        build(),
        False,
        form,
        device_mesh=mesh,
        sharding_strategy=torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD,
    )
    FSDP.set_state_dict_type(mine, *settings_of(form))
    state = mine.state_dict()
    assert_same(dict(state), dict(theirs.state_dict()))
    if form == "dtensor":
        assert isinstance(state["row"], DTensor)
        assert [str(p) for p in state["row"].placements] == ["R", "S(0)"]
    other = ours(
        build(seed=1),
        False,
        form,
        device_mesh=mesh,
        sharding_strategy=flatparam.ShardingStrategy.HYBRID_SHARD,
    )
    other.load_state_dict(state)
    assert_model(full_state(other), build().state_dict())


@on_ranks(2)
def test_use_dtensor_without_a_mesh(group: Collectives, files: Files) -> None:
    """`_use_dtensor=True` gives DTensors over the unit's group also without a mesh, and they load."""
    model = ours(build(), False)
    config = flatparam.ShardedStateDictConfig(_use_dtensor=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        state = model.state_dict()
        theirs = fsdp1(build(), False, "dtensor").state_dict()
        for name, value in theirs.items():
            assert type(state[name]) is type(value), name
            if isinstance(value, DTensor):
                assert state[name].placements == value.placements
                assert_same(state[name].to_local(), value.to_local())
        other = ours(build(seed=1), False)
        with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT, config):
            other.load_state_dict(state)
    assert_model(full_state(other), build().state_dict())


@on_ranks(2, source=["full", "sharded", "chunked", "dtensor"], target=["full", "sharded", "dtensor", "chunked"])
def test_loading_does_not_ask_for_the_form(group: Collectives, files: Files, source: str, target: str) -> None:
    """S-086: a state of one form loads where that form is set; sharded ones of either kind in any sharded setting."""
    state = ours(build(), False, source).state_dict()
    model = ours(build(seed=1), True, target)
    with FSDP.state_dict_type(model, *settings_of(source)):
        model.load_state_dict(state)
    assert_model(full_state(model), build().state_dict())


@on_ranks(2, form=["chunked", "dtensor"], originals=BOTH)
def test_torchs_state_in_ours(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """S-086: what torch's `state_dict()` returns in these processes loads into ours directly, and ours into torch's."""
    mine, theirs = pair(originals, form)
    other = ours(build(originals, seed=1), originals, form)
    other.load_state_dict(theirs.state_dict())
    assert_model(full_state(other), build(originals).state_dict())
    another = fsdp1(build(originals, seed=1), originals, FORMS[form])
    another.load_state_dict(mine.state_dict())
    assert_same(dict(another.state_dict()), dict(theirs.state_dict()))


@on_ranks(2)
def test_differences_are_seen(group: Collectives, files: Files) -> None:
    """What these tests compare with sees a missing key, another form, and one other bit."""
    sharded, full = (ours(build(), form=form).state_dict() for form in ("chunked", "full"))
    other = {**full, "row": full["row"] + torch.tensor([0.0, 0.0, 1e-6])}
    for mine in (other, sharded, {k: v for k, v in full.items() if k != "row"}):
        with pytest.raises(AssertionError):
            assert_same(dict(mine), dict(full))
    with pytest.raises(AssertionError, match="expected the shards"):
        assert_same(dict(ours(build(), form="sharded").state_dict()), dict(sharded))
