"""What one rank does, from beginning to end."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from attrs import define

from flatparam import Checkpointer
from flatparam_comm import SingleCollectives

from .batches import Batches
from .checkpoints import remove_all
from .costs import Costs
from .forecast import Forecast
from .launch import threads_per_rank
from .learner import Learner, build
from .meter import Meter
from .metrics import Metrics
from .options import Options
from .plan import Plan, make_plan
from .plots import draw_loss, draw_memory, draw_plan
from .progress import Progress
from .ranks import Ranks, joined
from .report import Console, Measured, counted, summary
from .sample import generate
from .stop import StopRequests
from .trainer import Trainer


def train(options: Options, world_size: int, requests: StopRequests, console: Console) -> int:
    """Join the ranks, train, and report. Returns the number of the signal that stopped the run early, or 0."""
    plan = make_plan(options, world_size)
    torch.set_num_threads(threads_per_rank(options.threads, world_size))
    describe(options, plan, world_size, console)
    with joined(options.device, alone=options.plain) as ranks:
        costs = Costs.of(options, ranks.size)
        meter = Meter(ranks.device, sharded=not options.plain)
        # The planner does not know exact sums.
        is_usual = options.reduction == "default" and options.wire == options.gather_wire == "none"
        is_planned = plan.start < options.steps and is_usual
        forecast = Forecast.of(options, ranks, meter.process_group) if is_planned else None
        meter.bytes_moved_since_last()
        learner = build(options, ranks, meter)
        with Checkpointer(
            plan.checkpoints, learner.model, learner.optimizer,
            ranks=meter.process_group or SingleCollectives(), keep=2, asynchronous=True,
        ) as checkpointer:  # fmt: skip
            session = _Session.of(options, plan, ranks, learner, meter, requests, console, checkpointer)
            session.run()
        if not session.trainer.stopped_by:
            session.show_sample()
        session.report(costs, forecast)
    return session.trainer.stopped_by or requests.pending()


def describe(options: Options, plan: Plan, world_size: int, console: Console) -> None:
    """Say what is about to happen."""
    shape, corpus = options.shape, plan.corpus
    ranks = counted(world_size, "rank")
    how = "an ordinary module in one process" if options.plain else f"{options.strategy.upper()} on {ranks}"
    console.say(f"A byte-level GPT, trained with {'plain PyTorch' if options.plain else 'flatparam'}")
    console.fact("text", f"{corpus.source}: {counted(corpus.files, 'file')}, {len(corpus.text):,} bytes")
    console.detail(f"sha256 {corpus.sha256}")
    console.detail(f"the last {corpus.held_out_nbytes:,} bytes are held out")
    console.fact(
        "model", f"{shape.numel:,} parameters ({options.size}): {shape.layers} blocks of width {shape.width}, "
        f"{shape.heads} heads, context {shape.context} bytes"
    )  # fmt: skip
    console.fact("sharding", how + ("" if options.plain else f", {shape.layers + 1} units (each block, and the rest)"))
    console.fact("steps", f"{options.steps:,} of {options.batch} rows x {shape.context} bytes over all ranks")
    if plan.resumed is not None:
        ranks_then = counted(plan.resumed.ranks, "rank")
        console.fact("resume", f"{plan.resumed.path}: {plan.start:,} steps done on {ranks_then}")
        console.detail("(--fresh starts over)")
    console.fact("out", str(options.out))
    console.say()


@define(eq=False)
class _Session:
    """The parts of a running job, on one rank."""

    plan: Plan
    checkpointer: Checkpointer
    trainer: Trainer
    metrics: Metrics
    console: Console
    saved_step: int

    @classmethod
    def of(
        cls, options: Options, plan: Plan, ranks: Ranks, learner: Learner, meter: Meter,
        requests: StopRequests, console: Console, checkpointer: Checkpointer,
    ) -> _Session:  # fmt: skip
        if ranks.is_first:
            options.out.mkdir(parents=True, exist_ok=True)
        metrics = Metrics(options.out / "metrics.jsonl" if ranks.is_first else None)
        batches = Batches.of(plan.corpus, batch=options.batch, context=options.shape.context, seed=options.seed)
        trainer = Trainer(options, ranks, learner, batches, meter, metrics, requests, done=plan.start)
        return cls(plan, checkpointer, trainer, metrics, console, saved_step=plan.start)

    def run(self) -> None:
        """Go on from the checkpoint, if there is one, train, and leave a checkpoint of the last step done."""
        trainer, plan = self.trainer, self.plan
        if plan.resumed is not None:
            self.checkpointer.load(plan.start)
        elif trainer.ranks.is_first:
            remove_all(plan.checkpoints)  # with --fresh there may be some
        steps = trainer.options.steps
        self.metrics.open(keep_up_to=plan.start)
        if plan.start >= steps:
            self.console.say(f"  all {steps:,} steps are done already; --steps N goes on, --fresh starts over\n")
        else:
            with Progress(self.console, start=plan.start, steps=steps) as progress:
                trainer.run(progress, lambda: self._save(progress.note))
        if trainer.done > self.saved_step:
            self._save(self.console.say)
        elif trainer.stopped_by:
            self.console.say(self._nothing_new())
        self.metrics.close()

    def _save(self, note: Callable[[str], None]) -> None:
        trainer = self.trainer
        path = self.checkpointer.save(trainer.done, extra={"recipe": self.plan.recipe.to_json()})
        self.saved_step = trainer.done
        trainer.meter.bytes_moved_since_last()
        note(f"  step {trainer.done:>5}: writing checkpoint {path}")

    def _nothing_new(self) -> str:
        if self.plan.resumed is not None:
            return f"  stopped before a new step; {self.plan.resumed.path} is as it was"
        return "  stopped before the first step; there is no checkpoint of this run"

    def show_sample(self) -> None:
        """Print text that the model writes."""
        trainer = self.trainer
        if trainer.options.sample_bytes:
            text = generate(trainer.learner, trainer.options, trainer.ranks, trainer.requests)
            self.console.say(f"\nThe model goes on from {trainer.options.prompt!r}:\n")
            self.console.say("\n".join(f"    {line}" for line in text.strip("\n").split("\n")))

    def report(self, costs: Costs, forecast: Forecast | None) -> None:
        """Print the table and draw the plots, if any step was done."""
        trainer = self.trainer
        if not trainer.step_seconds:
            return
        meter = trainer.meter
        at_rest, peak, process_peak, moved = trainer.ranks.largest(
            [trainer.at_rest, meter.peak_bytes(), meter.process_peak_bytes(), trainer.moved_per_step]
        )
        if trainer.options.reduction == "exact":
            self.console.fact("hash", trainer.learner.hash())
        milliseconds = 1000 * statistics.median(trainer.step_seconds)
        measured = Measured(int(at_rest), int(peak), int(process_peak), int(moved), milliseconds)
        self.console.say()
        for line in summary(costs, measured):
            self.console.say(line)
        self.console.say()
        if forecast is not None:
            for line in forecast.beside(measured, trainer.ranks):
                self.console.say(line)
            self.console.say()
        if trainer.ranks.is_first:
            out = trainer.options.out
            drawn = [
                draw_loss(self.metrics.records, out / "loss.png"),
                draw_memory(meter.timeline, trainer.at_rest, costs, out / "memory.png"),
            ]
            if forecast is not None:
                drawn.append(draw_plan(forecast, meter.timeline, out / "plan.png"))
            self.console.fact("plots", ", ".join(dict.fromkeys(drawn)))
            self.console.fact("metrics", str(out / "metrics.jsonl"))
