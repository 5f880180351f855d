"""The memory of full parameters that somebody has by its address: NumPy, DLPack, shared memory, views that are kept."""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamHandle
from flatparam_core.testing import check_invariants

from .ranks import flatten_alone, reduce


def gather(handles: list[FlatParamHandle]) -> None:
    """Gather to memory of their own, as if there were several ranks."""
    for handle in handles:
        full, shard = handle.begin_unshard(copied=True)
        full.copy_(shard)
        handle.finish_unshard()


GIVEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda tensor: tensor.detach().numpy(),
    "dlpack": lambda tensor: numpy.from_dlpack(tensor.detach()),
    "view": lambda tensor: tensor.detach()[:1],
    "shared": lambda tensor: tensor.detach().share_memory_(),
}


@each_row("counted", [False, True], ids=["in-a-pass", "counted"])
@each_row("how", GIVEN)
def test_who_has_the_memory_keeps_it_and_its_values(how: str, counted: bool, use_orig_params: bool) -> None:
    """What was given out stays as it was when the parameter changes, and the next gathers are right.

    Views and DLPack keep their memory only if the holders were counted, as they are when parameters are summoned.
    """
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    if counted:
        handle.form.count_holders()
    given = GIVEN[how](module.weight)
    before = module.weight.detach().clone()
    leaves = handle.leaves
    handle.reshard()
    check_invariants(handle)
    with torch.no_grad():
        handle.flat_param.add_(1.0)
    gather([handle])
    assert handle.leaves is leaves
    assert torch.equal(module.weight, before + 1)
    if counted or how in ("numpy", "shared"):
        assert given.tolist() == before[: len(given)].tolist()
    module(torch.ones(1, 2)).sum().backward()
    handle.deposit(0)
    handle.deposit(1)
    handle.reshard()
    reduce([handle])
    assert all(parameter.grad is not None for parameter in module.parameters())
    check_invariants(handle)


def test_the_backward_pass_has_what_the_forward_pass_saved() -> None:
    """An array of a weight that the forward pass uses does not change its gradient."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = flatten_alone(module)
    gather([handle])
    module[1].weight.detach().numpy()
    loss = module(torch.ones(1, 2)).sum()
    handle.reshard()
    gather([handle])
    loss.backward()
    assert torch.equal(module[0].bias.grad, module[1].weight.detach().sum(0))


def test_memory_is_left_once() -> None:
    """The next reshard frees memory as ever, if nobody else has it."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    gather([handle])
    handle.form.count_holders()
    kept = handle.leaves[0].detach()
    handle.reshard()
    gather([handle])
    storage = handle.buffer.tensor.untyped_storage()
    assert storage.data_ptr() != kept.untyped_storage().data_ptr()
    handle.reshard()
    assert storage.nbytes() == 0
    assert handle.buffer.tensor.untyped_storage()._cdata == storage._cdata


def test_a_backend_that_has_the_buffer_at_the_first_gather_is_not_counted_for_good() -> None:
    """Its thread lets go a moment later; who has an array of a later pass keeps the values then."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    full, shard = handle.begin_unshard(copied=True)
    full.copy_(shard)
    handle.finish_unshard()
    del full
    for _ in range(2):
        handle.form.leave_to_holders()
        handle.reshard()
        gather([handle])
    handle.form.leave_to_holders()
    given = module.weight.data.numpy()
    before = module.weight.tolist()
    handle.reshard()
    gather([handle])
    with torch.no_grad():
        module.weight.zero_()
    assert given.tolist() == before
