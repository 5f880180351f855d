"""How costs grow with the number of units and of parameters; and the step of an optimizer over many parameters.

On one rank whose collectives do nothing. Seconds are of CPU time, the least of some repetitions: the work is the same
each time, and other programs only add to it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor, nn

from flatparam_comm import Collectives

from .absent import CONTENDERS, PLAIN, world
from .counts import calls_of, without_collector
from .training import Setting, Training
from .workloads import stack

NAMES: Final = tuple(name for name in CONTENDERS if "without" not in name)
WORLD_SIZE: Final = 8
OPTIMIZER_ROUNDS: Final = 30


def grow(
    group: Collectives, shapes: Sequence[tuple[int, int]], repetitions: int
) -> dict[str, dict[str, dict[str, float]]]:
    """For each (units, parameters in one) and contender: seconds of `build` and `pass`, `calls` in each.

    `build` begins when the model is there.
    """
    warnings.simplefilter("ignore")
    with world(WORLD_SIZE) as ranks:
        return {
            f"{units}x{parameters}": {
                name: _costs(CONTENDERS[name], _setting(ranks, units, parameters), repetitions) for name in NAMES
            }
            for units, parameters in shapes
        }


def _setting(group: Collectives, units: int, parameters: int) -> Setting:
    return Setting(stack(units, width=4, depth=parameters // 2), False, group)


def _costs(contender: Callable[[Setting], Training], setting: Setting, repetitions: int) -> dict[str, float]:
    builds: list[float] = []
    passes: list[float] = []
    for _ in range(repetitions):
        training = None  # the one before goes first
        build = prepared(contender, setting)
        with without_collector():
            seconds, training = _cpu_seconds(build)
        builds.append(seconds)
    assert training is not None, "there is a repetition"
    training.step()
    with without_collector():
        passes += [_cpu_seconds(partial(_pass, training))[0] for _ in range(repetitions + 1)]
    return {
        "build": min(builds),
        "pass": min(passes),
        "calls": calls_of(partial(_pass, training)),
        "build calls": calls_of(prepared(contender, setting)),
    }


def prepared(contender: Callable[[Setting], Training], setting: Setting) -> Callable[[], Training]:
    """The contender's construction, with the model made already."""
    model = setting.model()
    return partial(contender, evolve(setting, workload=evolve(setting.workload, model=lambda: model)))


def _pass(training: Training) -> None:
    training.backward(training.forward())
    training.optimizer.zero_grad()


def _cpu_seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def optimizer_steps(group: Collectives, parameters: int, world_size: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of AdamW's step over one unit with so many parameters, half of which do not decay: quartiles.

    `after others` is the step that comes right after those of the others, which have filled the processor's caches;
    `again` are three more.
    """
    warnings.simplefilter("ignore")
    with world(world_size) as ranks:
        steps = {name: _stepping(CONTENDERS[name](_setting(ranks, 1, parameters))) for name in _ORIGINALS}
        steps["one flat tensor"] = _flat_step(_setting(ranks, 1, parameters))
        samples: Mapping[str, list[list[float]]] = {name: [] for name in steps}
        with without_collector():
            for _ in range(OPTIMIZER_ROUNDS):
                for name, step in steps.items():
                    samples[name].append([1e3 * _cpu_seconds(step)[0] for _ in range(4)])
    return {
        name: {
            "after others": statistics.quantiles([first for first, *_ in blocks], n=4),
            "again": statistics.quantiles([each for _, *rest in blocks for each in rest], n=4),
        }
        for name, blocks in samples.items()
    }


_ORIGINALS: Final = (PLAIN, "flatparam, original", "torch FSDP1, original", "torch FSDP2")


def _stepping(training: Training) -> Callable[[], Any]:
    """The step of a new optimizer over the training's parameters in two groups, once there are gradients."""
    optimizer = _decaying_by_kind(training.model)
    training.backward(training.forward())
    optimizer.step()
    return optimizer.step


def _decaying_by_kind(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    return _in_two_groups(weights, biases)


def _in_two_groups(decaying: Sequence[Tensor], others: Sequence[Tensor]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def _flat_step(setting: Setting) -> Callable[[], Any]:
    """The same over as many elements in one tensor for each group."""
    kinds: dict[bool, int] = {True: 0, False: 0}
    for parameter in setting.model().parameters():
        kinds[parameter.ndim > 1] += parameter.numel()
    flats: list[Tensor] = [torch.zeros(-(-numel // setting.group.size)) for numel in kinds.values()]
    for flat in flats:
        flat.grad = torch.ones_like(flat)
    optimizer = _in_two_groups(flats[:1], flats[1:])
    optimizer.step()
    return optimizer.step
