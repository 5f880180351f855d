"""Print what is hidden behind computing: ``python -m integration_tests.simulated.overlap --pictures build/overlap``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import attrs

from flatparam_simdev.replay import Costs, Replay, Step, draw, replay
from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.worlds import on_simulated
from tools import pages

STEP: Final = "step 2"
"""Everything is known by then: the first step finds the order, the second is the first to use it."""

PROGRAMS: Final = {
    "flatparam": Program(),
    "flatparam, forward_prefetch": Program(prefetch="forward"),
    "FSDP1": Program("fsdp1"),
    "FSDP1, forward_prefetch": Program("fsdp1", prefetch="forward"),
    "FSDP2": Program("fsdp2"),
    "NO_SHARD: flatparam": Program(strategy="none"),
    "NO_SHARD: FSDP1": Program("fsdp1", strategy="none"),
    "SHARD_GRAD_OP: flatparam": Program(strategy="grad_op"),
    "SHARD_GRAD_OP: FSDP1": Program("fsdp1", strategy="grad_op"),
    "SHARD_GRAD_OP: FSDP2": Program("fsdp2", strategy="grad_op"),
    "hybrid: flatparam": Program(strategy="hybrid_of_one"),
    "hybrid: FSDP1": Program("fsdp1", strategy="hybrid_of_one"),
    "offload: flatparam": Program(offload=True),
    "offload, forward_prefetch: flatparam": Program(offload=True, prefetch="forward"),
    "offload: FSDP1": Program("fsdp1", offload=True),
    "offload: FSDP2": Program("fsdp2", offload=True),
    "bfloat16: flatparam": Program(precision="bfloat16"),
    "bfloat16: FSDP1": Program("fsdp1", precision="bfloat16"),
    "bfloat16: FSDP2": Program("fsdp2", precision="bfloat16"),
    "checkpointing: flatparam": Program(checkpointing="not reentrant"),
    "checkpointing: FSDP1": Program("fsdp1", checkpointing="not reentrant"),
    "checkpointing: FSDP2": Program("fsdp2", checkpointing="not reentrant"),
    "accumulation: flatparam": Program(micro_batches=2, no_sync=True),
    "accumulation: FSDP1": Program("fsdp1", micro_batches=2, no_sync=True),
    "accumulation: FSDP2": Program("fsdp2", micro_batches=2, no_sync=True),
}


@attrs.frozen
class Row:
    """A line of the table."""

    name: str
    outcome: Outcome
    schedule: Replay

    @property
    def slug(self) -> str:
        """The name as a part of a file's name."""
        return "-".join(self.name.replace(",", "").replace(":", "").split())

    @property
    def cells(self) -> tuple[str, ...]:
        """What stands in it."""
        step = self.schedule.step(STEP)
        return (
            self.name,
            _hidden(step, "forward"),
            _hidden(step, "backward"),
            f"{step.length:.0f}",
            f"{step.length / step.lower_bound:.2f}",
            str(sum(step.waits_of_host.values())),
            " / ".join(str(_kernels(step, word)) for word in ("forward", "backward", "optimizer")),
            str(step.peak_nbytes),
            str(step.peak_of_pools_nbytes),
            str(len(self.outcome.findings)),
        )


HEAD: Final = (
    "configuration",
    "forward hidden",
    "backward hidden",
    "step",
    "of the bound",
    "waits of the host",
    "kernels",
    "peak bytes",
    "bytes of pools",
    "findings",
)


def rows(outcomes: Iterable[tuple[str, Outcome]], costs: Costs, host_call: float) -> list[Row]:
    """A row for each outcome, in a replay with these costs."""
    return [Row(name, outcome, replay(outcome.log, costs, host_call=host_call)) for name, outcome in outcomes]


def table(lines: Sequence[Row]) -> str:
    """The rows as a table of Markdown."""
    return pages.table([HEAD, *(row.cells for row in lines)], ["---"])


def _hidden(step: Step, word: str) -> str:
    communication = step.communication_in(word)
    return f"{communication.hidden:.0f} of {communication.total:.0f}" if communication.total else "-"


def _kernels(step: Step, word: str) -> int:
    return sum(count for phase, count in step.kernels.items() if word in phase.split())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="of the model")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[1.0], help="a collective's cost, in matrix products"
    )
    parser.add_argument("--host-call", type=float, default=0.0, help="what the host needs for a call; a product is 100")
    parser.add_argument("--only", default="", help="the configurations whose names contain this")
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each configuration")
    parser.add_argument("--docs", type=Path, help="a folder for a small one of each, at the ratio 1")
    return parser.parse_args()


def main() -> None:
    """Run the programs, and print a table for each ratio."""
    arguments = _arguments()
    chosen = {name: program for name, program in PROGRAMS.items() if arguments.only in name}
    programs = [attrs.evolve(program, blocks=arguments.blocks) for program in chosen.values()]
    outcomes = list(zip(chosen, on_simulated(2, run, programs)[0], strict=True))
    for ratio in arguments.ratios:
        lines = rows(outcomes, Costs(communication=100.0 * ratio), arguments.host_call)
        print(f"\nA matrix product is 100, a collective or a copy {100 * ratio:.0f}:\n\n{table(lines)}")
        if arguments.pictures is not None:
            arguments.pictures.mkdir(parents=True, exist_ok=True)
            for row in lines:
                (arguments.pictures / f"{row.slug}-{ratio:g}.svg").write_text(
                    draw(row.schedule, STEP, f"{row.name}, ratio {ratio:g}")
                )
        if arguments.docs is not None and ratio == 1:
            arguments.docs.mkdir(parents=True, exist_ok=True)
            for row in lines:
                if "forward_prefetch" in row.name:
                    continue  # it looks as without
                small = draw(row.schedule, STEP, row.name, least=1.0)
                (arguments.docs / f"overlap-{row.slug}.svg").write_text(small)


if __name__ == "__main__":
    main()
