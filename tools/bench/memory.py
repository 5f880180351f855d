"""How many bytes of tensors there are at once, by the allocator's own account.

torch's allocator for CPU keeps a total when a flag of its C++ library says so, and writes a line for each change. That
sees every thread (gloo's release tensors, where the profiler does not look) and storages that are resized.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, frozen

_LINE: Final = re.compile(rb"C10 (?:alloc|deleted) \d+ bytes, total alloc (\d+) bytes")
_INFO, _WARNING = 0, 1
_SETTLING: Final = 0.25
_BEFORE_THE_NEXT: Final = 0.005
"""How long gloo's threads are given to drop what they hold: at the end, and after each collective. In seconds."""


@frozen
class Memory:
    """Bytes of all tensors that were made since a beginning: the most at a time, and those left in the end."""

    peak: int
    at_rest: int


@define
class Allocator:
    """The account of this process; make one before what is to be measured exists."""

    base: int = 0

    def __attrs_post_init__(self) -> None:
        _flag(ctypes.c_bool, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        self.base = self.during(lambda: None).at_rest

    def during(self, action: Callable[[], object]) -> Memory:
        """What was held while `action` ran."""
        gc.collect()  # cycles that are left of something else
        with _lines() as lines, _threads_keeping_up():
            action()
            # gloo's threads drop the tensors of a collective that is over when they get to it.
            time.sleep(_SETTLING)
            torch.empty(0).untyped_storage().resize_(1)  # at least one line
        totals = [int(total) - self.base for total in _LINE.findall(lines[0])]
        return Memory(max(totals), totals[-1])


@contextmanager
def _threads_keeping_up() -> Iterator[None]:
    """Inside, who waits for a collective goes on when gloo's thread has had time to drop the tensors.

    Otherwise a peak would be by a buffer larger from run to run, whoever's step it is.
    """
    wait = torch.distributed.Work.wait

    def wait_and_settle(work: torch.distributed.Work, *arguments: Any, **named: Any) -> Any:
        result = wait(work, *arguments, **named)
        time.sleep(_BEFORE_THE_NEXT)
        return result

    torch.distributed.Work.wait = wait_and_settle  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.distributed.Work.wait = wait  # type: ignore[method-assign]


@contextmanager
def _lines() -> Iterator[list[bytes]]:
    """What is logged inside, as the only entry of a list that is filled afterwards."""
    found: list[bytes] = []
    level = _flag(ctypes.c_int, "FLAGS_caffe2_log_level")
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        level.value = _INFO
        try:
            yield found
        finally:
            level.value = _WARNING
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            found.append(file.read())


def _flag(kind: Any, name: str) -> ctypes.c_bool | ctypes.c_int:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flag: ctypes.c_bool | ctypes.c_int = kind.in_dll(library, name)
    return flag
