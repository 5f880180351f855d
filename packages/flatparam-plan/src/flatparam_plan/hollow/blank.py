"""Without them a rehearsal begins sooner: memory of models, values that nobody has, and torch's compiler.

To import the compiler takes longer than to plan a large model.
"""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, Final, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatparam_runtime import untraced

_FILLS: Final = frozenset(
    [
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.random_,
        Tensor.bernoulli_,
        Tensor.exponential_,
        Tensor.log_normal_,
        Tensor.cauchy_,
        Tensor.geometric_,
    ]
)


@final
class Blank(TorchFunctionMode):
    """Inside, initialisers leave tensors on the meta device as they are; other tensors are filled as always."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def hollow_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of `model` without a byte on an accelerator: what is there is on the meta device in the copy."""
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            there: Tensor = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    return copy.deepcopy(model, memo)


_NAME: Final = "torch._dynamo"
_MARK: Final = "__dynamo_disable"


@final
class Config:
    """Stands for the compiler's settings: the one that checkpointing asks for is here, others are the compiler's."""

    error_on_nested_fx_trace: Final = True
    """It matters while a graph is made, and none is."""

    def __init__(self, compiler: ModuleType) -> None:
        """Ask `compiler` for other settings."""
        self._compiler = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.__getattr__("config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_compiler":
            super().__setattr__(name, value)
        else:
            setattr(self._compiler.__getattr__("config"), name, value)


@final
class StandIn(ModuleType):
    """Stands for `torch._dynamo` until somebody asks for more than not to compile a function."""

    def __init__(self) -> None:
        """Begin with nothing disabled."""
        super().__init__(_NAME)
        self._disabled: list[Any] = []
        self.was_needed = False
        self.config = Config(self)

    def disable(
        self, fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        """`fn`, which is not to be compiled, or a decorator for such functions.

        Nothing is compiled now. Later, torch asks anew about its own functions (`wrapping=False`); others, of a module
        that is imported now, are marked.
        """
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, reason=reason, wrapping=wrapping)
        if not wrapping:
            self._disabled.append(fn)
            return fn
        if isinstance(fn, FunctionType):
            return untraced(fn, with_callees=recursive)
        # A class, say: the compiler knows what to do with it.
        return self.__getattr__("disable")(fn, recursive, reason=reason)

    def graph_break(self, msg: str = "") -> None:
        """Nothing: no graph is made."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__spec__", "__wrapped__"):
            raise AttributeError(name)
        self.was_needed = True
        self.leave()
        return getattr(importlib.import_module(_NAME), name)

    def leave(self) -> None:
        """Make way for the compiler; torch asks it anew for each function that it is not to compile."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        for function in self._disabled:
            vars(function).pop(_MARK, None)
        self._disabled.clear()


@contextmanager
def without_compiler() -> Iterator[StandIn | None]:
    """Inside, torch does not import its compiler for functions that are not to be compiled.

    Gives what stands for it; `None` if the compiler, or another stand-in, is there.
    """
    if _NAME in sys.modules:
        yield None
        return
    stands = sys.modules[_NAME] = StandIn()
    try:
        yield stands
    finally:
        stands.leave()
