"""One loading of a tree of wrappers."""

from __future__ import annotations

from typing import final

import attrs
from torch import nn

from flatparam_comm import Topology
from flatparam_state import ModelLoad

__all__ = ["TreeLoad"]


@final
@attrs.define(eq=False)
class TreeLoad:
    """One loading of a tree of wrappers, which belongs to the outermost of them and ends with it.

    Each wrapper takes the entries of its own unit. The outermost one copies for all of them at the end, and only if
    everything fits.
    """

    outermost: nn.Module
    errors: list[str]
    """The list in which torch collects the errors of one loading: the same object for every module in it."""
    is_ours: bool = False
    """Whether the wrapper's own `load_state_dict` is under way, and not that of a plain module around it."""
    taken: set[str] = attrs.field(factory=set)
    """The clean names of the entries that wrappers have taken."""
    _loads: list[ModelLoad] = attrs.field(factory=list)
    _open: dict[nn.Module, ModelLoad] = attrs.field(factory=dict)
    """By wrapper, the loads of those whose modules torch is loading now."""
    is_closed: bool = False

    def begin(self, wrapper: nn.Module, load: ModelLoad) -> None:
        """Note that `wrapper` takes the entries of its unit from now on."""
        self._loads.append(load)
        self._open[wrapper] = load

    def end(self, wrapper: nn.Module) -> ModelLoad | None:
        """Return the load of `wrapper`, which takes no entries any more; `None` if it has none."""
        load = self._open.pop(wrapper, None)
        if load is not None:
            load.stop()
        return load

    def leave(self, wrapper: nn.Module) -> None:
        """Have `wrapper`, whose loading an exception ended, take nothing any more.

        The loads of the wrappers around it are left to them: torch may be iterating over the hooks on `wrapper`.
        """
        load = self._open.pop(wrapper, None)
        if load is not None:
            load.close()

    def really_missing(self, missing: list[str]) -> list[str]:
        """The names of `missing` that are in no flat parameter; one unit may borrow a parameter of a different one."""
        in_flat = {handle for load in self._loads for handle in load.in_flat}
        return [key for key in missing if not any(each.is_in(key, in_flat) for each in self._loads)]

    def checksums(self, topology: Topology) -> dict[str, int]:
        """Return the checksums of what each unit's load has taken, by name."""
        return {name: each for load in self._loads for name, each in load.checksums(topology).items()}

    def commit(self) -> None:
        """Copy what was taken to the shards; every rank calls it."""
        for load in self._loads:
            load.commit()

    def close(self) -> None:
        """Forget everything, at the end of the outermost wrapper's loading."""
        for load in self._loads:
            load.close()
        self._loads.clear()
        self._open.clear()
        self.is_closed = True
