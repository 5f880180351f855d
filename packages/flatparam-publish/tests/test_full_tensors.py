"""Full tensors of a sharded model, one bucket at a time, for a function or in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from safetensors.torch import load_file
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, Topology
from flatparam_comm.testing import rectangle, run_processes, run_threads
from flatparam_core import CHUNK
from flatparam_publish import PublishError, dense, publish
from flatparam_publish.catalogue import published_tensors
from flatparam_publish.gathering import full_tensors, most_nbytes
from flatparam_runtime import FlatParamError, UnitPlan, shard_module, summon_full_params

from .beneath import CASES, AllocatedBytes, Case, mlp, shard, shard_case
from .sample import assert_equal, expected

HALF = torch.bfloat16


@pytest.mark.parametrize("bucket", [1, 2**20])
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_once(name: str, bucket: int, use_orig_params: bool) -> None:
    """Whatever the units, dtypes and memory orders, the first rank's sink gets what the whole model has, once."""

    def program(ranks: Collectives) -> Any:
        model = shard_case(CASES[name], ranks, use_orig_params=use_orig_params)
        given: list[tuple[str, Tensor]] = []
        catalogue = publish(model, lambda *pair: given.append(pair), bucket=bucket)
        wanted = expected(model)
        assert [each.name for each in catalogue.tensors] == ([n for n, _ in given] or [*wanted])
        return given, wanted

    for world_size in (1, 3):
        (given, wanted), *others = run_threads(world_size, program)
        assert len(given) == len(wanted)
        assert_equal(dict(given), wanted)
        assert all(not of_other for of_other, _ in others)


@each_row("bucket", [1, 60, 2**20])
def test_chunks_are_put_together(bucket: int) -> None:
    """Of a model whose ranks have chunks of rows, some of them none, every rank gets whole tensors in one piece."""

    def program(ranks: Collectives) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False), nn.Linear(2, 4))
        shard_module(model, UnitPlan(Topology(ranks), use_orig_params=True), rule_of=lambda _: CHUNK)
        given: dict[str, Tensor] = {}
        publish(model, given.__setitem__, bucket=bucket, every_rank=True)
        assert_equal(given, expected(model))

    for world_size in (1, 2, 3, 4):
        run_threads(world_size, program)


def test_names_and_dtype() -> None:
    """Tensors come under the receiver's names and in its dtype; those that are no floating-point numbers stay."""

    def program(ranks: Collectives, names: Any) -> dict[str, Tensor]:
        model = shard_case(CASES["buffers"], ranks)
        given: dict[str, Tensor] = {}
        publish(model, given.__setitem__, names=names, dtype=HALF, every_rank=True)
        wanted = {f"model.{name}" if "layer" in name else name: v for name, v in expected(model, HALF).items()}
        assert_equal(given, wanted)
        return given

    run_threads(2, program, {"layer.weight": "model.layer.weight", "layer.bias": "model.layer.bias"})
    run_threads(2, program, lambda name: f"model.{name}" if "layer" in name else None)


def test_what_cannot_be_published() -> None:
    """Names that collide, a dtype of integers, and a call inside of summoned parameters are refused at once."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks)
        with pytest.raises(ValueError, match=r"'0.weight' and '2.weight' both become 'x.weight'"):
            publish(model, print, names=lambda name: "x.weight" if "weight" in name else None)
        with pytest.raises(ValueError, match="expected a floating-point dtype, found torch.int8"):
            publish(model, print, dtype=torch.int8)
        with summon_full_params(model), pytest.raises(FlatParamError, match="summoned"):
            publish(model, print)
        with pytest.raises(ValueError, match="a path is written by the first rank"):
            publish(model, "somewhere", every_rank=True)

    run_threads(2, program)


def layers() -> nn.Sequential:
    """Layers of very different sizes."""
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 90), nn.Linear(90, 40), nn.Linear(40, 2))


@each_row("bucket", [1, 500, 4000, 10**6])
def test_memory(bucket: int) -> None:
    """At most two buckets that follow each other are in memory, each of half of `bucket` or of one tensor."""

    def program(ranks: Collectives) -> None:
        model = shard_case(Case(layers, ("0", "1", "2", "3")), ranks)
        pairs = published_tensors(model, None, HALF)
        largest = max(published.info.nbytes for _, published in pairs)
        limit = most_nbytes(pairs, bucket)
        # A flat parameter that fits is gathered with its padding.
        assert limit <= 2 * max(bucket // 2, largest) + 2 * ranks.size
        topology = Topology(ranks)
        with AllocatedBytes() as count:
            for name, tensor in full_tensors(pairs, topology, bucket, lambda: True):
                del name, tensor
            assert count.now == 0
        assert count.peak == limit

    run_threads(3, program, deliver_late=False)


def test_one_bucket_is_gathered_while_one_is_used() -> None:
    """Each flat parameter is gathered by one collective, issued before the tensors of the one before it are used."""

    def program(ranks: Collectives) -> list[str]:
        ledger = ByteLedger(keep=True)
        model = shard(layers(), RecordingCollectives(ranks, ledger), ("0", "1", "2", "3"))
        order: list[str] = []

        def sink(name: str, tensor: Tensor) -> None:
            order.append(f"{name} after {len(ledger.transfers)}")

        publish(model, sink)
        assert [each.op for each in ledger.transfers] == ["all_gather"] * 4
        return order

    order, *_ = run_threads(2, program)
    numbers = (2, 3, 4, 4)
    assert order == [f"{layer}.{kind} after {numbers[layer]}" for layer in range(4) for kind in ("weight", "bias")]


@each_row("bucket", [1, 500, 10**6])
def test_bytes_on_the_wire(bucket: int) -> None:
    """In buckets of any size, each flat parameter moves once, in the dtype in which it is published."""

    def program(ranks: Collectives) -> tuple[int, int]:
        ledger = ByteLedger()
        model = shard(layers(), RecordingCollectives(ranks, ledger), ("0", "1", "2", "3"))
        publish(model, lambda name, tensor: None, dtype=HALF, bucket=bucket)
        return ledger.total.payload_nbytes, sum(p.numel() for p in layers().parameters())

    moved, numel = run_threads(2, program)[0]
    assert 2 * numel <= moved <= 2 * (numel + 4)


def test_copies_take_no_part() -> None:
    """Of ranks that hold copies of the shards only the first move anything, unless the others call the sink too."""

    def program(ranks: Collectives, every_rank: bool) -> tuple[int, int]:
        ledger = ByteLedger()
        cut = rectangle(ranks, 2)
        topology = Topology(RecordingCollectives(cut.shard, ledger), cut.replicate)
        model = mlp()
        shard_module(model, UnitPlan(topology, True, True))
        given: dict[str, Tensor] = {}
        publish(model, given.__setitem__, every_rank=every_rank)
        moved = ledger.total.count
        wanted = expected(model)
        if given:
            assert_equal(given, wanted)
        return moved, len(given)

    assert run_threads(4, program, False) == [(1, 6), (1, 0), (0, 0), (0, 0)]
    assert run_threads(4, program, True) == [(1, 6)] * 4


@each_row("rank", [0, 1])
def test_a_sink_that_fails(rank: int) -> None:
    """If a sink raises, every rank raises the same, and the ranks can publish again."""

    def program(ranks: Collectives) -> None:
        model = shard(mlp(), ranks, ("0", "2", "4"))
        calls = []

        def sink(name: str, tensor: Tensor) -> None:
            calls.append(name)
            if ranks.rank == rank and len(calls) == 3:
                raise OSError("the receiver is gone")

        with pytest.raises(PublishError, match=f"rank {rank}: OSError: the receiver is gone"):
            publish(model, sink, every_rank=True)
        assert len(calls) == (3 if ranks.rank == rank else 6)
        publish(model, lambda name, tensor: None)

    run_threads(2, program)


def test_tensors_may_be_kept() -> None:
    """A sink may keep every tensor, whatever the buckets: their memory is not used again."""

    def program(ranks: Collectives) -> None:
        model = shard(layers(), ranks, ("0", "1", "2", "3"))
        given: dict[str, Tensor] = {}
        publish(model, given.__setitem__, bucket=100, every_rank=True)
        assert_equal(given, expected(model))

    run_threads(2, program)


@pytest.mark.parametrize("name", ["buffers", "dtypes", "odd shapes", "tied"])
@pytest.mark.parametrize("largest", [40, 10**9])
def test_files(name: str, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, or a directory with as many files as are needed and an index, has every tensor."""
    whole = dense.divided
    monkeypatch.setattr(dense, "divided", lambda tensors: whole(tensors, largest))

    def program(ranks: Collectives) -> dict[str, Tensor]:
        model = shard_case(CASES[name], ranks)
        publish(model, tmp_path / "model.safetensors", dtype=HALF)
        publish(model, tmp_path / "folder", dtype=HALF)
        return expected(model, HALF)

    wanted = run_threads(2, program)[0]
    assert_equal(load_file(tmp_path / "model.safetensors"), wanted)
    parts = sorted((tmp_path / "folder").glob("*.safetensors"))
    assert (len(parts) > 1) == (largest == 40) == (tmp_path / "folder/model.safetensors.index.json").exists()
    assert_equal({n: value for part in parts for n, value in load_file(part).items()}, wanted)


def test_no_file_is_half(tmp_path: Path) -> None:
    """What exists is not replaced, what fails leaves nothing, and every rank is told."""

    def program(ranks: Collectives) -> Sequence[str]:
        model = shard(mlp(), ranks)
        publish(model, tmp_path / "model.safetensors")
        with pytest.raises(PublishError, match="rank 0: CheckpointError: .* exists already"):
            publish(model, tmp_path / "model.safetensors")
        with pytest.raises(PublishError, match="expected a directory, found none"):
            publish(model, tmp_path / "nowhere" / "model.safetensors")
        return [path.name for path in tmp_path.iterdir()]

    assert run_threads(2, program)[0] == ["model.safetensors"]


def test_a_model_that_is_not_sharded() -> None:
    """It is published as it is."""
    model, given = mlp(), {}
    publish(model, given.__setitem__)
    assert_equal(given, dict(model.named_parameters()))


def publish_where_one_raises(ranks: Collectives) -> str:
    """The error of `publish` if `names` raises on rank 1 alone."""
    model = shard(mlp(), ranks)

    def names(name: str) -> str:
        if ranks.rank == 1:
            raise KeyError(f"{name} is not known here")
        return name

    with pytest.raises((KeyError, RuntimeError)) as caught:
        publish(model, lambda name, tensor: None, names=names)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.processes
def test_a_function_that_raises_on_one_rank() -> None:
    """If `names` raises on one rank, the others, which wait for it, raise within seconds and say what it was."""
    first, second = run_processes(2, publish_where_one_raises)
    assert second.startswith("KeyError")
    assert "rank 1 failed first in publish()" in first
    assert "KeyError" in first
