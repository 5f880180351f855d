"""GradientLedger: deposits, sums, casts, and that nothing undefined is ever reduced."""

import itertools
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from hypothesis import given

from flatparam_core import FlatLayout, FlatParamError, GradientLedger, ParamSpec

from .strategies import layouts, tensors_for

CPU = torch.device("cpu")
PAIR = FlatLayout.plan([ParamSpec("a", (3,), torch.float32), ParamSpec("b", (2, 2), torch.float32)], world_size=5)


def ledger_of(layout: FlatLayout = PAIR, dtype: torch.dtype = torch.float32) -> GradientLedger:
    return GradientLedger.create(layout, dtype=dtype, device=CPU)


def poison(ledger: GradientLedger) -> None:
    """Fill the whole buffer with NaN, as fresh memory may be."""
    ledger.open()
    ledger.buffer.tensor.fill_(torch.nan)


def stored(ledger: GradientLedger) -> int:
    return ledger.buffer.tensor.untyped_storage().size()


def test_takes_memory_from_first_deposit_to_release() -> None:
    """A ledger holds no bytes until a gradient comes, and none after it is released."""
    ledger = ledger_of()
    assert stored(ledger) == 0
    ledger.deposit(0, torch.ones(3))
    assert stored(ledger) == ledger.buffer.nbytes == 40
    assert not ledger.is_empty
    ledger.release()
    assert stored(ledger) == 0
    assert ledger.is_empty


@given(layouts(torch.float32))
def test_complete_is_the_gradients_and_zeros(layout: FlatLayout) -> None:
    """The flat gradient of poisoned memory has every deposit in its slot, and zeros in all gaps."""
    ledger = ledger_of(layout)
    poison(ledger)
    gradients = tensors_for([slot.spec for slot in layout.slots])
    for index, gradient in enumerate(gradients):
        ledger.deposit(index, gradient)
    full = ledger.complete()
    assert full.shape == (layout.numel,)
    for slot, gradient in zip(layout.slots, gradients, strict=True):
        assert torch.equal(full.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start), gradient.detach())
    assert all(not full[gap.as_slice()].any() for gap in layout.gaps)


def test_what_was_not_deposited_is_zero() -> None:
    """A parameter without a gradient adds zeros to the reduction, also in memory that was NaN."""
    ledger = ledger_of()
    poison(ledger)
    ledger.deposit(1, torch.full((2, 2), 2.0))
    assert ledger.complete().tolist() == [0, 0, 0, 2, 2, 2, 2, 0, 0, 0]
    assert list(ledger.deposited) == [0, 1]


def test_complete_without_any_deposit() -> None:
    """A rank that got no gradient at all takes part in the reduction with zeros."""
    ledger = ledger_of()
    poison(ledger)
    assert not ledger.complete().any()
    assert ledger.is_empty


def test_deposits_add_up() -> None:
    """Several gradients of one parameter are summed in the order in which they came."""
    ledger = ledger_of()
    poison(ledger)
    parts = [torch.randn(3) for _ in range(3)]
    for part in parts:
        ledger.deposit(0, part)
    assert torch.equal(ledger.slot(0), (parts[0] + parts[1]) + parts[2])


def test_release_forgets() -> None:
    """After a release the next deposit starts a new sum."""
    ledger = ledger_of()
    ledger.deposit(0, torch.ones(3))
    ledger.release()
    poison(ledger)
    ledger.deposit(0, torch.full((3,), 2.0))
    assert ledger.slot(0).tolist() == [2.0, 2.0, 2.0]


@each_row("kept", [False, True])
def test_gradients_are_dropped_one_by_one(kept: bool) -> None:
    """A dropped gradient is as one that has not arrived; with the last one the memory is freed."""
    ledger = ledger_of()
    (ledger.keep if kept else ledger.deposit)(0, torch.ones(3))
    ledger.deposit(1, torch.ones(2, 2))
    ledger.drop([0])
    assert [index for index, _ in ledger.arrived()] == [1]
    assert ledger.complete().tolist()[:7] == [0.0] * 3 + [1.0] * 4
    ledger.deposit(0, torch.ones(3))
    assert ledger.slot(0).tolist() == [1.0] * 3
    ledger.drop([0, 1])
    assert ledger.is_empty
    assert stored(ledger) == 0


@each_row("divisor", [1.0, 2.0, 3.0, 8.0])
def test_divisor(divisor: float) -> None:
    """Each deposit is divided by its divisor, the first and the later ones alike."""
    ledger = ledger_of()
    gradient = torch.randn(3)
    ledger.deposit(0, gradient, divisor=divisor)
    assert torch.equal(ledger.slot(0), gradient / divisor)
    ledger.deposit(0, gradient, divisor=divisor)
    assert torch.equal(ledger.slot(0), gradient / divisor + gradient / divisor)


def test_deposit_does_not_change_or_keep_the_gradient() -> None:
    """The ledger copies: the caller's tensor keeps its values, and changing it later changes nothing."""
    ledger = ledger_of()
    gradient = torch.ones(3)
    for _ in range(2):
        ledger.deposit(0, gradient, divisor=2.0)
    assert gradient.tolist() == [1.0, 1.0, 1.0]
    gradient.zero_()
    assert ledger.slot(0).tolist() == [1.0, 1.0, 1.0]


@each_row("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_to_the_reduction_dtype(dtype: torch.dtype) -> None:
    """A gradient of a different dtype is cast once, on its way into the slot."""
    ledger = ledger_of(dtype=dtype)
    gradient = torch.randn(3)
    ledger.deposit(0, gradient)
    assert ledger.complete().dtype is dtype
    assert torch.equal(ledger.slot(0), gradient.to(dtype))


@each_row("deposits", [1, 2])
def test_divides_in_the_wider_dtype(deposits: int) -> None:
    """A half-precision gradient that would underflow when divided survives if the reduction dtype is wider."""
    ledger = ledger_of()
    tiny = torch.full((3,), 6e-8, dtype=torch.float16)
    for _ in range(deposits):
        ledger.deposit(0, tiny, divisor=8.0)
    assert torch.equal(ledger.slot(0), tiny.float() / 8.0 * deposits)


def test_sums_in_the_reduction_dtype() -> None:
    """Accumulating bf16 gradients in an fp32 ledger keeps the bits that a bf16 sum would lose."""
    ledger = ledger_of()
    ledger.deposit(0, torch.full((3,), 256.0, dtype=torch.bfloat16))
    ledger.deposit(0, torch.full((3,), 1.0, dtype=torch.bfloat16))
    assert ledger.slot(0).tolist() == [257.0, 257.0, 257.0]


def test_a_gradient_with_a_graph_is_taken_without_it() -> None:
    """A gradient of ``backward(create_graph=True)`` is deposited as numbers; the ledger keeps no graph alive."""
    ledger = ledger_of()
    gradient = torch.ones(3, requires_grad=True) * 2
    for divisor in (1.0, 2.0):
        ledger.deposit(0, gradient, divisor=divisor)
        ledger.deposit(1, gradient.sum().expand(2, 2), divisor=divisor)
    full = ledger.complete()
    assert not full.requires_grad
    assert not ledger.slot(0).requires_grad
    assert ledger.slot(0).tolist() == [3.0, 3.0, 3.0]


def test_expanded_and_transposed_gradients() -> None:
    """A gradient in any strides lands element by element where its parameter's elements lie."""
    spec = ParamSpec("w", (2, 3), torch.float32, True, (1, 2))
    ledger = ledger_of(FlatLayout.plan([spec], world_size=1))
    gradient = torch.arange(6.0).reshape(2, 3)
    ledger.deposit(0, gradient)
    assert torch.equal(ledger.slot(0), gradient)
    assert ledger.complete().tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    ledger.deposit(0, torch.ones(()).expand(2, 3), divisor=2.0)
    assert torch.equal(ledger.slot(0), gradient + 0.5)


def test_complex_gradients() -> None:
    """Complex parameters accumulate complex gradients."""
    ledger = ledger_of(FlatLayout.plan([ParamSpec("c", (2,), torch.complex64)], world_size=1), torch.complex64)
    for _ in range(2):
        ledger.deposit(0, torch.tensor([1 + 2j, 3 - 4j]), divisor=4.0)
    assert ledger.slot(0).tolist() == [0.5 + 1j, 1.5 - 2j]


def test_slot_of_a_parameter_without_gradient() -> None:
    """Asking for a gradient that has not arrived is refused with the parameter's name."""
    ledger = ledger_of()
    ledger.deposit(0, torch.ones(3))
    with pytest.raises(FlatParamError, match="no gradient of 'b' has arrived"):
        ledger.slot(1)


def test_a_wrong_shape_is_an_error() -> None:
    """A gradient that is not of its parameter's shape and does not broadcast is refused by torch."""
    with pytest.raises(RuntimeError, match="size"):
        ledger_of().deposit(0, torch.ones(4))


def test_is_full() -> None:
    """A ledger is full once every parameter has its gradient."""
    ledger = ledger_of()
    assert not ledger.is_full
    ledger.deposit(0, torch.ones(3))
    assert not ledger.is_full
    ledger.deposit(1, torch.ones(2, 2))
    assert ledger.is_full


WAYS: dict[str, Callable[[GradientLedger, int], None]] = {
    "deposit": lambda ledger, index: ledger.deposit(index, torch.ones(SHAPES[index])),
    "all": lambda ledger, index: ledger.deposit_all([index], [torch.ones(SHAPES[index])]),
    "keep": lambda ledger, index: ledger.keep(index, torch.ones(SHAPES[index])),
}
SHAPES = [(3,), (2, 2)]


@each_row("ways", itertools.product(WAYS, WAYS), ids="-".join)
def test_is_full_again_at_the_end_of_each_pass(ways: tuple[str, str]) -> None:
    """While gradients accumulate, a ledger is full after the last gradient of each pass, and not between, in any order."""
    ledger = ledger_of()
    for order in ([0, 1], [1, 0], [0, 1]):
        found = []
        for index, way in zip(order, ways, strict=True):
            WAYS[way](ledger, index)
            found.append(ledger.is_full)
        assert found == [False, True]
    ledger.collect()
    assert ledger.is_full
    ledger.drop([0])
    assert not ledger.is_full
    ledger.deposit(0, torch.ones(3))
    assert not ledger.is_full
    ledger.deposit(1, torch.ones(2, 2))
    assert ledger.is_full
    ledger.release()
    ledger.deposit(0, torch.ones(3))
    assert not ledger.is_full
