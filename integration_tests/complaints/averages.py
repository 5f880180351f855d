"""Programs that keep an average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .rows import FSDP1, row
from .shared import Off, backward, loss_of, off, seeded, sgd, shard, train, wrap


def averaged(model: Any, ranks: Sequence[int]) -> AveragedModel:
    """Train a model and keep its moving average, by torch's own class."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(model)
    for step in range(3):
        backward(model, ranks, step)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average


@row("pytorch#149138", "torch's `AveragedModel` of a sharded model.")
def averaged_model(fsdp: Any, rank: int) -> Off:
    average = averaged(shard(fsdp, seeded()), [rank])
    expected = averaged(seeded(), [0, 1])
    return off(average.module, expected.module, seeded())


@row("Lightning#21414", "The averaged model is evaluated.")
def evaluated_average(fsdp: Any, rank: int) -> Off:
    average = averaged(shard(fsdp, seeded()), [rank])
    expected = averaged(seeded(), [0, 1])
    with torch.no_grad():
        return Off(abs((loss_of(average, rank) / loss_of(expected, rank)).item() - 1))


@row("miles-credit#414", "The average begins as a deep copy of the sharded model.")
def copied(fsdp: Any, rank: int) -> Off:
    found = []
    for model, ranks in ((shard(fsdp, seeded()), [rank]), (seeded(), [0, 1])):
        average = copy.deepcopy(model)
        train(model, ranks)
        with torch.no_grad():
            for mine, each in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(each, 0.5)
        found.append(average)
    return off(found[0], found[1], seeded())


@row(
    "miles-credit#416",
    "The weights are exchanged for their average, a loss is computed, and training goes on.",
)
def exchanged(fsdp: Any, rank: int) -> Off:
    models, losses = (shard(fsdp, seeded()), seeded()), []
    for model, ranks in zip(models, ([rank], [0, 1]), strict=True):
        average = [each.detach().clone() for each in model.parameters()]
        train(model, ranks)
        with torch.no_grad():
            kept = [each.detach().clone() for each in model.parameters()]
            for each, mine in zip(model.parameters(), average, strict=True):
                each.lerp_(mine, 0.5)
            losses.append(loss_of(model, rank))
            for each, mine in zip(model.parameters(), kept, strict=True):
                each.copy_(mine)
        train(model, ranks)
    by_loss = abs((losses[0] / losses[1]).item() - 1)
    return Off(max(by_loss, off(models[0], models[1], seeded()).by))


@row(
    "SimpleTuner#1884",
    "torch's `AveragedModel` of a model in FSDP1's class, with original parameters.",
    FSDP1,
)
def averaged_wrapper(fsdp: Any, rank: int) -> Off:
    average = averaged(wrap(fsdp, seeded(), use_orig_params=True), [rank])
    expected = averaged(seeded(), [0, 1])
    return off(average.module, expected.module, seeded())
