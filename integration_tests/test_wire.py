"""The wire, as users ask for it: by unit, by both doors, on every transport, with layouts, offload and checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sums
import torch
from torch import nn

from flatparam import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard, layout
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_checkpoint import Checkpointer
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, Topology, run_threads
from flatparam_comm.testing import run_processes
from flatparam_comm.transfer.reduction import PART_NBYTES
from flatparam_onehost import shared_memory
from flatparam_runtime import summon_full_params
from flatparam_sums import Wire, load_residuals, save_residuals

BLOCKS = ModuleWrapPolicy({sums.Block})
EVERYTHING = Wire(reduce="int8", gather="bf16")


def step(model: Any, number: int, rank: int) -> None:
    torch.autograd.backward(sums.loss(model, number, rank)[0])


def trained(ranks: Collectives, transport: str, wire: Any) -> str:
    """Train for some steps; returns the hash of the parameters."""
    where: Any = ranks if transport == "threads" else None if transport == "gloo" else transport
    model = FSDP(sums.build(), where, auto_wrap_policy=BLOCKS, wire=wire, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(5):
        with model.accumulate(weight=3 + ranks.rank):
            step(model, number, ranks.rank)
        model.reduce_gradients()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return sums.digest_of(model.state_dict())


@pytest.mark.parametrize(
    "wire",
    [EVERYTHING, Wire(reduce="mxfp8", gather="mxfp8"), Wire(reduce="bf16", gather="int8")],
    ids=["int8 and bf16", "mxfp8", "bf16 and int8"],
)
def test_equal_bits_on_every_transport(wire: Wire) -> None:
    """Threads, gloo and shared memory have one hash, and it is another one than that of the default."""
    found = {*run_threads(2, trained, "threads", wire)}
    for transport in ("gloo", "shared_memory"):
        found |= {*run_processes(2, trained, transport, wire)}
    assert len(found) == 1
    assert found != {*run_threads(2, trained, "threads", "default")}


def summed_over_copies(ranks: Collectives, transport: str, wire: Wire) -> str:
    """Return the hash of two passes' gradients over two groups of two ranks, which take them where autograd left them."""
    topology = Topology.cut(ranks, [[0, 1], [2, 3]])
    if transport == "shared memory":
        topology = Topology(shared_memory(topology.shard), topology.replicate)
    with PART_NBYTES.set_to(0):
        model = FSDP(sums.build(), topology, use_orig_params=True, wire=wire)
        for number in range(2):
            step(model, number, ranks.rank)
    found = {str(number): each.grad for number, each in enumerate(model.parameters())}
    return sums.digest_of(found)


@pytest.mark.parametrize("wire", [Wire(across="int8"), Wire(reduce="bf16")], ids=["across", "both"])
def test_copies_of_gradients_that_are_not_copied(wire: Wire) -> None:
    """Through shared memory the sum over copies has its format, too, if gradients travel without a flat buffer."""
    threads = run_threads(4, summed_over_copies, "threads", wire)
    assert run_processes(4, summed_over_copies, "shared memory", wire) == threads


def test_by_unit() -> None:
    """A policy gives single units a wire, by both doors; the others send what they have."""

    def rank(ranks: Collectives, door: str) -> tuple[int, int]:
        ledger = ByteLedger()
        group = RecordingCollectives(ranks, ledger)
        model: Any = sums.build()
        if door == "policy":
            first = model[1]
            policy = CustomPolicy(
                lambda module: {"wire": EVERYTHING} if module is first else isinstance(module, sums.Block)
            )
            model = FSDP(model, group, auto_wrap_policy=policy)
        else:
            fully_shard(model[1], mesh=group, wire=EVERYTHING)
            fully_shard(model[2], mesh=group)
            fully_shard(model, mesh=group)
        step(model, 0, ranks.rank)
        sent = {name: each.sent_nbytes for name, each in ledger.by_label().items()}
        narrow, wide = (next(v for k, v in sent.items() if k.endswith(at)) for at in ("1", "2"))
        return narrow, wide

    for door in ("policy", "fully_shard"):
        for narrow, wide in run_threads(2, rank, door):
            assert 0 < narrow < 0.6 * wide


def test_fp32_asks_for_wide_reductions() -> None:
    """With a model in bf16, `wire="fp32"` is `reduce_dtype=torch.float32`, to the bit."""

    def rank(ranks: Collectives, **arguments: Any) -> list[bytes]:
        model = FSDP(sums.build(), ranks, **arguments)
        step(model, 0, ranks.rank)
        return [each.grad.numpy().tobytes() for each in model.parameters() if each.grad is not None]

    narrow = MixedPrecision(param_dtype=torch.bfloat16)
    wide = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    by_wire = run_threads(2, partial(rank, mixed_precision=narrow, wire="fp32"))
    assert by_wire == run_threads(2, partial(rank, mixed_precision=wide))
    assert by_wire != run_threads(2, partial(rank, mixed_precision=narrow))


KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "offload": {"cpu_offload": CPUOffload(True)},
    "shares": {"layout": layout.by({}, shares=(3, 1))},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", [EVERYTHING, Wire(reduce="mxfp8", gather="mxfp8")], ids=["int8", "mxfp8"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_it_learns_as_without(kind: str, wire: Wire, use_orig_params: bool) -> None:
    """After twenty steps the loss is within a tenth of that without a wire, whatever else is asked."""

    def rank(ranks: Collectives, wire: Any) -> float:
        arguments = dict(KINDS[kind])
        if kind == "hybrid":
            arguments["process_group"] = Topology.cut(ranks, [[0, 1], [2, 3]])
        else:
            arguments["process_group"] = ranks
        model = FSDP(sums.build(), auto_wrap_policy=BLOCKS, wire=wire, use_orig_params=use_orig_params, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(20):
            with model.no_sync():
                step(model, 0, ranks.rank)
            step(model, 1, ranks.rank)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return float(sums.loss(model, 0, 0)[0])

    size = 4 if kind == "hybrid" else 2
    plain, narrow = run_threads(size, rank, "default"), run_threads(size, rank, wire)
    assert len({*narrow}) == 1
    assert abs(narrow[0] - plain[0]) <= 0.1 * plain[0]


@pytest.mark.parametrize("door", ["flat", "originals", "fully_shard"])
def test_what_was_lost_is_in_the_checkpoint(door: str, tmp_path: Path) -> None:
    """Two ranks save, three go on, then one: the sum of forty steps is off by what rounding loses in a few."""
    pull = torch.tensor([1.0, 0.0031, -0.0047, 0.5, 0.0]).repeat(7)

    def run(ranks: Collectives, steps: int, feeds: bool) -> torch.Tensor:
        model: Any = nn.Linear(len(pull), 1, bias=False)
        nn.init.zeros_(model.weight)
        wire = Wire(reduce="int8")
        if door == "fully_shard":
            fully_shard(model, mesh=ranks, wire=wire)
        else:
            model = FSDP(model, ranks, wire=wire, use_orig_params=door == "originals")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-12)
        with Checkpointer(tmp_path / str(feeds), model, optimizer) as checkpointer:
            loaded = checkpointer.load()
            if feeds:
                load_residuals(model, optimizer)
            for _ in range(steps):
                model(pull).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if feeds:
                save_residuals(model, optimizer)
            checkpointer.save(steps + (0 if loaded is None else loaded.step))
        with summon_full_params(model):
            return model.weight.detach().flatten().clone()

    errors = {}
    for feeds in (True, False):
        for size in (2, 3, 2, 1, 3, 2, 3, 2, 3, 2):
            found = run_threads(size, run, 4, feeds)[0]
        error = (found.double() + 40 * pull.double()).abs()
        errors[feeds] = float(error[pull.abs() < 0.01].max())
    # One step's rounding, of at most twice the gradient.
    assert errors[True] <= 2 / 254
    assert errors[False] > 4 * errors[True]


def test_an_unknown_wire() -> None:
    """Both doors refuse what is no wire, and say what is one."""

    def rank(ranks: Collectives) -> None:
        for make in (
            lambda: FSDP(sums.build(), ranks, wire="int4"),
            lambda: fully_shard(sums.build(), mesh=ranks, wire="int4"),
        ):
            with pytest.raises(ValueError, match="expected wire to be 'default', 'bf16', 'fp32' or a"):
                make()

    run_threads(2, rank)
