"""The count of the collectives that this process issues on one process group."""

from __future__ import annotations

import abc

import torch

from flatparam_comm.checks import Site
from flatparam_comm.errors import CommError
from flatparam_comm.relay.activity import ACTIVITY
from flatparam_comm.relay.positions.page import Page, code_of

__all__ = ["CollectiveCount"]


class CollectiveCount(abc.ABC):
    """The count of the collectives on one group, which is the same on all of its ranks at the same collective.

    What it does if something is wrong is up to the classes beneath it.
    """

    __slots__ = ("_page", "_takes_care", "issued")

    def __init__(self, *, takes_care: bool) -> None:
        """Begin to count; `takes_care` says whether to look for failures when the next collective is issued."""
        self.issued = 0
        self._takes_care = takes_care
        self._page: Page | None = None

    def begin(self, site: Site, dtype: torch.dtype | None = None, numel: int = 0, detail: int = 0) -> None:
        """Count a collective that is issued now, and compare it with those of the ranks that were here before.

        Args:
            dtype: the dtype of its tensors.
            numel: the number of elements of the longest of them.
            detail: the reduction, or the root.

        Raises:
            PeerError: if a rank of the group has failed, so that the group is broken.
            MismatchError: if a rank of this host has issued a different collective.
        """
        if self._takes_care:
            self._look_around(site)
        number = self.issued = self.issued + 1
        ACTIVITY.issued += 1
        if self._page is not None:
            code = code_of(site.op, dtype, detail)
            other = self._page.enter(number, site, code, numel)
            if other is not None:
                raise self._diverged(site, (code, numel), *other)

    def note(self, site: Site, dtype: torch.dtype | None, numel: int, detail: int) -> None:
        """Count a collective that is issued now, and that the transport compares by itself; arguments as `begin`."""
        self.issued += 1
        ACTIVITY.issued += 1
        if self._page is not None:
            self._page.enter(self.issued, site, code_of(site.op, dtype, detail), numel)

    @abc.abstractmethod
    def _look_around(self, site: Site) -> None:
        """Look for failures of the group's ranks before the collective at `site` is issued; may raise."""

    @abc.abstractmethod
    def _diverged(self, site: Site, ours: tuple[int, int], peer: int, code: int, numel: int) -> CommError:
        """The error for a collective of `peer` that differs from ours: codes, and numbers of elements."""
