"""Saving and loading while training: the class that a training program uses."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import attrs
from torch import nn
from typing_extensions import Self

from flatparam_checkpoint.keys import Optimizers, averages_by_name, optimizers_by_name
from flatparam_checkpoint.load.load_session import Loaded, load_checkpoint
from flatparam_checkpoint.load.prepared_model import LoadOptions
from flatparam_checkpoint.save.after_failure import StepWatch, save_after_failure
from flatparam_checkpoint.save.save_session import Saver
from flatparam_checkpoint.save.subject import Subject
from flatparam_comm import CommError, telling
from flatparam_files import CheckpointError, OnMoment
from flatparam_files.checkpoint.commit import Committer
from flatparam_files.checkpoint.directory import CheckpointDirectory, nothing
from flatparam_files.checkpoint.fields import check_step
from flatparam_files.disk.system import AnyPath
from flatparam_runtime import ExchangesValues, FlatParamError
from flatparam_state.optimizer import holding_parts
from flatparam_state.ranks import ranks_of

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

T = TypeVar("T")


@final
class Checkpointer:
    """Saves a sharded model, its optimizer and whatever else a run needs to go on, and loads them anywhere.

    Every rank makes one and calls `save`, `load`, `wait` and `close` in the same order. Each rank writes only the bytes
    that it owns; no tensor moves between ranks. A checkpoint is there whole or not at all.
    """

    def __init__(
        self,
        directory: AnyPath,
        model: nn.Module | None = None,
        optimizer: Optimizers = None,
        *,
        averages: ShardedEMA | Mapping[str, ShardedEMA] | None = None,
        ranks: ExchangesValues | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
        private: bool = False,
        on_moment: OnMoment = nothing,
    ) -> None:
        """Nothing is touched yet; the first `save` makes the directory and locks it.

        Args:
            directory: the same on every rank, and seen by all; a relative one is below the current folder of now.
            model: sharded, or not. None saves `extra` alone.
            optimizer: of the model's parameters; several by name.
            averages: of the model's parameters; several by name.
            ranks: those that share the model; by default those that it is sharded over, and all ranks if it is not
                sharded (see `resolve_topology`).
            keep: after each save delete all but this many checkpoints; None keeps all.
            asynchronous: copy to host memory, and write beside training.
            on_save_error: "warn" has training go on without the checkpoint.
            private: let nobody but this user enter the directory, and read its files; otherwise the umask decides.
            on_moment: for tests, see `Moment`.
        """
        if not os.fspath(directory):
            raise ValueError("expected a directory, found an empty path")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"expected keep to be None or a number of at least 1, found {keep!r}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"expected a module as model, or None, found {type(model).__name__}")
        if on_save_error not in ("raise", "warn"):
            raise ValueError(f"expected on_save_error to be 'raise' or 'warn', found {on_save_error!r}")
        self._ranks = ranks_of(model) if ranks is None else ranks
        # The program may change its folder later on.
        self._directory = CheckpointDirectory(Path(directory).absolute(), private)
        optimizers = optimizers_by_name(optimizer)
        each: object
        for each in optimizers.values():
            if not (hasattr(each, "param_groups") and hasattr(each, "state_dict")):
                raise TypeError(
                    f"expected an optimizer, a dictionary of several by name, or None, found {type(each).__name__}"
                )
        if optimizers and model is None:
            raise ValueError("expected the model of the optimizer's parameters too")
        of_model = averages_by_name(averages)
        if any(each.model is not model for each in of_model.values()):
            raise ValueError("expected averages of the model that is saved, found those of a different one, or of none")
        self._averages = of_model
        self._on_save_error = on_save_error
        self._subject = Subject(model, optimizers, self._ranks.rank, of_model)
        self._watch = StepWatch(self._subject)
        self._saver = Saver(
            self._ranks,
            self._subject,
            Committer(self._directory, keep, on_moment),
            asynchronous=asynchronous,
            on_moment=on_moment,
        )

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
        self._saver.cancel()
        self._saver.close()

    def save(self, step: int, *, extra: Any = None, rank_extra: Any = None) -> Path | None:
        """Save everything as the checkpoint of `step`, and make it the latest; every rank calls it.

        An asynchronous save returns when everything is in host memory; whether it went well is known at the next
        `save`, `wait` or `close`.

        Args:
            extra: plain values and tensors (a parameter is saved as one), nested in any way, the same on all ranks;
                that of rank 0 is written.
            rank_extra: this rank's own, such as the state of its random generators.

        Returns:
            The directory where the checkpoint is, or will be; None if the save failed and `on_save_error` is "warn".

        Raises:
            CheckpointError: on every rank, if one has failed, naming rank and file and what to do. What was saved
                before is as it was, and training can go on. Also if the model shows its averages (`applied`).
        """

        def check() -> None:
            check_step(step)
            self._check_averages("saved")

        with _telling("save"), holding_parts(*self._subject.optimizers.values()):
            self._reported(self._saver.settle)
            self._saver.begin("save", {"step": step, "on_save_error": self._on_save_error}, check)
            return self._reported(lambda: self._saver.save(step, extra, rank_extra))

    def _check_averages(self, deed: str) -> None:
        if any(each.is_applied for each in self._averages.values()):
            raise CheckpointError(
                f"the model shows its averages, so its own parameters cannot be {deed}",
                rank=self._ranks.rank,
                hint="leave ShardedEMA.applied() first",
            )

    def _reported(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except CheckpointError as error:
            if self._on_save_error == "raise":
                raise
            warnings.warn(f"a save has failed, and the program goes on: {error}", stacklevel=4)
            return None

    def save_last(self, step: int, *, extra: Any = None, rank_extra: Any = None, seconds: float = 30.0) -> Path | None:
        """Save once more after a rank has failed, if every process lives and all ranks have done the same steps.

        Every rank calls it where it has caught its exception, and then raises that again. No collective is issued: the
        ranks meet in the store that their process group was made with. A save that is still under way is finished
        first, or given up.

        Args:
            step: the step that all ranks have completed.
            extra: see `save`.
            rank_extra: see `save`.
            seconds: how long to wait for each rank.

        Returns:
            The directory where the checkpoint is, or None with a warning that says why there is none: a rank has not
            come (its process has ended), its exception came out of an optimizer's step, ranks have done different
            numbers of steps or of updates of an average, parameters were written by hand, or the save has failed. What
            was saved before is as it was. Buffers that the failed step has written are saved, with another warning.
        """
        self._saver.cancel()
        try:
            self._check_averages("saved")
            failure = sys.exc_info()[1]
            with holding_parts(*self._subject.optimizers.values()):
                place = save_after_failure(
                    self._saver, self._ranks, self._subject, self._watch, failure, step, extra, rank_extra, seconds
                )
        except (CheckpointError, CommError, FlatParamError) as error:
            warnings.warn(f"no last checkpoint was saved: {error}", stacklevel=2)
            return None
        # Rank 0 saves the buffers.
        if self._ranks.rank == 0:
            self._watch.tell()
        return place

    def wait(self) -> None:
        """Return when no save is under way any more; every rank calls it.

        Raises:
            CheckpointError: if that save has failed, on every rank.
        """
        with _telling("wait"):
            self._reported(self._saver.settle)

    def close(self) -> None:
        """Wait for a save that is under way, and let others write to the directory; every rank calls it.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._saver.close()

    def steps(self) -> list[int]:
        """Return the steps of which there is a checkpoint, in order.

        Raises:
            CheckpointError: if the directory is something else, or cannot be listed.
        """
        return self._directory.steps()

    def latest(self) -> int | None:
        """Return the step that `load()` would load; None if there is none.

        Raises:
            CheckpointError: if there are checkpoints, and none is sound.
        """
        chosen = self._directory.choose()
        return None if chosen is None else chosen.manifest.step

    def load(
        self, step: int | None = None, *, strict: bool = True, convert_dtype: bool = False, other_states: bool = False
    ) -> Loaded | None:
        """Load the latest checkpoint, or that of `step`, into model, optimizer and averages; every rank calls it.

        World size, wrapping, sharding strategy and `use_orig_params` may differ from those of the save. Every rank
        reads only the blocks that it needs, and verifies them. Nothing is changed on any rank before all have said that
        everything is sound and fits.

        Args:
            strict: refuse a checkpoint that has other names than the model, or lacks the averages.
            convert_dtype: convert parameters and buffers to the dtypes that they have in the model, and what the
                optimizer keeps of a parameter in the parameter's dtype.
            other_states: load a different optimizer's state, too: one that lacks what the optimizer needs, such as the
                state of AdamW for SGD with momentum.

        Returns:
            Everything else that was saved; None if no step is named and there is no checkpoint yet.

        Raises:
            CheckpointError: on every rank, if one has found a fault, naming rank, file and parameter.
        """
        options = LoadOptions(strict, convert_dtype, other_states)
        with _telling("load"), holding_parts(*self._subject.optimizers.values()):
            self._reported(self._saver.settle)
            self._saver.begin(
                "load",
                {"step": step, **attrs.asdict(options), "on_save_error": self._on_save_error},
                lambda: self._check_averages("loaded"),
            )
            loaded = load_checkpoint(self._directory, self._ranks, self._subject, step, options)
            self._watch.begin()
            return loaded


@contextlib.contextmanager
def _telling(call: str) -> Iterator[None]:
    """Inside, an exception that this rank has alone, such as `KeyboardInterrupt`, is told to the ranks that wait."""
    agreed: Exception | None = None
    with telling(f"Checkpointer.{call}()"):
        try:
            yield
        except (CheckpointError, CommError) as error:
            agreed = error
    if agreed is not None:
        raise agreed
