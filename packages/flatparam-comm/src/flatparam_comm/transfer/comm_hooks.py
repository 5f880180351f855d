"""The user's functions that replace a unit's collectives."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal, final

import attrs
from torch import Tensor

HookStage = Literal["reduce", "all_reduce", "all_gather"]


@final
@attrs.define(eq=False)
class CommHooks:
    """The function of each stage that is called instead of the collective; `None` keeps the collective.

    A hook is complete when it returns (on CUDA: in the order of the current stream). It is called with equal arguments
    on every rank, in the same order.
    """

    reduce: Callable[[Tensor, Tensor], None] | None = None
    """`(full gradient, shard to write)`; it averages, too. If nothing is sharded, both are the same tensor."""
    all_reduce: Callable[[Tensor, Tensor], None] | None = None
    """`(shard of the gradient, the same)`, in place, over the ranks with copies of the shard; it averages, too."""
    all_gather: Callable[[Tensor, Tensor], None] | None = None
    """`(shard, full parameters to write)`."""

    def check_free(self, stage: HookStage, unit: str) -> None:
        """Make sure that `unit` has no hook at `stage` yet.

        Raises:
            AssertionError: if it has one, as FSDP1 does.
        """
        if getattr(self, stage, None) is not None:
            raise AssertionError(
                f"unit {unit!r} already has a communication hook at the stage {stage!r}: remove it first, by "
                "registering None"
            )

    def set(self, stage: HookStage, state: Any, hook: Callable[..., Any] | None, *, in_place: bool) -> None:
        """Call `hook(state, input, output)` at `stage`, or `hook(state, tensor)` if it works in place.

        Raises:
            TypeError: if `hook` cannot be called.
            ValueError: for an unknown stage.
        """
        if stage not in ("reduce", "all_reduce", "all_gather"):
            raise ValueError(f"expected the stage 'reduce', 'all_reduce' or 'all_gather', found {stage!r}")
        if hook is not None and not callable(hook):
            raise TypeError(f"expected a communication hook that can be called, found {type(hook).__name__}")
        setattr(self, stage, None if hook is None else functools.partial(_call, hook, state, in_place))

    def given(self, stage: HookStage) -> tuple[Callable[..., Any] | None, Any]:
        """Return the hook of `stage` and its state, as `set` was given them; None for both if there is none."""
        called = getattr(self, stage)
        return (None, None) if called is None else called.args[:2]

    def __deepcopy__(self, memo: dict[int, object]) -> CommHooks:
        """Return the same functions with the same states, which may hold process groups."""
        return copy.copy(self)


def _call(hook: Callable[..., Any], state: Any, in_place: bool, source: Tensor, target: Tensor) -> None:
    # A hook may replace the memory of its argument, as torch's compressing hooks do.
    given = source.detach()
    if not in_place:
        hook(state, given, target)
        return
    hook(state, given)
    if target is not source or given.data_ptr() != source.data_ptr():
        target.copy_(given)
