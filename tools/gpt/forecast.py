"""What the run will cost each rank, planned before it begins: memory, bytes, and the time of a step."""

from __future__ import annotations

import functools
from typing import Final

import torch
from attrs import frozen

from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_plan.hardware.samples import ROUGH, Sample
from flatparam_plan.planner import plan_from
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.report import Plan
from flatparam_plan.timeline import predict
from flatparam_plan.training import Setup, TrainingProgram

from .learner import optimizer_of
from .model import GPT
from .options import Options
from .ranks import Ranks
from .report import Measured, table

_WARM, _TIMED = 3, 8
_STRATEGIES: Final = {"full_shard": "full", "shard_grad_op": "grad_op", "no_shard": "no_shard"}


@frozen
class Forecast:
    """A plan of the run, on the CPU."""

    plan: Plan

    @classmethod
    def of(cls, options: Options, ranks: Ranks, group: Collectives | None) -> Forecast | None:
        """Plan the run, and run some steps of its model with three blocks, for the time. A collective.

        There is none for a plain module, nor for an accelerator, whose memory the plan does not know to the byte, nor
        for an optimizer of whole matrices, which moves bytes of its own.
        """
        if (
            options.optimizer != "adamw"
            or options.plain
            or ranks.device.type != "cpu"
            or options.strategy not in _STRATEGIES
        ):
            return None
        # The same weights on every rank; the model that is trained is made from its seed later.
        torch.manual_seed(options.seed)
        program, setup = _program(options, ranks.size), _setup(options, ranks)
        shard = group if group is not None and ranks.size > 1 else SingleCollectives()
        sample = Sample.of(program, setup, Topology(shard))
        for number in range(_WARM + _TIMED):
            sample.step(is_timed=number >= _WARM)
        found = rehearse(program, setup)
        return cls(plan_from(found, prediction=predict(found, ROUGH, sample.timings())))

    @property
    def milliseconds(self) -> float:
        """The predicted time of a step."""
        return 0.0 if self.plan.prediction is None else 1000 * self.plan.prediction.seconds

    def beside(self, measured: Measured, ranks: Ranks) -> list[str]:
        """The plan and the run, side by side, the largest of the ranks. A collective."""
        costs = self.plan.costs
        at_rest, peak, sent = ranks.largest([costs.resting.nbytes, costs.steps[-1].peak, costs.steps[-1].sent_nbytes])
        rows = [
            _row("bytes per rank at rest", int(at_rest), measured.at_rest),
            _row("bytes per rank at peak", int(peak), measured.peak),
            _row("bytes moved per step", int(sent), measured.moved_per_step),
        ]
        time = (f"{self.milliseconds:.1f}", f"{measured.step_milliseconds:.1f}")
        error = f"{(self.milliseconds / measured.step_milliseconds - 1) * 100:+.0f} %"
        rows.append(("milliseconds per step", *time, error, "planned from a few steps of three blocks"))
        return table(("", "plan", "this run", "error", ""), rows)


def _row(name: str, planned: int, real: int) -> tuple[str, ...]:
    if not real:
        return (name, f"{planned:,}", "-", "", "not recorded")
    return (
        name,
        f"{planned:,}",
        f"{real:,}",
        f"{planned - real:+,}",
        "",
    )


def _program(options: Options, world_size: int) -> TrainingProgram:
    """The run's program: what a rank computes in a step."""
    rows = options.batch // world_size // options.accumulate

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        windows = torch.zeros(batch, length + 1, dtype=torch.int64)
        return windows[:, :-1], windows[:, 1:]

    def part_of_step(loss: torch.Tensor) -> torch.Tensor:
        part = loss / options.accumulate
        # As in the training loop, the loss itself is there until its backward pass is over.
        vars(part)["whole"] = loss
        return part

    return TrainingProgram.of(
        functools.partial(GPT, options.shape, recompute=options.checkpoint_activations),
        inputs,
        batch=rows,
        sequence=options.shape.context,
        loss=part_of_step,
    )


def _setup(options: Options, ranks: Ranks) -> Setup:
    return Setup(
        world_size=ranks.size,
        ranks_per_host=ranks.size,
        rank=ranks.rank,
        strategy=_STRATEGIES[options.strategy],
        wrap=("Block",),
        optimizer=functools.partial(optimizer_of, options),
        use_orig_params=options.use_orig_params,
        accumulate=options.accumulate,
        no_sync=options.no_sync,
        max_norm=options.clip or None,
        transport="gloo",
    )
