"""Something goes wrong in the middle of a pass: where, and what."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel
from flatparam_runtime import clean_fqn


class OutOfLuck(Exception):
    """What is raised; not a RuntimeError, so that nothing catches it by mistake."""


class _Explode(torch.autograd.Function):
    """The identity, until its backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, error: BaseException) -> Tensor:
        context.error = error
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise context.error


def find(model: nn.Module, path: str) -> nn.Module:
    """The module of the zoo that has this path, not the wrapper around it."""
    for name, module in model.named_modules():
        if clean_fqn(name) == path and not isinstance(module, FullyShardedDataParallel):
            return module
    raise KeyError(path)


@contextlib.contextmanager
def raising_before(model: nn.Module, path: str, error: BaseException, *, call: int = 0) -> Iterator[None]:
    """Raise inside the forward of this module, at its call number ``call`` (recomputations count)."""
    module = find(model, path)
    forward = module.forward
    calls = 0

    def explode(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise error
        return forward(*args, **kwargs)

    module.forward = explode
    try:
        yield
    finally:
        del module.forward


@contextlib.contextmanager
def raising_in_backward_of(model: nn.Module, path: str, error: BaseException) -> Iterator[None]:
    """Raise when the backward pass has reached the output of this module."""
    module = find(model, path)
    forward = module.forward
    module.forward = lambda *args, **kwargs: _Explode.apply(forward(*args, **kwargs), error)
    try:
        yield
    finally:
        del module.forward
