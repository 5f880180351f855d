"""Flat gradients that are never made: every stretch of them is what the ledger would have had there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatparam_core import FlatLayout, FlatParamError, GradientLedger

from .strategies import layouts, tensors_for

CPU = torch.device("cpu")


def ledger_of(layout: FlatLayout, dtype: torch.dtype = torch.float32) -> GradientLedger:
    return GradientLedger.create(layout, dtype=dtype, device=CPU)


def gradients_of(layout: FlatLayout) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors_for([slot.spec for slot in layout.slots])]


@given(layouts(torch.float32), st.data())
def test_every_stretch_is_that_of_the_flat_gradient(layout: FlatLayout, data: st.DataObject) -> None:
    """Any stretch equals that of the flat gradient, whatever gradients came, and in any dtype."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    gradients = gradients_of(layout)
    came = data.draw(st.sets(st.integers(0, len(gradients) - 1)))
    kept, deposited = ledger_of(layout, dtype), ledger_of(layout, dtype)
    for index in came:
        kept.keep(index, gradients[index])
        deposited.deposit(index, gradients[index])
    expected = deposited.complete()
    apart = kept.hand_over()
    assert (apart.numel(), apart.dtype, apart.device) == (layout.numel, dtype, CPU)
    assert not kept.buffer.held_nbytes
    assert kept.deposited == deposited.deposited
    start = data.draw(st.integers(0, layout.numel))
    stop = data.draw(st.integers(start, layout.numel))
    room = torch.full((stop - start + 4,), torch.nan, dtype=dtype)
    apart.fill(start, room[2:-2])
    assert torch.equal(room[2:-2], expected[start:stop])
    assert room[:2].isnan().all()
    assert room[-2:].isnan().all()


@given(layouts(torch.float32), st.sampled_from([1.0, 2.0, 3.0]))
def test_what_was_kept_is_deposited_with_the_rest(layout: FlatLayout, divisor: float) -> None:
    """`keep` and `deposit` may alternate; the flat gradient is the same, and takes no memory before there is one."""
    gradients = gradients_of(layout)
    kept, deposited = ledger_of(layout), ledger_of(layout)
    for index, gradient in enumerate(gradients):
        kept.keep(index, gradient, divisor=divisor)
        deposited.deposit(index, gradient, divisor=divisor)
    assert not kept.buffer.held_nbytes
    assert kept.is_full
    assert not kept.is_empty
    assert torch.equal(kept.complete(), deposited.complete())
    assert kept.deposited == deposited.deposited


@given(layouts(torch.float32))
def test_a_second_gradient_is_added(layout: FlatLayout) -> None:
    """A parameter that gets two gradients has their sum, whether the first was kept or deposited."""
    gradients = gradients_of(layout)
    ledger, expected = ledger_of(layout), ledger_of(layout)
    for index, gradient in enumerate(gradients):
        (ledger.keep if index % 2 else ledger.deposit)(index, gradient)
        ledger.keep(index, gradient)
        expected.deposit(index, gradient + gradient)
    assert torch.equal(ledger.complete(), expected.complete())


@given(layouts(torch.float32))
def test_released_gradients_are_forgotten(layout: FlatLayout) -> None:
    """`release` drops gradients, whether they were kept or handed over."""
    ledger = ledger_of(layout)
    for hand_over in (False, True):
        for index, gradient in enumerate(gradients_of(layout)):
            ledger.keep(index, gradient)
        if hand_over:
            ledger.hand_over()
        ledger.release()
        assert ledger.is_empty
        assert not ledger.complete().any()
        ledger.release()


@given(layouts(torch.float32))
def test_what_was_copied_is_not_handed_over(layout: FlatLayout) -> None:
    """A sum, or a gradient with a divisor, is not handed over: it is only in the flat buffer."""
    gradients = gradients_of(layout)
    for divided in (False, True):
        ledger = ledger_of(layout)
        if divided:
            ledger.keep(0, gradients[0], divisor=2.0)
        else:
            ledger.deposit(0, gradients[0])
        assert not ledger.is_apart
        with pytest.raises(FlatParamError, match="in the flat buffer"):
            ledger.hand_over()


def test_each_element_is_copied_once() -> None:
    """Stretches that cover the flat gradient copy every element of a part once, and nothing is allocated for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    copied: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            name = function.overloadpacket.__name__
            if name == "copy_":
                copied.append(args[1].numel())
            elif name == "_foreach_copy_":
                copied.extend(part.numel() for part in args[1])
            else:
                assert name in ("as_strided", "slice", "detach", "zero_"), name
            return function(*args, **(kwargs or {}))

    from flatparam_core import ParamSpec

    layout = FlatLayout.plan(
        [ParamSpec(name, (5, 7), torch.float32) for name in "abc"], world_size=2, alignment_nbytes=16
    )
    ledger = ledger_of(layout)
    for index in range(3):
        ledger.keep(index, torch.ones(5, 7))
    apart, out = ledger.hand_over(), torch.empty(layout.numel)
    with Count():
        apart.fill(0, out[: layout.shard_numel])
        apart.fill(layout.shard_numel, out[layout.shard_numel :])
    assert sum(copied) == 3 * 35
    assert float(out.sum()) == 3 * 35
