"""Saving on all ranks: agree that it can begin, write, and commit; at once, or in the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from flatparam_checkpoint.agreement import agree, agree_on_call, attempt
from flatparam_checkpoint.save.background import BackgroundSave
from flatparam_checkpoint.save.contribution import Contribution
from flatparam_checkpoint.save.subject import Inventories, Subject
from flatparam_files import CheckpointError, OnMoment, join_path
from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.rank_part import Ticket
from flatparam_files.disk.system import free_nbytes
from flatparam_runtime import ExchangesValues
from flatparam_state.optimizer import Inventory, complete_groups, first_hole, group_numbers
from flatparam_state.places import places_in


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


# The saves


@final
class Saver:
    """Saves one model, its optimizers and other values again and again; every rank has a saver.

    At most one save is under way: whoever begins the next one calls `settle` first.
    """

    def __init__(
        self, ranks: ExchangesValues, subject: Subject, committer: Committer, *, asynchronous: bool, on_moment: OnMoment
    ) -> None:
        """Nothing is touched yet.

        Args:
            committer: commits on rank 0; the other ranks only learn from it where the checkpoints are.
            asynchronous: copy everything to host memory, and write in the background.
        """
        self._ranks = ranks
        self._subject = subject
        self._committer = committer
        self._root = committer.directory.root.absolute()
        self._asynchronous = asynchronous
        self._on_moment = on_moment
        self._background: BackgroundSave | None = None

    def begin(self, call: str, arguments: Mapping[str, object], check: Callable[[], object]) -> None:
        """Have all ranks make the call with the same `arguments`, of the same things; see `agree_on_call`.

        No save is under way any more: see `settle`.
        """
        alike = {
            **arguments,
            **self._subject.described,
            "keep": self._committer.keep,
            "asynchronous": self._asynchronous,
            "private": self._committer.directory.is_private,
        }
        agree_on_call(self._ranks, self._committer.directory.names, call, alike, check)

    def save(self, step: int, extra: Any, rank_extra: Any) -> Path:
        """Save everything as the checkpoint of `step`, after `begin`; returns where it is, or will be.

        Raises:
            CheckpointError: on every rank, if one has failed; see `settle` if the save goes on in the background.
        """
        contribution, ticket = self._begin(step, extra, rank_extra)
        if self._asynchronous:
            # A rank without the memory for it says so at the next call, as do the others.
            staged = attempt(contribution.staged, self._ranks.rank, directory=self._root)
            self._background = BackgroundSave(self._ranks, self._committer, ticket, staged, self._write_part)
        else:
            self._write(ticket, contribution)
        return self._committer.directory.path_of(step)

    def with_ranks(self, ranks: ExchangesValues) -> Saver:
        """Return a saver of the same to the same directory, at once, whose ranks talk over `ranks`."""
        return Saver(ranks, self._subject, self._committer, asynchronous=False, on_moment=self._on_moment)

    def _begin(self, step: int, extra: Any, rank_extra: Any) -> tuple[Contribution, Ticket]:
        """Agree that the save can begin: every rank has what it writes, there is room, and rank 0 has the lock."""
        contribution = Contribution()

        def prepare() -> tuple[Any, int, Ticket | None]:
            inventories = self._subject.contribute(contribution, extra, rank_extra)
            free = free_nbytes(self._root)
            return inventories, free, self._committer.prepare(step) if self._ranks.rank == 0 else None

        attempted = attempt(prepare, self._ranks.rank, directory=self._root)
        inventories, free, ticket = attempted.value or ({}, 0, None)
        fact = (ticket, contribution.disk_nbytes, free, inventories)
        try:
            facts = agree(self._ranks, attempted, fact, label="begin to save")
            tickets, needs, frees, told = zip(*facts, strict=True)
            shared: Ticket = tickets[0]
            check_optimizers(self._subject, contribution, told)
            check_space(self._committer.directory.root, shared.step, needs, frees)
        except BaseException:
            if ticket is not None:
                self._committer.abandon(ticket)
            raise
        return contribution, shared

    def _write_part(self, ticket: Ticket, contribution: Contribution) -> None:
        shows = False if self._asynchronous or self._ranks.rank else None
        contribution.write(ticket, self._ranks.rank, self._ranks.size, self._on_moment, shows=shows)

    def _write(self, ticket: Ticket, contribution: Contribution) -> None:
        """Write and commit, all ranks together."""
        steps = (
            ("write", lambda: self._write_part(ticket, contribution)),
            ("commit", lambda: self._ranks.rank == 0 and self._committer.commit(ticket, self._ranks.size)),
        )
        for label, action in steps:
            attempted = attempt(action, self._ranks.rank, directory=self._root, need=contribution.disk_nbytes)
            try:
                agree(self._ranks, attempted, label=f"{label} a checkpoint")
            except BaseException:
                if self._ranks.rank == 0:
                    self._committer.abandon(ticket)
                raise

    def settle(self) -> None:
        """Wait for the save in the background, if there is one; every rank calls it.

        Raises:
            CheckpointError: on every rank, if the save has failed on one.
        """
        if self._background is None:
            return
        attempted = self._background.finish()
        ticket, self._background = self._background.ticket, None
        try:
            agree(self._ranks, attempted, label="finish a checkpoint")
        except BaseException:
            if self._ranks.rank == 0:
                self._committer.abandon(ticket)
            raise

    def cancel(self) -> None:
        """Finish what can be finished without a word with the other ranks: they may be elsewhere.

        A save that fails then is warned about: the exception that the program leaves with is what is raised.
        """
        if self._background is not None:
            background, self._background = self._background, None
            error = background.cancel()
            if error is not None:
                warnings.warn(f"a checkpoint was not saved: {error}", stacklevel=3)

    def close(self) -> None:
        """Let others write to the directory."""
        self._committer.close()
