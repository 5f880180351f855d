"""The optimizers whose state is saved and loaded: torch's element-wise ones, which see a shard as they see a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The one that most tests take."""
    return torch.optim.Adam(parameters, lr=0.1)


class Keeper(torch.optim.Optimizer):
    """Keeps all kinds of state, of which only `like` is shaped like its parameter."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter] = {
                        "like": parameter.detach() * 2,
                        "text": "kept",
                        "nothing": None,
                        "count": 3,
                        "history": [0.5, 0.25],
                    }


class Ticker(torch.optim.SGD):
    """SGD with momentum that also counts, in a 0-d tensor under a name that no optimizer of torch uses."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for values in self.state.values():
            values["ticks"] = values.get("ticks", torch.zeros(())) + 1


def decay_groups(model: nn.Module, *, names: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Two groups with settings of their own, divided by the parameters' names."""
    chosen = [parameter for name, parameter in model.named_parameters() if names(name)]
    others = [parameter for name, parameter in model.named_parameters() if not names(name)]
    return [{"params": chosen, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]


def lacking_a_parameter(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """Rank 1's optimizer does not hold the first parameter of which it has elements."""
    parameters = list(model.parameters())
    if rank == 1:
        parameters.remove(next(parameter for parameter in parameters if parameter.numel()))
    return adam(parameters)


def lacking_a_step(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """Rank 1's optimizer holds all, and has not stepped the first parameter of which it has elements."""
    optimizer = adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: _drop_a_gradient(model) if rank == 1 else None)
    return optimizer


def _drop_a_gradient(model: nn.Module) -> None:
    next(parameter for parameter in model.parameters() if parameter.numel()).grad = None
