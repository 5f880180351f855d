"""An optimizer that was made before ``flatten_module(use_orig_params=False)`` holds the originals: they follow the shard."""

import gc

import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatParamHandle, flatten_module, owner_of

from .ranks import Ranks, flatten_alone, gather, reduce, seeded
from .test_training import OPTIMIZERS, ZOO, check_equal, train_locally, train_ranks


class TwoBranches(nn.Module):
    """A forward pass uses the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, used: str) -> torch.Tensor:
        found: torch.Tensor = sum(getattr(self, name)(torch.ones(1, 2)) for name in used)
        return found.square().sum()


def train_round(handle: FlatParamHandle, module: nn.Module, *inputs: object) -> None:
    """Run a step on one rank, from the shard to ``.grad``."""
    gather([handle])
    module(*inputs).sum().backward()
    for index in range(len(handle.leaves)):
        handle.deposit(index)
    handle.reshard()
    reduce([handle])


def held_ranks(model: str, world_size: int) -> tuple[Ranks, list[list[nn.Parameter]]]:
    """Ranks of a model, and for each what an optimizer made before sharding holds."""
    modules = [seeded(ZOO[model]) for _ in range(world_size)]
    held = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    prepared = iter(modules)
    return Ranks(lambda: next(prepared), world_size), held


@each_row("set_to_none", [True, False], ids=["none", "zeros"])
@each_row("optimizer", OPTIMIZERS)
@each_row("model", ZOO)
def test_two_ranks_of_followers_equal_one_model(model: str, optimizer: str, set_to_none: bool) -> None:
    """Stepping the originals trains the shards: bit for bit the losses and parameters of plain training.

    Also if a parameter has a gradient only sometimes, or never: the followers get ``None`` when plain training does.
    """
    losses, reference = train_locally(ZOO[model], optimizer, 2, set_to_none=set_to_none)
    ranks, held = held_ranks(model, 2)
    optimizers = [OPTIMIZERS[optimizer](parameters) for parameters in held]
    assert train_ranks(ranks, optimizers, set_to_none=set_to_none) == losses
    check_equal(ranks, reference)


@each_row("set_to_none", [True, False], ids=["none", "zeros"])
@each_row("world_size", [1, 4])
def test_other_powers_of_two(world_size: int, set_to_none: bool) -> None:
    """One and four ranks of followers equal plain training bit for bit too, though some hold nothing of a parameter."""
    losses, reference = train_locally(ZOO["conditional"], "adamw", world_size, set_to_none=set_to_none)
    ranks, held = held_ranks("conditional", world_size)
    optimizers = [OPTIMIZERS["adamw"](parameters) for parameters in held]
    assert train_ranks(ranks, optimizers, set_to_none=set_to_none) == losses
    check_equal(ranks, reference)


def test_followers_are_views_of_the_shard() -> None:
    """Originals that somebody holds keep their number of dimensions and cost no memory beside the shard."""
    module = nn.Conv2d(2, 3, 2)
    held = list(module.parameters())
    (handle,) = flatten_module(module, rank=1, world_size=2)
    assert [tuple(parameter.shape) for parameter in held] == [(10, 1, 1, 1), (3,)]
    home = handle.flat_param.untyped_storage().data_ptr()
    assert all(parameter.untyped_storage().data_ptr() == home for parameter in held)
    with torch.no_grad():
        held[1].fill_(6.0)
    assert module.bias.tolist() == [6.0] * 3
    assert handle.flat_param[10:13].tolist() == [6.0] * 3


def test_their_gradients_are_views_of_the_flat_gradient() -> None:
    """After a reduction, changing the flat parameter's gradient (as clipping does) changes what the followers step on."""
    module = nn.Linear(2, 2)
    held = list(module.parameters())
    handle = flatten_alone(module)
    assert [parameter.grad for parameter in held] == [None, None]
    train_round(handle, module, torch.ones(1, 2))
    assert handle.flat_param.grad is not None
    handle.flat_param.grad.mul_(10.0)
    assert [parameter.grad.flatten().tolist() for parameter in held] == [[10.0] * 4, [10.0] * 2]
    assert [tuple(parameter.grad.shape) for parameter in held] == [(2, 2), (2,)]


def test_gradients_accumulate_over_rounds_without_zero_grad() -> None:
    """Two reductions without zero_grad give the followers the sum, as they do the flat parameter."""
    module = nn.Linear(2, 2)
    held = list(module.parameters())
    handle = flatten_alone(module)
    for count in (1.0, 2.0, 3.0):
        train_round(handle, module, torch.ones(1, 2))
        assert held[0].grad.flatten().tolist() == [count] * 4
        assert handle.flat_param.grad.tolist() == [count] * 6


@each_row("set_to_none", [True, False], ids=["none", "zeros"])
def test_each_round_after_zero_grad_starts_afresh(set_to_none: bool) -> None:
    """zero_grad of an optimizer over the followers empties the flat gradient too, round after round."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    handle = flatten_alone(module)
    for _ in range(3):
        train_round(handle, module, torch.ones(1, 2))
        assert handle.flat_param.grad.tolist() == [1.0] * 6
        optimizer.zero_grad(set_to_none=set_to_none)


@each_row("set_to_none", [True, False], ids=["none", "zeros"])
def test_a_parameter_without_a_gradient_has_what_plain_training_has(set_to_none: bool) -> None:
    """Over rounds that use different branches, each follower's gradient is that of plain training: None, zeros or values."""
    plain = seeded(TwoBranches)
    module = seeded(TwoBranches)
    held = list(module.parameters())
    steppers = [torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(held, lr=0.1)]
    handle = flatten_alone(module)
    for used in ("a", "ab", "b", "a"):
        plain(used).backward()
        train_round(handle, module, used)
        for parameter, wanted in zip(held, plain.parameters(), strict=True):
            assert (parameter.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                assert torch.equal(parameter.grad.flatten(), wanted.grad.flatten())
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=set_to_none)
    wanted = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    assert torch.equal(handle.flat_param, wanted)


def test_a_zeroed_follower_leaves_the_others_alone() -> None:
    """If only some followers were set to None, only their parts of the flat gradient start afresh."""
    module = nn.Linear(2, 2)
    weight, bias = module.parameters()
    handle = flatten_alone(module)
    train_round(handle, module, torch.ones(1, 2))
    bias.grad = None
    train_round(handle, module, torch.ones(1, 2))
    assert weight.grad.flatten().tolist() == [2.0] * 4
    assert bias.grad.tolist() == [1.0] * 2
    assert handle.flat_param.grad.tolist() == [2.0] * 4 + [1.0] * 2


def test_nobody_follows_where_nobody_holds_the_originals() -> None:
    """Originals that only the module held are gone once it is sharded; the exposure keeps none alive."""
    module = nn.Linear(2, 2)
    held = module.weight
    handle = flatten_alone(module)
    gc.collect()
    assert list(handle.exposure.originals()) == [0]
    assert handle.exposure.originals()[0] is held
    del held
    gc.collect()
    assert handle.exposure.originals() == {}


def test_the_originals_of_the_other_exposure() -> None:
    """With use_orig_params=True every original is there, whoever else holds it."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=True)
    assert list(handle.exposure.originals()) == [0, 1]
    assert handle.exposure.originals()[1] is module.bias


def test_a_gradient_from_before_sharding_is_dropped() -> None:
    """A full gradient that a follower had is not mixed with the sharded ones."""
    module = nn.Linear(2, 2)
    held = list(module.parameters())
    module(torch.full((1, 2), 9.0)).sum().backward()
    handle = flatten_alone(module)
    assert [parameter.grad for parameter in held] == [None, None]
    train_round(handle, module, torch.ones(1, 2))
    assert held[0].grad.flatten().tolist() == [1.0] * 4


def test_the_stamp_counts_a_followers_step() -> None:
    """An in-place change through a follower is seen in the stamp, as one through the flat parameter is."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = flatten_alone(module)
    train_round(handle, module, torch.ones(1, 2))
    before = handle.stamp()
    optimizer.step()
    assert handle.stamp() > before


def test_the_stamp_counts_a_change_before_the_first_gradient() -> None:
    """Values written through an original that somebody holds are a change of the shard, also before any training."""
    module = nn.Linear(2, 2)
    held = list(module.parameters())
    handle = flatten_alone(module)
    before = handle.stamp()
    with torch.no_grad():
        held[0].fill_(3.0)
    assert handle.stamp() > before


def test_zero_grad_of_the_module_counts_for_followers() -> None:
    """After ``module.zero_grad()`` a parameter that the next round does not use has no gradient to be stepped on."""
    module = TwoBranches()
    held = list(module.parameters())
    handle = flatten_alone(module)
    train_round(handle, module, "ab")
    module.zero_grad()
    train_round(handle, module, "a")
    assert [parameter.grad is None for parameter in held] == [False, False, True, True]


def test_new_data_of_a_follower_is_not_lost() -> None:
    """``.data =`` on an original that follows the shard is taken over, or refused; never lost silently."""
    module = nn.Linear(2, 2)
    held = list(module.parameters())
    handle = flatten_alone(module)
    held[0].data = torch.full((2, 2), 7.0)
    gather([handle])
    assert module.weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]


@each_row("use_orig_params", [False, True])
def test_originals_can_be_asked_for(use_orig_params: bool) -> None:
    """Originals that nobody has held are made anew, once; stepping them trains the shard, as it does for kept ones."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gc.collect()
    weight, bias = handle.original(0), handle.original(1)
    assert handle.original(0) is weight
    assert owner_of(bias) == (handle, 1)
    assert [tuple(weight.shape), tuple(bias.shape)] == [(2, 2), (2,)]
    optimizer = torch.optim.SGD([weight, bias], lr=1.0)
    expected = handle.flat_param.detach().clone()
    for _ in range(2):
        stamp = handle.stamp()
        train_round(handle, module, torch.ones(1, 2))
        assert weight.grad is not None
        assert weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        optimizer.step()
        expected[:6] -= 1.0
        assert torch.equal(handle.flat_param[:6], expected[:6])
        assert handle.stamp() != stamp
        optimizer.zero_grad()


def test_an_original_that_comes_late_has_the_gradient() -> None:
    """One that is asked for after the backward pass has its part of the flat parameter's gradient."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    gc.collect()
    train_round(handle, module, torch.ones(1, 2))
    late = handle.original(1)
    assert late.grad is not None
    assert late.grad.tolist() == [1.0, 1.0]
