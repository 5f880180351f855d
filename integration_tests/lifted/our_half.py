"""The other half of every test here: ours, in a world of threads, beside one unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from integration_tests.parity import zoo
from integration_tests.parity.local import reduce_by_rule
from integration_tests.parity.models import Block
from integration_tests.parity.runs import assert_same_tensors, gradients_of, parameters_of

Build: TypeAlias = Callable[[], nn.Module]
Wrap: TypeAlias = Callable[[nn.Module, Collectives], nn.Module]
Loss: TypeAlias = Callable[[nn.Module, int, int], Tensor]
"""Of a model, a step and a rank."""
MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]

FSDP = FullyShardedDataParallel
STEPS = 3
RANKS = 2

both_exposures = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])


def seeded(build: Build, seed: int = 0) -> nn.Module:
    """The same module at each call."""
    return zoo.seeded(build, seed)()


def batch(step: int, rank: int, width: int = 4) -> Tensor:
    """The rank's input of this step, 3 rows."""
    return zoo.batch(step, rank, 3, width)


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


def blocks() -> nn.Module:
    """Two blocks and a layer; the same in every call."""
    return seeded(lambda: nn.Sequential(Block(4), Block(4), nn.Linear(4, 2)))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    loss: Loss = square_loss,
    steps: Sequence[int] = range(STEPS),
) -> None:
    """Train a wrapped model as its rank."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()


def train_local(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss = square_loss) -> dict[str, Tensor]:
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


def train_alone(model: nn.Module, ranks: int = RANKS, steps: Sequence[int] = range(STEPS)) -> nn.Module:
    """Train an unsharded model on the mean of the losses of that many ranks, and return it."""
    optimizer = sgd(model.parameters())
    for step in steps:
        give_gradients(model, [gradient_of(model, [step], rank) for rank in range(ranks)])
        optimizer.step()
    return model


def gradient_of(model: nn.Module, steps: Sequence[int], rank: int) -> dict[str, Tensor | None]:
    """What an unsharded model has for a rank after the backward passes of these steps."""
    model.zero_grad()
    for step in steps:
        square_loss(model, step, rank).backward()
    return gradients_of(model)


def give_gradients(model: nn.Module, of_ranks: Sequence[dict[str, Any]], divide: float | None = None) -> None:
    """Have an unsharded model hold the ranks' mean, or their sum divided by another number.

    Of neighbours first, then of pairs: if each pair is a shard group this is the order in which ours adds.
    """
    for name, parameter in model.named_parameters():
        terms = [gradients[name] for gradients in of_ranks]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        parameter.grad = terms[0] / (divide or len(of_ranks))


def assert_trains_as_one(build: Build, wrap: Wrap, ranks: int = 2) -> None:
    """Demand that a wrapped model, trained on that many ranks, has the bits of the unsharded one."""

    def rank(group: Collectives) -> dict[str, Any]:
        model = wrap(build(), group)
        train(model, sgd(model.parameters()), group.rank)
        return model.state_dict()

    expected = train_alone(build(), ranks).state_dict()
    for state in run_threads(ranks, rank):
        assert_same_tensors(state, expected, "after training:")


def full_parameters(model: Any) -> dict[str, Tensor]:
    """A copy of every parameter, by the names of the unwrapped model, of torch's wrapper or of ours."""
    with type(model).summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


def full_gradients(model: Any) -> dict[str, Tensor | None]:
    """A copy of every full gradient of a model that we shard, wrapped or by hooks alone."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
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


def hybrid(group: Collectives) -> tuple[Collectives, Collectives]:
    """For four ranks: neighbours share the parameters, and there are two copies."""
    shards = [group.subgroup(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [group.subgroup(ranks) for ranks in ([0, 2], [1, 3])]
    return next(filter(_mine, shards)), next(filter(_mine, copies))  # type: ignore[return-value]


def _mine(group: Collectives | None) -> bool:
    return group is not None
