"""Named ranges in a profile, under the names that FSDP1 gives them, so that people and tools find them again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from flatparam_runtime.compiling import untraced

__all__ = ["in_range", "profiled"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@functools.partial(untraced, with_callees=False)
def in_range(name: str, function: Callable[..., Result], *args: Any) -> Result:
    """Call `function(*args)`, which a profile shows as `FullyShardedDataParallel.<name>`; it costs nothing without one.

    The names are FSDP1's: `_root_pre_forward`, `_pre_forward`, `_to_kwargs`, `_pre_forward_prefetch`, `_post_forward`,
    `_pre_backward_hook`, `_pre_backward_prefetch`, `_post_backward_hook`, `_post_backward_hook_reshard_only`,
    `_post_backward_prefetch`, and `rate_limiter` where a reduction waits for the one before it.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # it is there
        return function(*args)
    with torch.profiler.record_function(f"FullyShardedDataParallel.{name}"):
        return function(*args)


def profiled(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Call the function in a range; see `in_range`."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # it is there
                return function(*args, **kwargs)
            return in_range(name, functools.partial(function, **kwargs) if kwargs else function, *args)

        return call

    return decorate
