"""`Receiver`: the newest version of a publication, whole, in a module or a dict."""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor, nn

from flatparam_publish.target import DictTarget, ModuleTarget, Target, Value
from flatparam_publish.versions import PublishError, Update, UpdateSource, VersionId, read_records

__all__ = ["Receiver"]


@final
class Receiver:
    """Keeps a module or a dict at the newest version of a publication, between two uses of it.

    `receive()` reads a version whole, compares it with its digests, works out each new value, and writes only then. If
    it is interrupted while it writes, the next call first finishes the version. After a restart of the program, make a
    new one: it begins with the newest version.
    """

    def __init__(
        self,
        target: nn.Module | dict[str, Tensor],
        source: UpdateSource,
        *,
        part: int | None = None,
        device: torch.device | str = "cpu",
        strict: bool = True,
    ) -> None:
        """Receive from `source` into `target`.

        Args:
            target: a module that is not sharded, whose parameters and persistent buffers have the published names, or a
                dict, which gets a tensor for each.
            source: a `Mailbox` of the publisher's folder, or a `GroupChannel`.
            part: the rank of this receiver among those that have slices, if the publisher's `Mailbox` slices tensors.
            device: of the tensors of a dict.
            strict: a module has to get every one of its tensors; if not, those that are not published stay as they are.

        Raises:
            ValueError: if the module is sharded.
        """
        self._target: Target
        if isinstance(target, nn.Module):
            self._target = ModuleTarget(target, strict)
        else:
            self._target = DictTarget(target, torch.device(device))
        self._source = source
        self._part = part
        self._held: VersionId | None = None
        self._begun: _Application | None = None

    def __repr__(self) -> str:
        return f"Receiver(version {self.version})"

    @property
    def version(self) -> int:
        """The number of the version that the target has; 0 before the first, and while one is half written."""
        return self._held.number if self._held and self._begun is None else 0

    @property
    def version_id(self) -> VersionId | None:
        """The version that the target has, with its digest."""
        return None if self._begun is not None else self._held

    @torch.no_grad()
    def receive(self) -> bool:
        """Bring the target to the newest version; returns whether the target has changed.

        From a `Mailbox` it returns at once if there is none. From a `GroupChannel` it waits for the publisher.

        Raises:
            PublishError: if the version is damaged, or does not fit the target, which keeps the one before.
        """
        if self._begun is not None:
            self._finish()
        updates = self._source.fetch(self._held, self._part, self._target.check)
        for update in updates:
            if update.before is not None and update.before != self._held:
                raise PublishError(
                    f"version {update.version.number} has the changes since {update.before}, but this receiver has "
                    f"{self._held}"
                )
            _check_complete(update)
            self._begun = _Application.of(update, self._target.values(update.catalogue))
            self._finish()
        return bool(updates)

    def _finish(self) -> None:
        """Write what was begun; once more if it was interrupted."""
        assert self._begun is not None, "there is something to write"
        self._begun.write()
        self._held, self._begun = self._begun.version, None


def _check_complete(update: Update) -> None:
    """Make sure that a version with all values has as many of each tensor as it is to have.

    Raises:
        PublishError: naming the tensor, if it has not.
    """
    tensors = update.catalogue.tensors
    left = [each.info.numel for each in tensors]
    for packet in update.packets if update.before is None else ():
        for record in read_records(packet, [each.info.dtype.itemsize for each in tensors]):
            left[record.index] -= record.numel
    if update.before is None and any(left):
        name = next(each.name for each, numel in zip(tensors, left, strict=True) if numel)
        raise PublishError(
            f"version {update.version.number} does not have all values of {name!r}; publish all values again"
        )


@final
@attrs.frozen(eq=False)
class _Application:
    """New values of a target, all worked out: writing them twice is as good as once."""

    version: VersionId
    writes: tuple[tuple[Value, Tensor | slice, Tensor], ...]

    @classmethod
    def of(cls, update: Update, values: list[Value]) -> _Application:
        """Work out what `update` puts where; nothing is changed."""
        sizes = [each.info.dtype.itemsize for each in update.catalogue.tensors]
        writes: list[tuple[Value, Tensor | slice, Tensor]] = []
        for packet in update.packets:
            for record in read_records(packet, sizes):
                value = values[record.index]
                positions, new = record.new_values(value.bits())
                where = slice(record.start, record.start + record.numel) if positions is None else positions
                writes.append((value, where, new))
        return cls(update.version, tuple(writes))

    def write(self) -> None:
        """Write all of it."""
        for value, where, new in self.writes:
            value.write(where, new)
