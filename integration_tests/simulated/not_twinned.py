"""Which tests have no twin by `plugin.py`, and why: beside those that start processes or need CUDA, these.

A name is what pytest calls a test, without its parameters where it stands for all of them, or a file.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_COMM: Final = "packages/flatparam-comm/tests"
_RUNTIME: Final = "packages/flatparam-runtime/tests"
_OPTIM: Final = "packages/flatparam-optim/tests"
_STATE: Final = "packages/flatparam-state/tests"
_LIFTED: Final = "integration_tests/lifted"
_PUBLISH: Final = "packages/flatparam-publish/tests"
_CLIENTS: Final = "packages/flatparam-clients/tests"
_INTERFACE: Final = "packages/flatparam/tests"

_GATHERS_AHEAD: Final = "on an accelerator small units are gathered ahead in the forward pass, on purpose"
_POOL: Final = "on an accelerator torch's allocator is the pool, and ours keeps nothing"
_LSTM: Final = "an LSTM has a kernel of its own on each kind of device but the CPU, and the simulated one has none"
_FSDP1_ON_CPU: Final = "torch's FSDP1 is beside it, over gloo and on the CPU by name"
_CPU_BY_NAME: Final = "it passes the CPU as the device, by name"
_PIECES: Final = "long parameters are stepped in pieces on the CPU only, whose caches they do not fit in"
_FUSED: Final = (
    "a real accelerator steps a whole unit by one fused kernel; the simulated one takes the CPU's, which rounds a "
    "tensor's end otherwise"
)
_BY_HAND: Final = "it counts elements as a CPU lays them out; an accelerator's shards are aligned"
_STAYS: Final = "it says what moves on a machine without an accelerator: nothing, or the parameters alone"
_HALF: Final = "the simulated device rounds the end of a tensor in half precision as a CPU does, and no other device"
_DIVIDES_BEHIND: Final = "an accelerator divides a sum and not its summands, so that the sum may leave the range"
_STEP_COUNT: Final = "torch puts RMSprop's count of steps on the default device, where no offloaded parameter is"
_FREED: Final = (
    "on an accelerator streams would have to agree on memory that somebody has a view of, so it is freed, as in FSDP1"
)
_READ_LATER: Final = "on an accelerator the ranks' comparison is read one pass later, and the test ends before"
_PRETENDS: Final = "it has the CPU pretend to run ahead, and the device does"
_SPARSE: Final = "the simulated device has no sparse tensors"
_WEAK_REFERENCES: Final = "torch cannot take a parameter with weak references to a device that is none of its own list"

NOT_TWINNED: Final = MappingProxyType(
    {
        f"{_COMM}/test_contract_refusals.py::test_bad_calls_are_refused_and_leave_the_group_usable": _SPARSE,
        f"{_RUNTIME}/test_parts.py": "shared memory alone takes parts, and it is the host's",
        f"{_RUNTIME}/test_lending.py::test_a_view_that_a_hook_keeps_stays_right": _FREED,
        f"{_RUNTIME}/test_events.py::test_the_schedule_of_one_step": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_events.py::test_the_schedule_with_an_input_that_needs_a_gradient": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_events.py::test_events_carry_phase_and_bytes": _GATHERS_AHEAD,
        f"{_RUNTIME}/test_events.py::test_waits_are_told_to_the_instruments_that_ask_for_them": _GATHERS_AHEAD,
        **{
            f"{_RUNTIME}/test_nonfinite.py::test_a_step_is_left_out_as_one_process_leaves_it_out"
            f"[offloaded-_rmsprop-{how}-{orig}]": _STEP_COUNT
            for how in ("once", "no_sync", "reduced")
            for orig in (True, False)
        },
        f"{_RUNTIME}/test_nonfinite.py::test_a_sum_that_overflows_is_found[2e+38-1--True]": _DIVIDES_BEHIND,
        f"{_RUNTIME}/test_nonfinite.py::test_a_sum_that_overflows_is_found[2e+38-1--False]": _DIVIDES_BEHIND,
        f"{_RUNTIME}/test_nonfinite.py::test_large_gradients_are_finite": _DIVIDES_BEHIND,
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
        f"{_INTERFACE}/test_compositions.py::test_marks_for_the_compiler": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_deferred_init.py::test_param_init_fn_is_called_as_by_torch": _FSDP1_ON_CPU,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_every_optimizer_has_the_bits_of_the_plain_one": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_state_is_the_optimizers_own": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_saved_and_loaded_between": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_what_cannot_be_cut_is_stepped_whole": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_gradients_come_and_go": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_state_that_the_step_makes_is_put_together": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_state_that_was_cleared": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_a_step_that_is_broken_off": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_a_step_is_noticed_by_autograd": _PIECES,
        f"{_OPTIM}/segments/test_flat_pieces.py::test_other_parameters_are_left_alone": _PIECES,
        f"{_OPTIM}/segments/test_joined_steps.py::test_every_optimizer_has_the_bits_of_the_plain_one[whole-AdamW-how6]": _FUSED,
        f"{_OPTIM}/segments/test_joined_steps.py::test_a_scaler_that_skips_steps[True]": _FUSED,
        f"{_OPTIM}/segments/test_joined_steps.py::test_long_parameters_are_not_joined": _PIECES,
        "integration_tests/matrices/test_muon.py::test_half_precision_is_exact": _HALF,
        f"{_INTERFACE}/test_grad_scaler.py::test_sparse_gradients_are_torchs": _SPARSE,
        f"{_CLIENTS}/test_install.py::test_after_torch_has_wrapped": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_offloading.py::test_the_bytes_that_are_freed": _STAYS,
        f"{_INTERFACE}/test_offloading.py::test_host_memory_of_a_host": _STAYS,
        f"{_INTERFACE}/test_offloading.py::test_between_forward_and_backward": _STAYS,
        f"{_STATE}/test_between_uses.py::test_offloading": _STAYS,
        f"{_INTERFACE}/test_optim_state.py::test_a_state_that_torchs_fsdp1_saved": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_policies.py::test_a_subclass_is_called_with_fsdp1s_arguments": _CPU_BY_NAME,
        f"{_INTERFACE}/optimizers/test_optimizer_in_backward.py::test_training_is_that_of_an_optimizer_outside"
        "[{'cpu_offload': CPUOffload(offload_params=True)}-whole]": _WEAK_REFERENCES,
        f"{_INTERFACE}/optimizers/test_optimizer_in_backward.py::test_training_is_that_of_an_optimizer_outside"
        "[{'cpu_offload': CPUOffload(offload_params=True)}-policy]": _WEAK_REFERENCES,
        f"{_STATE}/test_memory.py::test_loading_a_model_allocates_nothing": (
            "values that lie on the host come through memory of the device"
        ),
        f"{_CLIENTS}/test_clients_inside.py::test_the_upcast_of_mixed_precision": _CPU_BY_NAME,
        f"{_INTERFACE}/test_fully_shard.py::test_unshard_and_reshard": _BY_HAND,
        f"{_INTERFACE}/test_fully_shard.py::test_policies_of_torch": "memory that is not pinned is refused there",
        f"{_INTERFACE}/test_fully_shard.py::test_values_after_sharding_on_the_meta_device": _CPU_BY_NAME,
        f"{_CLIENTS}/test_private_names.py::test_a_flat_parameter_that_is_cast": _FSDP1_ON_CPU,
        f"{_CLIENTS}/test_private_names.py::test_the_facts_of_a_flat_parameter_are_torchs": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_placement.py::test_without_sync_module_states_each_rank_keeps_its_own_values": _BY_HAND,
        f"{_CLIENTS}/test_private_names.py::test_the_length_of_a_shard": _BY_HAND,
        f"{_INTERFACE}/test_wrapper_tensors.py::test_training_on_top_of_it": _BY_HAND,
        f"{_INTERFACE}/test_placement.py::test_ways_to_name_the_cpu": "it is about the CPU",
        f"{_INTERFACE}/test_policies.py::test_a_policy_function_is_asked_with_torchs_arguments": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_policies.py::test_the_modules_that_torch_wraps": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_policies.py::test_the_modules_that_torch_wraps_beside_ignored_ones": _FSDP1_ON_CPU,
        f"{_CLIENTS}/test_private_names.py::test_how_far_ahead_units_are_gathered": _GATHERS_AHEAD,
        f"{_INTERFACE}/test_resolving.py::test_forward_prefetch": _GATHERS_AHEAD,
        f"{_INTERFACE}/test_resolving.py::test_no_prefetch": _GATHERS_AHEAD,
        f"{_INTERFACE}/test_state_dict.py::test_a_state_that_torchs_fsdp1_saved": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_state_dict_type.py::test_the_default_is_fsdp1s": _FSDP1_ON_CPU,
        f"{_INTERFACE}/test_wrapper.py::test_parameter_names_are_fsdp1s": _FSDP1_ON_CPU,
        f"{_COMM}/test_many_ranks.py::test_a_mismatch_of_many_ranks": _CPU_BY_NAME,
        f"{_COMM}/test_many_ranks.py::test_many_different_ranks": _CPU_BY_NAME,
        f"{_COMM}/test_transfer.py::test_a_host_that_runs_ahead": _PRETENDS,
        f"{_COMM}/test_uneven.py::test_shards_of_different_lengths_are_gathered_and_summed": _BY_HAND,
        f"{_STATE}/test_optimizer_misfits.py::test_a_tensor_that_cannot_be_copied": _SPARSE,
        f"{_STATE}/test_optimizer_misfits.py::test_a_parameter_that_cannot_be_copied_on_one_rank": _SPARSE,
        f"{_PUBLISH}/test_full_tensors.py::test_bytes_on_the_wire": _BY_HAND,
        f"{_LIFTED}/test_clipping.py::test_l36_a_norm_that_is_not_finite": _BY_HAND,
        "packages/flatparam-plan/tests/test_recorder.py::test_the_line_is_the_formula": _BY_HAND,
        f"{_INTERFACE}/test_deferred_init.py::test_buffers_of_a_unit_without_parameters": _CPU_BY_NAME,
        f"{_INTERFACE}/test_environment_switches.py::test_fake_reduce": _BY_HAND,
        "integration_tests/test_load_pretrained.py::test_memory": "it counts memory of the host",
        f"{_INTERFACE}/test_written_states.py::test_torchs_average_moves": (
            "torch averages whole numbers by an operation that the device has for fractions alone"
        ),
        **{
            f"{_INTERFACE}/test_nonfinite.py::test_a_bad_step_is_as_if_it_had_not_been[half_kept-{orig}]": (
                "torch's optimizers step lists on an accelerator, and want gradients in the dtype of the parameters"
            )
            for orig in (True, False)
        },
        **{
            f"{_INTERFACE}/test_ranks_compute_alike.py::{name}": _READ_LATER
            for name in (
                "test_an_optimizer_state_of_other_values_on_one_rank_is_told",
                "test_averages_that_differ_by_rank_are_told",
                "test_averages_on_one_rank_alone_are_told",
                "test_torchs_clipping_to_another_norm_on_one_rank_is_told",
                "test_another_scale_on_one_rank_is_told",
                "test_groups_of_several_models",
            )
        },
    }
)
"""By the name of a test, why it makes no sense on the device."""


def why_not_twinned(node_id: str) -> str | None:
    """Why the test with this name has no twin; `None` where it has one."""
    return next((reason for name, reason in NOT_TWINNED.items() if stands_for(name, node_id)), None)


def stands_for(name: str, node_id: str) -> bool:
    """Whether a name of `NOT_TWINNED` means the test with this node id."""
    return node_id == name or node_id.startswith((f"{name}[", f"{name}::"))
