"""ParamSpec: names, shapes, memory orders and dtypes, and what is refused."""

import math

import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatparam_core import LayoutError, ParamSpec, memory_view

from .strategies import param_specs, tensor_for


@given(param_specs())
def test_counts_elements_and_bytes(spec: ParamSpec) -> None:
    """numel and nbytes are those of a tensor of the shape and dtype; a 0-d parameter has one element."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    assert spec.numel == tensor.numel()
    assert spec.nbytes == tensor.numel() * tensor.element_size()


@given(param_specs(smallest=1))
def test_keeps_dense_strides(spec: ParamSpec) -> None:
    """Whatever the order of its dimensions, a dense tensor keeps its strides."""
    tensor = tensor_for(spec)
    assert ParamSpec.of("p", tensor).stride == tuple(tensor.stride())


@given(param_specs(smallest=1))
def test_memory_view_is_a_view_in_memory_order(spec: ParamSpec) -> None:
    """A dense tensor is seen through memory_view without a copy, element after element as it lies in memory."""
    tensor = tensor_for(spec)
    flat = memory_view(tensor, spec)
    assert flat.tolist() == list(range(1, spec.numel + 1))
    assert flat.data_ptr() == tensor.data_ptr()


@given(param_specs(smallest=1), st.data())
def test_memory_view_reorders_a_tensor_of_another_order(spec: ParamSpec, data: st.DataObject) -> None:
    """A tensor with the values but not the strides of the spec gives the same flat elements."""
    tensor = tensor_for(spec)
    dims = data.draw(st.permutations(range(tensor.dim())))
    back = sorted(range(tensor.dim()), key=lambda dim: dims[dim])
    other = tensor.permute(dims).contiguous().permute(back)
    assert torch.equal(other, tensor)
    assert torch.equal(memory_view(other, spec), memory_view(tensor, spec))


@each_row(
    "tensor",
    [
        torch.zeros(4, 6)[:, ::2],
        torch.zeros(1, 4).expand(3, 4),
        torch.zeros(6).as_strided((3, 2), (1, 1)),
        torch.zeros(20)[::5],
    ],
    ids=["gapped", "expanded", "overlapping", "strided"],
)
def test_lays_anything_else_out_row_major(tensor: torch.Tensor) -> None:
    """A gapped, expanded or overlapping tensor is laid out row-major, as a fresh copy of it would be."""
    assert ParamSpec.of("p", tensor).stride == tuple(torch.empty(tensor.shape).stride())


def test_channels_last_keeps_its_order() -> None:
    """The spec of a channels_last convolution weight has the strides of channels_last."""
    weight = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last).weight
    assert ParamSpec.of("w", weight).stride == (75, 1, 15, 3)


@each_row("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
def test_zero_numel_is_row_major(shape: tuple[int, ...]) -> None:
    """A parameter without elements has row-major strides, whatever strides it came with."""
    tensor = torch.empty(shape).transpose(0, -1)
    assert ParamSpec.of("p", tensor) == ParamSpec("p", tuple(tensor.shape), torch.float32, False)


def test_zero_dimensions() -> None:
    """A 0-d parameter has one element and no strides."""
    spec = ParamSpec.of("scale", nn.Parameter(torch.tensor(2.0)))
    assert (spec.shape, spec.stride, spec.numel, spec.requires_grad) == ((), (), 1, True)


@each_row(
    ("shape", "stride"),
    [((2, 3), (3,)), ((2, 3), (6, 2)), ((2, 3), (1, 1)), ((2,), (0,)), ((4,), (-1,)), ((2, 3), (3, 1, 1))],
)
def test_refuses_strides_that_are_not_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Strides that leave gaps, overlap or do not fit the shape are refused, with the parameter's name."""
    with pytest.raises(LayoutError, match=r"'block\.w'.*densely"):
        ParamSpec("block.w", shape, torch.float32, True, stride)


@each_row("dtype", [torch.uint8, torch.int64, torch.bool])
def test_refuses_a_gradient_of_integers(dtype: torch.dtype) -> None:
    """An integer parameter that is to get a gradient is refused by name; a frozen one is accepted."""
    with pytest.raises(LayoutError, match="'q'"):
        ParamSpec("q", (2,), dtype)
    assert ParamSpec("q", (2,), dtype, requires_grad=False).nbytes == 2 * dtype.itemsize


@given(param_specs())
def test_equal_specs_are_one_key(spec: ParamSpec) -> None:
    """Two specs of the same facts are equal and hash alike."""
    again = ParamSpec(spec.fqn, spec.shape, spec.dtype, spec.requires_grad, spec.stride, spec.aliases)
    assert len({spec, again}) == 1
    assert math.prod(again.shape) == spec.numel
