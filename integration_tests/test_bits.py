"""What makes equality of bits a fair demand: in a test, a matrix product depends on values and shapes alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT = 64
"""Bytes; where torch lets every tensor of its own begin. A view may begin anywhere."""

SHAPES = [
    (4, 4, 4),
    (8, 16, 8),
    (1, 40, 24),
    (32, 300, 1),
    (6, 1, 24),
    (10, 20, 3),
    (300, 7, 31),
    (3, 256, 129),
]
"""Rows, inputs and outputs of layers whose bits depend on addresses on some CPUs where MKL is let."""


def lying(tensor: Tensor, elements: int) -> Tensor:
    """The same values, so many elements behind a boundary."""
    room = torch.empty(tensor.numel() + 2 * ALIGNMENT, dtype=tensor.dtype)
    begin = -room.data_ptr() % ALIGNMENT // tensor.element_size() + elements
    return room[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "output": lambda x, weight, grad: F.linear(x, weight),
    "gradient of the input": lambda x, weight, grad: grad @ weight,
    "gradient of the weight": lambda x, weight, grad: grad.t() @ x,
}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies without MKL")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_does_not_depend_on_addresses(product: str, shape: tuple[int, int, int]) -> None:
    """A linear layer's output and gradients have the same bits wherever input, weight and gradient begin."""
    rows, inputs, outputs = shape
    x, weight, grad = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    expected = PRODUCTS[product](*(lying(each, 0) for each in (x, weight, grad)))
    for moved in range(3):
        for elements in range(1, ALIGNMENT // 4):
            operands = [lying(each, elements * (i == moved)) for i, each in enumerate((x, weight, grad))]
            assert torch.equal(PRODUCTS[product](*operands), expected)
