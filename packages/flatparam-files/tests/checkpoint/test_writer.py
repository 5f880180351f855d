"""One process writes a checkpoint of any number of files, and reads it back piece by piece."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from each_row import each_row

from flatparam_core import Span
from flatparam_files.checkpoint.reader import open_checkpoint
from flatparam_files.checkpoint.soundness import verify_checkpoint
from flatparam_files.checkpoint.writer import CheckpointWriter
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.safetensors import DTYPES
from flatparam_files.disk.source import CHUNK_NBYTES, Source, TensorInfo
from flatparam_files.disk.system import bytes_view

from .examples import example

TENSORS = {
    **{f"model/{str(dtype)[6:]}": example(dtype, 3, 4) for dtype in (*DTYPES, torch.complex128, torch.complex32)},
    "model/empty": torch.empty(0, 3),
    "model/scalar": torch.tensor(2.5),
    "optimizer/state/scalar/exp_avg": torch.tensor(0.5),
    "extra/data/order": torch.randperm(10),
    "extra/list/1": torch.ones(2),
}
VALUES = {"optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["scalar"]}]}, "extra": {"n": 1, "data": {}, "list": [0, None]}}  # fmt: skip


def write(root: Path, tensors: dict[str, torch.Tensor] = TENSORS, *, world_size: int = 1, step: int = 0) -> Path:
    """Write `tensors` and `VALUES`."""
    infos = {path: TensorInfo(tensor.shape, tensor.dtype) for path, tensor in tensors.items()}
    with CheckpointWriter(root, infos, VALUES, world_size=world_size, step=step, aliases={"model/tied": "model/scalar"} if "model/scalar" in tensors else {}) as writer:  # fmt: skip
        for path, tensor in tensors.items():
            writer.write(path, iter([tensor.reshape(-1)[:5], tensor.reshape(-1)[5:]]))
        return writer.commit()


@each_row("world_size", [1, 2, 5])
def test_what_was_written_is_read(tmp_path: Path, world_size: int) -> None:
    """Tensors of every dtype bit for bit, values, aliases and facts; the root and the checkpoint itself can be opened."""
    path = write(tmp_path, world_size=world_size, step=7)
    assert path == tmp_path / "step-00000007"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(world_size))]  # fmt: skip
    for where in (path, tmp_path):
        with open_checkpoint(where) as reader:
            assert isinstance(reader, Source)
            assert reader.format == "flatparam"
            assert reader.tensors == {at: TensorInfo(tensor.shape, tensor.dtype) for at, tensor in TENSORS.items()}
            assert reader.values == VALUES
            assert (reader.facts["step"], reader.facts["world_size"]) == (7, world_size)
            assert reader.facts["aliases"] == {"model/tied": "model/scalar"}
            for at, tensor in TENSORS.items():
                assert torch.equal(bytes_view(reader.load(at)), bytes_view(tensor)), at
            assert reader.load("model/tied") == 2.5
            extra = reader.decode(reader.manifest.values["extra"])
            assert torch.equal(extra["data"]["order"], TENSORS["extra/data/order"])
            assert torch.equal(extra["list"][1], torch.ones(2))
    assert verify_checkpoint(tmp_path).is_sound


def test_safetensors_opens_the_files(tmp_path: Path) -> None:
    """The real library finds the same numbers in each rank's file."""
    tensors = {at: tensor for at, tensor in TENSORS.items() if tensor.dtype in DTYPES}
    path = write(tmp_path, tensors, world_size=2)
    files = [safetensors.torch.load_file(path / f"rank-0000{rank}.safetensors") for rank in range(2)]
    for at, tensor in tensors.items():
        numel = tensor.numel()
        halves = [files[rank].get(f"{at}[{numel * rank // 2}:{numel * (rank + 1) // 2}]") for rank in range(2)]
        found = torch.cat([half for half in halves if half is not None] or [tensor.reshape(-1)])
        assert torch.equal(bytes_view(found), bytes_view(tensor)), at


def test_spans_of_large_tensors_are_read_in_chunks(tmp_path: Path) -> None:
    """Any span, over block, chunk and file boundaries; nothing larger than a chunk is yielded."""
    big = torch.arange(5 * 2**20 + 3, dtype=torch.int32)
    write(tmp_path, {"model/big": big}, world_size=2)
    generator = torch.Generator().manual_seed(0)
    with open_checkpoint(tmp_path) as reader:
        for _ in range(20):
            start, stop = sorted(torch.randint(0, big.numel() + 1, (2,), generator=generator).tolist())
            chunks = list(reader.read("model/big", Span(start, stop)))
            assert all(chunk.nbytes <= CHUNK_NBYTES for chunk in chunks)
            assert torch.equal(torch.cat([*chunks, big[:0]]), big[start:stop])


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    """No checkpoint, no temporary directory, no lock."""
    with CheckpointWriter(tmp_path, {"model/a": TensorInfo((3,), torch.float32)}, {}) as writer:
        writer.write("model/a", [torch.ones(3)])
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert write(tmp_path).is_dir()


def test_announcements_are_binding(tmp_path: Path) -> None:
    """Another path, too many and too few elements, a different dtype, a missing tensor: refused."""

    def writer() -> CheckpointWriter:
        return CheckpointWriter(tmp_path, {"model/a": TensorInfo((3,), torch.float32)}, {})

    with writer() as it, pytest.raises(ValueError, match="expected tensor 'model/a', found 'model/b'"):
        it.write("model/b", [])
    with writer() as it, pytest.raises(ValueError, match="expected 3 elements, found more"):
        it.write("model/a", [torch.ones(2), torch.ones(2)])
    with writer() as it, pytest.raises(ValueError, match="expected 3 elements, found 2"):
        it.write("model/a", [torch.ones(2)])
    with writer() as it, pytest.raises(ValueError, match=r"expected torch.float32, found torch.float64"):
        it.write("model/a", [torch.ones(3, dtype=torch.float64)])
    with writer() as it, pytest.raises(ValueError, match="1 announced tensors were not written"):
        it.commit()


def test_a_step_is_written_once(tmp_path: Path) -> None:
    """What is committed stays; the error says what to do."""
    write(tmp_path, step=3)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 exists already.*a different directory"):
        write(tmp_path, step=3)
    assert verify_checkpoint(tmp_path).is_sound


def test_nothing_there(tmp_path: Path) -> None:
    """An empty directory, and one that is not there, are said to hold no checkpoint."""
    for path in (tmp_path, tmp_path / "no"):
        with pytest.raises(CheckpointError, match="expected a checkpoint here, found none"):
            open_checkpoint(path)
