"""The module attributes under which the parameters of one layout are seen."""

from __future__ import annotations

import collections
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.bindings import BoundParameter, ParamInfo
from flatparam_core.exposure.registry import Reader, ShardedRegistry, install, uninstall
from flatparam_core.exposure.replaced import fitting_replacements, is_harmless, replaced

__all__ = ["Sites"]

T = TypeVar("T")
_put: Final[Callable[[Any, str, Any], None]] = dict.__setitem__
"""Past the method of a `ShardedRegistry`."""


@final
@attrs.frozen(eq=False)
class _Attributes:
    """The attributes of all parameters in a row, for loops at each gather; most lists have one entry for each."""

    owners: list[weakref.ReferenceType[nn.Module]]
    names: list[str]
    indices: list[int]
    """The parameter of each attribute, as an index in the layout."""
    assigned: list[tuple[ParamInfo, int]]
    """The attributes of modules that override `__setattr__`, such as nn.LSTM, which keeps a list beside the names."""
    repeats: bool
    """Whether some parameter has several attributes."""
    by_module: dict[int, dict[str, int]]
    """For the first attribute of each module, the names of all of that module's attributes, with their parameters."""

    @classmethod
    def of(cls, infos: Sequence[Sequence[ParamInfo]]) -> Self:
        row = [(info, index) for index, each in enumerate(infos) for info in each]
        # A module that is alive has one weak reference.
        firsts: dict[int, int] = {}
        by_module: dict[int, dict[str, int]] = {}
        for place, (info, index) in enumerate(row):
            by_module.setdefault(firsts.setdefault(id(info.reference), place), {})[info.param_name] = index
        return cls(
            [info.reference for info, _ in row],
            [info.param_name for info, _ in row],
            [index for _, index in row],
            [each for each in row if type(each[0].module).__setattr__ is not nn.Module.__setattr__],
            len(row) != len(infos),
            by_module,
        )

    def spread(self, values: Sequence[T]) -> Sequence[T]:
        """For each attribute, the one of `values` (one per parameter) that belongs to its parameter."""
        return [values[index] for index in self.indices]


@final
@attrs.define(eq=False)
class Sites:
    """Every attribute that holds a parameter of one layout, and what was last put there."""

    infos: list[tuple[ParamInfo, ...]]
    shown: list[torch.Tensor | None]
    _row: _Attributes | None = None
    _readers: dict[int, dict[str, Reader]] = attrs.field(factory=dict)
    """For the first attribute of each module, the readers of its names, once they are made."""
    _registries: dict[int, ShardedRegistry] = attrs.field(factory=dict)
    """For the first attribute of each module, its registry while it is sharded, to be used again."""
    _parts: list[torch.Tensor | None] = attrs.field(factory=list)
    """What was registered when these registries were last put in their places."""

    @classmethod
    def of(cls, bound: Sequence[BoundParameter]) -> Self:
        """The attributes of `bound`, which show their parameters now."""
        return cls([b.infos for b in bound], [b.parameter for b in bound])

    def __getstate__(self) -> tuple[object, ...]:
        return self.infos, self.shown

    def __setstate__(self, state: tuple[list[tuple[ParamInfo, ...]], list[torch.Tensor | None]]) -> None:
        type(self).__init__(self, *state)

    def _attributes(self) -> _Attributes:
        if self._row is None:
            self._row = _Attributes.of(self.infos)
        return self._row

    def _modules(self, row: _Attributes) -> list[nn.Module]:
        modules = [reference() for reference in row.owners]
        if None in modules:
            # This raises an error that names the parameter.
            return [info.module for infos in self.infos for info in infos]
        return modules  # type: ignore[return-value]  # there is no None

    def at_attributes(self, values: Sequence[T]) -> Sequence[T]:
        """For each attribute, the one of `values` (one per parameter) that belongs to its parameter."""
        row = self._row or self._attributes()
        return row.spread(values) if row.repeats else values

    def registered(self) -> list[nn.Parameter | None]:
        """For each attribute, the parameter that is registered there now.

        Raises:
            FlatParamError: if a module is gone.
        """
        row = self._row or self._attributes()
        registries = [module._parameters for module in self._modules(row)]
        return list(map(dict.get, registries, row.names))

    def put(
        self,
        values: Sequence[torch.Tensor | None],
        read: Callable[[int, torch.Tensor | None], torch.Tensor | None] | None = None,
    ) -> None:
        """Register each value under all the names of its parameter.

        Args:
            values: one per parameter.
            read: what attributes show from now on, of the parameter with this index, and of what is registered for it;
                None shows what is registered.

        Raises:
            FlatParamError: if somebody has put a different parameter there since, other than a frozen one in the same
                memory; the message names it.
        """
        row = self._row or self._attributes()
        modules = self._modules(row)
        registries = [module._parameters for module in modules]
        repeats = row.repeats
        shown: Sequence[torch.Tensor | None] = self.shown
        found = list(map(dict.get, registries, row.names))
        if repeats:
            shown = row.spread(shown)
        # The check comes before any change.
        if not all(map(operator.is_, found, shown)) and not all(map(is_harmless, found, shown)):
            raise self._first_replaced()
        spread = row.spread(values) if repeats else values
        if read is None:
            self._show_registered(row, modules)
            registries = [module._parameters for module in modules]
        is_again = read is not None and len(self._parts) == len(values)
        # The shortcut for a sharded form that was shown before: the registries have it.
        if not (is_again and all(map(operator.is_, self._parts, values)) and self._registries):
            collections.deque(map(_put, registries, row.names, spread), maxlen=0)
            is_again = False
        for info, index in row.assigned:
            setattr(info.module, info.param_name, values[index])
        if read is not None:
            self._have_read(row, modules, read, values, is_again=is_again)
        self.shown = list(values)

    def _show_registered(self, row: _Attributes, modules: Sequence[nn.Module]) -> None:
        """Have attributes show what is registered: the modules get their own dictionaries back."""
        for place, names in row.by_module.items():
            own = modules[place].__dict__
            registry = own["_parameters"]
            if type(registry) is not ShardedRegistry:
                continue
            # The shortcut for a module whose readers are all of these sites; its registry is used again.
            if len(registry.readers) == len(names):
                if len(registry) != len(names):
                    registry.plain.clear()
                    registry.plain.update(registry)
                own["_parameters"] = registry.plain
                self._registries[place] = registry
            else:
                uninstall(modules[place], names)

    def _have_read(
        self,
        row: _Attributes,
        modules: Sequence[nn.Module],
        read: Callable[[int, torch.Tensor | None], torch.Tensor | None],
        values: Sequence[torch.Tensor | None],
        *,
        is_again: bool,
    ) -> None:
        """Have reads of attributes call `read`.

        Args:
            values: what is registered, one per parameter.
            is_again: the registries have these values, and the modules' own dictionaries others.
        """
        for place, readers in (self._readers or self._make_readers(row, read)).items():
            own = modules[place].__dict__
            plain, registry = own["_parameters"], self._registries.get(place)
            fits = registry is not None and registry.plain is plain
            if is_again and not (fits and len(plain) == len(readers)):
                for name, index in row.by_module[place].items():
                    plain[name] = values[index]
            if registry is None or not fits:
                install(modules[place], readers)
                continue
            if len(plain) != len(readers):
                dict.clear(registry)
                dict.update(registry, plain)
            elif not is_again:
                dict.update(registry, plain)
            own["_parameters"] = registry
        self._parts = list(values)

    def _make_readers(
        self, row: _Attributes, read: Callable[[int, torch.Tensor | None], torch.Tensor | None]
    ) -> dict[int, dict[str, Reader]]:
        for place, names in row.by_module.items():
            self._readers[place] = {name: functools.partial(read, index) for name, index in names.items()}
        return self._readers

    def put_back(self, indices: Sequence[int] | None = None) -> None:
        """Register again what was registered last, if somebody has registered something else since.

        Args:
            indices: the parameters to look at; by default all.
        """
        for index in range(len(self.infos)) if indices is None else indices:
            value = self.shown[index]
            for info in self.infos[index]:
                if info.module._parameters.get(info.param_name) is not value:
                    _register(info, value)

    def replacements(self) -> dict[int, nn.Parameter]:
        """By index, the parameters that somebody has registered since, under all names; see `fitting_replacements`."""
        return fitting_replacements(self.infos, self.shown)

    def _first_replaced(self) -> FlatParamError:
        flat = [info for infos in self.infos for info in infos]
        both = zip(flat, self.registered(), self.at_attributes(self.shown), strict=True)
        return replaced(next(info for info, found, before in both if not is_harmless(found, before)))

    def add(
        self,
        index: int,
        infos: Sequence[ParamInfo],
        read: Callable[[int, torch.Tensor | None], torch.Tensor | None],
    ) -> None:
        """Show parameter `index` under further names too, from now on; it is sharded now, and `read` as in `put`."""
        self.infos[index] += tuple(infos)
        self._row = None
        self._readers, self._registries, self._parts = {}, {}, []
        for info in infos:
            _register(info, self.shown[index])
            install(info.module, {info.param_name: functools.partial(read, index)})


def _register(info: ParamInfo, value: torch.Tensor | None) -> None:
    module = info.module
    module._parameters[info.param_name] = value  # type: ignore[assignment]  # or what a presenter makes
    if type(module).__setattr__ is not nn.Module.__setattr__:
        setattr(module, info.param_name, value)
