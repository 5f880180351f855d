"""Measure publishing, or watch it.

python tools/publishing costs --page          # bytes and seconds by learning rate, into docs/guides/publishing.md
python tools/publishing syncs --versions 1000 # compare a receiver with all full tensors after each step
python tools/publishing loop --rounds 50      # a trainer on two ranks and a generator, in a loop
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# A folder that is run has itself first on the path, and not the folder that it is in.
sys.path[0] = str(Path(__file__).resolve().parents[1])


def main() -> int:
    """Run the chosen command; 1 if versions differ."""
    from pages import fill

    from publishing import costs, loop, syncs

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="tiny", help="the preset of the main job (tiny, small, ...)")
    parser.add_argument("--pretraining", type=int, default=50, help="steps before the fine-tuning")
    commands = parser.add_subparsers(dest="command", required=True)
    costly = commands.add_parser("costs")
    costly.add_argument("--versions", type=int, default=10)
    costly.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5, 1e-4])
    costly.add_argument("--page", action="store_true", help="write the table to the guide")
    many = commands.add_parser("syncs")
    many.add_argument("--versions", type=int, default=1000)
    many.add_argument("--rate", type=float, default=1e-6)
    looped = commands.add_parser("loop")
    looped.add_argument("--rounds", type=int, default=20)
    looped.add_argument("--rate", type=float, default=1e-6)
    chosen = parser.parse_args()
    if chosen.command == "costs":
        text = costs.table(costs.measured(chosen.size, chosen.pretraining, chosen.versions, chosen.rates))
        print(text)
        if chosen.page:
            fill(costs.PAGE, {costs.PART: text}, gap="\n")
        return 0
    if chosen.command == "syncs":
        found = syncs.synced(chosen.size, chosen.versions, chosen.rate, chosen.pretraining)
        times = found.dense_nbytes / found.nbytes
        print(
            f"{found.equal:,} of {found.versions:,} versions equal the full tensors; {found.nbytes:,} bytes sent, "
            f"{found.dense_nbytes:,} if all were sent each time: {times:.1f} times fewer"
        )
        return int(found.equal != found.versions)
    came = loop.run_loop(loop.Loop(chosen.size, chosen.rounds, chosen.rate, chosen.pretraining))
    print(f"{came.syncs} versions in {came.seconds:.1f} s")
    print(
        f"{came.nbytes:,} bytes sent, {came.dense_nbytes:,} if dense: {came.dense_nbytes / came.nbytes:.1f} times fewer"
    )
    print(f"{came.publish_s:.2f} s in publish(), {came.receive_s:.2f} s in receive()")
    print(
        f"{came.answers:,} answers with {came.versions_answered_with} versions, "
        f"the longest took {came.longest_answer_s:.3f} s"
    )
    print(f"reward {came.rewards[0]:.3f} in the first round, {came.rewards[1]:.3f} in the last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
