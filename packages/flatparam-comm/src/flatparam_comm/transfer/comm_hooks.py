"""Functions of the user's that stand for a unit's collectives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal, final

import attrs
from torch import Tensor

__all__ = ["CommHooks", "HookStage"]

HookStage = Literal["reduce", "all_reduce", "all_gather"]


@final
@attrs.define(eq=False)
class CommHooks:
    """For each stage, what is called instead of the collective; `None` leaves it as it is.

    A hook is complete when it returns (on CUDA: in the order of the current stream). It is called with equal arguments
    on every rank, in the same order.
    """

    reduce: Callable[[Tensor, Tensor], None] | None = None
    """`(full gradient, shard to write)`; it averages too. Where nothing is sharded the two are one tensor."""
    all_reduce: Callable[[Tensor, Tensor], None] | None = None
    """`(shard of the gradient, the same)`, in place, over the ranks that hold copies of the shard; it averages too."""
    all_gather: Callable[[Tensor, Tensor], None] | None = None
    """`(shard, full parameters to write)`."""

    def check_free(self, stage: HookStage, unit: str) -> None:
        """Make sure that `unit` has no hook at `stage` yet.

        Raises:
            AssertionError: if it has one, as FSDP1 does.
        """
        if getattr(self, stage, None) is not None:
            raise AssertionError(
                f"unit {unit!r} has a communication hook at the stage {stage!r} already: take it away first, by "
                "registering None"
            )

    def set(self, stage: HookStage, state: Any, hook: Callable[..., Any] | None, *, in_place: bool) -> None:
        """Have `hook(state, input, output)` called at `stage`, or `hook(state, tensor)` where it works in place.

        Raises:
            TypeError: where it cannot be called.
            ValueError: for a stage that there is not.
        """
        if stage not in ("reduce", "all_reduce", "all_gather"):
            raise ValueError(f"expected the stage 'reduce', 'all_reduce' or 'all_gather', found {stage!r}")
        if hook is not None and not callable(hook):
            raise TypeError(f"expected a communication hook that can be called, found {type(hook).__name__}")
        setattr(self, stage, None if hook is None else functools.partial(_call, hook, state, in_place))

    def __deepcopy__(self, memo: dict[int, object]) -> CommHooks:
        """The same functions with the same states, which may hold process groups."""
        return copy.copy(self)


def _call(hook: Callable[..., Any], state: Any, in_place: bool, source: Tensor, target: Tensor) -> None:
    given = source.detach()  # a hook may give what it gets other memory, as torch's compressing hooks do
    if not in_place:
        hook(state, given, target)
        return
    hook(state, given)
    if target is not source or given.data_ptr() != source.data_ptr():
        target.copy_(given)
