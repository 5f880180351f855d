"""The checkpoints that DeepSpeed wrote for the tests, and changing copies of them."""

import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from flatparam_core import Span
from flatparam_files.disk.source import Source

WRITTEN: Final = Path(__file__).parent / "deepspeed_fixture"
NAMES: Final = sorted(path.stem for path in WRITTEN.glob("*.safetensors"))

OPTIM: Final = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL: Final = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def read_whole(source: Source, path: str) -> Tensor:
    """The whole tensor at `path`."""
    info = source.tensors[path]
    pieces = [*source.read(path, Span(0, info.numel)), torch.empty(0, dtype=info.dtype)]
    return torch.cat(pieces).view(info.shape)


def copied(name: str, directory: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint in `directory`, and the directory of its step."""
    shutil.copytree(WRITTEN / name, directory / name)
    return directory / name, directory / name / "global_step2"


def edit(file: Path, change: Callable[[Any], None]) -> None:
    """Load one of DeepSpeed's files, change what is in it, and save it as DeepSpeed does."""
    with classes_of_deepspeed():
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


@contextmanager
def classes_of_deepspeed() -> Iterator[dict[str, Any]]:
    """Let classes be found under the names that DeepSpeed's pickles mention, here without DeepSpeed."""
    stages = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "later": 4}
    classes = {
        "deepspeed.runtime.zero.config.ZeroStageEnum": Enum("ZeroStageEnum", stages, type=int),
        **{
            name: type(name.rpartition(".")[2], (), {})
            for name in (
                "deepspeed.runtime.fp16.loss_scaler.LossScaler",
                "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
                "deepspeed.utils.tensor_fragment.fragment_address",
                "deepspeed.runtime.engine.DeepSpeedEngine",
            )
        },
    }
    modules: dict[str, types.ModuleType] = {}
    for name, made in classes.items():
        module, _, short = name.rpartition(".")
        made.__module__ = module
        parents = module.split(".")
        for depth in range(1, len(parents) + 1):
            modules.setdefault(".".join(parents[:depth]), types.ModuleType(parents[depth - 1]))
        setattr(modules[module], short, made)
    with mock.patch.dict(sys.modules, modules):
        yield classes
