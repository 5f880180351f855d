"""From leaf gradients to ``.grad``: what is reduced, who gets a gradient, and what stays ``None``."""

import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamHandle, Precision, flatten_module

from .ranks import Ranks, flatten_alone, gather, reduce, seeded


class Branches(nn.Module):
    """Two branches of which a forward pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        out: torch.Tensor = self.left(x) if left else self.right(x)
        return out


def originals(handle: FlatParamHandle) -> dict[str, nn.Parameter]:
    return dict(zip(handle.layout.fqns, handle.exposure.parameters(), strict=True))


def test_deposit_takes_the_gradient_off_the_leaf(use_orig_params: bool) -> None:
    """A deposit moves the gradient: the leaf has none afterwards, and a second deposit moves nothing."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    module(torch.ones(1, 3)).sum().backward()
    handle.deposit(1)
    assert handle.leaves[1].grad is None
    assert handle.leaves[0].grad is not None
    handle.deposit(1)
    assert handle.gradients.slot(1).tolist() == [1.0, 1.0]
    assert list(handle.gradients.deposited) == [0, 1]


def test_gradients_are_kept_while_resharded(use_orig_params: bool) -> None:
    """Freeing the parameters keeps the deposited gradients, and those that are still on the leaves."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    module(torch.ones(1, 3)).sum().backward()
    handle.deposit(0)
    handle.reshard()
    handle.deposit(1)
    assert handle.gradients.slot(0).tolist() == [[1.0] * 3] * 2
    assert handle.gradients.slot(1).tolist() == [1.0, 1.0]


def test_reduce_asks_for_the_flat_gradient() -> None:
    """begin_reduce gives a fresh shard to write to and the whole flat gradient, in the reduction dtype."""
    precision = Precision(reduce_dtype=torch.float64)
    (handle,) = flatten_module(nn.Linear(3, 5), rank=1, world_size=3, precision=precision)
    output, full = handle.begin_reduce()
    assert (output.shape, output.dtype) == ((handle.layout.shard_numel,), torch.float64)
    assert (full.shape, full.dtype) == ((handle.layout.numel,), torch.float64)
    assert not full.any()


@each_row("world_size", [1, 2, 3])
def test_the_padding_of_a_reduced_shard_is_zero(world_size: int) -> None:
    """The gradient of the padding is zero, so no optimizer ever moves it."""
    ranks = Ranks(lambda: nn.Linear(3, 5), world_size)
    ranks.unshard()
    for (handle,) in ranks.handles:
        handle.gradients.open()
        handle.gradients.buffer.tensor.fill_(torch.nan)
    ranks.backward([module(torch.randn(2, 3)).sum() for module in ranks.modules])
    grads = [handle.flat_param.grad for (handle,) in ranks.handles]
    flat = torch.cat([grad for grad in grads if grad is not None])
    assert torch.isfinite(flat).all()
    assert all(not flat[gap.as_slice()].any() for gap in ranks.handles[0][0].layout.gaps)


def test_memory_is_freed_after_reduction(use_orig_params: bool) -> None:
    """After finish_reduce there is no flat gradient, and ``.grad`` has one shard of bytes."""
    ranks = Ranks(lambda: nn.Linear(4, 4), 2, use_orig_params=use_orig_params)
    ranks.unshard()
    ranks.backward([module(torch.ones(1, 4)).sum() for module in ranks.modules])
    for (handle,) in ranks.handles:
        assert handle.gradients.buffer.tensor.untyped_storage().size() == 0
        assert all(leaf.grad is None for leaf in handle.leaves)
        storages = {
            parameter.grad.untyped_storage().data_ptr(): parameter.grad.untyped_storage().size()
            for parameter in handle.exposure.parameters()
            if parameter.grad is not None
        }
        assert list(storages.values()) == [handle.layout.shard_numel * 4]


def test_gradients_accumulate_over_reductions(use_orig_params: bool) -> None:
    """A second reduction adds to ``.grad``, and setting it to None starts again."""
    ranks = Ranks(lambda: nn.Linear(3, 5), 2, use_orig_params=use_orig_params)

    def step() -> None:
        ranks.unshard()
        ranks.backward([module(torch.ones(1, 3)).sum() for module in ranks.modules])

    def total() -> float:
        parameters = [p for (handle,) in ranks.handles for p in handle.exposure.parameters()]
        return sum(float(p.grad.sum()) for p in parameters if p.grad is not None)

    step()
    assert total() == 20.0
    step()
    assert total() == 40.0
    for module in ranks.modules:
        module.zero_grad()
    step()
    assert total() == 20.0


def test_no_gradient_stays_none_with_originals() -> None:
    """With the original parameters, one that no rank used has None, and one that some rank used has the mean."""
    ranks = Ranks(Branches, 2, use_orig_params=True)
    x = torch.ones(1, 3)
    ranks.unshard()
    ranks.backward([ranks.modules[0](x, True).sum(), ranks.modules[1](x, True).sum()])
    for (handle,) in ranks.handles:
        grads = {name: parameter.grad for name, parameter in originals(handle).items()}
        assert grads["right.weight"] is None
        assert grads["right.bias"] is None
        assert (grads["left.weight"] is None) == (not originals(handle)["left.weight"].numel())
    ranks.unshard()
    ranks.backward([ranks.modules[0](x, False).sum(), ranks.modules[1](x, True).sum()])
    parts = [originals(handle)["right.bias"].grad for (handle,) in ranks.handles]
    assert torch.cat([part for part in parts if part is not None]).tolist() == [0.5, 0.5, 0.5]


def test_every_rank_agrees_on_who_has_a_gradient() -> None:
    """A parameter whose gradient came only on another rank has one here too, if this rank has elements of it."""
    ranks = Ranks(Branches, 2, use_orig_params=True)
    x = torch.ones(1, 3)
    ranks.unshard()
    ranks.backward([ranks.modules[0](x, True).sum(), ranks.modules[1](x, False).sum()])
    for module in ranks.modules:
        assert [p.grad is not None for p in module.parameters()] == [p.numel() > 0 for p in module.parameters()]
        assert all(p.grad is None or p.grad.shape == p.shape for p in module.parameters())


def test_by_default_this_ranks_arrivals_count() -> None:
    """Without ``arrived``, a parameter gets a gradient if this rank deposited one."""
    module = Branches()
    handle = flatten_alone(module, use_orig_params=True)
    gather([handle])
    module(torch.ones(1, 3), True).sum().backward()
    for index in range(4):
        handle.deposit(index)
    output, full = handle.begin_reduce()
    handle.finish_reduce(output.copy_(full))
    assert {fqn for fqn, p in originals(handle).items() if p.grad is not None} == {"left.weight", "left.bias"}


def test_nothing_arrived_leaves_grad_alone(use_orig_params: bool) -> None:
    """A reduction in which no rank had a gradient sets none, and keeps one that is there."""
    ranks = Ranks(Branches, 2, use_orig_params=use_orig_params)
    ranks.unshard()
    ranks.reshard()
    ranks.reduce()
    for (handle,) in ranks.handles:
        assert all(parameter.grad is None for parameter in handle.exposure.parameters())


def test_the_flat_parameters_gradient_of_unused_parts_is_zero() -> None:
    """With the flat parameter, the part of a parameter that got no gradient is zero in the flat gradient."""
    ranks = Ranks(Branches, 2)
    ranks.unshard()
    ranks.backward([module(torch.ones(1, 3), True).sum() for module in ranks.modules])
    gradients = ranks.full_gradients()
    assert not gradients["right.weight"].any()
    assert gradients["left.bias"].tolist() == [1.0, 1.0, 1.0]


def test_divisors_before_and_after() -> None:
    """The averaging factor may be applied at each deposit, after the reduction, or split between the two."""
    found = []
    for before, after in ((4.0, 1.0), (1.0, 4.0), (2.0, 2.0)):
        ranks = Ranks(lambda: nn.Linear(3, 5), 4)
        ranks.unshard()
        for module in ranks.modules:
            module(torch.ones(2, 3)).square().sum().backward()
        ranks.deposit(divisor=before)
        ranks.reshard()
        ranks.reduce(divisor=after)
        found.append(ranks.full_gradients()["weight"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_reduction_dtype_is_cast_back() -> None:
    """Gradients are reduced in the reduction dtype and arrive in the shard's own."""
    precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks = Ranks(lambda: nn.Linear(3, 5).double(), 2, precision=precision)
    ranks.unshard()
    ranks.backward([module(torch.ones(1, 3).bfloat16()).sum() for module in ranks.modules])
    for (handle,) in ranks.handles:
        assert handle.gradients.buffer.tensor.dtype is torch.float32
        assert handle.flat_param.grad is not None
        assert handle.flat_param.grad.dtype is torch.float64


def test_accumulating_in_the_ledger_without_reducing(use_orig_params: bool) -> None:
    """Several backward passes before one reduction give the sum of their gradients, as gradient accumulation needs."""
    inputs = [torch.randn(2, 3) for _ in range(3)]
    reference = seeded(lambda: nn.Linear(3, 5))
    for x in inputs:
        reference(x).square().sum().backward()
    ranks = Ranks(lambda: nn.Linear(3, 5), 2, use_orig_params=use_orig_params)
    for x in inputs:
        ranks.unshard()
        for module in ranks.modules:
            module(x).square().sum().backward()
        ranks.deposit(divisor=2)
        ranks.reshard()
    ranks.reduce()
    for name, parameter in reference.named_parameters():
        parts = []
        for rank, (handle,) in enumerate(ranks.handles):
            index = handle.layout.fqns.index(name)
            fragment = handle.layout.fragment(index, rank)
            if use_orig_params:
                grad = handle.exposure.parameters()[index].grad
            else:
                grad = handle.flat_param.grad
                grad = None if grad is None else grad[fragment.in_shard.as_slice()]
            assert (grad is None) == (use_orig_params and not fragment.in_shard)
            parts.append(torch.empty(0) if grad is None else grad.flatten())
        assert parameter.grad is not None
        assert torch.equal(torch.cat(parts), parameter.grad.reshape(-1))


def test_frozen_parameters_cost_no_gradient_memory(use_orig_params: bool) -> None:
    """Frozen parameters beside trainable ones: theirs is a flat parameter of its own, whose ledger never gets bytes."""
    make = lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2))  # noqa: E731
    ranks = Ranks(make, 2, use_orig_params=use_orig_params)
    ranks.unshard()
    for module in ranks.modules:
        module(torch.ones(1, 8)).sum().backward()
    ranks.deposit()
    for trained, frozen in ranks.handles:
        assert trained.layout.fqns == ("1.weight", "1.bias")
        assert frozen.layout.fqns == ("0.weight", "0.bias")
        assert trained.gradients.buffer.tensor.untyped_storage().size() == trained.layout.numel * 4
        assert frozen.gradients.buffer.tensor.untyped_storage().size() == 0
        assert frozen.gradients.is_empty
    ranks.reshard()
    ranks.reduce()
    for _, frozen in ranks.handles:
        assert all(parameter.grad is None for parameter in frozen.exposure.parameters())


def test_a_parameter_frozen_between_backward_and_reduction_gets_its_gradient() -> None:
    """As in one process: freezing a parameter leaves the gradients of earlier backward passes to it."""
    module = nn.Linear(3, 2)
    handle = flatten_alone(module, use_orig_params=True)
    gather([handle])
    module(torch.ones(1, 3)).sum().backward()
    handle.deposit(0)
    handle.deposit(1)
    handle.reshard()
    module.bias.requires_grad_(False)
    reduce([handle])
    assert torch.equal(module.bias.grad, torch.ones(2))
    assert torch.equal(module.weight.grad, torch.ones(2, 3))


def test_a_gradient_from_before_flattening_is_no_trap() -> None:
    """An original that had a gradient when it was flattened can still be trained."""
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    (handle,) = flatten_module(module, rank=0, world_size=2, use_orig_params=True)
    assert all(p.grad is None or p.grad.shape == p.shape for p in module.parameters())
    output, _ = handle.begin_reduce()
    handle.finish_reduce(output.zero_(), arrived=[1, 1])
