"""Questions that FSDP1 and flatparam answer in the same processes; a test is that the answers are the same.

`alike` makes a test out of a function of a `Library`: it runs twice on every rank of a world of gloo processes, once
with torch's names and once with ours, and what it returns, or the class of the error that it raises, has to be the same.
One test asks it with every case of its parameters, and names those that differ.
`unlike` makes one where the two are meant to differ: it names the paragraph of `docs/differences-from-torch.md` that says
so, and what ours is. Each world starts once, for all questions that pytest has collected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import importlib
import io
import itertools
import math
import pickle
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.fsdp.wrap
from torch import Tensor, nn

import flatparam
import flatparam.sharded_grad_scaler
import flatparam.wrap
from flatparam_comm import Collectives
from flatparam_comm.testing import PATIENCE, run_processes

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences-from-torch.md"

#: How long a collective may wait for a rank that does not come: long, since it only costs time where a test fails.
_PG_TIMEOUT = PATIENCE / 5

#: How long all questions to one world may take.
_WORLD_TIMEOUT = 1.4 * PATIENCE

#: How often ranks try to reach each other in a new process group.
_ATTEMPTS: Final = 5


class Library:
    """The names of `torch.distributed.fsdp`, `.wrap` and `.sharded_grad_scaler`, in torch or in flatparam."""

    def __init__(self, is_ours: bool, *modules: types.ModuleType) -> None:
        self.is_ours = is_ours
        self._modules = modules

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    @property
    def FSDP(self) -> Any:
        """The wrapper's class."""
        return self.FullyShardedDataParallel

    def shard(self, module: nn.Module, *args: Any, **arguments: Any) -> Any:
        """The wrapper around `module`, on the CPU, which FSDP1 does without an accelerator only where it is told so."""
        if len(args) < 9:
            arguments.setdefault("device_id", torch.device("cpu"))
        return self.FSDP(module, *args, **arguments)


THEIRS = Library(
    False,
    torch.distributed.fsdp.wrap,  # first: `wrap` is the function
    torch.distributed.fsdp,
    torch.distributed.fsdp.sharded_grad_scaler,
)
OURS = Library(True, flatparam.wrap, flatparam, flatparam.sharded_grad_scaler)

Body: TypeAlias = Callable[..., Any]
"""Called as `body(library, **case)`; what it returns is made `plain`."""


@attrs.frozen
class Answer:
    """What came of a question on one rank, of one library."""

    value: Any = None
    errors: tuple[str, ...] = ()
    """The names of the classes of the error that was raised, the most special first."""
    told: str = ""
    """The error's traceback, for people."""


@attrs.frozen
class Question:
    """A body with one case of its parameters, in a form that travels."""

    module: str
    name: str
    case: str
    arguments: tuple[tuple[str, Any], ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """What the answers are filed under."""
        return self.module, self.name, self.case

    def ask(self, library: Library) -> Answer:
        """This rank's answer."""
        body = getattr(importlib.import_module(self.module), self.name).body
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so at every turn
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                stack.enter_context(redirect(io.StringIO()))  # it prints some errors
            try:
                return Answer(plain(body(library, **dict(self.arguments))))
            except Exception as error:
                classes = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__[:-2]]
                return Answer(errors=tuple(classes), told=traceback.format_exc(limit=-6))


def alike(ranks: int = 1, **axes: Sequence[Any]) -> Callable[[Body], Any]:
    """Make a test of a question: on every rank of a world of `ranks`, for each combination of `axes`, ours is torch's."""
    return _asking(ranks, axes, None, None)


def unlike(paragraph: str, *, ranks: int = 1, ours: Any, **axes: Sequence[Any]) -> Callable[[Body], Any]:
    """Make a test of a question that torch answers otherwise, for the reason that `paragraph` of the docs says.

    Args:
        ours: our value on every rank; a class of errors where we raise one.
    """
    return _asking(ranks, axes, paragraph, ours)


def _asking(ranks: int, axes: Mapping[str, Sequence[Any]], paragraph: str | None, ours: Any) -> Any:
    cases = [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    def decorate(body: Body) -> Any:
        questions = [Question(body.__module__, body.__name__, _words(case), case) for case in cases]

        def test(answers: Answers) -> None:
            failed = []
            for question in questions:
                try:
                    demand(answers.of(ranks, question))
                except pytest.fail.Exception as error:
                    failed.append(f"{question.case or body.__name__}:\n{error}")
            if failed:
                _fail("\n".join(failed))

        test.__name__ = test.__qualname__ = body.__name__
        test.__doc__ = body.__doc__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        test.ranks = ranks  # type: ignore[attr-defined]
        test.questions = questions  # type: ignore[attr-defined]
        # The first one pays for its whole world.
        return pytest.mark.processes(pytest.mark.timeout(_WORLD_TIMEOUT + 100)(test))

    def demand(given: list[tuple[Answer, Answer]]) -> None:
        if paragraph is None:
            for mine, theirs in given:
                demand_alike(mine, theirs)
        else:
            assert f"**{paragraph}" in DIFFERENCES.read_text(), "the docs do not say so"
            for mine, theirs in given:
                demand_unlike(mine, theirs, ours)

    return decorate


def _words(case: tuple[tuple[str, Any], ...]) -> str:
    return "-".join(
        (name if value else f"not_{name}") if isinstance(value, bool) else str(value) for name, value in case
    )


def demand_alike(mine: Answer, theirs: Answer) -> None:
    """Fail where ours is not torch's: a different value, or an error of a class that is not torch's."""
    if theirs.errors and not mine.errors:
        _fail(f"FSDP1 raises, and we return {mine.value}:\n{theirs.told}")
    if theirs.errors and theirs.errors[0] not in mine.errors:
        _fail(f"FSDP1:\n{theirs.told}\nours:\n{mine.told}")
    if mine.errors and not theirs.errors:
        _fail(f"FSDP1 returns {theirs.value}, and we raise\n{mine.told}")
    found = list(itertools.islice(_differences(mine.value, theirs.value), 5))
    if found:
        _fail("\n".join(found))


def demand_unlike(mine: Answer, theirs: Answer, expected: Any) -> None:
    """Fail where ours is not what is expected, or torch's is that too."""
    if isinstance(expected, type) and issubclass(expected, Exception):
        name = f"{expected.__module__}.{expected.__qualname__}"
        if name not in mine.errors:
            _fail(f"we return {mine.value}, or raise\n{mine.told}")
        if name in theirs.errors:
            _fail(f"FSDP1 does the same:\n{theirs.told}")
    else:
        if mine.errors:
            _fail(mine.told)
        found = list(_differences(mine.value, plain(expected)))
        if found:
            _fail("\n".join(found))
        if not theirs.errors and theirs.value == plain(expected):
            _fail(f"FSDP1 does the same: {theirs.value}")


def _fail(message: str) -> None:
    pytest.fail(message, pytrace=False)


def _differences(mine: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where two plain values differ."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
        for key in mine:
            yield from _differences(mine[key], theirs[key], f"{path}/{key}")
    elif isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _differences(one, other, f"{path}/{index}")
    elif type(mine) is not type(theirs) or mine != theirs:
        yield f"{path}: FSDP1 has {theirs!r}, we have {mine!r}"


@attrs.define(eq=False)
class Answers:
    """What both libraries answer to the questions that pytest has collected; a world starts when it is first needed."""

    questions: dict[int, list[Question]]
    root: Path
    """Shared by the processes of one pytest run."""
    _known: dict[int, dict[tuple[str, str, str], list[tuple[Answer, Answer]]]] = attrs.field(factory=dict)

    def of(self, ranks: int, question: Question) -> list[tuple[Answer, Answer]]:
        """Ours and torch's, on each rank."""
        if ranks not in self._known:
            self._known[ranks] = self._once(ranks)
        return self._known[ranks][question.key]

    def _once(self, ranks: int) -> Any:
        path = self.root / f"{ranks}.pickle"
        with (self.root / f"{ranks}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(self._ask(ranks)))
            made, error = pickle.loads(path.read_bytes())
        if error is not None:
            pytest.fail(error, pytrace=False)
        return made

    def _ask(self, ranks: int) -> tuple[Any, str | None]:
        questions = self.questions[ranks]
        store = self.root / f"stores-{ranks}"
        store.mkdir()
        try:
            of_ranks = run_processes(
                ranks, answer_all, questions, store, timeout=_WORLD_TIMEOUT, pg_timeout=_PG_TIMEOUT
            )
        except Exception:
            return None, traceback.format_exc()
        answers = {
            question.key: list(given) for question, given in zip(questions, zip(*of_ranks, strict=True), strict=True)
        }
        return answers, None


def answer_all(group: Collectives, questions: Sequence[Question], stores: Path) -> list[tuple[Answer, Answer]]:
    """This rank's answers to every question, ours first."""
    rank, size = group.rank, group.size
    told = dist.FileStore(str(stores / "told"), size)
    told.set_timeout(timedelta(seconds=4 * _PG_TIMEOUT))
    given = []
    for number, question in enumerate(questions):
        answers = tuple(
            _together(question, library, told, f"{number}/{library.is_ours}", rank, size, stores)
            for library in (OURS, THEIRS)
        )
        given.append(answers)
    return given  # type: ignore[return-value]  # pairs


def _together(
    question: Question, library: Library, told: dist.Store, key: str, rank: int, size: int, stores: Path
) -> Answer:
    """Answer; where a rank has failed that the others may have waited for, all make a new process group."""
    answer = question.ask(library)
    told.set(f"{key}/{rank}", "failed" if answer.errors else "well")
    if size > 1 and any(told.get(f"{key}/{other}") == b"failed" for other in range(size)):
        dist.destroy_process_group()
        for attempt in range(_ATTEMPTS):
            if _connected(told, f"{key}/{attempt}", rank, size, stores):
                break
    return answer


def _connected(told: dist.Store, key: str, rank: int, size: int, stores: Path) -> bool:
    """Make a new process group; false, on every rank, if some rank could not be reached, as on a busy machine."""
    told.set(f"{key}/begin/{rank}", "")
    told.wait([f"{key}/begin/{other}" for other in range(size)])  # nobody is in the old group any more
    try:
        dist.init_process_group(
            "gloo",
            init_method=(stores / f"group-{key.replace('/', '-')}").as_uri(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_PG_TIMEOUT),
        )
    except RuntimeError as error:
        told.set(f"{key}/end/{rank}", str(error) or "failed")
    else:
        told.set(f"{key}/end/{rank}", "well")
    if all(told.get(f"{key}/end/{other}") == b"well" for other in range(size)):
        return True
    if dist.is_initialized():
        dist.destroy_process_group()
    return False


def plain(value: Any) -> Any:
    """`value` in words and numbers that are equal for both libraries where it means the same, and that travel."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), str(value.device), plain(value.detach().tolist()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name != "dim_0_chunks"  # ours alone
        }
        return (type(value).__name__, fields)
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, map(plain, value)))
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if isinstance(value, type):
        return value.__name__
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    return f"a {type(value).__name__}"


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Inside, collect the categories of the warnings; each once, in order of their names, at the end."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found.extend(sorted({warning.category.__name__ for warning in caught}))
