"""Checkpoints as sources over stored tensors, and the trees of other programs brought into that form."""

from flatparam_files.formats.stored.arrange import MODEL_KEYS, OPTIMIZER_KEYS, arranged
from flatparam_files.formats.stored.stored_tensors import (
    Storage,
    Stored,
    StridedTensor,
    read_boxes,
    row_major,
)
from flatparam_files.formats.stored.whole_sources import (
    StoredSource,
    averages_as_model,
    cast_model,
    select,
    stored_source,
    tree_of,
    watch,
)

__all__ = [
    "MODEL_KEYS",
    "OPTIMIZER_KEYS",
    "Storage",
    "Stored",
    "StoredSource",
    "StridedTensor",
    "arranged",
    "averages_as_model",
    "cast_model",
    "read_boxes",
    "row_major",
    "select",
    "stored_source",
    "tree_of",
    "watch",
]
