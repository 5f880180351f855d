"""What a unit returns, and what may change between its passes: rows L-46 and L-56 of the specification."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from flatparam import ShardingStrategy
from flatparam_comm import Collectives, FlatParamError, run_threads
from integration_tests.lifted.our_half import (
    FSDP,
    assert_trains_as_one,
    blocks,
    full_gradients,
    give_gradients,
    gradient_of,
    seeded,
    sgd,
    square_loss,
    train,
    train_alone,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, gradients_of

X = torch.ones(3, 4)


class Plain:
    """An output that is no container that torch knows of."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    """One without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Hidden:
    """One that shows its tensor by a function only."""

    def __init__(self, value: Tensor) -> None:
        self.get = lambda: value

    @property
    def value(self) -> Tensor:
        return self.get()


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "plain": Plain,
    "slots": Slotted,
    "hidden in a function": Hidden,
    "nested": lambda tensor: Plain({"inner": [Slotted(tensor)]}),
}


def tensor_in(output: Any) -> Tensor:
    """The tensor of any of these."""
    value = output.value
    return value["inner"][0].value if isinstance(value, dict) else value


class Odd(nn.Module):
    """A layer that returns an object of a class of the user's."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


class Around(nn.Module):
    """Layers before and after an odd one."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(4, 4), Odd(make), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(tensor_in(self.odd(self.first(x))))


def torch_l46_root(group: Collectives) -> None:
    tensor_in(fsdp1(Odd(Plain))(X)).sum().backward()


def torch_l46_inside(group: Collectives) -> None:
    model = Around(Plain)
    model.odd = fsdp1(model.odd)
    fsdp1(model)(X).sum().backward()


def test_l46_torch_misses_tensors_in_objects(processes: Outcomes) -> None:
    """Torch fails late, in backward, where a wrapper returns an object of a class of the user's."""
    processes.assert_raised(torch_l46_root, "ValueError", "but current state is TrainingState.IDLE")
    processes.assert_raised(torch_l46_inside, "RuntimeError", "out of bounds for storage of size 0")


@each_row("make", OUTPUTS.values(), ids=OUTPUTS)
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_l46_a_unit_returns_any_object(make: Callable[[Tensor], Any], strategy: str) -> None:
    """A unit may return its tensors in objects of any class, also hidden ones; it trains to the same bits."""

    def wrap(model: Any, group: Collectives) -> nn.Module:
        model.odd = FSDP(model.odd, sharding_strategy=ShardingStrategy[strategy])
        return FSDP(model, sharding_strategy=ShardingStrategy[strategy])

    assert_trains_as_one(functools.partial(seeded, lambda: Around(make)), wrap)


class AtRoot(nn.Module):
    """Has an odd model inside, wrapped or not, and returns the tensor."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        return tensor_in(self.odd(x))


@each_row("make", OUTPUTS.values(), ids=OUTPUTS)
def test_l46_a_root_returns_any_object(make: Callable[[Tensor], Any]) -> None:
    """The same of the outermost wrapper, whose caller takes the tensor out."""

    def wrap(model: Any, group: Collectives) -> nn.Module:
        model.odd = FSDP(model.odd)
        return model

    def rank(group: Collectives) -> dict[str, Any]:
        model: Any = wrap(build(), group)
        train(model, sgd(model.parameters()), group.rank)
        return model.odd.state_dict()

    build = functools.partial(seeded, lambda: AtRoot(Odd(make)))
    expected: Any = train_alone(build(), 2)
    for state in run_threads(2, rank):
        assert_same_tensors(state, expected.odd.state_dict(), "after training:")


Change = Callable[[Iterable[nn.Parameter]], None]


def add(parameters: Iterable[nn.Parameter]) -> None:
    """Change values in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.25)


def replace_data(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters other memory, with other values."""
    for parameter in parameters:
        parameter.data = parameter.data + 0.25


def two_units(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The blocks as a root with one unit inside."""
    model: Any = blocks()
    model[1] = wrap(model[1])
    return wrap(model)


def torch_two_units() -> nn.Module:
    """Torch under SHARD_GRAD_OP, with original parameters."""
    more = {"sharding_strategy": TorchStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    return two_units(lambda module: fsdp1(module, **more))


def torch_l56_data(group: Collectives) -> None:
    model = torch_two_units()
    loss = square_loss(model, 0, 0)
    replace_data(model.parameters())
    loss.backward()


def torch_l56_step(group: Collectives) -> str:
    model = torch_two_units()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    square_loss(model, 0, 0).backward()
    loss = square_loss(model, 0, 0)
    optimizer.step()
    loss.backward()
    return "no word"


def test_l56_torch_raises_or_is_silent(processes: Outcomes) -> None:
    """Torch raises AssertionError for replaced data; after an optimizer's step between the passes it says nothing."""
    words = "does not support changing the parameters between forward and backward"
    processes.assert_raised(torch_l56_data, "AssertionError", words)
    assert processes.values(torch_l56_step) == ["no word"] * 2


def ours(strategy: str, original: bool) -> nn.Module:
    more: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    return two_units(lambda module: FSDP(module, **more))


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def changed_alone(change: Change) -> dict[str, Any]:
    """What the unsharded model is after the change and training."""
    model = blocks()
    change(model.parameters())
    return train_alone(model, 2).state_dict()


@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@each_row("original", [False, True])
def test_l56_a_step_between_the_passes_is_told(strategy: str, original: bool) -> None:
    """Backward raises on every rank, naming the unit; what was changed stays, and training goes on to the same bits."""

    def rank(group: Collectives) -> dict[str, Any]:
        model = ours(strategy, original)
        optimizer = sgd(model.parameters())
        loss = square_loss(model, 0, group.rank)
        add(held_by(optimizer))
        with pytest.raises(FlatParamError, match=r"unit '.+' on rank \d: its parameters were changed"):
            loss.backward()
        train(model, optimizer, group.rank)
        return model.state_dict()

    for state in run_threads(2, rank):
        assert_same_tensors(state, changed_alone(add), "after training:")


@each_row("original", [False, True])
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_l56_replaced_data(strategy: str, original: bool) -> None:
    """Other data for what the optimizer holds is told of in backward, or counts from the next forward on."""

    def rank(group: Collectives) -> Any:
        model = ours(strategy, original)
        optimizer = sgd(model.parameters())
        loss = square_loss(model, 0, group.rank)
        replace_data(held_by(optimizer))
        gradients = None
        with contextlib.suppress(FlatParamError):
            loss.backward()
            gradients = full_gradients(model)
        train(model, optimizer, group.rank)
        return gradients, model.state_dict()

    alone = blocks()
    give_gradients(alone, [gradient_of(alone, [0], rank) for rank in range(2)])
    for gradients, state in run_threads(2, rank):
        if gradients is not None:
            assert_same_tensors(gradients, gradients_of(alone), "gradient")
        assert_same_tensors(state, changed_alone(replace_data), "after training:")


@each_row("change", [add, replace_data])
def test_l56_full_parameters_are_a_copy(change: Change) -> None:
    """What is done to the full parameters that a root shows between passes is refused, or dropped with them."""

    def rank(group: Collectives) -> dict[str, Any]:
        model = FSDP(blocks(), use_orig_params=True)
        optimizer = sgd(model.parameters())
        loss = square_loss(model, 0, group.rank)
        change(shown for module in model.modules() for shown in module.parameters(recurse=False) if shown.requires_grad)
        with contextlib.suppress(RuntimeError):
            loss.backward()
            assert change is replace_data, "autograd tells of a change in place"
        train(model, optimizer, group.rank)
        return model.state_dict()

    for state in run_threads(2, rank):
        assert_same_tensors(state, changed_alone(lambda parameters: None), "after training:")


@each_row("failed", [False, True], ids=["between the passes", "after a failed backward"])
def test_l56_an_optimizer_made_late(failed: bool) -> None:
    """An optimizer that is made while a root shows full parameters trains the model; torch's is refused."""

    def rank(group: Collectives) -> dict[str, Any]:
        model = ours("FULL_SHARD", original=True)
        held = list(model.parameters())
        loss = square_loss(model, 0, group.rank)
        if failed:
            add(held)
            with pytest.raises(FlatParamError):
                loss.backward()
        train(model, sgd(model.parameters()), group.rank)
        return model.state_dict()

    expected = changed_alone(add if failed else lambda parameters: None)
    for state in run_threads(2, rank):
        assert_same_tensors(state, expected, "after training:")


def torch_l56_late_optimizer(group: Collectives) -> None:
    model = torch_two_units()
    square_loss(model, 0, 0)
    sgd(model.parameters())


def test_l56_torch_refuses_a_late_optimizer(processes: Outcomes) -> None:
    """Torch shows views between the passes, which an optimizer refuses."""
    processes.assert_raised(torch_l56_late_optimizer, "ValueError", "can't optimize a non-leaf Tensor")
