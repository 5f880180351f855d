"""The tensors that a receiver writes to: those of a dict, or the parameters and buffers of a plain module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_publish.versions import Catalogue, PublishedTensor, PublishError, bits_of
from flatparam_runtime import units_in

__all__ = ["DictTarget", "ModuleTarget", "Target", "Value"]

_SHOWN = 5


@final
@attrs.frozen(eq=False)
class Value:
    """One tensor of a target, and its published part."""

    published: PublishedTensor
    tensors: tuple[Tensor, ...]
    """Where it goes: one tensor, or several if a tied parameter is not tied here."""

    def bits(self) -> Tensor:
        """The integers of the published elements in their memory order; a view if the target has them so."""
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


class Target(Protocol):
    """The tensors that a receiver writes to."""

    def check(self, catalogue: Catalogue) -> None:
        """Check that the target can take these tensors.

        Raises:
            PublishError: naming those that it cannot take; nothing is changed.
        """
        ...

    def values(self, catalogue: Catalogue) -> list[Value]:
        """The tensors of the target, one for each tensor of the catalogue."""
        ...


@final
@attrs.frozen(eq=False)
class DictTarget:
    """A dict of tensors by name, which are made when the first version comes."""

    tensors: dict[str, Tensor]
    device: torch.device

    def check(self, catalogue: Catalogue) -> None:
        """Any tensors will do."""

    def values(self, catalogue: Catalogue) -> list[Value]:
        """The tensors of the dict; it has those of the catalogue, and no others, then."""
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
class ModuleTarget:
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
        """The tensors of the module."""
        here = self._tensors()
        return [
            Value(each, tuple(_distinct(here[n] for n in each.names if n in here)))
            for each in catalogue.tensors
        ]

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


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())
