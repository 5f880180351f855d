"""Losses over parameters themselves: a penalty, a norm or a count inside the wrapped forward, and outside of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives

from .models import seeded
from .worlds import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
LINEAR = ModuleWrapPolicy({nn.Linear})


class Penalised(nn.Module):
    """A module that computes its loss itself, as a LightningModule does, with a penalty on all parameters or on one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.counted: list[float] = []

    def forward(self, x: torch.Tensor, over: str) -> torch.Tensor:
        loss = self.out(self.layer(x).tanh()).square().mean()
        if over == "all":
            loss = loss + sum(p.square().sum() for p in self.parameters())
        elif over == "named":
            loss = loss + sum(p.square().sum() for name, p in self.named_parameters() if name.endswith("weight"))
        elif over == "children":
            loss = loss + sum(p.square().sum() for child in self.children() for p in child.parameters())
            assert len([next(child.parameters()).dtype for child in self.children()]) == 2
        elif over == "one":
            loss = loss + self.layer.weight.square().sum() + self.out.weight.abs().sum()
        self.counted = [sum(p.numel() for p in self.parameters())]
        self.counted += [float(torch.stack([p.detach().norm() for p in self.parameters()]).norm())]
        return loss


def in_place() -> nn.Module:
    model = seeded(Penalised)
    fully_shard(model.layer)
    fully_shard(model)
    return model


def one_unit(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: FSDP(seeded(Penalised), **settings)


ZERO2, WHOLE = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
ONE_UNIT = {
    "flat": one_unit(),
    "flat-zero2": one_unit(sharding_strategy=ZERO2),
    "flat-whole": one_unit(sharding_strategy=WHOLE),
    "original": one_unit(use_orig_params=True),
    "original-whole": one_unit(use_orig_params=True, sharding_strategy=WHOLE),
}
UNITS = {
    "flat-units": one_unit(auto_wrap_policy=LINEAR),
    "flat-units-zero2": one_unit(auto_wrap_policy=LINEAR, sharding_strategy=ZERO2),
    "original-units": one_unit(auto_wrap_policy=LINEAR, use_orig_params=True),
    "in-place": in_place,
}
ALL = {**ONE_UNIT, **UNITS}


def x_of(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], world: Collectives) -> Any:
    """The full gradients, and what the module counted."""
    loss(model, world.rank).backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    module = getattr(model, "module", model)
    return {name: state[name] - value for name, value in model.state_dict().items()}, module.counted


def expected(loss: Callable[[nn.Module, int], torch.Tensor], ranks: int = 2) -> tuple[dict[str, Any], list[float]]:
    model = seeded(Penalised)
    for rank in range(ranks):
        (loss(model, rank) / ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}, model.counted


@each_row("over", ["all", "named", "one"])
@each_row("how", ONE_UNIT)
def test_inside_the_forward_of_one_unit(how: str, over: str) -> None:
    """Each parameter counts once in a penalty, a number and a norm over `self.parameters()`, on every rank."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return model(x_of(rank), over)

    wanted, counted = expected(loss)
    for found, numbers in on_ranks(2, lambda world: gradients(ONE_UNIT[how](), loss, world)):
        assert numbers == pytest.approx(counted, rel=1e-6)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@each_row("over", ["all", "one", "children"])
@each_row("how", UNITS)
def test_inside_the_forward_of_the_root_over_inner_units(how: str, over: str) -> None:
    """The gradient is right for whole parameters of the root, for parts that it lists, and for what it reads of units."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return model(x_of(rank), over)

    wanted, _ = expected(loss)
    for found, _ in on_ranks(2, lambda world: gradients(UNITS[how](), loss, world)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@each_row("how", ALL)
def test_outside_of_the_forward(how: str) -> None:
    """A penalty on attributes between forward and backward is over this rank's parts, and all parts get its gradient.

    A model that is not sharded (`whole`) has the penalty on every rank, as DDP does.
    """

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        module = getattr(model, "module", model)
        layer = getattr(module.layer, "module", module.layer)
        return model(x_of(rank), "") + layer.weight.square().sum() + layer.bias.square().sum()

    wanted, _ = expected(loss)
    for found, _ in on_ranks(2, lambda world: gradients(ALL[how](), loss, world)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@each_row("how", ALL)
def test_a_gradient_is_cleared_between_forward_and_backward(how: str) -> None:
    """`model.zero_grad()` between the two clears what the step before left, whatever the module lists then."""

    def train(world: Collectives) -> Any:
        model = ALL[how]()
        model(x_of(7 + world.rank), "").backward()
        loss = model(x_of(world.rank), "")
        model.zero_grad()
        loss.backward()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return {name: state[name] - value for name, value in model.state_dict().items()}

    wanted, _ = expected(lambda model, rank: model(x_of(rank), ""))
    for found in on_ranks(2, train):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@each_row("how", UNITS)
def test_a_called_unit_lists_its_parameters_in_every_step(how: str) -> None:
    """Steps with a penalty over the parameters of units that were called are those of one process, the later ones too."""

    def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer, ranks: int) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for each in (rank,) if ranks == 1 else range(ranks):
                (model(x_of(10 * step + each), "children") / ranks).backward()
            optimizer.step()

    def on_rank(world: Collectives) -> Any:
        model = UNITS[how]()
        train(model, world.rank, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        return {name: value.clone() for name, value in model.state_dict().items()}

    local = seeded(Penalised)
    train(local, 0, torch.optim.SGD(local.parameters(), lr=0.1), 2)
    for found in on_ranks(2, on_rank):
        for name, value in local.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
