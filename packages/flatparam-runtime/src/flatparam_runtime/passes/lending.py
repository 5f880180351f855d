"""A unit lends its full parameters to what reads one of them past its own calls (`self.head.weight`)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

from torch import Tensor, nn

from flatparam_runtime.autograd import apart_from_checkpoints, dispatch_modes, in_backward, untraced, use_count
from flatparam_runtime.passes.freeing import Juncture, free
from flatparam_runtime.passes.tree import UnitTree, tree_of
from flatparam_runtime.unit import ForwardCall, Phase, Unit, unit_of


def lend_what_is_read(tree: UnitTree, watch: Callable[[UnitTree, Unit], None]) -> None:
    """Have the units of `tree` lend a parameter that another unit's forward call reads (`self.head.weight`).

    Args:
        watch: has the gradients of a lender's leaves reported.
    """
    for unit in tree.units:
        for number, handle in enumerate(unit.handles):
            handle.exposure.reading = functools.partial(_read, unit.held.reference, number, watch)
    tree.lends = True


@functools.partial(untraced, with_callees=False)
def _read(
    reference: weakref.ReferenceType[nn.Module], number: int, watch: Callable[[UnitTree, Unit], None], index: int
) -> Tensor | None:
    """Return the full parameter `index` of a sharded unit, if a forward call or a backward pass reads it; None outside.

    The unit lends its parameters until that call is over, and again for the backward pass of the call; to what reads
    them in a backward pass, such as a hook or a recomputation, until it has done its own part, or the pass is over.
    """
    module = reference()
    # Somebody may have kept a module inside of one that is gone.
    unit = None if module is None else unit_of(module)
    if unit is None or unit.phase is Phase.INSPECTING or unit.held.calls or _is_for_words():
        return None
    tree = tree_of(unit)
    reader, running = tree.innermost, tree.backward
    if reader is unit:
        return None
    if reader is not None:
        lend = functools.partial(_lend, tree, unit, reader, unit.handles[number].layout.fqns[index], watch)
    elif running is not None and not running.has_computed and in_backward():
        lend = functools.partial(_lend_to_backward, tree, unit, watch)
    else:
        return None
    apart_from_checkpoints(lend) if dispatch_modes() else lend()
    return unit.handles[number].exposure.shown(index)


def _lend_to_backward(tree: UnitTree, unit: Unit, watch: Callable[[UnitTree, Unit], None]) -> None:
    unit.unshard(full_precision=unit.computes_in_full_precision)
    watch(tree, unit)


def _is_for_words() -> bool:
    """Return whether the attribute is read to print a module, as `nn.Linear.extra_repr` does, maybe on one rank."""
    # The frames are this one, the two of ours, the registry's, that of torch's `__getattr__`, and the reader's.
    frame = sys._getframe(1)
    for _ in range(6):
        if frame.f_code.co_name in ("extra_repr", "__repr__"):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _lend(tree: UnitTree, unit: Unit, reader: Unit, fqn: str, watch: Callable[[UnitTree, Unit], None]) -> None:
    call = reader.calls[-1]
    for other in list(call.lent):
        take_back_unused(reader, call, other)
    reader.borrow(unit, fqn)
    # At once: an exception has to find it.
    call.lent[unit] = []
    unit.unshard(full_precision=call.full_precision)
    watch(tree, unit)
    call.lent[unit] = _holders(unit)


def _holders(unit: Unit) -> list[int]:
    """Return the references to the full parameters of `unit`, from C++ and from Python, and to their memory."""
    return [
        each
        for handle in unit.handles
        for leaf in handle.leaves
        for each in (use_count(leaf), sys.getrefcount(leaf), handle.buffer.holders)
    ]


def take_back_unused(reader: Unit, call: ForwardCall, unit: Unit) -> None:
    """End the loan of `unit` if nobody has kept or computed with what was read, such as a dtype."""
    if call.lent[unit] == _holders(unit):
        del call.lent[unit]
        reader.give_back(unit)
        free(unit, Juncture.LOAN_ENDED)
