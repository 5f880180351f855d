"""Which files one plain training step goes through, and in which order; and making, asking and saving a model."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from attrs import define, field
from torch import nn

WIDTH: Final = 8
CPU: Final = torch.device("cpu")
LIBRARIES: Final = ("flatparam", "FSDP1", "FSDP2")
"""Whose steps are compared: ours, and the peers of torch."""
MOMENTS: Final = ("step", "making a sharded model", "state_dict", "Checkpointer.save")
"""What can be followed; the last of flatparam alone."""


@define
class Trace:
    """The calls of functions below a folder, in order: how deep, in which file, and the function's name."""

    folder: Path
    calls: list[tuple[int, Path, str]] = field(factory=list)
    functions: dict[tuple[Path, int], None] = field(factory=dict)
    """The functions that were called, in the order of their first calls: the file, and the line that each begins in."""
    classes: set[str] = field(factory=set)
    """The classes whose methods were called."""
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
        if not path.is_relative_to(self.folder):
            return
        if event == "call":
            self._depth += 1
            name = frame.f_code.co_name
            # A reader does not open what a decorator puts around a function to follow that function.
            is_wrapper = "function" in frame.f_code.co_freevars
            if not name.startswith("<") and not is_wrapper:
                self.calls.append((self._depth, path, name))
                self.functions.setdefault((path, frame.f_code.co_firstlineno))
                owner = getattr(frame.f_code, "co_qualname", name).rpartition(".")[0]
                if owner and not owner.endswith("<locals>"):
                    self.classes.add(owner)
        elif event == "return":
            self._depth -= 1

    @property
    def files(self) -> list[Path]:
        """The files, each once, in the order in which a reader meets them; without `__init__`, which has no code."""
        return list(dict.fromkeys(path for _, path, _ in self.calls if path.name != "__init__.py"))

    @property
    def file_changes(self) -> int:
        """How often two calls that follow each other are in different files, so that a reader turns to another one."""
        paths = [path for _, path, _ in self.calls]
        return sum(before != after for before, after in itertools.pairwise(paths))

    def longest_way(self, function: str, package: str) -> list[Path]:
        """The files of a package that some call of `function` goes through, from one to the next: the longest way.

        The outermost call, which is the root's, is left out if there are others: it begins and ends the pass, too.
        """
        starts = [start for start, (_, _, name) in enumerate(self.calls) if name == function]
        outermost = min((self.calls[start][0] for start in starts), default=0)
        inner = [start for start in starts if self.calls[start][0] > outermost]
        return max((self._way(start, package) for start in inner or starts), key=returns, default=[])

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


def trace(root: Path, library: str = "flatparam", moment: str = "step") -> Trace:
    """The third step of a model of three blocks, each a unit, of the first of two gloo ranks; or another moment.

    It is a step of the packages below `root`, a checkout, and not of those that are installed.

    Args:
        library: one of `LIBRARIES`.
        moment: one of `MOMENTS`.
    """
    sys.path[:0] = map(str, sorted((root / "packages").glob("*/src")))
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        dist.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=0 if child else 1)
        try:
            return _train(root, library, moment, Path(folder), traced=bool(child))
        finally:
            dist.destroy_process_group()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)


def _sharded_by(library: str, model: nn.Sequential) -> nn.Module:
    """The model, of which each block is a unit."""
    if library == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for block in (*list(model)[1:], model):
            fully_shard(block)
        return model
    of = importlib.import_module("torch.distributed.fsdp" if library == "FSDP1" else "flatparam")
    policy = importlib.import_module(f"{of.__name__}.wrap").ModuleWrapPolicy({nn.Sequential})
    sharded: nn.Module = of.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU)
    return sharded


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)


def _train(root: Path, library: str, moment: str, folder: Path, *, traced: bool) -> Trace:
    model = _sharded_by(library, _model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_torch = Path(torch.__file__).parent / "distributed" / "fsdp"
    found = Trace(root / "packages" if library == "flatparam" else of_torch)

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    actions: dict[str, Callable[[], object]] = {
        "step": step,
        "making a sharded model": lambda: _sharded_by(library, _model()),
        "state_dict": model.state_dict,
    }
    if moment == "Checkpointer.save":
        checkpointer = importlib.import_module("flatparam").Checkpointer(folder / "saved", model, optimizer)
        checkpointer.save(1)
        actions[moment] = lambda: checkpointer.save(2)
    elif moment == "state_dict":
        model.state_dict()
    with found.recording() if traced else nullcontext():
        actions[moment]()
    return found
