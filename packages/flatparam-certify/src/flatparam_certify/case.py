"""The case: the model, the batches and the loss that a certificate is about, and how a name leads to it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_certify.meshes import CertifyError

_PARTS: Final = ("build", "batch", "loss")
_SEEDS_OF_A_STEP: Final = 1_000_003


@final
@attrs.frozen
class Case:
    """A model, its data and its loss. Each function is called with torch's generator seeded: it may draw numbers.

    Attributes:
        build: returns the model, on the CPU, with parameters in float32. Every rank and the reference get the same one.
        batch: returns the batch of a step, a micro-batch and a data rank, all from 0: tensors, alone or in tuples,
            lists and dictionaries. Ranks that share their data (those of tp, cp and pp) have the same data rank.
        loss: returns the mean loss of a batch, as a tensor of one element, from the model and the batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Any]
    loss: Callable[[Any, Any], Tensor]

    def model(self, seed: int) -> nn.Module:
        """Return a new model, the same for each `seed`.

        Raises:
            CertifyError: if `build` returns no module, or one whose parameters are not in float32 on the CPU.
        """
        with _seeded(seed), _telling("build"):
            made: Any = self.build()
        if not isinstance(made, nn.Module):
            raise CertifyError(f"build: expected a torch.nn.Module, found {type(made).__name__}; return the model")
        for name, parameter in made.named_parameters():
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                raise CertifyError(
                    f"build: expected parameters in float32 on the CPU, found {name} in {parameter.dtype} on "
                    f"{parameter.device}; the engine chooses lower precision"
                )
        return made

    def draw(self, seed: int, step: int, micro_batch: int, data_rank: int) -> Any:
        """Return a batch, the same for the same numbers."""
        with (
            _seeded((seed * _SEEDS_OF_A_STEP + step) * _SEEDS_OF_A_STEP + micro_batch * 1009 + data_rank),
            _telling("batch"),
        ):
            return self.batch(step, micro_batch, data_rank)

    def loss_of(self, model: Any, batch: Any) -> Tensor:
        """Return the loss of a batch.

        Raises:
            CertifyError: if `loss` returns anything but a tensor of one element.
        """
        # A model that draws random numbers in its forward pass draws the same ones everywhere.
        with _seeded(0):
            found: Any = self.loss(model, batch)
        if not isinstance(found, Tensor) or found.numel() != 1:
            shown = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise CertifyError(f"loss: expected a tensor of one element, found {shown}; return the mean over the batch")
        mean: Tensor = found.reshape(())
        return mean


@contextmanager
def _telling(function: str) -> Iterator[None]:
    """Tell which function of the case raised, and where."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "an unknown place"
        raise CertifyError(f"{function} raised {type(error).__name__}: {error} ({place}); correct it") from error


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def case_named(name: str) -> Case:
    """Return the case that `MODULE`, `FILE.py`, `MODULE:NAME` or `FILE.py:NAME` leads to.

    A module, a class or an object is a case if it has `build`, `batch` and `loss`; a function is called without
    arguments, and returns one.

    Raises:
        CertifyError: if nothing of this name can be imported, or what is there is no case.
    """
    found = found_at(name)
    if not _is_case(found) and callable(found):
        found = found()
    if isinstance(found, Case):
        return found
    if not _is_case(found):
        lacking = [part for part in _PARTS if not callable(getattr(found, part, None))]
        raise CertifyError(
            f"{name}: expected functions build, batch and loss, found none named {', '.join(lacking)}; write "
            "`def build(): ...`, `def batch(step, micro_batch, data_rank): ...` and `def loss(model, batch): ...`"
        )
    return Case(*(getattr(found, part) for part in _PARTS))


def _is_case(found: Any) -> bool:
    return all(callable(getattr(found, part, None)) for part in _PARTS)


def found_at(name: str) -> Any:
    """Return the module, or what is in it, that a name leads to.

    Raises:
        CertifyError: if it cannot be imported, or has nothing of that name.
    """
    path, _, inner = name.partition(":")
    try:
        found: Any = _imported_file(Path(path)) if path.endswith(".py") else _imported(path)
    except Exception as error:  # whatever the module raises while it is imported
        raise CertifyError(
            f"expected MODULE:NAME or FILE.py:NAME that can be imported, found {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in inner.split(".") if inner else ():
        if not hasattr(found, part):
            raise CertifyError(f"expected {part!r} in {path}, found none; {name!r} names it")
        found = getattr(found, part)
    return found


def _imported(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _imported_file(path: Path) -> ModuleType:
    """Import a file as a module of its name; what it imports may lie beside it."""
    resolved = path.resolve()
    loaded = sys.modules.get(resolved.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(resolved):
        return loaded
    if not resolved.is_file():
        raise FileNotFoundError(f"expected a file, found none at {path}")
    if str(resolved.parent) not in sys.path:
        sys.path.insert(0, str(resolved.parent))
    name = resolved.stem if loaded is None else f"{resolved.stem}_{zlib.crc32(bytes(resolved))}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
