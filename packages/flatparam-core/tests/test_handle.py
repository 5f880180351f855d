"""FlatParamHandle: packing, leaves, mixed precision and writing back."""

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamHandle, Precision, flatten_module

from .ranks import Ranks, flatten_alone, gather, seeded

BF16 = Precision(param_dtype=torch.bfloat16)


def linear() -> nn.Linear:
    return nn.Linear(3, 5)


def test_leaves_are_the_same_objects_for_ever(use_orig_params: bool) -> None:
    """Each unshard shows the very leaves of the first one, at the same views of the same buffer."""
    ranks = Ranks(linear, 2, use_orig_params=use_orig_params)
    (handle,) = ranks.handles[1]
    assert handle.leaves == ()
    ranks.unshard()
    leaves = handle.leaves
    for _ in range(4):
        ranks.reshard()
        assert all(now is then for now, then in zip(handle.leaves, leaves, strict=True))
        ranks.unshard()
        assert ranks.modules[1].weight is leaves[0]


def test_leaves_are_independent_autograd_leaves() -> None:
    """A leaf is no view to autograd: its gradient is its own, and a parameter that was not used has none."""
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    handle = flatten_alone(module)
    gather([handle])
    module["used"](torch.ones(1, 2)).sum().backward()
    assert all(leaf.is_leaf and not leaf._is_view() for leaf in handle.leaves)
    assert [leaf.grad is not None for leaf in handle.leaves] == [True, True, False, False]


def test_backward_after_reshard_and_unshard_is_exact(use_orig_params: bool) -> None:
    """Freeing after the forward pass and filling before the backward pass gives the gradients of never having freed."""
    inputs = torch.randn(4, 3)
    reference = seeded(linear)
    reference(inputs).square().sum().backward()
    ranks = Ranks(linear, 2, use_orig_params=use_orig_params)
    ranks.unshard()
    losses = [module(inputs).square().sum() for module in ranks.modules]
    ranks.reshard()
    ranks.unshard()
    for loss, (handle,) in zip(losses, ranks.handles, strict=True):
        loss.backward()
        for leaf, wanted in zip(handle.leaves, reference.parameters(), strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, wanted.grad)


@each_row("world_size", [1, 2, 3, 7])
def test_shards_hold_the_parameters_and_zero_padding(world_size: int, use_orig_params: bool) -> None:
    """End to end, the ranks' shards are the parameters; what is padding is zero."""
    full = seeded(linear)
    ranks = Ranks(linear, world_size, use_orig_params=use_orig_params)
    layout = ranks.handles[0][0].layout
    flat = torch.cat([handle.flat_param.detach() for (handle,) in ranks.handles])
    assert flat.numel() == layout.numel
    for slot, wanted in zip(layout.slots, full.parameters(), strict=True):
        assert torch.equal(flat[slot.span.as_slice()], wanted.detach().reshape(-1))
    assert all(not flat[gap.as_slice()].any() for gap in layout.gaps)


def test_the_shard_has_memory_of_its_own(use_orig_params: bool) -> None:
    """A rank keeps its shard's bytes and none of the original parameters' memory."""
    module = nn.Linear(30, 40)
    storages = [parameter.untyped_storage().data_ptr() for parameter in module.parameters()]
    (handle,) = flatten_module(module, rank=1, world_size=4, use_orig_params=use_orig_params)
    assert handle.flat_param.untyped_storage().size() == handle.layout.shard_numel * 4
    assert handle.flat_param.untyped_storage().data_ptr() not in storages
    if use_orig_params:
        own = handle.flat_param.untyped_storage().data_ptr()
        assert all(p.untyped_storage().data_ptr() == own for p in module.parameters())


def test_first_unshard_in_inference_mode(use_orig_params: bool) -> None:
    """A model that was first evaluated in inference mode can be trained afterwards."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    with torch.inference_mode():
        gather([handle])
        module(torch.ones(1, 3))
        handle.reshard()
    gather([handle])
    module(torch.ones(1, 3)).sum().backward()
    assert [leaf.requires_grad for leaf in handle.leaves] == [True, True]
    assert handle.leaves[1].grad is not None
    assert handle.leaves[1].grad.tolist() == [1.0, 1.0]


def test_first_unshard_without_grad(use_orig_params: bool) -> None:
    """A model that was first evaluated under no_grad can be trained afterwards."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    with torch.no_grad():
        gather([handle])
        handle.reshard()
    gather([handle])
    assert module(torch.ones(1, 3)).requires_grad


def test_an_unfilled_buffer_never_shows_old_values() -> None:
    """Values that were gathered before do not come back by themselves: each unshard shows what was written for it."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    gather([handle])
    handle.reshard()
    with torch.no_grad():
        handle.flat_param.fill_(4.0)
    gather([handle])
    assert module.weight.tolist() == [[4.0, 4.0], [4.0, 4.0]]


@each_row("world_size", [1, 2, 3])
def test_compute_dtype(world_size: int, use_orig_params: bool) -> None:
    """With a compute dtype the leaves have it, rounded from the shard, which keeps the parameters' own dtype."""
    full = seeded(linear)
    ranks = Ranks(linear, world_size, use_orig_params=use_orig_params, precision=BF16)
    ranks.unshard()
    for module, (handle,) in zip(ranks.modules, ranks.handles, strict=True):
        assert handle.flat_param.dtype is torch.float32
        assert handle.buffer.nbytes == handle.layout.numel * 2
        assert torch.equal(module.weight, full.weight.detach().bfloat16())
        assert torch.equal(module.bias, full.bias.detach().bfloat16())
    ranks.reshard()
    assert all(module.weight.dtype is torch.float32 for module in ranks.modules)


def test_where_the_gathers_input_lies() -> None:
    """The input of a gather is the shard itself if dtypes agree, else the rank's own slice of the output."""
    for precision in (Precision(), BF16):
        (handle,) = flatten_module(nn.Linear(3, 5), rank=1, world_size=2, precision=precision)
        full, shard = handle.begin_unshard()
        assert full.shape == (handle.layout.numel,)
        assert shard.shape == (handle.layout.shard_numel,)
        assert full.dtype is shard.dtype is precision.compute(torch.float32)
        home = handle.flat_param if precision == Precision() else handle.buffer.shard(1)
        assert shard.data_ptr() == home.data_ptr()
        assert not shard.requires_grad


def test_the_gathers_input_is_not_a_graph_node() -> None:
    """Filling the buffer records no history, even outside no_grad."""
    handle = flatten_alone(nn.Linear(3, 5), precision=BF16)
    full, _ = handle.begin_unshard()
    assert full.grad_fn is None
    assert not full.requires_grad


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["own", "bf16"])
def test_write_back(precision: Precision, use_orig_params: bool) -> None:
    """Values written into the full parameters, in their own dtype, on every rank are the parameters after write_back.

    Padding is unchanged.
    """
    ranks = Ranks(linear, 2, use_orig_params=use_orig_params, precision=precision)
    ranks.unshard(full_precision=True)
    for module, (handle,) in zip(ranks.modules, ranks.handles, strict=True):
        with torch.no_grad():
            module.weight.fill_(0.5)
            module.bias.copy_(torch.arange(5.0))
        handle.write_back()
    ranks.reshard()
    full = ranks.full_parameters()
    assert torch.equal(full["weight"], torch.full((5, 3), 0.5, dtype=full["weight"].dtype))
    assert full["bias"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    flat = torch.cat([handle.flat_param.detach() for (handle,) in ranks.handles])
    assert all(not flat[gap.as_slice()].any() for gap in ranks.handles[0][0].layout.gaps)


def test_without_write_back_a_change_of_full_parameters_is_gone() -> None:
    """Values that are written into full parameters last until these are resharded."""
    ranks = Ranks(linear, 2)
    wanted = ranks.full_parameters()
    ranks.unshard()
    with torch.no_grad():
        for module in ranks.modules:
            module.weight.zero_()
    ranks.reshard()
    assert torch.equal(ranks.full_parameters()["weight"], wanted["weight"])


def test_zero_dimensional_and_empty_parameters(use_orig_params: bool) -> None:
    """0-d parameters and parameters without elements keep their shapes, and only one rank holds the 0-d one."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.weight = nn.Parameter(torch.ones(3))

    ranks = Ranks(Odd, 3, use_orig_params=use_orig_params)
    assert sum(module.scale.numel() for module in ranks.modules) == 1
    ranks.unshard()
    for module in ranks.modules:
        assert module.scale.shape == ()
        assert module.scale.item() == 3.0
        assert module.nothing.shape == (0, 4)
        (module.scale * module.weight).sum().backward()
        assert module.scale.grad.item() == 3.0
    ranks.deposit(divisor=3)
    ranks.reshard()
    ranks.reduce()
    assert ranks.modules[0].scale.numel() == 1


def test_a_gapped_parameter_becomes_row_major(use_orig_params: bool) -> None:
    """A parameter that is a slice of a larger tensor is sharded with its values, row-major."""
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.arange(12.0).reshape(3, 4)[:, ::2]))
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    assert module.w.tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert module.w.is_contiguous()


def test_name_of_a_handle() -> None:
    """A handle is named after its parameter, or after its first and last."""

    def name(module: nn.Module) -> str:
        handle: FlatParamHandle = flatten_alone(module)
        return handle.name

    assert name(nn.Linear(2, 2, bias=False)) == "weight"
    assert name(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == "0.weight .. 2.bias (4 parameters)"
