"""The beginning of a save: every rank has what it writes, the optimizers agree, and there is room on the disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import attrs
import torch

from flatparam_state.checkpoint.model_tensors import bring_to_rest
from flatparam_state.checkpoint.save.contribution import Contribution
from flatparam_state.checkpoint.save.model_pieces import add_averages, add_model
from flatparam_state.checkpoint.save.optimizer_pieces import add_optimizer
from flatparam_state.files import CheckpointError, join_path
from flatparam_state.optimizer import Inventory, complete_groups, first_hole, group_numbers
from flatparam_state.places import places_in

if TYPE_CHECKING:
    from flatparam_state.averages import ShardedEMA

__all__ = ["Inventories", "Subject", "check_optimizers", "check_space", "check_steps"]

Inventories: TypeAlias = Mapping[tuple[str, ...], Inventory]
"""The inventory of each optimizer of a rank, by the keys under which its state is in a checkpoint."""


@final
@attrs.frozen(eq=False)
class Subject:
    """The model, the optimizers and the averages that a program saves, and the rank that saves its part of them."""

    model: torch.nn.Module | None
    optimizers: Mapping[tuple[str, ...], torch.optim.Optimizer]
    rank: int
    averages: Mapping[tuple[str, ...], ShardedEMA] = attrs.field(factory=dict)

    def contribute(self, contribution: Contribution, extra: Any, rank_extra: Any) -> Inventories:
        """Add all that this rank saves; returns what each of its optimizers holds."""
        inventories: dict[tuple[str, ...], Inventory] = {}
        if self.model is not None:
            bring_to_rest(self.model)
            add_model(self.model, self.rank, contribution)
            for at, optimizer in self.optimizers.items():
                inventories[at] = add_optimizer(self.model, optimizer, at, self.rank, contribution)
            for at, averages in self.averages.items():
                add_averages(averages, at, self.rank, contribution)
        if self.rank == 0:
            contribution.add_values(("extra",), extra)
        if rank_extra is not None:
            contribution.add_values(("rank_extra", str(self.rank)), rank_extra)
        return inventories


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


def check_steps(root: Path, steps: Sequence[int]) -> None:
    """Refuse to save if the ranks save different steps.

    Args:
        root: the directory of the checkpoints, as the program named it.
        steps: the step that each rank saves.
    """
    other = next((rank for rank, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise CheckpointError(
            f"rank {other}: {root}: the ranks save different steps: rank 0 saves step {steps[0]}, and rank {other} "
            f"saves step {steps[other]}",
            rank=other,
            path=root,
            hint="have every rank call save() with one step; nothing was written",
        )


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
