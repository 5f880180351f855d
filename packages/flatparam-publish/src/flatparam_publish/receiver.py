"""`Receiver`: the newest version of a publication, whole, in a module or a dict."""

from __future__ import annotations

from typing import Protocol, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_publish.catalogue import Catalogue, PublishedTensor
from flatparam_publish.channel import Update, UpdateSource, VersionId
from flatparam_publish.encoding import bits_of, read_records
from flatparam_publish.publish_error import PublishError
from flatparam_runtime import units_in


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
        self._target: _Target
        if isinstance(target, nn.Module):
            self._target = _ModuleTarget(target, strict)
        else:
            self._target = _DictTarget(target, torch.device(device))
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
    """Check that a version with all values has all of each tensor; a PublishError names one of which it has not."""
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


# The tensors that a receiver writes to: those of a dict, or the parameters and buffers of a plain module


_SHOWN = 5


@final
@attrs.frozen(eq=False)
class Value:
    """One tensor of a target, and its published part."""

    published: PublishedTensor
    tensors: tuple[Tensor, ...]
    """Where it goes: one tensor, or several if a tied parameter is not tied here."""

    def bits(self) -> Tensor:
        """Return the integers of the published elements in their memory order; a view if the target has them so."""
        ordered = self.tensors[0].permute(self.published.dims).to(self.published.info.dtype)
        return bits_of(ordered.contiguous().view(-1))

    def write(self, positions: Tensor | slice, new: Tensor) -> None:
        """Put the integers `new` at `positions`."""
        bits = self.bits()
        bits[positions] = new
        values = self.published.view(bits.view(self.published.info.dtype))
        for tensor in self.tensors:
            if tensor.data_ptr() != values.data_ptr():
                tensor.copy_(values)


class _Target(Protocol):
    """The tensors that a receiver writes to."""

    def check(self, catalogue: Catalogue) -> None:
        """Check that the target can take these tensors.

        Raises:
            PublishError: naming those that it cannot take; nothing is changed.
        """

    def values(self, catalogue: Catalogue) -> list[Value]:
        """Return the tensors of the target, one for each tensor of the catalogue."""


@final
@attrs.frozen(eq=False)
class _DictTarget:
    """A dict of tensors by name, which are made when the first version comes."""

    tensors: dict[str, Tensor]
    device: torch.device

    def check(self, catalogue: Catalogue) -> None:
        """Any tensors will do."""

    def values(self, catalogue: Catalogue) -> list[Value]:
        """Return the tensors of the dict; it has those of the catalogue, and no others, then."""
        names = {each.name for each in catalogue.tensors}
        for each in catalogue.tensors:
            found = self.tensors.get(each.name)
            if found is None or (found.shape, found.dtype) != (each.info.shape, each.info.dtype):
                flat = torch.zeros(each.info.numel, dtype=each.info.dtype, device=self.device)
                self.tensors[each.name] = each.view(flat)
        for name in [name for name in self.tensors if name not in names]:
            del self.tensors[name]
        return [Value(each, (self.tensors[each.name],)) for each in catalogue.tensors]


@final
@attrs.frozen(eq=False)
class _ModuleTarget:
    """The parameters and persistent buffers of a module that is not sharded."""

    module: nn.Module
    strict: bool = True
    """Whether each of its tensors has to be published."""

    def __attrs_post_init__(self) -> None:
        if units_in(self.module):
            raise ValueError(
                f"Receiver: expected a plain module, found a {type(self.module).__name__} that is sharded; receive "
                "into a dict, and load that"
            )

    def check(self, catalogue: Catalogue) -> None:
        """Check names, shapes and dtypes: the module has to hold each published number exactly."""
        here = self._tensors()
        problems, wanted = [], set()
        for each in catalogue.tensors:
            names = [name for name in each.names if name in here]
            wanted.update(names)
            if not names:
                problems.append(f"the module lacks {each.name!r}")
            problems += [problem for name in names if (problem := _problem(each, name, here[name]))]
        if self.strict:
            # Of a tied tensor, one name is enough.
            memory = {here[name].data_ptr() for name in wanted if here[name].numel()}
            missing = [name for name in here if name not in wanted and here[name].data_ptr() not in memory]
            problems += [f"the publication lacks {name!r}" for name in missing]
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise PublishError(
                f"the {type(self.module).__name__} cannot receive: {'; '.join(problems[:_SHOWN])}{more}; see names=, "
                "only= and dtype= of the publisher, and strict= of the receiver"
            )

    def values(self, catalogue: Catalogue) -> list[Value]:
        """Return the tensors of the module."""
        here = self._tensors()
        found = []
        for each in catalogue.tensors:
            # Names of a tied tensor share their memory.
            distinct = {here[name].data_ptr(): here[name] for name in each.names if name in here}
            found.append(Value(each, tuple(distinct.values())))
        return found

    def _tensors(self) -> dict[str, Tensor]:
        found = self.module.state_dict(keep_vars=True)
        return {name: each.detach() for name, each in found.items() if isinstance(each, Tensor)}


def _problem(published: PublishedTensor, name: str, tensor: Tensor) -> str:
    info = published.info
    if tensor.shape != info.shape:
        return f"{name!r}: published with shape {info.shape}, found {tuple(tensor.shape)}"
    if tensor.dtype != info.dtype and torch.promote_types(tensor.dtype, info.dtype) != tensor.dtype:
        return f"{name!r}: published in {info.dtype}, which {tensor.dtype} cannot hold exactly"
    if tensor.is_meta:
        return f"{name!r} is on the meta device"
    return ""
