"""What both halves of a row share: small models, a training run of a rank, and the same run on one unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from integration_tests.parity.local import reduce_by_rule
from integration_tests.parity.runs import gradients_of, parameters_of

Build: TypeAlias = Callable[[], nn.Module]
Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]
"""Of a model, a step and a rank."""
MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

STEPS = 3
RANKS = 2

both_exposures = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])


def seeded(build: Build) -> nn.Module:
    """The same module at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def batch(step: int, rank: int, width: int = 4) -> Tensor:
    """The rank's input of this step, 3 rows."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(100 * step + rank))


def square_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """The mean square of what the model makes of a batch."""
    return model(batch(step, rank)).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum, so that a gradient counts in later steps too."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With a weight decay that is seen at once."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def mlp() -> nn.Sequential:
    """Three layers whose sizes two does not divide."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, loss: Loss = square_loss) -> None:
    """This rank's part of some steps."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


def train_local(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss = square_loss
) -> dict[str, Tensor]:
    """The parameters after the same steps of one process, each with the mean of the ranks' gradients."""
    for step in range(STEPS):
        mean_gradients(model, functools.partial(_backward, loss, step))
        optimizer.step()
    return parameters_of(model)


def _backward(loss: Loss, step: int, model: nn.Module, rank: int) -> None:
    loss(model, step, rank).backward()


def mean_gradients(model: nn.Module, backward: Callable[[nn.Module, int], object]) -> None:
    """Leave the mean of the gradients in the model that `backward(model, rank)` computes for each rank."""
    of_ranks = []
    for rank in range(RANKS):
        model.zero_grad()
        backward(model, rank)
        of_ranks.append(gradients_of(model))
    for name, parameter in model.named_parameters():
        parameter.grad = reduce_by_rule([gradients[name] for gradients in of_ranks])


def full_parameters(model: Any) -> dict[str, Tensor]:
    """A copy of every parameter, by the names of the unwrapped model, of torch's wrapper or of ours."""
    with type(model).summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


def full_gradients(model: Any) -> dict[str, Tensor | None]:
    """The same for the gradients of our wrapper."""
    with type(model).summon_full_params(model, writeback=False, with_grads=True):
        return gradients_of(model)


def wrapped(module: nn.Module, *units: type[nn.Module], **arguments: Any) -> FullyShardedDataParallel:
    """Our wrapper, with the modules of these classes as units."""
    policy = ModuleWrapPolicy(set(units)) if units else None
    return FullyShardedDataParallel(module, auto_wrap_policy=policy, **arguments)


def on_two_ranks(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(group, *args)` returns on each of two ranks in a world of threads."""

    def rank(group: Collectives) -> Any:
        return fn(group, *args)

    return run_threads(RANKS, rank)
