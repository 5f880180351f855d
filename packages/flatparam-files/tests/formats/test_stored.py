"""Ranges of elements as boxes, and strided tensors read through them."""

import math
from pathlib import Path

import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st

from flatparam_core import Span
from flatparam_files.disk.source import Box, TensorInfo, row_major_boxes
from flatparam_files.disk.system import bytes_of
from flatparam_files.formats.stored_tensors import Storage, StridedTensor
from flatparam_files.formats.torch_archive import open_archive

from .samples import awkward, same

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_boxes_are_the_span_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The elements of the boxes, one box after the other, are those of the span, and there are few boxes."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    found = []
    for box in row_major_boxes(shape, Span(start, stop)):
        inside = numbers[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        assert inside.numel() == box.numel
        found += inside.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(row_major_boxes(shape, Span(start, stop)))) <= max(1, 2 * len(shape))


def test_boxes_of_nothing() -> None:
    """An empty span has no boxes, also in a tensor without elements."""
    assert list(row_major_boxes((0, 3), Span(0, 0))) == []
    assert list(row_major_boxes((2, 3), Span(2, 2))) == []


@each_row("name", awkward())
def test_every_range_of_a_stored_tensor(name: str, tmp_path: Path) -> None:
    """Any range of any stored tensor is what torch's own flattening has there."""
    tensor = awkward()[name]
    torch.save({name: tensor}, tmp_path / "t.pt")
    stored = open_archive(tmp_path / "t.pt").root[name]
    flat, numel = tensor.detach().reshape(-1), tensor.numel()
    for start in range(0, numel + 1, max(1, numel // 5)):
        for stop in range(start, numel + 1, max(1, numel // 3)):
            found = torch.cat([flat[:0], *stored.read(Span(start, stop))])
            assert same(found, flat[start:stop])


def test_scattered_elements_take_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of a large matrix is not read by reading the matrix: a read fetches at most twice what is needed."""
    matrix = torch.randn(4096, 4096)
    torch.save({"column": matrix[:, 7], "t": matrix[:, :64].t()}, tmp_path / "t.pt")
    root = open_archive(tmp_path / "t.pt").root
    sizes: list[int] = []
    read = monkeypatch.context
    with read() as patched:
        from flatparam_files.disk.system import ByteFile

        original = ByteFile.read

        def recorded(file: ByteFile, offset: int, nbytes: int) -> bytearray:
            sizes.append(nbytes)
            return original(file, offset, nbytes)

        for stored in root.values():
            stored.storage.sound.add(stored.storage.start)  # the checksum needs all bytes
        patched.setattr(ByteFile, "read", recorded)
        assert same(torch.cat(list(root["column"].read(Span(0, 4096)))), matrix[:, 7])
        assert max(sizes) <= 1 << 16
        assert same(torch.cat(list(root["t"].read(Span(0, 64 * 4096)))), matrix[:, :64].t().reshape(-1))
        assert max(sizes) <= 1 << 21


@each_row(
    ("shape", "offset", "strides"),
    [
        ((4,), 0, (2,)),
        ((4,), 5, (1,)),
        ((-1,), 0, (1,)),
        ((2,), -1, (1,)),
        ((2,), 0, (-1,)),
        ((2, 2), 0, (1,)),
    ],
)
def test_a_tensor_must_lie_in_its_storage(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> None:
    """Strides and offsets that reach out of the storage are refused before anything is read."""
    storage = Storage(Path("nowhere"), 0, 24)
    with pytest.raises(ValueError, match=r"ends at byte|do not fit|negative"):
        StridedTensor(TensorInfo(shape, torch.float32), storage, offset, strides)


def test_overlaps_of_boxes() -> None:
    """The overlap of boxes is their common elements, and has none where they do not meet."""
    assert Box((0, 2), (4, 4)).overlap(Box((1, 0), (9, 3))) == Box((1, 2), (3, 1))
    assert Box((0,), (2,)).overlap(Box((5,), (2,))).numel == 0


def test_the_memory_of_a_tensor() -> None:
    """`bytes_of` is the memory itself, and keeps it; a tensor that has no such memory is refused."""
    tensor = torch.arange(4, dtype=torch.uint8)
    view = bytes_of(tensor)
    tensor[1] = 9
    del tensor
    assert view.tobytes() == bytes([0, 9, 2, 3])
    assert len(bytes_of(torch.empty(0, dtype=torch.uint8))) == 0
    for wrong in (
        torch.ones(2),
        torch.arange(4, dtype=torch.uint8)[::2],
        torch.empty(2, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(TypeError, match="expected contiguous uint8 on the CPU"):
            bytes_of(wrong)
