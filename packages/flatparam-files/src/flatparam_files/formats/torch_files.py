"""Files of `torch.save`: state dicts of models and optimizers, read piece by piece, and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source
from flatparam_files.disk.system import AnyPath
from flatparam_files.formats.arrange import arranged, together
from flatparam_files.formats.hugging_face import read_shards
from flatparam_files.formats.output import SparseFile, appearing, check_new
from flatparam_files.formats.stored_tensors import Stored
from flatparam_files.formats.torch_archive import is_archive, open_archive, write_archive
from flatparam_files.formats.whole_sources import StoredSource, stored_source, tree_of

# What accelerate calls the full model and optimizer of FSDP.
ACCELERATE_FILES: Final = ("pytorch_model_fsdp.bin", "optimizer.bin")
# What Hugging Face libraries called a model before safetensors: one file, or the index of several, in their order.
PYTORCH_FILES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def open_torch_file(*paths: AnyPath, prefix: str | None = None) -> StoredSource:
    """Open what `torch.save` wrote: a model's state dict, an optimizer's, or a dictionary of both.

    No code of the file is run: only tensors and plain values are admitted, which is less than
    `torch.load(weights_only=True)` does. Extra memory: the structure; tensors are read by ranges.

    Args:
        paths: the file, or several that belong together, such as one of the model and one of the optimizer. A
            directory with `PYTORCH_FILES`, or an index of such files, stands for the model in them.
        prefix: the keys above the model and the optimizer, if there are some; see `open_source`.

    Raises:
        CheckpointError: if a file is damaged, holds anything else, or its parts cannot be told apart.
    """
    files = [_file_at(Path(path)) for path in paths]
    root: Any = _root_of(files[0]) if len(files) == 1 else together(files, [*map(_parts_of, files)])
    tensors, values = arranged(root, files[0], prefix)
    return StoredSource("torch", tensors, values, {"files": [str(file) for file in files]})


def _file_at(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = next((path / name for name in PYTORCH_FILES if (path / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"{path} has no {' and no '.join(PYTORCH_FILES)}; give a file", path=path)
    return found


def _root_of(file: Path) -> Any:
    if file.suffix == ".json":

        def tensors_in(each: Path) -> dict[str, Stored]:
            return {name: value for name, value in _state_dict_in(each).items() if isinstance(value, Stored)}

        return {"model": read_shards(file, tensors_in)}
    if not is_archive(file):
        raise CheckpointError(
            f"{file} is not a zip archive, which torch.save writes since torch 1.6",
            path=file,
            hint="if it is an older file, load it and save it again",
        )
    return open_archive(file).root


def _state_dict_in(file: Path) -> Mapping[Any, Any]:
    root = _root_of(file)
    if not isinstance(root, Mapping):
        raise CheckpointError(f"{file} holds a {type(root).__name__}, and not a state dict", path=file)
    return root


def _parts_of(file: Path) -> Mapping[Any, Any]:
    """Return the part of the whole that one file of several adds."""
    root = _state_dict_in(file)
    if "param_groups" in root or "state" in root:
        return {"optimizer": root}
    return {"model": root} if any(isinstance(value, Stored) for value in root.values()) else root


def write_torch_file(source: Source, path: AnyPath, *, dry_run: bool = False) -> dict[str, int]:
    """Write a source as one file that `torch.load(weights_only=True)` reads.

    A source that has only a model becomes its plain state dict, one that has only an optimizer that optimizer's; any
    other is a dictionary with `"model"`, `"optimizer"` and `"extra"`. Extra memory: the structure and one chunk.

    Args:
        dry_run: write nothing.

    Returns:
        The bytes of tensors by file.

    Raises:
        CheckpointError: if `path` exists, or a value has no form in this format.
    """
    path = Path(path)
    check_new(path)
    if not dry_run:
        tree = tree_of(source)
        only = next(iter(tree)) if len(tree) == 1 else None
        with appearing(path) as temporary, SparseFile(temporary) as file:
            write_archive(file, tree[only] if only in ("model", "optimizer") else tree)
    tied = stored_source(source).aliases()
    return {path.name: sum(info.nbytes for name, info in source.tensors.items() if name not in tied)}
