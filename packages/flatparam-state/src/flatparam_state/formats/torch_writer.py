"""Writing a checkpoint as one file that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

from pathlib import Path

from flatparam_state.formats.archive_writer import write_archive
from flatparam_state.formats.output import SparseFile, appearing
from flatparam_state.formats.views import tree_of
from flatparam_state.source import Source

__all__ = ["write_torch_file"]


def write_torch_file(source: Source, path: str | Path) -> None:
    """Write a source as `torch.save` would.

    A source that has only a model becomes its plain state dict, one that has only an optimizer that optimizer's; any
    other is a dictionary with `"model"`, `"optimizer"` and `"extra"`. Extra memory: the structure and one chunk.

    Raises:
        CheckpointError: where `path` exists, or a value has no form in this format.
    """
    tree = tree_of(source)
    only = next(iter(tree)) if len(tree) == 1 else None
    root = tree[only] if only in ("model", "optimizer") else tree
    with appearing(Path(path)) as temporary, SparseFile(temporary) as file:
        write_archive(file, root)
