"""What `torch.compile` leaves as it is: it compiles the modules of a unit, and not what happens around them.

`torch.compiler.disable` says so too, at the price of importing Dynamo with this package, and of some microseconds for
each call. Here the code object is marked, which the interpreter's frame hook reads, and the function, which Dynamo
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function, *, with_callees: bool = True) -> Function:
    """Have `torch.compile` run `function`, a Python function, as it is.

    Args:
        with_callees: everything that it calls too; else that is compiled by itself.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if with_callees else default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):  # another version of torch: the way that is public
        return torch.compiler.disable(function, recursive=with_callees)  # type: ignore[no-any-return, no-untyped-call]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets
    return function
