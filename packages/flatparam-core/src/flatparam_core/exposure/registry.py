"""The parameters that a module registers while they are sharded: a read of one asks what it is to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch

__all__ = ["PART", "Reader", "ShardedRegistry", "install", "uninstall"]

Reader: TypeAlias = "Callable[[torch.Tensor | None], torch.Tensor | None]"
"""Is given what is registered under a name, and returns what an attribute of that name shows."""

PART = "_flatparam_part"
"""The attribute of a tensor that a reader has made of a flat parameter, and that nobody is to register."""


@final
class ShardedRegistry(dict[str, Any]):
    """The `_parameters` of a module of which some are sharded, in the place of the module's own dictionary.

    `module.weight` looks a name up here by `[]`, and so asks the name's reader. Whatever lists parameters, such as
    `named_parameters()`, asks by `items()` or `get()`, and sees what is registered.
    """

    __slots__ = ("plain", "readers")

    def __init__(self, plain: dict[str, Any]) -> None:
        """Have the entries of `plain`, the module's own dictionary, which `uninstall` puts back."""
        super().__init__(plain)
        self.plain = plain
        self.readers: dict[str, Reader] = {}

    def __getitem__(self, name: str) -> Any:
        registered = dict.__getitem__(self, name)
        reader = self.readers.get(name)
        return registered if reader is None else reader(registered)

    def __setitem__(self, name: str, value: Any) -> None:
        # `torch.func.functional_call` puts back what it has read.
        dict.__setitem__(self, name, None if hasattr(value, PART) else value)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has a dictionary of its own, until its unit is revived.
        return dict, (dict(self),)


def install(own: dict[str, Any], readers: Mapping[str, Reader]) -> None:
    """Have reads of these parameters of a module ask their readers; `own` has the module's attributes."""
    registry = own["_parameters"]
    if not isinstance(registry, ShardedRegistry):
        registry = own["_parameters"] = ShardedRegistry(registry)
    registry.readers.update(readers)


def uninstall(own: dict[str, Any], names: Mapping[str, object]) -> None:
    """Have reads of the parameters `names` see what is registered; after the last, put the module's dictionary back."""
    registry = own["_parameters"]
    if not isinstance(registry, ShardedRegistry):
        return
    for name in names:
        registry.readers.pop(name, None)
    if not registry.readers:
        plain = registry.plain
        plain.clear()
        plain.update(registry)
        own["_parameters"] = plain
