"""The most bytes that units take for full parameters and flat gradients at once, by the formula of `docs/memory.md`."""

from __future__ import annotations

from collections.abc import Sequence

from flatparam_runtime import BackwardOrder, Unit

__all__ = ["peak_of_units"]


def peak_of_units(units: Sequence[Unit]) -> int:
    """Return the peak of a step of `units`, the root first and the others in the order of their forward passes.

    It holds for units that run one after the other; what activations take comes on top.
    """
    root, *others = units
    full, flat = root.unsharded_nbytes, _flat_nbytes(root)
    most, kept = full + flat, 0
    for number, unit in enumerate(others):
        prefetch, own = unit.plan.prefetch, unit.unsharded_nbytes
        before = others[number - 1] if number else None
        after = others[number + 1] if number + 1 < len(others) else None
        runs_ahead = unit.device.type != "cpu"
        ahead = 0
        if after is not None and (prefetch.forward or runs_ahead):
            ahead = after.unsharded_nbytes
        in_forward = full + kept + own + ahead
        ahead = reducing = 0
        if before is not None and before.plan.free_after_forward:
            ahead = before.unsharded_nbytes
        if after is not None and runs_ahead:
            reducing = _flat_nbytes(after)
        computing = max(own, _flat_nbytes(unit))
        if prefetch.backward is BackwardOrder.BEFORE_COMPUTE:
            computing += ahead
        elif prefetch.backward is BackwardOrder.AFTER_COMPUTE:
            computing = max(own, _flat_nbytes(unit) + ahead)
        most = max(most, in_forward, full + flat + kept + computing + reducing)
        if not unit.plan.free_after_forward:
            kept += own
    return most


def _flat_nbytes(unit: Unit) -> int:
    """Return the bytes of the unsharded gradients."""
    return sum(handle.gradients.buffer.nbytes for handle in unit.trainable)
