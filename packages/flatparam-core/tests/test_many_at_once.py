"""Work on all parameters in a few calls has the same result, bit for bit, as one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam_core import FlatLayout, FlatParamError, GradientLedger, ParamSpec, discover
from flatparam_core.exposure.sites import Sites
from flatparam_core.geometry.shard_pieces import ShardPieces
from flatparam_core.storage.gradients import SMALL_NBYTES

from .ranks import flatten_alone, gather
from .strategies import layouts

FIVE = FlatLayout.plan([ParamSpec(f"p{n}", (n + 1, 3), torch.float32) for n in range(5)], world_size=4)


def ledger_of(layout: FlatLayout = FIVE, dtype: torch.dtype = torch.float32) -> GradientLedger:
    ledger = GradientLedger.create(layout, dtype=dtype, device=torch.device("cpu"))
    ledger.open()
    # Fresh memory may hold NaN.
    ledger.buffer.tensor.fill_(torch.nan)
    return ledger


def random_gradients(layout: FlatLayout, indices: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(layout.slots[index].spec.shape).to(dtype) for index in indices]


def assert_same_ledgers(found: GradientLedger, expected: GradientLedger) -> None:
    assert found.deposited == expected.deposited
    assert torch.equal(found.complete(), expected.complete())


@given(layouts(torch.float32), st.data(), st.sampled_from((1.0, 2.0, 3.0, 7.0)))
def test_deposits_at_once_are_those_one_by_one(layout: FlatLayout, data: st.DataObject, divisor: float) -> None:
    """Any choice of parameters, neighbours or not, gets the bits of single deposits, and zeros around them."""
    chosen = data.draw(st.sets(st.integers(0, len(layout.slots) - 1), min_size=1).map(sorted))
    at_once, one_by_one = ledger_of(layout), ledger_of(layout)
    # The second time the gradients are sums.
    for _ in range(2):
        gradients = random_gradients(layout, chosen, torch.float32)
        at_once.deposit_all(chosen, gradients, divisor=divisor)
        for index, gradient in zip(chosen, gradients, strict=True):
            one_by_one.deposit(index, gradient, divisor=divisor)
        assert_same_ledgers(at_once, one_by_one)


@each_row("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_row("sizes", [[0], [-1], [1], [1, 1], [0, 1], [1, -1, 1]], ids=str)
@each_row("divisor", [1.0, 2.0])
def test_either_side_of_the_threshold(sizes: list[int], dtype: torch.dtype, divisor: float) -> None:
    """At, below and above the size from which a gradient is copied by itself, alone or with others, the bits are the same."""
    limit = SMALL_NBYTES.value // dtype.itemsize
    layout = FlatLayout.plan([ParamSpec(f"p{n}", (limit + by,), dtype) for n, by in enumerate(sizes)], world_size=2)
    indices = range(len(sizes))
    gradients = random_gradients(layout, indices, dtype)
    at_once, one_by_one = ledger_of(layout, dtype), ledger_of(layout, dtype)
    at_once.deposit_all(indices, gradients, divisor=divisor)
    for index, gradient in zip(indices, gradients, strict=True):
        one_by_one.deposit(index, gradient, divisor=divisor)
    assert at_once.is_full
    assert_same_ledgers(at_once, one_by_one)


def test_what_lies_between_is_not_divided() -> None:
    """A slot between two stretches, which was deposited before, keeps its value."""
    ledger = ledger_of()
    ledger.deposit(2, torch.full((3, 3), 6.0))
    ledger.deposit_all([0, 1, 3, 4], [torch.full((n + 1, 3), 8.0) for n in (0, 1, 3, 4)], divisor=2.0)
    assert [ledger.slot(index).unique().tolist() for index in range(5)] == [[4.0], [4.0], [6.0], [4.0], [4.0]]
    assert ledger.is_full


@pytest.mark.pairs("dtype", "given_dtype")
@pytest.mark.parametrize("given_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-7, 1.0, 6e4])
def test_dtypes_at_once(dtype: torch.dtype, given_dtype: torch.dtype, size: float) -> None:
    """In every pair of dtypes the divisor is applied where single deposits apply it, and the bits are theirs."""
    at_once, one_by_one = ledger_of(dtype=dtype), ledger_of(dtype=dtype)
    gradients = [(torch.randn(n + 1, 3) * size).to(given_dtype) for n in range(5)]
    at_once.deposit_all(range(5), gradients, divisor=64.0)
    for index, gradient in enumerate(gradients):
        one_by_one.deposit(index, gradient, divisor=64.0)
    for index in range(5):
        assert torch.equal(at_once.slot(index).nan_to_num(nan=1.5), one_by_one.slot(index).nan_to_num(nan=1.5))


def test_half_precision_neither_underflows_nor_overflows_by_the_divisor() -> None:
    """The division is done in the wider of the two dtypes: what fits after it does not vanish or become infinite."""
    shapes = [(n + 1, 3) for n in range(5)]
    wide = ledger_of()
    wide.deposit_all(range(5), [torch.full(s, 6e-8, dtype=torch.float16) for s in shapes], divisor=1024.0)
    assert all(0.0 < wide.slot(index).min() < 1e-10 for index in range(5))
    narrow = ledger_of(dtype=torch.float16)
    narrow.deposit_all(range(5), [torch.full(s, 1e6) for s in shapes], divisor=1024.0)
    assert all(narrow.slot(index).unique().tolist() == [976.5] for index in range(5))


def test_different_dtypes_at_once() -> None:
    """Gradients of several dtypes are taken together if the ledger's holds them all, and else one by one."""
    gradients = [torch.ones(n + 1, 3, dtype=torch.bfloat16 if n % 2 else torch.float32) for n in range(5)]
    for dtype in (torch.float32, torch.bfloat16):
        ledger = ledger_of(dtype=dtype)
        ledger.deposit_all(range(5), gradients, divisor=4.0)
        assert all(ledger.slot(index).unique().tolist() == [0.25] for index in range(5))


def test_a_handle_takes_the_gradients_that_are_there(use_orig_params: bool) -> None:
    """`deposit_all` moves those gradients of its leaves that are there; a missing one leaves its slot alone."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    everything = range(len(handle.leaves))
    gradients = [torch.randn_like(leaf) for leaf in handle.leaves]
    for leaf, gradient in zip(handle.leaves, gradients, strict=True):
        leaf.grad = gradient.clone()
    handle.leaves[1].grad = None
    handle.deposit_all([1])
    assert handle.gradients.is_empty
    handle.deposit_all([0, 1, 3], divisor=2.0)
    assert [leaf.grad is None for leaf in handle.leaves] == [True, True, False, True]
    assert list(handle.gradients.deposited) == [1, 0, 0, 1]
    handle.deposit_all(everything, divisor=2.0)
    assert [leaf.grad for leaf in handle.leaves] == [None] * 4
    assert list(handle.gradients.deposited) == [1, 0, 1, 1]
    for index in (0, 2, 3):
        assert torch.equal(handle.gradients.slot(index), gradients[index] / 2.0)
    handle.gradients.release()


@each_row("divisor", [1.0, 3.0])
def test_large_and_small_gradients_at_once(divisor: float) -> None:
    """Gradients of more than 64 KiB among smaller ones get the bits of single deposits, whatever the neighbours."""
    numels = (SMALL_NBYTES.value // 4, SMALL_NBYTES.value // 4 + 1, 5, 7, SMALL_NBYTES.value)
    layout = FlatLayout.plan([ParamSpec(f"p{n}", (n,), torch.float32) for n in numels], world_size=2)
    at_once, one_by_one = ledger_of(layout), ledger_of(layout)
    gradients = random_gradients(layout, range(5), torch.float32)
    at_once.deposit_all(range(5), gradients, divisor=divisor)
    for index, gradient in enumerate(gradients):
        one_by_one.deposit(index, gradient, divisor=divisor)
    assert at_once._batch((0, 1, 2, 3, 4)).large == [1, 4]
    assert_same_ledgers(at_once, one_by_one)


class Calls(TorchDispatchMode):
    """Notes the names of operators that write to tensors that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@each_row("given_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_accelerator_takes_all_gradients_in_one_call(given_dtype: torch.dtype) -> None:
    """Off the CPU gradients of every size and dtype are one call together, and so are their sums and their mean."""
    numels = (SMALL_NBYTES.value, 3, SMALL_NBYTES.value + 4, 7)
    layout = FlatLayout.plan([ParamSpec(f"p{n}", (n,), torch.float32) for n in numels], world_size=2)
    ledger = GradientLedger.create(layout, dtype=torch.float32, device=torch.device("meta"))
    ledger.open()
    gradients = [torch.empty(n, dtype=given_dtype, device="meta") for n in numels]
    with Calls() as calls:
        ledger.deposit_all(range(4), gradients)
    assert calls.names == ["_foreach_copy_"]
    if given_dtype == torch.float64:  # a sum in the wider dtype, and a mean, are made before they are cut to float32
        return
    with Calls() as calls:
        ledger.deposit_all(range(4), gradients, divisor=2.0)
    assert calls.names == ["_foreach_add_"]
    ledger.release()
    with Calls() as calls:
        ledger.deposit_all([0, 2, 3], gradients[::2] + gradients[3:], divisor=2.0)
    assert calls.names == ["_foreach_copy_", "_foreach_div_"]


@given(layouts(torch.float32))
def test_pieces_of_a_shard(layout: FlatLayout) -> None:
    """Each rank's pieces are views of its shard at the parameters' fragments, in slot order, of their dimensions."""
    for rank in range(min(layout.world_size, 4)):
        shard = torch.randn(layout.shard_numel)
        pieces = ShardPieces.of(layout, rank).views(shard)
        assert len(pieces) == len(layout.slots)
        for piece, fragment, slot in zip(pieces, layout.fragments(rank), layout.slots, strict=True):
            assert torch.equal(piece.reshape(-1), shard[fragment.in_shard.as_slice()])
            assert piece.dim() == max(len(slot.spec.shape), 1)
            keeps_rows = layout.world_size == 1 or slot.spec.rule.kind in ("row", "whole")
            assert piece.shape[1:].numel() == 1 or (keeps_rows and piece.shape[1:] == slot.spec.shape[1:])
            assert piece.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


@given(layouts(torch.float32))
def test_lines_of_a_shard(layout: FlatLayout) -> None:
    """The same pieces, each 1-D, with `shapes` as the shapes that they had; an empty one has memory nowhere else."""
    for rank in range(min(layout.world_size, 4)):
        shard = torch.randn(layout.shard_numel)
        pieces = ShardPieces.of(layout, rank)
        for line, piece, shape in zip(pieces.lines(shard), pieces.views(shard), pieces.shapes, strict=True):
            assert line.dim() == 1
            assert piece.shape == shape == line.view(shape).shape
            assert line.data_ptr() == piece.data_ptr()
            assert line.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()


class Tied(nn.Module):
    """Two names of one weight, a parameter of its own, and a recurrent layer, which keeps a list beside the names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.recurrent = nn.LSTM(2, 2)


def test_what_is_put_at_the_sites() -> None:
    """Each value is registered under all names of its parameter, and a module that keeps a list has it there too."""
    module = Tied()
    bound = discover(module)
    sites = Sites.of(bound)
    values = [nn.Parameter(each.parameter.detach().clone()) for each in bound]
    sites.put(values)
    for each, value in zip(bound, values, strict=True):
        assert all(getattr(info.module, info.param_name) is value for info in each.infos)
    assert module.first.weight is module.second.weight is values[0]
    assert all(any(weight is value for value in values) for weight in module.recurrent._flat_weights)
    assert all(found is value for found, value in zip(sites.shown, values, strict=True))


def test_nothing_is_put_beside_a_replaced_parameter() -> None:
    """If somebody has put a different parameter at one of the names, the error names it, and no attribute changes."""
    module = Tied()
    bound = discover(module)
    sites = Sites.of(bound)
    module.second.weight = nn.Parameter(torch.zeros(2, 2))
    before = [id(parameter) for parameter in module.parameters()]
    with pytest.raises(FlatParamError, match=r"parameter 'second\.weight' was replaced by another object"):
        sites.put([nn.Parameter(each.parameter.detach().clone()) for each in bound])
    assert [id(parameter) for parameter in module.parameters()] == before
