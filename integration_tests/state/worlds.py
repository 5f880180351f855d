"""Tests whose body runs on every rank of a world of gloo processes; each world starts once, for all its tests.

`on_ranks` makes a test out of such a body. A body that fails on some ranks only leaves the others in a collective until
that times out; the world then makes a new process group, so that the next body is not disturbed.
"""

from __future__ import annotations

import fcntl
import importlib
import itertools
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import torch
import torch.distributed as dist

from flatparam_comm import Collectives, ProcessGroupCollectives
from flatparam_comm.testing import PATIENCE, run_processes
from integration_tests.state.ours import write_ours
from integration_tests.state.torch_files import Files, write_torchs

Body: TypeAlias = Callable[..., None]
"""Called as `body(group, files, **case)`."""

#: How long a collective may take in which not all ranks take part.
_PG_TIMEOUT = PATIENCE / 5

#: How long all jobs of a world may take.
_WORLD_TIMEOUT = 3 * PATIENCE

#: How long a test may take: the first one pays for its whole world, and for the files.
TEST_TIMEOUT = 6 * PATIENCE


@attrs.frozen
class Job:
    """One body with one case of its parameters, in a form that travels."""

    module: str
    name: str
    case: str
    arguments: tuple[tuple[str, Any], ...]

    def run(self, group: Collectives, files: Files) -> None:
        """Be this rank of it."""
        getattr(importlib.import_module(self.module), self.name).body(group, files, **dict(self.arguments))


def on_ranks(*sizes: int, **axes: Sequence[Any]) -> Callable[[Body], Any]:
    """Make a test, for each size of a world, of a function that its ranks call with each combination of `axes`.

    Of three axes or more every second combination, which are all pairs of values, is short; a second test, which is
    long, has the rest.
    """
    parts: dict[str, list[tuple[tuple[str, Any], ...]]] = {"some": [], "rest": []}
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        case = tuple((name, axes[name][place]) for name, place in zip(axes, places, strict=True))
        parts["rest" if len(axes) > 2 and sum(places) % 2 else "some"].append(case)

    def decorate(body: Body) -> Any:
        jobs = {part: [_job(body, case) for case in cases] for part, cases in parts.items()}

        def test(worlds: Worlds, size: int, part: str) -> None:
            worlds.demand(size, jobs[part])

        test.__name__ = test.__qualname__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        test.jobs = jobs  # type: ignore[attr-defined]
        tests = [pytest.param(size, "some", id=str(size)) for size in sizes]
        if parts["rest"]:
            tests += [pytest.param(size, "rest", id=f"{size}, the rest", marks=pytest.mark.long) for size in sizes]
        return pytest.mark.processes(pytest.mark.parametrize(("size", "part"), tests)(test))

    return decorate


def _job(body: Body, case: tuple[tuple[str, Any], ...]) -> Job:
    words = [(name if value else f"not_{name}") if isinstance(value, bool) else str(value) for name, value in case]
    return Job(body.__module__, body.__name__, "-".join(words), case)


@attrs.define(eq=False)
class Worlds:
    """What came of the jobs that pytest has collected, by world size; a world starts when it is first asked about."""

    jobs: dict[int, list[Job]]
    root: Path
    """Shared by the processes of one pytest run."""
    outcomes: dict[int, dict[tuple[str, str, str], list[str | None]]] = attrs.field(factory=dict)

    def demand(self, size: int, jobs: Sequence[Job]) -> None:
        """Fail where a rank failed in one of these jobs, with its traceback."""
        if size not in self.outcomes:
            files = self.once("files", self._write)
            self.outcomes[size] = self.once(f"world-{size}", lambda: self._run(size, files))
        told = [
            f"{job.case or job.name}, rank {rank} of {size}:\n{error}"
            for job in jobs
            for rank, error in enumerate(self.outcomes[size][job.module, job.name, job.case])
            if error is not None
        ]
        if told:
            pytest.fail("\n".join(told), pytrace=False)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, made by the first process of the pytest run that asks."""
        path = self.root / f"{name}.pickle"
        with (self.root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                try:
                    made, error = make(), None
                except Exception:
                    made, error = None, traceback.format_exc()
                path.write_bytes(pickle.dumps((made, error)))
            made, error = pickle.loads(path.read_bytes())
            if error is not None:
                pytest.fail(f"{name}: {error}", pytrace=False)
            return made

    def _write(self) -> Files:
        files = Files(self.root / "files")
        files.root.mkdir()
        run_processes(2, write_torchs, files, pg_timeout=_PG_TIMEOUT)
        for size in (2, 3):
            run_processes(size, write_ours, files, pg_timeout=_PG_TIMEOUT)
        return files

    def _run(self, size: int, files: Files) -> dict[tuple[str, str, str], list[str | None]]:
        jobs = self.jobs[size]
        store = self.root / f"stores-{size}"
        store.mkdir()
        of_ranks = run_processes(size, run_jobs, jobs, files, store, timeout=_WORLD_TIMEOUT, pg_timeout=_PG_TIMEOUT)
        return {
            (job.module, job.name, job.case): list(errors)
            for job, errors in zip(jobs, zip(*of_ranks, strict=True), strict=True)
        }


def run_jobs(group: Collectives, jobs: list[Job], files: Files, stores: Path) -> list[str | None]:
    """Every job on this rank: None, or the traceback of its failure."""
    rank, size = group.rank, group.size
    told = dist.FileStore(str(stores / "told"), size)
    told.set_timeout(timedelta(seconds=4 * _PG_TIMEOUT))
    errors = []
    for number, job in enumerate(jobs):
        error = _attempt(job, files)
        errors.append(error)
        told.set(f"{number}/{rank}", "well" if error is None else "failed")
        if any(told.get(f"{number}/{other}") == b"failed" for other in range(size)):
            _start_again(rank, size, stores / f"group-{number}")
    return errors


def _attempt(job: Job, files: Files) -> str | None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so at every turn
        try:
            job.run(ProcessGroupCollectives(), files)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # torch's CheckpointException is one
            return traceback.format_exc(limit=-8) + ("" if str(error) else _values(error))
    return None


def _values(error: BaseException) -> str:
    """What the failing function knew, for an assertion that says nothing itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "".join(f"  {name} = {str(value)[:300]}\n" for name, value in frames[-1].f_locals.items())


def _start_again(rank: int, size: int, path: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=path.as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_PG_TIMEOUT),
    )
