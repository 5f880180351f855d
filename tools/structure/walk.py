"""Which files one plain training step goes through, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from attrs import define, field

WIDTH: Final = 8


@define
class Trace:
    """The calls of functions of the packages, in order: how deep, in which file, and the function's name."""

    root: Path
    calls: list[tuple[int, Path, str]] = field(factory=list)
    _depth: int = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down what is called inside."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(self.root / "packages"):
            return
        if event == "call":
            self._depth += 1
            name = frame.f_code.co_name
            if not name.startswith("<"):
                self.calls.append((self._depth, path, name))
        elif event == "return":
            self._depth -= 1

    @property
    def files(self) -> list[Path]:
        """The files, each once, in the order in which a reader meets them."""
        return list(dict.fromkeys(path for _, path, _ in self.calls))

    def longest_way(self, function: str, package: str) -> list[Path]:
        """The files of a package that some call of `function` goes through, from one to the next: the longest way."""
        ways = [
            self._way(start, package) for start, (_, _, name) in enumerate(self.calls) if name == function
        ]
        return max(ways, key=returns, default=[])

    def _way(self, start: int, package: str) -> list[Path]:
        depth, first, _ = self.calls[start]
        way = [first]
        for deep, path, _ in self.calls[start + 1 :]:
            if deep <= depth:
                break
            if path != way[-1] and package in path.parts:
                way.append(path)
        return way


def returns(way: Sequence[Path]) -> int:
    """How often the way comes back to a file that it has left."""
    seen: set[Path] = set()
    count = 0
    for path in way:
        count += path in seen
        seen.add(path)
    return count


def trace_a_step(root: Path) -> Trace:
    """The third step of a model of three blocks, each a unit, on the first of two ranks that are threads.

    It is a step of the packages below `root`, a checkout, and not of those that are installed.
    """
    sys.path[:0] = map(str, sorted((root / "packages").glob("*/src")))
    from flatparam_comm import run_threads

    traces: list[Trace] = run_threads(2, _train, root)
    return traces[0]


def _train(group: Any, root: Path) -> Trace:
    import torch
    from torch import nn

    from flatparam import FullyShardedDataParallel as FSDP
    from flatparam.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    model = FSDP(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks),
        process_group=group,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace(root)

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    if group.rank:
        step()
    else:
        _recorded(trace, step)
    return trace


def _recorded(trace: Trace, step: Callable[[], None]) -> None:
    with trace.recording():
        step()
