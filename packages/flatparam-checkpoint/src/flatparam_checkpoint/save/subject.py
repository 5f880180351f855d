"""The subject of a save: what a program hands over, of which each rank saves its part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, final

import attrs
import torch

from flatparam_checkpoint.save.model_pieces import add_averages, add_model
from flatparam_checkpoint.save.optimizer_pieces import add_optimizer
from flatparam_files.checkpoint import Contribution
from flatparam_state.at_rest import bring_to_rest
from flatparam_state.optimizer import Inventory

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

__all__ = ["Inventories", "Subject"]

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

    @property
    def described(self) -> dict[str, object]:
        """What every rank has to hand over alike, as the arguments of `Checkpointer` are called."""
        return {
            "model": None if self.model is None else type(self.model).__name__,
            "optimizer": sorted("/".join(at) for at in self.optimizers),
            "averages": sorted("/".join(at) for at in self.averages),
        }

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
