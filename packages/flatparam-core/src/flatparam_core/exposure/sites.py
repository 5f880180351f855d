"""The module attributes under which the parameters of one layout are seen."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.bindings import BoundParameter, ParamInfo


def is_harmless(found: torch.Tensor | None, shown: torch.Tensor | None) -> bool:
    """Return whether `found` may replace `shown`: it is the same, or both are frozen and have the same memory.

    Layers of bitsandbytes give themselves such a parameter during a forward pass.
    """
    if found is shown:
        return True
    if found is None or shown is None or found.requires_grad or shown.requires_grad:
        return False
    facts = [(each.data_ptr(), each.dtype, each.shape, each.stride()) for each in (found, shown)]
    return facts[0] == facts[1]


def replaced(info: ParamInfo) -> FlatParamError:
    """Return the error for a parameter that is not the one that was put there."""
    return FlatParamError(
        f"parameter {info.fqn!r} was replaced by another object after its module was sharded, so the other ranks would "
        "train without it; change its values instead, inside summon_full_params(), or replace it before sharding"
    )


def fitting_replacements(
    infos: Sequence[Sequence[ParamInfo]], shown: Sequence[torch.Tensor | None]
) -> dict[int, nn.Parameter]:
    """By index, the parameters that somebody has registered instead of `shown`, under all names of each.

    Only what has the same shape and dtype, and is on the same device, is among them.

    Args:
        infos: for each parameter, its attributes.
        shown: for each parameter, the tensor that was registered there.
    """
    found: dict[int, nn.Parameter] = {}
    for index, (places, old) in enumerate(zip(infos, shown, strict=True)):
        modules = [info.reference() for info in places]
        there = [
            None if module is None else module._parameters.get(info.param_name)
            for module, info in zip(modules, places, strict=True)
        ]
        new = there[0]
        if new is None or old is None or new is old or any(each is not new for each in there):
            continue
        if (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device):
            found[index] = new
    return found


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


T = TypeVar("T")
Read: TypeAlias = "Callable[[int, torch.Tensor | None], torch.Tensor | None]"
"""A function that returns what attributes show, of the parameter with this index, and of what is registered for it."""

_PARAMETERS: Final = "_parameters"
_REGISTRY_OF: Final = operator.itemgetter(_PARAMETERS)
_MODULE_OF: Final = weakref.ref.__call__
_ABSENT: Final = object()
"""The value of a name that a module does not register."""


@final
@attrs.frozen(eq=False)
class _Attributes:
    """The attributes of all parameters in a row, for loops at each gather; most lists have one entry for each."""

    modules: list[weakref.ReferenceType[nn.Module]]
    """Each module once."""
    owners: list[int]
    """The module of each attribute, as an index of `modules`."""
    names: list[str]
    indices: list[int]
    """The parameter of each attribute, as an index in the layout."""
    assigned: list[tuple[ParamInfo, int]]
    """The attributes of modules that override `__setattr__`, such as nn.LSTM, which keeps a list beside the names."""
    repeats: bool
    """Whether some parameter has several attributes."""
    by_module: list[dict[str, int]]
    """For each of `modules`, the names of its attributes, with their parameters."""
    absent: list[object]
    """For each attribute, what is found if its module does not register it."""

    @classmethod
    def of(cls, infos: Sequence[Sequence[ParamInfo]]) -> Self:
        row = [(info, index) for index, each in enumerate(infos) for info in each]
        # A module that is alive has one weak reference.
        numbers: dict[weakref.ReferenceType[nn.Module], int] = {}
        owners = [numbers.setdefault(info.reference, len(numbers)) for info, _ in row]
        by_module: list[dict[str, int]] = [{} for _ in numbers]
        for owner, (info, index) in zip(owners, row, strict=True):
            by_module[owner][info.param_name] = index
        return cls(
            [*numbers],
            owners,
            [info.param_name for info, _ in row],
            [index for _, index in row],
            [each for each in row if type(each[0].module).__setattr__ is not nn.Module.__setattr__],
            len(row) != len(infos),
            by_module,
            [_ABSENT] * len(row),
        )

    def spread(self, values: Sequence[T]) -> Sequence[T]:
        """For each attribute, the one of `values` (one per parameter) that belongs to its parameter."""
        return [values[index] for index in self.indices]

    def registries(self, owns: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """For each attribute, where its module registers parameters; `owns` are the attributes of each module."""
        return map([*map(_REGISTRY_OF, owns)].__getitem__, self.owners)


@final
@attrs.frozen(eq=False)
class _Swap:
    """The registries of modules that are sharded, kept while the modules have their own dictionaries, to be used again.

    To exchange dictionaries takes a fraction of the time that it takes to fill them.
    """

    registries: list[ShardedRegistry]
    plain: list[dict[str, Any]]
    """The modules' own dictionaries."""
    values: Sequence[torch.Tensor | None]
    """The entries of the registries, one for each parameter."""
    lengths: list[int]
    readers: list[dict[str, Reader]]
    sharded: list[int]
    """The number of each module's names that are sharded here."""
    others: list[tuple[int, str]]
    """The other entries of the modules, a bias that is None, say: its module, as an index, and its name."""

    @classmethod
    def of(
        cls, owns: Sequence[dict[str, Any]], names: Sequence[Mapping[str, int]], values: Sequence[torch.Tensor | None]
    ) -> Self | None:
        """Return the swap of modules that are sharded now; None if a registry shows what other sites have, too."""
        registries: list[ShardedRegistry] = [own[_PARAMETERS] for own in owns]
        readers = [each.readers for each in registries]
        sharded = [len(each) for each in names]
        if [len(each) for each in readers] != sharded:
            return None
        plain = [each.plain for each in registries]
        others = [
            (number, name) for number, each in enumerate(registries) for name in each if name not in names[number]
        ]
        lengths = [len(each) for each in registries]
        return cls(registries, plain, values, lengths, readers, sharded, others)

    def show_registered(self, owns: Sequence[dict[str, Any]]) -> bool:
        """Put the modules' own dictionaries in their places; returns False, and does nothing, if that may not be."""
        if list(map(len, self.readers)) != self.sharded:
            return False
        return self._exchange(owns, self.registries, self.plain)

    def show_sharded(self, owns: Sequence[dict[str, Any]], values: Sequence[torch.Tensor | None]) -> bool:
        """Put the registries in their places; returns False, and does nothing, if they have other values."""
        is_again = len(values) == len(self.values) and all(map(operator.is_, values, self.values))
        if not (is_again and self._exchange(owns, self.plain, self.registries)):
            return False
        # Somebody may have a module's own dictionary, and would find full parameters there whose memory is free.
        for number, registry in enumerate(self.registries):
            self.plain[number].update(registry)
        return True

    def _exchange(
        self, owns: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
    ) -> bool:
        # Loops: what maps a method of dictionaries takes several times as many instructions. The names that are sharded
        # here are registered, so equal lengths and the others say that all names are the same.
        for number, own in enumerate(owns):
            if own[_PARAMETERS] is not old[number]:
                return False
        if list(map(len, old)) != self.lengths or list(map(len, new)) != self.lengths:
            return False
        for number, name in self.others:
            if name not in old[number]:
                return False
        for number, name in self.others:
            dict.__setitem__(new[number], name, dict.__getitem__(old[number], name))
        for number, own in enumerate(owns):
            own[_PARAMETERS] = new[number]
        return True


@final
@attrs.define(eq=False)
class Sites:
    """Every attribute that holds a parameter of one layout, and what was last put there."""

    infos: list[tuple[ParamInfo, ...]]
    shown: list[torch.Tensor | None]
    _row: _Attributes | None = None
    _readers: list[dict[str, Reader]] = attrs.field(factory=list)
    """For each module, the readers of its names, once they are made."""
    _swap: _Swap | None = None

    @classmethod
    def of(cls, bound: Sequence[BoundParameter]) -> Self:
        """Return the attributes of `bound`, which show their parameters now."""
        return cls([b.infos for b in bound], [b.parameter for b in bound])

    def __getstate__(self) -> tuple[object, ...]:
        return self.infos, self.shown

    def __setstate__(self, state: tuple[list[tuple[ParamInfo, ...]], list[torch.Tensor | None]]) -> None:
        type(self).__init__(self, *state)

    def _attributes(self) -> _Attributes:
        if self._row is None:
            for infos, value in zip(self.infos, self.shown, strict=True):
                for info in filter(operator.attrgetter("is_gone"), infos):
                    _register(info, value)
            self._row = _Attributes.of(self.infos)
        return self._row

    def _anew(self) -> tuple[_Attributes, list[dict[str, Any]]]:
        """Return the row, and the attributes of each module, now that a module is gone: a stand-in has its place."""
        self._row, self._readers, self._swap = None, [], None
        row = self._attributes()
        return row, [*map(vars, map(_MODULE_OF, row.modules))]

    def at_attributes(self, values: Sequence[T]) -> Sequence[T]:
        """For each attribute, the one of `values` (one per parameter) that belongs to its parameter."""
        row = self._row or self._attributes()
        return row.spread(values) if row.repeats else values

    def registered(self) -> list[nn.Parameter | None]:
        """For each attribute, the parameter that is registered there now."""
        row = self._row or self._attributes()
        try:
            owns = [*map(vars, map(_MODULE_OF, row.modules))]
        except TypeError:
            row, owns = self._anew()
        return list(map(dict.get, row.registries(owns), row.names))

    def put(self, values: Sequence[torch.Tensor | None], read: Read | None = None) -> None:
        """Register each value under all the names of its parameter.

        Args:
            values: one per parameter.
            read: what attributes show from now on; None shows what is registered.

        Raises:
            FlatParamError: if somebody has put a different parameter there since, other than a frozen one in the same
                memory; the message names it.
        """
        row = self._row or self._attributes()
        try:
            owns = [*map(vars, map(_MODULE_OF, row.modules))]
        except TypeError:
            row, owns = self._anew()
        shown: Sequence[object] = row.spread(self.shown) if row.repeats else self.shown
        found = list(map(dict.get, row.registries(owns), row.names, row.absent))
        # The check comes before any change.
        is_untouched = all(map(operator.is_, found, shown))
        if not is_untouched and not all(map(is_harmless, self.registered(), self.at_attributes(self.shown))):
            raise self._first_replaced()
        swap = self._swap if is_untouched else None
        if read is not None:
            if swap is None or not swap.show_sharded(owns, values):
                self._register(row, owns, values)
                self._have_read(row, owns, read, values)
        elif swap is None or not swap.show_registered(owns):
            for own, names in zip(owns, row.by_module, strict=True):
                uninstall(own, names)
            self._swap = None
            self._register(row, owns, values)
        else:
            plain, owners, indices = swap.plain, row.owners, row.indices
            for at, name in enumerate(row.names):
                plain[owners[at]][name] = values[indices[at]]
        for info, index in row.assigned:
            _assign(info.module, info.param_name, values[index])
        self.shown = list(values)

    @staticmethod
    def _register(row: _Attributes, owns: Sequence[dict[str, Any]], values: Sequence[torch.Tensor | None]) -> None:
        for registry, name, index in zip(row.registries(owns), row.names, row.indices, strict=True):
            # Past the method of a `ShardedRegistry`.
            dict.__setitem__(registry, name, values[index])

    def _have_read(
        self, row: _Attributes, owns: Sequence[dict[str, Any]], read: Read, values: Sequence[torch.Tensor | None]
    ) -> None:
        """Have reads of attributes call `read`, of registries that have these values."""
        if not self._readers:
            self._readers = [
                {name: functools.partial(read, index) for name, index in names.items()} for names in row.by_module
            ]
        for own, readers in zip(owns, self._readers, strict=True):
            install(own, readers)
        self._swap = _Swap.of(owns, row.by_module, list(values))

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

    def add(self, index: int, infos: Sequence[ParamInfo], read: Read) -> None:
        """Show parameter `index` under further names too, from now on; it is sharded now, and `read` as in `put`."""
        self.infos[index] += tuple(infos)
        self._row = None
        self._readers, self._swap = [], None
        for info in infos:
            _register(info, self.shown[index])
            install(vars(info.module), {info.param_name: functools.partial(read, index)})


def _register(info: ParamInfo, value: torch.Tensor | None) -> None:
    module = info.module
    module._parameters[info.param_name] = value  # type: ignore[assignment]  # or what a presenter makes
    if type(module).__setattr__ is not nn.Module.__setattr__:
        _assign(module, info.param_name, value)


def _assign(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Set an attribute by the module's own `__setattr__`, which may read parameters: what is registered answers."""
    own: Any = module._parameters
    registry = own if isinstance(own, ShardedRegistry) else ShardedRegistry({})
    readers, registry.readers = registry.readers, {}
    try:
        setattr(module, name, value)
    finally:
        registry.readers = readers
