"""Files of `torch.save`: full state dicts of models and optimizers, read piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flatparam_state.errors import CheckpointError
from flatparam_state.formats.archive import is_archive, open_archive
from flatparam_state.formats.regions import StridedTensor
from flatparam_state.formats.trees import TreeSource, arranged
from flatparam_state.source import Source

__all__ = ["ACCELERATE_FILES", "open_torch_file", "open_torch_files"]

# What accelerate calls the full model and optimizer of FSDP.
ACCELERATE_FILES: Final = ("pytorch_model_fsdp.bin", "optimizer.bin")


def open_torch_file(path: str | Path) -> Source:
    """Open what `torch.save` wrote: a model's state dict, an optimizer's, or a dictionary of both.

    No code of the file is run: only tensors and plain values are admitted, which is less than
    `torch.load(weights_only=True)` does. Extra memory: the structure; tensors are read by ranges.

    Raises:
        CheckpointError: where the file is damaged, holds anything else, or its parts cannot be told apart.
    """
    return open_torch_files([Path(path)])


def open_torch_files(paths: Sequence[Path]) -> Source:
    """Open files that belong together, such as one of the model and one of the optimizer; see `open_torch_file`."""
    root: Any = _root_of(paths[0]) if len(paths) == 1 else _together(paths)
    tensors, values = arranged(root, paths[0], StridedTensor)
    return TreeSource("torch", tensors, values, {"files": [str(path) for path in paths]})


def _together(paths: Sequence[Path]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path in paths:
        found = _parts_of(path)
        twice = sorted(map(str, root.keys() & found.keys()))
        if twice:
            raise CheckpointError(
                f"{path} has {twice[0]!r}, and so has another of {', '.join(map(str, paths))}"
            )
        root.update(found)
    return root


def _root_of(path: Path) -> Any:
    if not is_archive(path):
        raise CheckpointError(
            f"{path} is no zip archive, as torch.save has written since torch 1.6",
            path=path,
            hint="where it is an older file, load it and save it again",
        )
    return open_archive(path).root


def _parts_of(path: Path) -> Mapping[Any, Any]:
    """What a file of several adds to the whole."""
    root = _root_of(path)
    if not isinstance(root, Mapping):
        raise CheckpointError(f"{path} holds a {type(root).__name__}, and not a state dict", path=path)
    if "param_groups" in root or "state" in root:
        return {"optimizer": root}
    return {"model": root} if any(isinstance(value, StridedTensor) for value in root.values()) else root
