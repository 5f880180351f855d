"""The tensors in the inputs and outputs of a module."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from torch import Tensor, nn

_WITHOUT_TENSORS: Final = (str, bytes, int, float, complex, type)
_IN_ORDER: Final = (tuple, list, set, frozenset, collections.deque)


def tensors_in(value: object, opaque: list[object] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in `value`, once: in tuples, lists, sets, mappings, dataclasses and objects with attributes.

    Args:
        opaque: gets the objects that may hold a tensor and cannot be searched: functions, iterators, callable objects.
    """
    if isinstance(value, Tensor):
        yield value
        return
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if item is None or isinstance(item, _WITHOUT_TENSORS) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, _IN_ORDER):
            stack.extend(reversed(list(item)))
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, nn.Module):
            continue
        elif callable(item) or isinstance(item, Iterator):
            if opaque is not None:
                opaque.append(item)
        else:
            stack.extend(reversed(_attributes(item)))


def _attributes(item: object) -> list[object]:
    values = list(vars(item).values()) if hasattr(item, "__dict__") else []
    for kind in type(item).__mro__:
        for descriptor in kind.__dict__.values():
            # The descriptor of a slot, whatever its name.
            if isinstance(descriptor, types.MemberDescriptorType):
                # The slot may never have been set.
                with contextlib.suppress(AttributeError):
                    values.append(descriptor.__get__(item))
    return values


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in it replaced; a container is rebuilt only if something in it changed.

    The function searches tuples (named ones too), lists, mappings and dataclasses; other objects are returned as they
    are.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: map_tensors(function, item) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(pairs)  # type: ignore[call-arg]  # a Mapping that is made from a dict
        # A copy keeps what a dict does not have, such as a defaultdict's factory.
        changed = copy.copy(value)
        changed.update(pairs)
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        if all(new is getattr(value, name) for name, new in fields.items()):
            return value
        return dataclasses.replace(value, **fields)
    return value
