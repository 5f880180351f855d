"""torch's own comparison of FSDP1 with DDP, with the models of torch's own tests, and `flatparam.install()` before it.

The comparison is in `torch.testing._internal.common_fsdp`. It trains a model wrapped by DDP and by what
`torch.distributed.fsdp` offers, saves and loads the state after each step, and compares losses and parameters.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

# Other versions of torch compare in other ways.
pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODELS = (
    "NestedWrappedModule",
    "AlwaysWrapNestedWrappedModule",
    "TransformerWithSharedParams",
    "NonUniformReqGradNWM",
    "NestedWrappedModuleWithDelay",
    "MixtureOfExperts",
)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")

Case: TypeAlias = tuple[str, str, bool, bool, str]
"""The model, the strategy, `use_orig_params`, offloading, and what else is set."""

CASES: list[Case] = [
    (model, strategy, originals, offload, "")
    for model, strategy, (originals, offload) in itertools.product(
        MODELS, STRATEGIES, ((False, False), (True, False), (True, True))
    )
    # torch trains this model with the original parameters alone.
    if originals or model != "NonUniformReqGradNWM"
]
CASES += [
    (model, "FULL_SHARD", True, False, more)
    for model in MODELS[:2]
    for more in ("BACKWARD_PRE", "BACKWARD_POST", "forward_prefetch", "scaler")
]


def test_torchs_own_comparison() -> None:
    """In no case do losses or parameters after two steps differ from DDP's by more than torch lets FSDP1's differ."""
    for failures in run_processes(2, compare, CASES):
        assert not failures, "\n".join(map(str, failures.items()))


def compare(group: Collectives, cases: list[Case]) -> dict[Case, str]:
    """Run torch's comparison in each case, and return what it says of those that fail."""
    del group
    warnings.simplefilter("ignore")
    flatparam.install()
    # Imported after it, as a program would, so that all of its names are ours.
    from torch.testing._internal import common_fsdp
    from torch.testing._internal.common_utils import TestCase

    class Comparison(common_fsdp.FSDPTestMixin, TestCase):  # type: ignore[misc]
        world_size, process_group = dist.get_world_size(), dist.group.WORLD
        rank = dist.get_rank()

        def runTest(self) -> None:
            """Not called: only the comparison's methods are."""

    assert common_fsdp.FSDP is flatparam.FullyShardedDataParallel
    failures = {}
    for case in cases:
        try:
            compare_one(common_fsdp, Comparison(), case)
        except Exception as error:
            failures[case] = f"{type(error).__name__}: {error}"
    return failures


def compare_one(torchs: Any, comparison: Any, case: Case) -> None:
    """Run torch's comparison in one case.

    Its mixed precision is left out, since it takes for granted that autocast leaves the loss of DDP in fp32, and so is
    a model in fp16, whose losses differ from DDP's by two roundings on the CPU.
    """
    name, strategy, originals, offload, more = case
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "": {},
        "forward_prefetch": {"forward_prefetch": True},
        "scaler": {"enable_sharded_grad_scaler": True},
        "BACKWARD_PRE": {"backward_prefetch": torchs.BackwardPrefetch.BACKWARD_PRE},
        "BACKWARD_POST": {"backward_prefetch": torchs.BackwardPrefetch.BACKWARD_POST},
    }[more]
    # torch's tests pass these models what they need to delay a rank, and a reference that leaves experts to their ranks.
    if name == "NestedWrappedModuleWithDelay":
        options["init_kwargs"] = {"delay_after_loss_ms": 1, "delay_before_reduction_ms": 1}
    if name == "MixtureOfExperts":
        options["ref_init_fn"] = torchs.DummyDDP
    comparison._test_fsdp_parity(
        getattr(torchs, name),
        torchs.FSDPInitMode.RECURSIVE,
        device_init_mode=torchs.DEVICEInitMode.DEVICE_BEFORE,
        sharding_strategy=getattr(torchs.ShardingStrategy, strategy),
        cpu_offload=torchs.CPUOffload(offload_params=offload),
        use_orig_params=originals,
        **options,
    )
