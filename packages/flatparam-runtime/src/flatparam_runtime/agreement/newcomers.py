"""The parameters that came into a module after it was sharded, and that no unit holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from torch import nn

from flatparam_comm import FlatParameter, clean_fqn, owner_of
from flatparam_runtime.unit.unit import Unit


def names_left_whole(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters below `module` that no unit holds."""
    return frozenset(name for name, _ in _left_whole(module))


def warn_of_newcomers(units: Iterable[Unit]) -> None:
    """Warn, once, of trained parameters that no unit holds and that were not there when the module was sharded."""
    for unit in units:
        before = unit.held.left_whole
        # A copy does not know.
        if before is None:
            continue
        names = [name for name, p in _left_whole(unit.module) if p.requires_grad and name not in before]
        if names:
            several = f" .. {names[-1]!r} ({len(names)} parameters)" if len(names) > 1 else ""
            warnings.warn(
                f"unit {unit.name!r}: no unit holds {names[0]!r}{several}, which came into the module after it "
                "was sharded: gradients are not averaged over the ranks there, so each rank trains different values; "
                "replace or add modules before the model is sharded, or shard the new module, too",
                stacklevel=2,
            )
            return


def _left_whole(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        if owner_of(parameter) is None and not isinstance(parameter, FlatParameter):
            yield clean_fqn(name), parameter
