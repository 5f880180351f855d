"""Residency: which steps of a flat parameter are legal, and what each costs in memory."""

from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamError, FlatParamHandle, IllegalStepError, Residency, Transitions
from flatparam_core.testing import check_invariants

from .ranks import flatten_alone

STEPS: dict[str, Callable[[FlatParamHandle], object]] = {
    "begin_unshard": FlatParamHandle.begin_unshard,
    "finish_unshard": FlatParamHandle.finish_unshard,
    "reshard": FlatParamHandle.reshard,
}
LEGAL = {
    ("SHARDED", "begin_unshard"): "UNSHARDING",
    ("UNSHARDING", "finish_unshard"): "UNSHARDED",
    ("UNSHARDING", "reshard"): "SHARDED",
    ("UNSHARDED", "reshard"): "SHARDED",
}
TARGETS = {"begin_unshard": "UNSHARDING", "finish_unshard": "UNSHARDED", "reshard": "SHARDED"}


def handle_in(state: str, use_orig_params: bool) -> tuple[nn.Linear, FlatParamHandle]:
    module = nn.Linear(4, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    if state != "SHARDED":
        full, shard = handle.begin_unshard()
        full.copy_(shard)
    if state == "UNSHARDED":
        handle.finish_unshard()
    assert handle.residency is Residency[state]
    return module, handle


@pytest.mark.pairs("state", "step")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", Residency.__members__)
def test_every_step_from_every_state(state: str, step: str, use_orig_params: bool) -> None:
    """A step that is in the table leads to its target; any other raises, names both ends, and changes nothing."""
    module, handle = handle_in(state, use_orig_params)
    shown, allocated = module.weight, handle.buffer.is_allocated
    if (state, step) in LEGAL:
        STEPS[step](handle)
        assert handle.residency.name == LEGAL[state, step]
    else:
        with pytest.raises(IllegalStepError, match=f"from {state} to {TARGETS[step]}"):
            STEPS[step](handle)
        assert handle.residency.name == state
        assert module.weight is shown
        assert handle.buffer.is_allocated == allocated
    check_invariants(handle)


def test_the_error_names_parameter_rank_and_what_is_legal() -> None:
    """An illegal step says which flat parameter on which rank, and what could be done instead."""
    _, handle = handle_in("UNSHARDED", use_orig_params=False)
    with pytest.raises(FlatParamError, match=r"weight \.\. bias.* on rank 0: .*; from UNSHARDED it can go to SHARDED"):
        handle.begin_unshard()


@each_row(("state", "allocated"), [("SHARDED", 0), ("UNSHARDING", 40), ("UNSHARDED", 40)])
def test_memory_of_each_state(state: str, allocated: int, use_orig_params: bool) -> None:
    """The full buffer costs its bytes exactly while the flat parameter is not sharded."""
    _, handle = handle_in(state, use_orig_params)
    assert handle.buffer.tensor.untyped_storage().size() == allocated
    assert handle.flat_param.untyped_storage().size() == 40


def test_giving_up_a_gather_leaves_everything_usable(use_orig_params: bool) -> None:
    """After a gather that was never finished, the module shows its shard, and unsharding again works."""
    module, handle = handle_in("UNSHARDING", use_orig_params)
    before = module.weight
    handle.reshard()
    assert module.weight is before
    full, shard = handle.begin_unshard()
    full.copy_(shard)
    handle.finish_unshard()
    assert module.weight.shape == (2, 4)


def test_memory_may_be_reserved_before(use_orig_params: bool) -> None:
    """`begin_unshard` fills reserved memory, or `unreserve` frees it; `reserve` is refused beside full parameters."""
    _, handle = handle_in("SHARDED", use_orig_params)
    handle.reserve(copied=True)
    assert handle.buffer.held_nbytes == handle.buffer.nbytes
    handle.unreserve()
    assert not handle.buffer.held_nbytes
    check_invariants(handle)
    # The one rank has to copy its shard.
    assert handle.reserve(copied=True)
    place = handle.buffer.tensor.data_ptr()
    full, shard = handle.begin_unshard(copied=True)
    assert full.data_ptr() == place != shard.data_ptr()
    full.copy_(shard)
    handle.finish_unshard()
    handle.unreserve()
    assert handle.buffer.held_nbytes == handle.buffer.nbytes
    with pytest.raises(IllegalStepError):
        handle.reserve()


@pytest.mark.parametrize("state", ["SHARDED", "UNSHARDING"])
def test_write_back_needs_the_full_parameters(state: str, use_orig_params: bool) -> None:
    """Writing back what is not complete in memory is refused, and the shard keeps its values."""
    _, handle = handle_in(state, use_orig_params)
    before = handle.flat_param.detach().clone()
    with pytest.raises(IllegalStepError, match="finish an unshard in full precision first"):
        handle.write_back()
    assert torch.equal(handle.flat_param, before)


def test_depositing_before_the_first_unshard_is_refused() -> None:
    """A gradient cannot be taken from a leaf before there are leaves."""
    handle = flatten_alone(nn.Linear(4, 2))
    assert handle.leaves == ()
    with pytest.raises(IndexError):
        handle.deposit(0)


def test_repr_shows_the_state() -> None:
    """The repr of a handle names its residency, rank, sizes and first parameters."""
    _, handle = handle_in("UNSHARDING", use_orig_params=False)
    assert repr(handle).startswith("FlatParamHandle(UNSHARDING, FlatParameter(rank 0 of 1, 10 of 10 elements")
    assert "weight, bias" in repr(handle)


def test_transitions_move_only_along_the_table() -> None:
    """A table of steps returns the target of a legal one, and else names the noun, both ends and what is legal."""
    table = Transitions(
        "colour",
        {
            Residency.SHARDED: frozenset({Residency.UNSHARDED}),
            Residency.UNSHARDED: frozenset(),
        },
    )
    assert table.move(Residency.SHARDED, Residency.UNSHARDED, who="it") is Residency.UNSHARDED
    with pytest.raises(IllegalStepError, match=r"it: colour cannot go from UNSHARDED to SHARDED; .* to nothing"):
        table.move(Residency.UNSHARDED, Residency.SHARDED, who="it")
