"""Compares files with a model before anything is read: names, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import attrs
import torch
from torch import nn

from flatparam_checkpoint.pretrained.files import PretrainedFiles
from flatparam_files import TensorInfo
from flatparam_state.model_tensors import ModelTensor, model_tensors

__all__ = ["Fit", "fit"]


@final
@attrs.frozen
class Fit:
    """How the files of a model fit it, by the names of the model."""

    missing: tuple[str, ...]
    """Names that the model has and the files lack, under each of its names if it is tied."""
    unexpected: tuple[str, ...]
    """Names that the files have and the model lacks."""
    mismatched: tuple[str, ...]
    """For each tensor that cannot be read into the model, what was expected and what was found."""
    tied: Mapping[str, str]
    """The names of tied parameters that the files lack, and the name under which they have them."""


def fit(model: nn.Module, files: PretrainedFiles) -> Fit:
    """Compare the parameters and persistent buffers of `model`, sharded or not, on any device, with `files`."""
    missing, mismatched, used, tied = [], [], set(), {}
    for tensor in model_tensors(model):
        found = files.found(tensor.names)
        used.update(found)
        if not found:
            missing.append(tensor.name)
            continue
        tied.update({name: found[0] for name in tensor.names if name not in found})
        for name in found:
            problem = _problem(name, tensor, files.info(name))
            if problem:
                mismatched.append(problem)
    unexpected = [name for name in files.paths if name not in used]
    return Fit(tuple(missing), tuple(unexpected), tuple(mismatched), tied)


def _problem(name: str, wanted: ModelTensor, found: TensorInfo) -> str:
    if wanted.shape != found.shape:
        return f"{name!r}: expected shape {wanted.shape}, found {found.shape}"
    if not _can_be_cast(found.dtype, wanted.dtype):
        return f"{name!r}: expected {wanted.dtype}, found {found.dtype}, which is not cast to it"
    return ""


def _can_be_cast(found: torch.dtype, wanted: torch.dtype) -> bool:
    return found == wanted or (found.is_floating_point and wanted.is_floating_point)
