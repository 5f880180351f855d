"""Tensors in files that are joined and cut before they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatparam_checkpoint import PretrainedFiles, UnreadTensor
from flatparam_files import TensorInfo
from flatparam_files.formats.stored_tensors import Storage, Stored
from flatparam_runtime import Span


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[PretrainedFiles, dict[str, Tensor]]:
    """Twelve matrices in a file of torch's, two of them transposed in memory, and what they are."""
    path = tmp_path_factory.mktemp("files") / "pytorch_model.bin"
    state = {f"experts.{k}": torch.arange(24.0).view(4, 6) + 100 * k for k in range(12)}
    state["experts.3"] = state["experts.3"].t().contiguous().t()
    state["experts.7"] = torch.arange(48.0).view(8, 6)[::2]
    torch.save(state, path)
    return PretrainedFiles.open(path), state


def read(tensor: UnreadTensor, start: int, stop: int) -> Tensor:
    """Some elements of it."""
    found = list(tensor.stored.read(Span(start, stop)))
    return torch.cat(found) if found else torch.empty(0)


@st.composite
def programs(draw: Any) -> Any:
    """A function of a list of matrices, made of torch's functions, to one tensor of two or three dimensions."""
    count = draw(st.integers(1, 4))
    first = draw(st.lists(st.integers(0, 11), min_size=count, max_size=count))
    how, dim = draw(st.sampled_from(["stack", "cat"])), draw(st.integers(-2, 1))
    cut, cut_dim, part = (
        draw(st.sampled_from(["chunk", "split", "none"])),
        draw(st.integers(0, 1)),
        draw(st.integers(0, 1)),
    )
    twice = draw(st.booleans())

    def run(matrices: list[Any]) -> Any:
        each = [matrices[k] for k in first]
        if cut == "chunk":
            each = [torch.chunk(matrix, 2, dim=cut_dim)[part] for matrix in each]
        if cut == "split":
            rest = matrices[0].shape[cut_dim] - 1
            each = [torch.split(matrix, [1, rest], dim=cut_dim)[part].contiguous() for matrix in each]
        joined = torch.stack(each, dim=dim) if how == "stack" else torch.cat(each, dim=dim)
        return torch.cat([joined, joined], dim=1) if twice else joined

    return run


@given(program=programs(), start=st.floats(0, 1), stop=st.floats(0, 1))
def test_what_is_read_is_what_torch_makes(
    files: tuple[PretrainedFiles, dict[str, Tensor]], program: Any, start: float, stop: float
) -> None:
    """Any elements of what is joined and cut before it is read are those of what is read first."""
    opened, state = files
    made = program([opened.unread(f"experts.{k}") for k in range(12)])
    expected = program([state[f"experts.{k}"] for k in range(12)])
    assert (made.shape, made.size(), made.size(0), made.dtype) == (
        expected.shape,
        expected.size(),
        expected.size(0),
        expected.dtype,
    )
    first, last = sorted((round(start * expected.numel()), round(stop * expected.numel())))
    assert torch.equal(read(made, first, last), expected.reshape(-1)[first:last])


@attrs.frozen
class Noted(Stored):
    """A tensor in memory, which notes what is read of it."""

    tensor: Tensor
    spans: list[Span] = attrs.field(factory=list, eq=False)

    def read(self, span: Span) -> Iterator[Tensor]:
        """See `Stored.read`."""
        self.spans.append(span)
        yield self.tensor.reshape(-1)[span.as_slice()]

    def storages(self) -> Iterator[Storage]:
        """None."""
        return iter(())


def test_only_what_is_needed_is_read() -> None:
    """A part of experts that are stacked, and joined in rows, is read from those that have it, and nothing else of them."""
    tensors = [torch.randn(8, 16) for _ in range(8)]
    noted = [Noted(TensorInfo((8, 16), torch.float32), tensor) for tensor in tensors]

    def joined(each: list[Any]) -> Any:
        return torch.cat([torch.stack(each[:4]), torch.stack(each[4:])], dim=1)

    one = 8 * 16
    found = read(joined([UnreadTensor(each) for each in noted]), 2 * one - 20, 3 * one + 50)
    assert torch.equal(found, joined(tensors).reshape(-1)[2 * one - 20 : 3 * one + 50])
    # The end of the first of the second half, all of the second of the first, and the beginning of its other half.
    by_tensor = {number: sum(span.numel for span in each.spans) for number, each in enumerate(noted) if each.spans}
    assert by_tensor == {4: 20, 1: one, 5: 50}


def test_what_is_not_joined(files: tuple[PretrainedFiles, dict[str, Tensor]], tmp_path: Path) -> None:
    """Different shapes or dtypes, wrong dimensions, other functions and tensors that cannot be cut are refused."""
    opened, _ = files
    one, other = opened.unread("experts.0"), opened.unread("experts.1")
    half = torch.chunk(one, 2)[0]  # type: ignore[arg-type]
    for refused, error, text in (
        (lambda: torch.stack([one, half]), ValueError, "one shape"),
        (lambda: torch.cat([half, one], dim=1), ValueError, "differ in dimension 1 only"),
        (lambda: torch.cat([one, other], dim=2), ValueError, "a dimension of 2, found 2"),
        (lambda: torch.split(one, [1, 1]), ValueError, "4 together"),
        (lambda: torch.chunk(one, 2, dim=2), ValueError, "a dimension of 2, found 2"),
        (lambda: torch.add(one, other), TypeError, "add"),
        (lambda: torch.chunk(torch.stack([one, other]), 2), TypeError, "not cut before it is read"),
    ):
        with pytest.raises(error, match=text):
            refused()
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, tmp_path / "b.bin")
    mixed = PretrainedFiles.open(tmp_path / "b.bin")
    with pytest.raises(ValueError, match=r"one dtype, found torch.float32, torch.float64"):
        torch.cat([mixed.unread("a"), mixed.unread("b")])  # type: ignore[list-item]
