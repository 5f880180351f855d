"""The ranges that a profile of a step shows."""

from __future__ import annotations

import torch
from torch import nn

from flatparam_comm import SingleCollectives
from flatparam_runtime import PrefetchPlan, in_range
from flatparam_runtime.unit.plan import BackwardOrder

from .models import Stack, batch
from .worlds import sharded

BLOCKS = ["blocks.0", "blocks.1"]


def profiled_step(module: nn.Module) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(batch().requires_grad_()).sum().backward()
    return {event.key.rpartition(".")[2] for event in profile.key_averages() if "FullySharded" in event.key}


def test_the_ranges_of_a_step() -> None:
    """A profile has FSDP1's names for what happens around forward and backward, with prefetching in both directions."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, prefetch=PrefetchPlan(1))
    module.blocks[0].requires_grad_(False)
    for handle in module.blocks[0]._flatparam_unit.handles:
        handle.flat_param.requires_grad_(False)
    module(batch().requires_grad_()).sum().backward()
    names = {
        "_root_pre_forward",
        "_pre_forward",
        "_to_kwargs",
        "_pre_forward_prefetch",
        "_post_forward",
        "_pre_backward_hook",
        "_pre_backward_prefetch",
        "_post_backward_hook",
        "_post_backward_hook_reshard_only",
        "rate_limiter",
    }
    assert names <= profiled_step(module)
    later = sharded(Stack, SingleCollectives(), units=BLOCKS, prefetch=PrefetchPlan(0, BackwardOrder.AFTER_COMPUTE))
    assert "_post_backward_prefetch" in profiled_step(later)


def test_a_range_returns_what_is_called() -> None:
    """`in_range` gives the function its arguments and returns its result, with a profile and without."""
    assert in_range("mine", divmod, 7, 3) == (2, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert in_range("mine", divmod, 7, 3) == (2, 1)
    assert any(event.key == "FullyShardedDataParallel.mine" for event in profile.key_averages())
