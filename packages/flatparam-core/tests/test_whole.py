"""If one rank has the whole flat parameter, nothing is copied."""

import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamHandle, Precision

from .ranks import flatten_alone, seeded


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unshard(handle: FlatParamHandle, **arguments: bool) -> None:
    """Unshard the only rank's flat parameter: there is nothing to gather from other ranks."""
    full, shard = handle.begin_unshard(**arguments)
    if full.data_ptr() != shard.data_ptr():
        full.copy_(shard)
    handle.finish_unshard()


def step(handle: FlatParamHandle, loss: torch.Tensor) -> torch.Tensor:
    """Run a step from a loss to `.grad`; return the flat gradient as it was to be reduced."""
    loss.backward()
    handle.deposit_all(range(len(handle.leaves)))
    handle.reshard()
    output, full = handle.begin_reduce()
    assert output.data_ptr() == full.data_ptr()
    handle.finish_reduce(output)
    return full


def test_full_parameters_are_the_flat_parameter() -> None:
    """The full parameters lie in the flat parameter's memory, and a reshard frees nothing."""
    module = seeded(lambda: nn.Linear(3, 5))
    handle = flatten_alone(module, use_orig_params=True)
    before = handle.flat_param.detach().clone()
    unshard(handle)
    assert {storage_of(leaf) for leaf in handle.leaves} == {storage_of(handle.flat_param)}
    with torch.no_grad():
        module.weight.mul_(2)
    handle.reshard()
    weight = handle.layout.slots[0].span.as_slice()
    assert torch.equal(handle.flat_param[weight], before[weight] * 2)
    assert handle.flat_param.untyped_storage().nbytes() > 0


@each_row("how", ["copied", "cast", "flat"])
def test_full_parameters_of_their_own(how: str) -> None:
    """Full parameters have memory of their own in a different dtype, on request, and if `parameters()` lists both."""
    module = seeded(lambda: nn.Linear(3, 5))
    precision = Precision(torch.bfloat16) if how == "cast" else None
    handle = flatten_alone(module, precision=precision, use_orig_params=how != "flat")
    before = handle.flat_param.detach().clone()
    unshard(handle, copied=how == "copied")
    assert storage_of(handle.leaves[0]) != storage_of(handle.flat_param)
    with torch.no_grad():
        module.weight.zero_()
    handle.reshard()
    assert torch.equal(handle.flat_param, before)
    assert not handle.buffer.is_allocated
    # In full precision, originals are views of the flat parameter again.
    unshard(handle, full_precision=True)
    assert (storage_of(handle.leaves[0]) == storage_of(handle.flat_param)) == (how != "flat")
    handle.reshard()


def test_they_follow_data_that_is_given() -> None:
    """A flat parameter that is given other data has its full parameters there, as the same objects."""
    module = seeded(lambda: nn.Linear(3, 5))
    handle = flatten_alone(module, use_orig_params=True)
    unshard(handle)
    leaves = handle.leaves
    handle.reshard()
    handle.flat_param.data = handle.flat_param.detach() + 1
    unshard(handle)
    assert all(leaf is before for leaf, before in zip(handle.leaves, leaves, strict=True))
    assert {storage_of(leaf) for leaf in handle.leaves} == {storage_of(handle.flat_param)}
    x = torch.randn(2, 3)
    assert torch.equal(module(x), nn.functional.linear(x, handle.leaves[0], handle.leaves[1]))
    handle.reshard()


def test_the_flat_gradient_becomes_the_gradient(use_orig_params: bool) -> None:
    """`.grad` lies in the memory that gradients were collected in, and the next pass collects in other memory."""
    reference = seeded(lambda: nn.Linear(3, 5))
    module = seeded(lambda: nn.Linear(3, 5))
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    made = []
    for _ in range(3):
        x = torch.randn(2, 3)
        reference(x).square().sum().backward()
        unshard(handle)
        made.append(step(handle, module(x).square().sum()))
        assert not handle.gradients.buffer.is_allocated
    owner = handle.exposure.parameters()[0]
    assert owner.grad is not None
    assert storage_of(owner.grad) == storage_of(made[0])
    assert len({storage_of(full) for full in made}) == 3
    flat = torch.cat(
        [parameter.grad.flatten() for parameter in handle.exposure.parameters() if parameter.grad is not None]
    )
    expected = torch.cat(
        [parameter.grad.flatten() for parameter in reference.parameters() if parameter.grad is not None]
    )
    assert torch.equal(flat[: expected.numel()], expected)
