"""A plan is what happens: memory at every stage, what rests, and every collective, with error 0.

The truth about memory is torch's own profiler of the CPU allocator; about collectives, the byte ledger.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans.configurations import CONFIGURATIONS

from flatparam.planning.costs import measure
from flatparam.planning.rehearsal.rehearsing import rehearse
from flatparam.planning.setup import Setup

pytestmark = pytest.mark.filterwarnings("ignore")


def errors_of(name: str, **chosen: Any) -> dict[str, int]:
    """The differences between the plan and one real rank among the others."""
    configuration = CONFIGURATIONS[name]
    setup = Setup(**{"wrap": configuration.units, **chosen})
    program = configuration.program()
    return rehearse(program, setup).costs.errors(measure(program, setup, setup.topology()))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_transformer_as_the_page_shows_it(name: str) -> None:
    """The ten configurations of the page have no error."""
    assert errors_of(name, **CONFIGURATIONS[name].settings) == {}


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_each_transformer_on_four_ranks(name: str, use_orig_params: bool) -> None:
    """Both exposures, three steps."""
    assert errors_of(name, world_size=4, use_orig_params=use_orig_params) == {}


STRATEGIES = {1: ("full",), 2: ("full", "grad_op", "no_shard"), 3: ("full", "grad_op", "no_shard")}
SHARDED = ("full", "grad_op", "no_shard", "hybrid:2", "hybrid_grad_op:2")
DTYPES = (None, torch.bfloat16)


@st.composite
def setups(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A transformer, and a setup that fits it."""
    name = draw(st.sampled_from(sorted(CONFIGURATIONS)))
    units = CONFIGURATIONS[name].units
    world = draw(st.sampled_from([1, 2, 3, 4, 16, 4096]))
    wrap = draw(st.sampled_from([units, None, 5000]))
    chosen = {
        "world_size": world,
        "rank": draw(st.integers(0, world - 1)),
        "strategy": draw(st.sampled_from(STRATEGIES.get(world, SHARDED))),
        "wrap": wrap,
        "param_dtype": draw(st.sampled_from(DTYPES)),
        "reduce_dtype": draw(st.sampled_from((*DTYPES, torch.float32))),
        "optimizer": draw(st.sampled_from(["adamw", "adam", "sgd", "momentum", "adagrad", "none"])),
        "cpu_offload": draw(st.booleans()),
        "checkpointing": draw(st.sampled_from([(), units])) if wrap == units else (),
        "use_orig_params": draw(st.booleans()),
        "accumulate": draw(st.integers(1, 3)),
        "max_norm": draw(st.sampled_from([None, 1.0])),
        "forward_prefetch": draw(st.integers(0, 2)),
        "backward_prefetch": draw(st.sampled_from(["pre", "post", "none"])),
        "transport": draw(st.sampled_from(["direct", "gloo", "shared_memory"])),
    }
    return name, chosen


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(setups())
def test_a_plan_is_what_happens(chosen: tuple[str, dict[str, Any]]) -> None:
    """Any transformer under any setup: plan and run are equal in every number."""
    name, setup = chosen
    assert errors_of(name, **setup) == {}
