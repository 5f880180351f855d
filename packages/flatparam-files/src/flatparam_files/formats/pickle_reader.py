"""Reading pickles without running them: a machine for the few opcodes that checkpoints need, and its budget.

Nothing that a pickle names is imported or called. Of the names that the caller admits, some stand for values, some for
functions of ours, and the rest become inert objects; a name that is not admitted is refused. So a file can say what it
likes and no code of its choosing runs, and the large buffers that Python's unpickler would reserve at a file's word
are never reserved. Memory and time are in proportion to the pickle's size: see `Budget`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn, final

import attrs

from flatparam_files.disk.checkpoint_error import CheckpointError, damage_named
from flatparam_files.disk.limits import allowed_nbytes, is_short_integer

# Modules that had other names when Python 2 was spoken, as pickles of protocol 2 still say.
_OLD_MODULES: Final = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@final
@attrs.frozen
class Global:
    """A dotted name that a pickle mentions: `torch._utils._rebuild_tensor_v2`."""

    name: str


@final
@attrs.define(eq=False)
class InertObject:
    """An object of an admitted class, by its parts: the arguments it is made of and the state it is given."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@final
@attrs.frozen
class AdmittedNames:
    """The names that a pickle may mention.

    Attributes:
        values: names that stand for a value, such as `torch.float32`.
        functions: names that may be called, and what is called in their place.
        inert: classes whose objects become an `InertObject`.
        hint: what the error about any other name tells the reader to do.
    """

    values: Mapping[str, Any]
    functions: Mapping[str, Callable[..., Any]]
    inert: frozenset[str] = frozenset()
    hint: str = ""


def read_pickle(data: bytes, names: AdmittedNames, *, what: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the object that a pickle describes.

    Args:
        what: where the pickle comes from, for errors.
        persistent: what a persistent id (torch's storages) stands for; none are admitted without it.

    Raises:
        CheckpointError: if the pickle is damaged, or mentions a name that is not admitted.
    """
    machine = _Machine(names, what, persistent, Budget(len(data)))
    with damage_named(f"{what} is damaged: its pickle cannot be read"):
        for opcode, argument, _ in pickletools.genops(data):
            machine.step(opcode.name, argument)
        return machine.result()


_MARK: Final = object()
_CONSTANTS: Final[Mapping[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS: Final[Mapping[str, Callable[[], Any]]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}
_NUMBERS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"})
_TEXTS: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_BYTES: Final = frozenset({"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"})
_LITERALS: Final = _NUMBERS | _TEXTS | _BYTES
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_KEYS: Final = (str, int, float, bool, bytes, type(None), InertObject)
# About what the objects of Python take.
_MEMO_NBYTES: Final = 100
_CONTAINER_NBYTES: Final = 80
_SET_NBYTES: Final = 240
_ITEM_NBYTES: Final = 16
_ENTRY_NBYTES: Final = 100
_OBJECT_NBYTES: Final = 400


def is_key(value: Any) -> bool:
    """Whether `value` may be a key: large integers can all have one hash, and that of a tuple can take for ever."""
    return isinstance(value, _KEYS) and (not isinstance(value, int) or abs(value) < 2**64)


@final
class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(
        self, names: AdmittedNames, what: str, persistent: Callable[[Any], Any] | None, budget: Budget
    ) -> None:
        self._budget = budget
        self._names = names
        self._what = what
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        """Return the object that the pickle describes, once all its opcodes are carried out."""
        (root,) = self._stack
        self._budget.visit(root)
        return root

    def step(self, opcode: str, argument: Any) -> None:
        """Carry out one opcode."""
        stack = self._stack
        if opcode in _PUTS:
            self._budget.take(_MEMO_NBYTES)
            self._memo[argument] = stack[-1]
        elif opcode in _GETS:
            stack.append(self._memo[argument])
        elif opcode in _LITERALS:
            self._budget.take_literal(argument)
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _CONTAINERS:
            self._budget.take(_SET_NBYTES if opcode == "EMPTY_SET" else _CONTAINER_NBYTES)
            stack.append(_CONTAINERS[opcode]())
        elif opcode in _TUPLES:
            self._budget.take(_CONTAINER_NBYTES)
            stack.append(tuple(reversed([stack.pop() for _ in range(_TUPLES[opcode])])))
        else:
            self._rarer_step(opcode, argument)

    def _rarer_step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "MARK":
                stack.append(_MARK)
            case "TUPLE":
                self._budget.take(_CONTAINER_NBYTES)
                stack.append(tuple(self._above_mark()))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._above_mark())
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS" | "ADDITEMS":
                self._extend(self._above_mark())
            case "MEMOIZE":
                self._budget.take(_MEMO_NBYTES)
                self._memo[len(self._memo)] = stack[-1]
            case "GLOBAL":
                stack.append(self._named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(self._named(module, name))
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._made(function, arguments))
            case "BUILD":
                self._set_state(stack.pop())
            case "BINPERSID" if self._persistent is not None:
                identity = stack.pop()
                self._budget.take(_OBJECT_NBYTES)
                self._budget.visit(identity)
                stack.append(self._persistent(identity))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                self._refuse(f"the opcode {opcode}")

    def _above_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("expected a mark on the stack, found none")
        above = self._stack[at + 1 :]
        self._budget.take(_ITEM_NBYTES * len(above))
        del self._stack[at:]
        return above

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError(f"items are set in a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not is_key(key):
                self._refuse(f"a {type(key).__name__} as the key of a dictionary")
            self._budget.take(_ENTRY_NBYTES)
            target[key] = value

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, set):
            if not all(map(is_key, items)):
                self._refuse("a set of containers")
            self._budget.take(_ENTRY_NBYTES * len(items))
            target.update(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise TypeError(f"items are appended to a {type(target).__name__}")

    def _named(self, module: Any, name: Any) -> Any:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("expected text as a name, found something else")
        dotted = f"{_OLD_MODULES.get(module, module)}.{name}"
        if dotted in self._names.values:
            return self._names.values[dotted]
        if dotted in self._names.functions or dotted in self._names.inert:
            return Global(dotted)
        self._refuse(repr(dotted))

    def _made(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise TypeError("expected a function to call, found something else")
        # A function may copy, compare or print what it is given.
        self._budget.take(_OBJECT_NBYTES)
        self._budget.visit(arguments)
        if function.name in self._names.functions:
            return self._names.functions[function.name](*arguments)
        return InertObject(function.name, arguments)

    def _set_state(self, state: Any) -> None:
        target = self._stack[-1]
        if isinstance(target, InertObject):
            target.state = state
        elif not isinstance(target, dict):
            # The state of an OrderedDict is its attributes, such as `_metadata`.
            raise TypeError(f"a {type(target).__name__} is given a state")

    def _refuse(self, found: str) -> NoReturn:
        raise CheckpointError(
            f"{self._what} holds {found}, which is not among what a checkpoint may hold; nothing of it was run. "
            f"{self._names.hint}"
        )


# The budget of a pickle: what its objects may take, and how often they may be looked at


_TIMES: Final = 32
"""The most bytes of objects for each byte of a large pickle; those of torch take up to twenty."""
_SMALL_VISITS: Final = 100_000
_VISITS_A_BYTE: Final = 16


@final
class Budget:
    """The rest of the memory, and of the visits to values, that a pickle of `nbytes` may cost.

    A value that is used in several places counts in each: whoever walks through a tree comes there again and again,
    and a pickle of 600 bytes can be a tree of a million leaves.
    """

    __slots__ = ("_allowed", "_left", "_visits")

    def __init__(self, nbytes: int) -> None:
        """All of it is left."""
        self._allowed = self._left = allowed_nbytes(nbytes, _TIMES)
        self._visits = _SMALL_VISITS + _VISITS_A_BYTE * nbytes

    def take(self, nbytes: int) -> None:
        """Take memory of the budget; a ValueError if there is not so much left."""
        self._left -= nbytes
        if self._left < 0:
            raise ValueError(f"its objects would take more than {self._allowed:,} bytes of memory")

    def take_literal(self, value: Any) -> None:
        """Take the memory of a number, a text or bytes; a ValueError if it is too much, or too long to be printed."""
        if isinstance(value, int) and not is_short_integer(value):
            raise ValueError(f"it has an integer of {value.bit_length():,} bits")
        self.take(64 + (len(value) if isinstance(value, (str, bytes, bytearray)) else 0))

    def visit(self, root: Any) -> None:
        """Take a visit to every value below `root` of the budget, and the memory of a copy of each text.

        Raises:
            ValueError: if there are not so many left, or a container holds itself.
        """
        # The containers on the way to where the walk is, and what is left of each.
        path: list[tuple[int, Iterator[Any]]] = [(0, iter((root,)))]
        inside: set[int] = set()
        while path:
            for value in path[-1][1]:
                self._visits -= 1
                if self._visits < 0:
                    raise ValueError("it has far more values than bytes, because it has the same ones again and again")
                below = _below(value)
                if below is not None:
                    if id(value) in inside:
                        raise ValueError("a container holds itself")
                    inside.add(id(value))
                    path.append((id(value), below))
                    break
                if isinstance(value, (str, bytes)):
                    self.take(len(value))
            else:
                inside.discard(path.pop()[0])


def _below(value: Any) -> Iterator[Any] | None:
    """Return the values that a container holds; None if it is none."""
    if isinstance(value, Mapping):
        return (each for item in value.items() for each in item)
    if isinstance(value, (list, tuple, set, frozenset)):
        return iter(value)
    arguments = getattr(value, "arguments", None)
    return iter((arguments, value.state)) if isinstance(arguments, tuple) else None
