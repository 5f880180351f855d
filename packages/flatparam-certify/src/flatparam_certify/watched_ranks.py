"""The ranks of an engine under test: processes over gloo that run one setting after the other, and are watched."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, final

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatparam_certify.case import Case, case_named
from flatparam_certify.engines import EngineUnderTest
from flatparam_certify.meshes import DIMENSIONS, CertifyError, MeshSizes
from flatparam_certify.rank import RunSeen, Skipped, run_setting
from flatparam_certify.settings import Setting

_STACKS_SIGNAL: Final = signal.SIGUSR1
_STACKS_SECONDS: Final = 0.5
_START_SECONDS: Final = 300.0
"""For ranks to begin, which import torch and the case first."""
_GRACE_SECONDS: Final = 3.0
"""For the other ranks to answer, once one has failed."""
_PRELOADED: Final = ("torch", "torch.distributed", "torch._dynamo", "torch.distributed.tensor", __name__)


@final
@attrs.frozen
class Failed:
    """A rank that did not do its part.

    Attributes:
        kind: `raised`, `hung` or `died`.
        text: the error in one line, or where the rank was.
        details: the traceback, or the stack of the rank.
    """

    kind: str
    text: str
    details: str = ""


@final
@attrs.frozen
class _Plan:
    """The orders of a rank, which it gets when it begins; the case and the engine are pickled."""

    rank: int
    mesh: MeshSizes
    folder: str
    payload: bytes
    path: tuple[str, ...]
    timeout: float
    seed: int

    @property
    def stacks(self) -> Path:
        """Return the file of this rank's stacks."""
        return Path(self.folder, f"stacks-{self.rank}.txt")


@final
@attrs.define(eq=False)
class _Child:
    """A rank's process, and the pipe to it."""

    plan: _Plan
    process: BaseProcess
    pipe: Connection


@final
class World:
    """Ranks that wait for settings. Use it as a context: at its end no process is left."""

    def __init__(self, mesh: MeshSizes, case: Case | str, engine: EngineUnderTest, seed: int, timeout: float) -> None:
        """Start the ranks.

        Args:
            timeout: the seconds that they have for each setting.

        Raises:
            CertifyError: if the functions of the case or of the engine cannot be found by another process.
        """
        try:
            payload = pickle.dumps((case, engine))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CertifyError(
                f"expected functions at the top level of a module, which each rank can import, found: {error}; move "
                "them there, or give the case or the engine by name"
            ) from error
        self.timeout = timeout
        self.is_sound = True
        self._folder = tempfile.TemporaryDirectory(prefix="flatparam-certify-")
        plans = [
            _Plan(rank, mesh, self._folder.name, payload, tuple(sys.path), timeout, seed) for rank in range(mesh.ranks)
        ]
        self._children: list[_Child] = []
        for plan in plans:
            self._children.append(_start(plan))

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self) -> list[Failed | None]:
        """Return what went wrong at the start, by rank: None, if nothing did."""
        return [each if isinstance(each, Failed) else None for each in self._answers(_START_SECONDS)]

    def run(self, setting: Setting, max_norm: float) -> list[RunSeen | Skipped | Failed]:
        """Return what each rank saw in a setting. If a rank failed alone or hung, the world can run no other one."""
        for child in self._children:
            # A rank that is gone is told by its answer.
            with contextlib.suppress(OSError):
                child.pipe.send_bytes(pickle.dumps((setting, max_norm)))
        return self._answers(self.timeout)

    def _answers(self, limit: float) -> list[Any]:
        """Return the answer of each rank, or how it failed."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        failing = False
        while len(answers) < len(self._children):
            waiting = [child for child in self._children if child.plan.rank not in answers]
            ready = wait([child.pipe for child in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                answers.update(_hung(waiting, "another rank had failed" if failing else f"{limit:g} seconds"))
                break
            for child in waiting:
                if child.pipe in ready:
                    answers[child.plan.rank] = _received(child)
            if not failing and any(isinstance(each, Failed) for each in answers.values()):
                failing, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
        found = [answers[rank] for rank in range(len(self._children))]
        kinds = {each.kind if isinstance(each, Failed) else "" for each in found}
        # If every rank has raised the same error, none of them waits for another one.
        self.is_sound = kinds in ({""}, {"raised"})
        return found

    def close(self) -> None:
        """End every process; those that wait for a setting leave by themselves."""
        for child in self._children:
            if self.is_sound:
                with contextlib.suppress(OSError):
                    child.pipe.send_bytes(pickle.dumps(None))
        for child in self._children:
            if self.is_sound:
                child.process.join(_GRACE_SECONDS)
            if child.process.is_alive():
                child.process.kill()
            child.process.join()
            child.process.close()
            child.pipe.close()
        self._children = []
        self._folder.cleanup()


def _start(plan: _Plan) -> _Child:
    # Children of a process that has run a backward pass cannot run one; those of a server can.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_be_rank, args=(plan, theirs), name=f"rank-{plan.rank}")
    process.start()
    theirs.close()
    return _Child(plan, process, ours)


def _hung(waiting: Sequence[_Child], after: str) -> dict[int, Failed]:
    """Return where ranks are that did not answer in time."""
    for child in waiting:
        with contextlib.suppress(ProcessLookupError):
            if child.process.pid is not None:
                os.kill(child.process.pid, _STACKS_SIGNAL)
    time.sleep(_STACKS_SECONDS)
    stacks = {child.plan.rank: _stack_of(child.plan.stacks) for child in waiting}
    return {
        rank: Failed("hung", f"after {after} it was in {_place_in(stack)}", stack) for rank, stack in stacks.items()
    }


def _received(child: _Child) -> Any:
    try:
        return pickle.loads(child.pipe.recv_bytes())
    except (EOFError, OSError):
        child.process.join(_GRACE_SECONDS)
        code = child.process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
        return Failed("died", f"its process ended {how}")


def _stack_of(path: Path) -> str:
    """Return the stack of a rank down to this package, the innermost frame first."""
    with contextlib.suppress(OSError):
        return path.read_text().strip().partition(f'  File "{__file__}"')[0].rstrip()
    return ""


def _place_in(stack: str) -> str:
    """Return where the main thread was: the innermost frame of a stack of faulthandler, and that of the program."""
    frames = [line.strip().removeprefix("File ") for line in stack.splitlines() if line.strip().startswith("File ")]
    inside = [line for line in frames if "/torch/" not in line and "flatparam_certify" not in line]
    if not frames:
        return "a place that it did not write down"
    return frames[0] if not inside or inside[0] == frames[0] else f"{inside[0]}, and there in {frames[0]}"


# In the process of a rank


def _be_rank(plan: _Plan, pipe: Connection) -> None:
    """Join the group, and run settings until the parent has none left."""
    sys.path[:] = [*plan.path, *(each for each in sys.path if each not in plan.path)]
    torch.set_num_threads(1)
    # The parent ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with plan.stacks.open("w") as stacks:
        faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=False)
        try:
            _join(plan)
            case, engine = pickle.loads(plan.payload)
            case = case_named(case) if isinstance(case, str) else case
            mesh = init_device_mesh("cpu", plan.mesh.sizes, mesh_dim_names=DIMENSIONS)
        except BaseException as error:
            pipe.send_bytes(pickle.dumps(_failure(error)))
            os._exit(1)
        pipe.send_bytes(pickle.dumps(None))
        while (told := _told(pipe)) is not None:
            setting, max_norm = told
            try:
                seen: Any = run_setting(case, engine, plan.mesh, mesh, setting, plan.seed, max_norm)
            except BaseException as error:
                seen = _failure(error)
            pipe.send_bytes(pickle.dumps(seen))
    # Not through the end of the interpreter, which may wait for ranks that are gone.
    os._exit(0)


def _told(pipe: Connection) -> tuple[Setting, float] | None:
    try:
        told: tuple[Setting, float] | None = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return told


def _join(plan: _Plan) -> None:
    os.environ.update({"RANK": str(plan.rank), "LOCAL_RANK": str(plan.rank), "WORLD_SIZE": str(plan.mesh.ranks)})
    dist.init_process_group(
        "gloo",
        init_method=Path(plan.folder, "store").as_uri(),
        rank=plan.rank,
        world_size=plan.mesh.ranks,
        # The parent sees a hang first, and where each rank is.
        timeout=timedelta(seconds=2 * plan.timeout + 60),
    )
    dist.barrier()


def _failure(error: BaseException) -> Failed:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return Failed("raised", f"{type(error).__name__}: {error}", "".join(lines))
