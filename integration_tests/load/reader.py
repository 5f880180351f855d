"""Verify the latest checkpoint of a run again and again until standard input ends; say how many were sound."""

from __future__ import annotations

import select
import sys
from pathlib import Path

from flatparam import Checkpointer, CheckpointError
from flatparam_comm import SingleCollectives
from flatparam_state.checkpoint import verify_checkpoint


def main(directory: Path) -> int:
    """Read until standard input ends; returns 1 at a checkpoint that is damaged."""
    sound: set[int] = set()
    reads = deleted = 0
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        latest = Checkpointer(directory, ranks=SingleCollectives()).latest() if directory.is_dir() else None
        if latest is None:
            continue
        path = directory / f"step-{latest:08}"
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            if path.exists():
                print(f"damaged: {error}")
                return 1
            deleted += 1
            continue
        reads += 1
        sound.add(latest)
    print(f"{reads} reads of {len(sound)} different latest ones, all sound; {deleted} deleted meanwhile")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
