"""The training loop."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import torch
from attrs import define, field, frozen

from .batches import Batches
from .learner import Learner
from .meter import Meter
from .metrics import Metrics, bits
from .options import Options
from .progress import Progress
from .ranks import Ranks
from .stop import STOP_SIGNALS, StopRequests

_WATCHED_STEP: Final = 3
"""The session's step whose memory is recorded (or the last, if it has fewer): by then the optimizer state exists."""


@frozen
class Step:
    """What one step gave, the same on every rank."""

    loss: float
    seconds: float
    moved: int
    stop: int
    out_of_time: bool


@define(eq=False)
class Trainer:
    """Takes a learner through its steps. ``done`` counts them, those before a resume included."""

    options: Options
    ranks: Ranks
    learner: Learner
    batches: Batches
    meter: Meter
    metrics: Metrics
    requests: StopRequests
    done: int = 0
    stopped_by: int = 0
    at_rest: int = 0
    step_seconds: list[float] = field(factory=list)
    moved_per_step: int = 0
    _first: int = 0
    _started: float = 0.0

    def run(self, progress: Progress, write_checkpoint: Callable[[], None]) -> None:
        """Train to the last step, or until every rank knows of a request to stop or that the time is up."""
        options = self.options
        self._first, self._started = self.done, time.monotonic()
        if self._agreed_to_stop_before_the_first_step():
            return
        if self.done == 0:
            self.evaluate(progress)
        self.meter.bytes_moved_since_last()
        while self.done < options.steps:
            step = self._step()
            self._record(step, progress)
            if step.stop:
                self.stopped_by = step.stop
                return
            if self.done % options.eval_every == 0 or self.done == options.steps:
                self.evaluate(progress)
            if step.out_of_time:
                progress.note(f"  --minutes {options.minutes:g} are over after step {self.done}")
                return
            if self.done % options.checkpoint_every == 0 and self.done < options.steps:
                write_checkpoint()

    def evaluate(self, progress: Progress) -> float:
        """The mean loss on the held-out rows, always the same ones. A collective."""
        options, ranks = self.options, self.ranks
        parts = ranks.size * options.accumulate
        self.learner.model.eval()
        loss = 0.0
        with torch.no_grad():
            for index in range(options.eval_batches):
                for part in range(ranks.rank * options.accumulate, (ranks.rank + 1) * options.accumulate):
                    rows = self.batches.held_out_part(index, options.eval_batches, part, parts)
                    loss += self._loss(rows.tokens, rows.targets).item()
        self.learner.model.train()
        mean = ranks.total([loss])[0] / (parts * options.eval_batches)
        self.metrics.add(step=self.done, held_out_loss=mean, held_out_bits_per_byte=bits(mean))
        progress.note(f"  step {self.done:>5}: held-out loss {mean:.4f}, {bits(mean):.3f} bits/byte")
        self.meter.bytes_moved_since_last()
        return mean

    def _step(self) -> Step:
        """One optimizer step on this rank's slice of the global batch. A collective."""
        start = time.perf_counter()
        self._set_learning_rate(self.done + 1)
        watched = self.done + 1 == min(self._first + _WATCHED_STEP, self.options.steps)
        model, optimizer = self.learner.model, self.learner.optimizer
        with self.meter.watching_memory(model, optimizer) if watched else nullcontext():
            loss = self._backward(self.done + 1)
            if self.options.clip:
                self.learner.clip(self.options.clip)
            optimizer.step()
        self.done += 1
        if watched or not self.at_rest:
            self.at_rest = self.meter.bytes_at_rest(model, optimizer)
        optimizer.zero_grad(set_to_none=True)
        return self._agree(loss, start)

    def _backward(self, step: int) -> float:
        """Gradients of this step's mean loss; returns the sum of the losses of this rank's parts."""
        own = self.options.accumulate
        parts = self.ranks.size * own
        total = 0.0
        for number in range(own):
            rows = self.batches.training_part(step, self.ranks.rank * own + number, parts)
            if self.options.reduction == "exact":
                with self.learner.micro_batch():
                    loss = self._loss(rows.tokens, rows.targets)
                    torch.autograd.backward(loss)
                total += loss.item()
                continue
            keep = self.options.no_sync and number < own - 1
            with self.learner.without_reduction() if keep else nullcontext():
                loss = self._loss(rows.tokens, rows.targets)
                (loss / own).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.item()
        if self.options.reduction == "exact":
            self.learner.reduce()
        return total

    def _loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        device = self.ranks.device
        loss: torch.Tensor = self.learner.model(tokens.to(device), targets.to(device))
        return loss

    def _agree(self, loss: float, start: float) -> Step:
        """One small all-reduce: the loss of the global batch, and whether any rank has to stop."""
        minutes = self.options.minutes
        late = minutes is not None and time.monotonic() - self._started > 60 * minutes
        moved = self.meter.bytes_moved_since_last()
        pending = self.requests.pending()
        total, late_ranks, *asked = self.ranks.total([loss, late, *(pending == each for each in STOP_SIGNALS)])
        stop = next((int(each) for each, ranks in zip(STOP_SIGNALS, asked, strict=True) if ranks), 0)
        mean = total / (self.ranks.size * self.options.accumulate)
        return Step(mean, time.perf_counter() - start, moved, stop, late_ranks > 0)

    def _agreed_to_stop_before_the_first_step(self) -> bool:
        self.stopped_by = int(self.ranks.largest([self.requests.pending()])[0])
        return self.stopped_by != 0

    def _set_learning_rate(self, step: int) -> None:
        options = self.options
        rate = learning_rate(step, steps=options.steps, warmup=options.warmup, peak=options.lr)
        for group in self.learner.optimizer.param_groups:
            group["lr"] = rate

    def _record(self, step: Step, progress: Progress) -> None:
        self.step_seconds.append(step.seconds)
        self.moved_per_step = step.moved
        speed = self.options.batch * self.options.shape.context / statistics.fmean(self.step_seconds[-20:])
        self.metrics.add(
            step=self.done,
            loss=step.loss,
            bits_per_byte=bits(step.loss),
            learning_rate=self.learner.optimizer.param_groups[0]["lr"],
            tokens_per_second=round(speed, 1),
            bytes_moved=step.moved,
        )
        progress.step(loss=step.loss, bits_per_byte=bits(step.loss), tokens_per_second=speed, moved=step.moved)


def learning_rate(step: int, *, steps: int, warmup: int, peak: float) -> float:
    """The rate of ``step`` (1 is the first): linear from 0 to ``peak`` over ``warmup`` steps, then a cosine down to
    a tenth of it at ``steps``.
    """
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
