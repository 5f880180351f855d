"""Writing a checkpoint as one file that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import os
from pathlib import Path

from flatparam_state.formats.archive_writer import write_archive
from flatparam_state.formats.output import SparseFile, appearing, refuse_existing
from flatparam_state.formats.views import aliases_of, tree_of
from flatparam_state.source import Source

__all__ = ["write_torch_file"]


def write_torch_file(
    source: Source, path: str | os.PathLike[str], *, dry_run: bool = False
) -> dict[str, int]:
    """Write a source as `torch.save` would.

    A source that has only a model becomes its plain state dict, one that has only an optimizer that optimizer's; any
    other is a dictionary with `"model"`, `"optimizer"` and `"extra"`. Extra memory: the structure and one chunk.

    Args:
        dry_run: write nothing.

    Returns:
        The bytes of tensors by file.

    Raises:
        CheckpointError: where `path` exists, or a value has no form in this format.
    """
    tree = tree_of(source)
    only = next(iter(tree)) if len(tree) == 1 else None
    root = tree[only] if only in ("model", "optimizer") else tree
    path = Path(path)
    if dry_run:
        refuse_existing(path)
    else:
        with appearing(path) as temporary, SparseFile(temporary) as file:
            write_archive(file, root)
    tied = aliases_of(source)
    return {path.name: sum(info.nbytes for name, info in source.tensors.items() if name not in tied)}
