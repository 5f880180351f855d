"""Saving and loading while training: the class that a training program uses."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_runtime import Collectives, resolve_topology
from flatparam_state.checkpoint.agreement import Failure, agree, attempt
from flatparam_state.checkpoint.directory import CheckpointDirectory
from flatparam_state.checkpoint.load.session import Loaded, load_checkpoint
from flatparam_state.checkpoint.model_tensors import check_at_rest
from flatparam_state.checkpoint.moments import OnMoment, nothing
from flatparam_state.checkpoint.save.background import Background
from flatparam_state.checkpoint.save.commit import Committer, free_nbytes, write_part
from flatparam_state.checkpoint.save.contribution import Contribution, Ticket
from flatparam_state.checkpoint.save.model_pieces import add_model, add_values
from flatparam_state.checkpoint.save.optimizer_pieces import add_optimizer, optimizers_by_name
from flatparam_state.checkpoint.save.report import report_path
from flatparam_state.errors import CheckpointError
from flatparam_state.files.safetensors.stream import Staging
from flatparam_state.optimizer.groups import complete_groups
from flatparam_state.optimizer.inventory import Inventory, first_hole, group_numbers
from flatparam_state.places import places_in
from flatparam_state.source import join_path

__all__ = ["Checkpointer", "Optimizers"]

T = TypeVar("T")

Optimizers: TypeAlias = "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None"
"""One optimizer, several by name, or none."""

_POLL_S: Final = 0.02
_LAST_PATIENCE_S: Final = 3.0
"""How long rank 0 looks for the reports of the others when they must be there."""
_PATIENCE_S: Final = 1800.0
"""How long a background save waits for the files of other ranks."""


@final
class Checkpointer:
    """Saves a sharded model, its optimizer and whatever else a run needs to go on, and loads them anywhere.

    Every rank makes one and calls `save`, `load`, `wait` and `close` in the same order. Each rank writes only the bytes
    that it owns; no tensor moves between ranks. A checkpoint is there whole or not at all.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module | None = None,
        optimizer: Optimizers = None,
        *,
        ranks: Collectives | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        on_moment: OnMoment = nothing,
    ) -> None:
        """Nothing is touched yet; the first `save` makes the directory and locks it.

        Args:
            directory: seen by all ranks under this name.
            model: sharded, or not. None saves `extra` alone.
            optimizer: of the model's parameters; several by name.
            ranks: those that share the model; by default all (see `resolve_topology`).
            keep: after each save delete all but this many checkpoints; None keeps all.
            asynchronous: copy to host memory, and write beside training.
            on_save_error: "warn" has training go on without the checkpoint.
            on_moment: for tests, see `Moment`.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"expected to keep at least 1 checkpoint, found keep={keep}")
        if on_save_error not in ("raise", "warn"):
            raise ValueError(f"expected on_save_error to be 'raise' or 'warn', found {on_save_error!r}")
        self._ranks = resolve_topology().shard if ranks is None else ranks
        self._directory = CheckpointDirectory(Path(directory))
        self._root = self._directory.root.absolute()
        self._model = model
        self._optimizers = optimizers_by_name(optimizer)
        if self._optimizers and model is None:
            raise ValueError("expected the model of the optimizer's parameters too")
        self._committer = Committer(self._directory, keep, on_moment)
        self._asynchronous = asynchronous
        self._on_save_error = on_save_error
        self._on_moment = on_moment
        self._background: tuple[Background, Ticket] | None = None

    def __repr__(self) -> str:
        return f"Checkpointer({str(self._directory.root)!r}, rank {self._ranks.rank} of {self._ranks.size})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks may be elsewhere: no word with them. What can be finished alone is finished.
        if self._background is not None:
            self._background[0].cancel()
            self._background = None
        self._committer.close()

    # Saving

    def save(self, step: int, *, extra: Any = None, rank_extra: Any = None) -> Path | None:
        """Save everything as the checkpoint of `step`, and make it the latest; every rank calls it.

        An asynchronous save returns when everything is in host memory; whether it went well is known at the next
        `save`, `wait` or `close`.

        Args:
            extra: plain values and tensors, nested in any way, the same on all ranks; that of rank 0 is written.
            rank_extra: this rank's own, such as the state of its random generators.

        Returns:
            Where it is (or will be); None where it failed and `on_save_error` is "warn".

        Raises:
            CheckpointError: on every rank, where one has failed, naming rank and file and what to do. What was saved
                before is as it was, and training can go on.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"expected a step of at least 0, found {step!r}")
        return self._reported(functools.partial(self._save, step, extra, rank_extra))

    def _reported(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except CheckpointError as error:
            if self._on_save_error == "raise":
                raise
            warnings.warn(f"a checkpoint was not saved: {error}", stacklevel=4)
            return None

    def _save(self, step: int, extra: Any, rank_extra: Any) -> Path:
        self._settle()
        contribution, ticket = self._begin(step, extra, rank_extra)
        if self._asynchronous:
            self._start(ticket, contribution)
        else:
            self._write(ticket, contribution)
        return self._directory.path_of(step)

    def _begin(self, step: int, extra: Any, rank_extra: Any) -> tuple[Contribution, Ticket]:
        """Agree that the save can begin: every rank has what it writes, there is room, and rank 0 has the lock."""
        contribution = Contribution()
        holds: dict[tuple[str, ...], Inventory] = {}

        def prepare() -> Ticket | None:
            holds.update(self._contribute(contribution, extra, rank_extra))
            return self._committer.prepare(step) if self._ranks.rank == 0 else None

        ticket, failure, cause = attempt(prepare, self._ranks.rank, directory=self._root)
        fact = (ticket, contribution.disk_nbytes, free_nbytes(self._root), holds)
        try:
            facts = agree(self._ranks, failure, fact, label="begin to save", cause=cause)
            shared: Ticket = facts[0][0]
            self._check_optimizers(contribution, [told for _, _, _, told in facts])
            self._check_space(shared, [need for _, need, _, _ in facts], [free for _, _, free, _ in facts])
        except CheckpointError:
            if ticket is not None:
                self._committer.abandon(ticket)
            raise
        return contribution, shared

    def _contribute(
        self, contribution: Contribution, extra: Any, rank_extra: Any
    ) -> dict[tuple[str, ...], Inventory]:
        """Add all that this rank saves; returns what each of its optimizers holds."""
        rank = self._ranks.rank
        holds: dict[tuple[str, ...], Inventory] = {}
        if self._model is not None:
            check_at_rest(self._model)
            add_model(self._model, rank, contribution)
            for at, optimizer in self._optimizers.items():
                holds[at] = add_optimizer(self._model, optimizer, at, rank, contribution)
        if rank == 0:
            add_values(contribution, ("extra",), extra)
        if rank_extra is not None:
            add_values(contribution, ("rank_extra", str(rank)), rank_extra)
        return holds

    def _check_optimizers(
        self, contribution: Contribution, told: Sequence[Mapping[tuple[str, ...], Inventory]]
    ) -> None:
        """Refuse to save if a rank's optimizer lacks what another's has, of the ranks that share a model."""
        own = [] if self._model is None else [fqn for place in places_in(self._model) for fqn in place.fqns]
        alike: dict[tuple[tuple[str, ...], bytes], dict[int, Inventory]] = {}
        for rank, held in enumerate(told):
            for at, holds in held.items():
                alike.setdefault((at, holds.model), {})[rank] = holds
        for (at, model), ranks in alike.items():
            mine = told[self._ranks.rank].get(at)
            known = mine is not None and mine.model == model
            hole = first_hole(ranks, own if known else ())
            if hole is not None:
                raise CheckpointError(
                    f"{join_path(at)}: {hole.message}",
                    rank=hole.rank,
                    fqn=hole.fqn,
                    hint=f"{hole.hint}; nothing was written",
                )
            if known and self._ranks.rank == 0:
                complete_groups(contribution.tree(*at, "param_groups"), group_numbers(ranks.values(), own))

    def _check_space(self, ticket: Ticket, needs: list[int], frees: list[int]) -> None:
        if sum(needs) > min(frees):
            rank = frees.index(min(frees))
            raise CheckpointError(
                f"rank {rank}: {self._directory.root}: the checkpoint of step {ticket.step} needs "
                f"{sum(needs):,} bytes, and {frees[rank]:,} are free",
                rank=rank,
                path=self._directory.root,
                hint="free space, or keep fewer checkpoints; nothing was written",
            )

    def _write_part(self, ticket: Ticket, contribution: Contribution) -> None:
        write_part(
            ticket,
            self._ranks.rank,
            self._ranks.size,
            contribution,
            staging=Staging(),
            on_moment=self._on_moment,
        )

    def _write(self, ticket: Ticket, contribution: Contribution) -> None:
        """Write and commit, all ranks together."""
        steps: list[tuple[str, Callable[[], object]]] = [
            ("write", lambda: self._write_part(ticket, contribution)),
            ("commit", lambda: self._ranks.rank == 0 and self._committer.commit(ticket, self._ranks.size)),
        ]
        for label, action in steps:
            _, failure, cause = attempt(
                action, self._ranks.rank, directory=self._root, need=contribution.disk_nbytes
            )
            try:
                agree(self._ranks, failure, label=f"{label} a checkpoint", cause=cause)
            except CheckpointError:
                if self._ranks.rank == 0:
                    self._committer.abandon(ticket)
                raise

    def _start(self, ticket: Ticket, contribution: Contribution) -> None:
        """Copy everything to host memory; then go on in a thread, where ranks talk through files alone."""
        staged = contribution.staged()
        name = f"checkpoint {ticket.step}, rank {self._ranks.rank}"
        self._background = Background(functools.partial(self._work, ticket, staged), name), ticket

    def _work(
        self,
        ticket: Ticket,
        contribution: Contribution,
        own_part: threading.Event,
        cancelled: threading.Event,
    ) -> None:
        failed = ticket.temporary / f"rank-{self._ranks.rank:05d}.failed"
        try:
            self._write_part(ticket, contribution)
            own_part.set()
            if self._ranks.rank == 0:
                self._await_reports(ticket, cancelled)
                self._committer.commit(ticket, self._ranks.size)
        except BaseException:
            with contextlib.suppress(OSError):
                failed.touch()  # rank 0 sees it; the directory stays until nobody writes to it any more
            raise

    def _await_reports(self, ticket: Ticket, cancelled: threading.Event) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        missing, hurried = list(range(self._ranks.size)), False
        while missing:
            missing = [rank for rank in missing if not report_path(ticket.temporary, rank).exists()]
            failed = sorted(ticket.temporary.glob("rank-*.failed"))
            if cancelled.is_set():
                deadline = min(deadline, time.monotonic() + _LAST_PATIENCE_S) if not hurried else deadline
                hurried = True
            if failed or (missing and time.monotonic() > deadline):
                who = failed[0].stem if failed else f"rank {missing[0]}"
                raise CheckpointError(
                    f"{ticket.temporary}: {who} has not written its part",
                    path=ticket.temporary,
                    rank=int(who[5:]),
                )
            if missing:
                time.sleep(_POLL_S)

    def wait(self) -> None:
        """Return when no save is under way any more; every rank calls it.

        Raises:
            CheckpointError: where that save has failed, on every rank.
        """
        self._reported(self._settle)

    def _settle(self) -> None:
        if self._background is None:
            return
        background, ticket = self._background
        # Ranks that are threads of one process: each must have started its own work before one waits for it.
        self._ranks.barrier(label="wait for a checkpoint")
        background.wait_for_own_part()
        # A rank that has died is the process group's to notice, here; the others have reported by now.
        self._ranks.barrier(label="every rank has written")
        background.hurry()
        cause = background.join()
        self._background = None
        failure = None
        if cause is not None:
            failure = Failure.of(cause, self._ranks.rank, directory=self._root)
        try:
            agree(self._ranks, failure, label="finish a checkpoint", cause=cause)
        except CheckpointError:
            if self._ranks.rank == 0:
                self._committer.abandon(ticket)
            raise

    def close(self) -> None:
        """Wait for a save that is under way, and let others write to the directory; every rank calls it.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._committer.close()

    # Loading

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, in order."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """The step that `load()` would load; None where there is none.

        Raises:
            CheckpointError: where there are checkpoints, and none is sound.
        """
        chosen = self._directory.choose()
        return None if chosen is None else chosen.manifest.step

    def load(
        self, step: int | None = None, *, strict: bool = True, convert_dtype: bool = False
    ) -> Loaded | None:
        """Load the latest checkpoint, or that of `step`, into the model and the optimizer; every rank calls it.

        World size, wrapping, sharding strategy and `use_orig_params` may differ from those of the save. Every rank
        reads only the blocks that it needs, and verifies them. Nothing is changed on any rank before all have said that
        everything is sound and fits.

        Args:
            strict: refuse a checkpoint that has other names than the model.
            convert_dtype: convert parameters and buffers to the dtypes that they have in the model.

        Returns:
            What else was saved; None where no step is named and there is no checkpoint yet.

        Raises:
            CheckpointError: on every rank, where one has found a fault, naming rank, file and parameter.
        """
        self._settle()
        return load_checkpoint(
            self._directory,
            self._ranks,
            self._model,
            self._optimizers,
            step=step,
            strict=strict,
            convert_dtype=convert_dtype,
        )
