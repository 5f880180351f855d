"""The models that these tests save and load, each with the submodules that become units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize


def mlp() -> nn.Sequential:
    """Three layers whose sizes no world size divides."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


class Nested(nn.Module):
    """Parameters of its own before, between and after its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 3))
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)))
        self.last = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x) + self.first.sum(0))


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


class SharedModule(nn.Module):
    """One submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.between = nn.Linear(3, 3)
        self.two = self.one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self.one(x)))


class Odd(nn.Module):
    """0-d, empty, transposed and channels_last parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.conv = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.temperature = nn.Parameter(torch.randn(()))


class Dtypes(nn.Module):
    """Several dtypes, trainable and frozen, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(3, 2)
        self.brief = nn.Linear(2, 3).bfloat16()
        self.long = nn.Linear(3, 1).double()
        self.codes = nn.Parameter(torch.randint(-128, 127, (5, 2), dtype=torch.int8), requires_grad=False)
        self.wave = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.single_again = nn.Linear(2, 2)


class Buffers(nn.Module):
    """Buffers that are saved, one that is not, one that is 0-d, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.arange(3))
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.register_buffer("count", torch.tensor(5.0))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


def frozen() -> nn.Sequential:
    """Whole layers and single biases frozen."""
    model = mlp()
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def checkpointed_inside() -> nn.Sequential:
    """Activation checkpointing around a layer of a unit."""
    model = mlp()
    model[2] = checkpoint_wrapper(model[2])
    return model


def lstm() -> nn.Module:
    """A module that keeps a list of its parameters beside their names."""
    return nn.LSTM(3, 2, num_layers=2)


def parametrized() -> nn.Sequential:
    """A weight that is computed from a parameter of another module."""
    model = mlp()
    parametrize.register_parametrization(model[2], "weight", nn.Softplus())
    return model


@attrs.frozen
class Case:
    """A model, the names of the submodules that become units (innermost first), and of those that are ignored."""

    make: Callable[[], nn.Module]
    units: tuple[str, ...] = ("",)
    ignored: tuple[str, ...] = ()

    def build(self, seed: int = 7) -> nn.Module:
        """The unsharded model; the same for the same seed."""
        torch.manual_seed(seed)
        return self.make()


CASES = {
    "one unit": Case(mlp),
    "every layer a unit": Case(mlp, ("0", "2", "4", "")),
    "units in a plain parent": Case(mlp, ("0", "4")),
    "nested units": Case(Nested, ("inner.1.0", "inner.1", "inner", "")),
    "parameters around a unit": Case(Nested, ("inner", "")),
    "tied": Case(Tied),
    "tied around a unit": Case(Tied, ("body", "")),
    "shared module": Case(SharedModule),
    "shared module as a unit": Case(SharedModule, ("one", "")),
    "odd shapes": Case(Odd),
    "odd shapes in two units": Case(Odd, ("conv", "")),
    "dtypes": Case(Dtypes),
    "dtypes in several units": Case(Dtypes, ("single", "brief", "")),
    "frozen": Case(frozen),
    "frozen in units": Case(frozen, ("0", "2", "")),
    "buffers": Case(Buffers, ("layer", "")),
    "ignored": Case(Nested, ("inner.1.1", ""), ignored=("inner.0", "inner.1.0")),
    "checkpointing inside a unit": Case(checkpointed_inside),
    "a unit inside checkpointing": Case(checkpointed_inside, ("2._checkpoint_wrapped_module", "")),
    "a unit around checkpointing": Case(checkpointed_inside, ("2", "")),
    "lstm": Case(lstm),
    "parametrized": Case(parametrized, ("2", "")),
}
