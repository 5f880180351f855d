"""Pickles of plain values and of objects that are only named: nothing has to be imported to write them.

Protocol 2, which every reader of checkpoints knows. Equal trees become equal bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, final

import attrs
import torch

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.formats.pickle_reader import Global


@final
@attrs.frozen(eq=False)
class PickledCall:
    """The result of `function(*arguments)`; if `new`, an object of the class `function`, which is given `state`."""

    function: Global
    arguments: tuple[Any, ...] = ()
    state: Any = None
    new: bool = False


@final
@attrs.frozen(eq=False)
class Persistent:
    """An object that the reader knows under an identity."""

    identity: tuple[Any, ...]


def pickle_of(root: Any) -> bytes:
    """The pickle of a tree of dictionaries, lists, tuples, plain values, `Global`, `PickledCall` and `Persistent`.

    Raises:
        CheckpointError: for a value of a different type.
    """
    out = io.BytesIO()
    out.write(pickle.PROTO + b"\x02")
    _PickleWriter(out).write(root)
    out.write(pickle.STOP)
    return out.getvalue()


_INT32: Final = range(-(2**31), 2**31)


@final
class _PickleWriter:
    def __init__(self, out: io.BytesIO) -> None:
        self._out = out.write

    def write(self, value: Any) -> None:
        """Append the opcodes that leave `value` on the stack."""
        match value:
            case None:
                self._out(pickle.NONE)
            case bool():
                self._out(pickle.NEWTRUE if value else pickle.NEWFALSE)
            case int() | float():
                self._number(value)
            case str():
                data = value.encode("utf-8", "surrogatepass")
                self._out(pickle.BINUNICODE + struct.pack("<I", len(data)) + data)
            case bytes() | bytearray():
                self.write(PickledCall(Global("_codecs.encode"), (value.decode("latin1"), "latin1")))
            case complex():
                self.write(PickledCall(Global("builtins.complex"), (value.real, value.imag)))
            case torch.dtype():
                self.write(Global(str(value)))
            case tuple():
                self._out(pickle.MARK)
                self._each(value)
                self._out(pickle.TUPLE)
            case list():
                self._out(pickle.EMPTY_LIST + pickle.MARK)
                self._each(value)
                self._out(pickle.APPENDS)
            case set() | frozenset():
                self.write(PickledCall(Global("builtins.set"), (sorted(value, key=repr),)))
            case Counter():
                self.write(PickledCall(Global("collections.Counter"), (dict(value),)))
            case Mapping():
                self._out(pickle.EMPTY_DICT + pickle.MARK)
                for item in value.items():
                    self._each(item)
                self._out(pickle.SETITEMS)
            case Global():
                module, _, name = value.name.rpartition(".")
                self._out(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            case PickledCall():
                self._call(value)
            case Persistent():
                self.write(value.identity)
                self._out(pickle.BINPERSID)
            case _:
                raise CheckpointError(f"a value of type {type(value).__name__} has no form in this format: {value!r}")

    def _each(self, values: tuple[Any, ...] | list[Any]) -> None:
        for value in values:
            self.write(value)

    def _number(self, value: int | float) -> None:
        if isinstance(value, float):
            self._out(pickle.BINFLOAT + struct.pack(">d", value))
        elif value in _INT32:
            self._out(pickle.BININT + struct.pack("<i", value))
        else:
            data = pickle.encode_long(value)
            self._out(pickle.LONG1 + struct.pack("<B", len(data)) + data)

    def _call(self, call: PickledCall) -> None:
        self.write(call.function)
        self.write(call.arguments)
        self._out(pickle.NEWOBJ if call.new else pickle.REDUCE)
        if call.state is not None:
            self.write(call.state)
            self._out(pickle.BUILD)
