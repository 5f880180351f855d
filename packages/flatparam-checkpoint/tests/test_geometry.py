"""What each rank writes and reads, byte for byte, and states that are not cut like their parameters."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads
from flatparam_core import Span
from flatparam_files import CheckpointError, open_checkpoint, open_source, write_checkpoint
from flatparam_files.checkpoint.manifest import BLOCK_NBYTES, Manifest
from flatparam_state import model_state_dict
from flatparam_state.model_tensors import model_tensors

from .beneath import Case, Setup, assert_equal_state
from .runs import resumed, saved
from .small import ALONE


def wide() -> nn.Sequential:
    """Weights of several blocks, which no world size divides."""
    return nn.Sequential(nn.Linear(2047, 1025))


WIDE = Case(wide, ("0",))


def blocks_nbytes(manifest: Manifest, path: str, span: Span) -> int:
    """The bytes of the blocks that cover `span`."""
    record = manifest.tensors[path]
    size, total = record.info.dtype.itemsize, 0
    for piece in record.pieces:
        wanted = piece.span.overlap(span)
        if wanted:
            start = (wanted.start - piece.span.start) * size // BLOCK_NBYTES * BLOCK_NBYTES
            stop = -(-(wanted.stop - piece.span.start) * size // BLOCK_NBYTES) * BLOCK_NBYTES
            total += min(stop, piece.span.numel * size) - start
    return total


def test_a_rank_reads_what_it_needs(tmp_path: Path) -> None:
    """From 2 ranks to 3: the bytes read are those of the blocks that cover the rank's fragments, and a header a file."""
    saved(Setup(2, WIDE), tmp_path)

    def rank(world: Collectives) -> tuple[int, int, int]:
        model, optimizer = Setup(3, WIDE).build(world)
        loaded = Checkpointer(tmp_path, model, optimizer, ranks=world).load()
        assert loaded is not None
        manifest = open_checkpoint(tmp_path).manifest
        expected, files = 0, set()
        for tensor in model_tensors(model):
            states = [f"optimizer/state/{tensor.name}/{name}" for name in ("exp_avg", "exp_avg_sq")]
            for path in (f"model/{tensor.name}", *states):
                expected += blocks_nbytes(manifest, path, tensor.span)
                files |= {p.file for p in manifest.tensors[path].pieces if p.span.overlap(tensor.span)}
        expected += sum(manifest.files[file].header_nbytes for file in files)
        return loaded.nbytes_read, expected, sum(file.nbytes for file in manifest.files)

    for found, expected, total in run_threads(3, rank):
        assert found == expected
        assert found < total * 0.6


def test_every_byte_is_written_once(tmp_path: Path) -> None:
    """HYBRID_SHARD and NO_SHARD: replicas share the writing, evenly, and the files hold each element once."""
    for shards in (2, 1, 4):
        root = tmp_path / str(shards)
        saved(Setup(4, WIDE, shards=shards), root)
        manifest = open_checkpoint(root).manifest
        sizes = [file.nbytes - file.header_nbytes for file in manifest.files]
        assert sum(sizes) == sum(record.info.nbytes for record in manifest.tensors.values() if record.pieces)
        assert max(sizes) - min(sizes) < sum(sizes) / 50


def test_other_memory_orders(tmp_path: Path) -> None:
    """A channels_last weight goes to a row-major one and back, whole or in shards."""

    def conv(order: torch.memory_format) -> Any:
        return lambda: nn.Sequential(nn.Conv2d(3, 5, 3)).to(memory_format=order)

    cases = [Case(conv(order)) for order in (torch.channels_last, torch.contiguous_format)]
    for number, (before, after) in enumerate([cases, cases[::-1]]):
        root = tmp_path / str(number)
        expected = saved(Setup(2, before), root)[0]
        for now, _, _ in resumed(Setup(3, after), root):
            assert_equal_state(now, expected[0])
        with open_checkpoint(root) as reader:
            weight = expected[0][0]["0.weight"]
            assert torch.equal(reader.load("model/0.weight"), weight)
            part = torch.cat(list(reader.read("model/0.weight", Span(7, 100))))
            assert torch.equal(part, weight.reshape(-1)[7:100])


class Blockwise(torch.optim.Optimizer):
    """Keeps a state of the parameter's shape, and one number for each four of its elements, as 8-bit optimizers do."""

    def __init__(self, parameters: Iterable[Any], scale: int = 400) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    flat = parameter.detach().reshape(-1)
                    self.state[parameter] = {
                        "code": parameter.detach().to(torch.int8),
                        "absmax": torch.cat([block.abs().amax(0, keepdim=True) for block in flat.split(4)] * self.scale)
                        if flat.numel()
                        else torch.zeros(0),
                    }


@each_row("scale", [1, 400], ids=["in the manifest", "in a file"])
@each_row("use_orig_params", [False, True])
def test_states_that_cannot_be_cut_anew(use_orig_params: bool, scale: int, tmp_path: Path) -> None:
    """They come back to a rank with the same part of the parameter; another part is refused, with what to do."""
    setup = Setup(2, use_orig_params=use_orig_params, make=lambda p: Blockwise(p, scale))

    def save(world: Collectives) -> Any:
        model, optimizer = setup.build(world)
        setup.train(model, optimizer, range(1))
        with Checkpointer(tmp_path, model, optimizer, ranks=world) as checkpointer:
            checkpointer.save(1)
        return [dict(optimizer.state[parameter]) for parameter in model.parameters()]

    def load(world: Collectives) -> Any:
        model, optimizer = setup.build(world, seed=8)
        Checkpointer(tmp_path, model, optimizer, ranks=world).load()
        return [optimizer.state[parameter] for parameter in model.parameters()]

    expected = run_threads(2, save)
    for mine, theirs in zip(run_threads(2, load), expected, strict=True):
        for now, before in zip(mine, theirs, strict=True):
            if not before:  # nothing of the parameter is here
                continue
            assert torch.equal(now["absmax"], before["absmax"])
            assert torch.equal(now["code"], before["code"])
            assert now["code"].dtype == torch.int8
    assert open_checkpoint(tmp_path).facts["per_rank"]

    def elsewhere(world: Collectives) -> None:
        model, optimizer = setup.build(world, seed=8)
        with pytest.raises(
            CheckpointError,
            match=r"'absmax' of '.*' belongs to the parts.*elements \[0, .*as many ranks and the same wrapping",
        ):
            Checkpointer(tmp_path, model, optimizer, ranks=world).load()

    run_threads(3, elsewhere)


def test_several_optimizers(tmp_path: Path) -> None:
    """By name, each with its own parameters and groups; without names, or under another, the error says which there are."""
    setup = Setup(2, use_orig_params=True)

    def build(world: Collectives, seed: int) -> Any:
        model, _ = setup.build(world, seed)
        parameters = list(model.parameters())
        optimizers = {
            "matrices": torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.9),
            "biases": torch.optim.AdamW(parameters[1::2], lr=torch.tensor(0.2), betas=(0.8, 0.9)),
        }
        return model, optimizers

    def run(world: Collectives) -> None:
        model, optimizers = build(world, 7)
        for optimizer in optimizers.values():
            setup.train(model, optimizer, range(2))
        with Checkpointer(tmp_path, model, optimizers, ranks=world) as checkpointer:
            checkpointer.save(1)
        other, others = build(world, 8)
        others["biases"].param_groups[0]["lr"] = torch.tensor(0.3)
        Checkpointer(tmp_path, other, others, ranks=world).load()
        for name, optimizer in optimizers.items():
            mine, theirs = others[name].state_dict(), optimizer.state_dict()
            assert mine["param_groups"] == theirs["param_groups"]
            for number, values in theirs["state"].items():
                for key, value in values.items():
                    assert torch.equal(mine["state"][number][key], value)
        for key, value in model_state_dict(model).items():
            assert torch.equal(model_state_dict(other)[key], value)
        with pytest.raises(CheckpointError, match=r"no state of an optimizer at 'optimizer'.*\['biases', 'matrices'\]"):
            Checkpointer(tmp_path, other, others["biases"], ranks=world).load()
        with pytest.raises(CheckpointError, match="no state of an optimizer at 'optimizer/other'"):
            Checkpointer(tmp_path, other, {"other": others["biases"]}, ranks=world).load()

    run_threads(2, run)
    # A tensor among the settings is found again in what a command made of the checkpoint.
    write_checkpoint(open_source(tmp_path), tmp_path / "resharded", world_size=3)

    def after(world: Collectives) -> None:
        model, optimizers = build(world, 9)
        optimizers["biases"].param_groups[0]["lr"] = torch.tensor(0.3)
        Checkpointer(tmp_path / "resharded", model, optimizers, ranks=world).load()
        assert [each.param_groups[0]["lr"] for each in optimizers.values()] == [0.1, torch.tensor(0.2)]

    run_threads(2, after)


def test_low_precision_parameters_keep_the_precision_of_their_states(tmp_path: Path) -> None:
    """States in fp32 of parameters in bf16, which torch's own load_state_dict would round."""
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"master": torch.randn(parameter.shape)}
    expected = [optimizer.state[parameter]["master"] for parameter in model.parameters()]
    with Checkpointer(tmp_path, model, optimizer, ranks=ALONE) as checkpointer:
        checkpointer.save(0)
        optimizer.state.clear()
        checkpointer.load()
    for parameter, master in zip(model.parameters(), expected, strict=True):
        assert torch.equal(optimizer.state[parameter]["master"], master)


def test_retention_keeps_the_newest_and_never_deletes_latest(tmp_path: Path) -> None:
    """Also where the run went back to an old step: what was saved last stays, whatever its number."""
    with Checkpointer(tmp_path, ranks=ALONE, keep=2) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step)
        assert checkpointer.steps() == [20, 30]
        checkpointer.load(20)
        checkpointer.save(21)
        assert checkpointer.steps() == [21, 30]
        assert checkpointer.latest() == 21
        checkpointer.save(22)
        assert checkpointer.steps() == [21, 22]


class Pair(nn.Module):
    """Two layers, which may share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight


@each_row("same", [True, False])
def test_two_tensors_for_a_tied_parameter(tmp_path: Path, same: bool) -> None:
    """A model that ties what was saved apart takes equal values; if they differ, it refuses them, or takes the first."""
    saved, tied = Pair(tied=False), Pair(tied=True)
    if same:
        with torch.no_grad():
            saved.second.weight.copy_(saved.first.weight)
    with Checkpointer(tmp_path, saved, ranks=ALONE) as checkpointer:
        checkpointer.save(0)
    before = tied.first.weight.detach().clone()
    with Checkpointer(tmp_path, tied, ranks=ALONE) as checkpointer:
        if not same:
            with pytest.raises(CheckpointError, match=r"different values for 'first\.weight' and 'second\.weight'"):
                checkpointer.load()
            assert torch.equal(tied.first.weight, before)
        checkpointer.load(strict=same)
    assert torch.equal(tied.first.weight, saved.first.weight)
    assert tied.second.weight is tied.first.weight
