"""Whether a save can begin: the ranks' optimizers agree, and there is room on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatparam_checkpoint.save.subject import Inventories, Subject
from flatparam_files import CheckpointError, join_path
from flatparam_files.checkpoint import Contribution
from flatparam_state import places_in
from flatparam_state.optimizer import Inventory, complete_groups, first_hole, group_numbers

__all__ = ["check_optimizers", "check_space"]


def check_optimizers(subject: Subject, contribution: Contribution, told: Sequence[Inventories]) -> None:
    """Refuse to save if a rank's optimizer lacks what another's has, of the ranks that share a model.

    On the first rank the groups in `contribution` get the parameters that only other ranks hold.
    """
    own = [] if subject.model is None else [fqn for place in places_in(subject.model) for fqn in place.fqns]
    alike: dict[tuple[tuple[str, ...], bytes], dict[int, Inventory]] = {}
    for rank, inventories in enumerate(told):
        for at, inventory in inventories.items():
            alike.setdefault((at, inventory.model), {})[rank] = inventory
    for (at, model), ranks in alike.items():
        mine = told[subject.rank].get(at)
        known = mine is not None and mine.model == model
        hole = first_hole(ranks, own if known else ())
        if hole is not None:
            raise CheckpointError(
                f"{join_path(at)}: {hole.message}",
                rank=hole.rank,
                fqn=hole.fqn,
                hint=f"{hole.hint}; nothing was written",
            )
        if known and subject.rank == 0:
            complete_groups(contribution.tree(*at, "param_groups"), group_numbers(ranks.values(), own))


def check_space(root: Path, step: int, needs: Sequence[int], frees: Sequence[int]) -> None:
    """Refuse to save if all ranks together need more bytes than the rank with the fewest finds free.

    Args:
        root: the directory of the checkpoints, as the program named it.
        needs: the bytes that each rank will write, at most.
        frees: the bytes that each rank finds free.
    """
    if sum(needs) > min(frees):
        rank = frees.index(min(frees))
        raise CheckpointError(
            f"rank {rank}: {root}: the checkpoint of step {step} needs {sum(needs):,} bytes, and {frees[rank]:,} are "
            "free",
            rank=rank,
            path=root,
            hint="free space, or keep fewer checkpoints; nothing was written",
        )
