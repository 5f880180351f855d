"""Which tests have no twin by `plugin.py`, and why: beside those that start processes or need CUDA, these.

A name is what pytest calls a test, without its parameters where it stands for all of them, or a file.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_RUNTIME: Final = "packages/flatparam-runtime/tests"
_LIFTED: Final = "integration_tests/lifted"

_GATHERS_AHEAD: Final = "on an accelerator small units are gathered ahead in the forward pass, on purpose"
_POOL: Final = "on an accelerator torch's allocator is the pool, and ours keeps nothing"
_LSTM: Final = "an LSTM has a kernel of its own on each kind of device but the CPU, and the simulated one has none"

NOT_TWINNED: Final = MappingProxyType(
    {
        f"{_RUNTIME}/test_backward.py::test_gradients_are_collected_one_unit_at_a_time[None-1]": (
            "it says that reductions do not overlap where nothing is asked for; on an accelerator they do"
        ),
        f"{_RUNTIME}/test_events.py::test_the_schedule_of_one_step": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_events.py::test_the_schedule_with_an_input_that_needs_a_gradient": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_events.py::test_events_carry_phase_and_bytes": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_inner_calls.py::test_an_inner_call_gathers_only_its_unit": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_pool.py::test_what_is_kept_within_a_pass": _POOL,
        f"{_RUNTIME}/test_pool.py::test_where_nothing_is_gathered_again_a_backward_pass_keeps_nothing": _POOL,
        f"{_RUNTIME}/test_pool.py::test_what_is_not_sharded_takes_no_memory": _POOL,
        f"{_RUNTIME}/test_pool.py::test_what_no_sync_holds": _POOL,
        f"{_RUNTIME}/test_pool.py::test_nothing_is_kept_after_summoning": _POOL,
        f"{_RUNTIME}/test_prefetch.py::test_forward_prefetch": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_prefetch_lists.py::test_a_list_takes_the_place_of_the_plan": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_shard.py::test_other_libraries_modules_are_units": _LSTM,
        f"{_RUNTIME}/test_traverse.py::test_a_tensor_is_found_in[packed sequence]": (
            "torch keeps the lengths of a packed sequence on the CPU, and its default device takes them elsewhere"
        ),
        f"{_LIFTED}/test_prefetch.py::test_l47_the_order_is_learned_again": _GATHERS_AHEAD,
        f"{_LIFTED}/test_prefetch.py::test_l47_several_units_ahead_in_the_forward_pass": _GATHERS_AHEAD,
        f"{_LIFTED}/test_prefetch.py::test_l47_lists_of_what_to_gather": _GATHERS_AHEAD,
        f"{_LIFTED}/test_prefetch.py::test_l48_the_peak_is_a_formula": _GATHERS_AHEAD,
        f"{_LIFTED}/test_ranks.py::test_l01_ranks_that_run_different_units_are_told": (
            "on an accelerator both units are gathered ahead, so that the ranks' forward passes do not differ yet"
        ),
    }
)
"""By the name of a test, why it makes no sense on the device."""


def why_not_twinned(node_id: str) -> str | None:
    """Why the test with this name has no twin; `None` where it has one."""
    return next((reason for name, reason in NOT_TWINNED.items() if stands_for(name, node_id)), None)


def stands_for(name: str, node_id: str) -> bool:
    """Whether a name of `NOT_TWINNED` means the test with this node id."""
    return node_id == name or node_id.startswith((f"{name}[", f"{name}::"))
