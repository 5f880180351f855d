"""Files that `torch.save` writes: a zip archive of a pickle and of storages."""

from flatparam_files.formats.torch_save.names import TORCH_NAMES, dtype_names, plain_dict
from flatparam_files.formats.torch_save.reader import is_archive, open_archive
from flatparam_files.formats.torch_save.state_files import (
    ACCELERATE_FILES,
    PYTORCH_FILES,
    open_torch_file,
    write_torch_file,
)
from flatparam_files.formats.torch_save.writer import write_archive

__all__ = [
    "ACCELERATE_FILES",
    "PYTORCH_FILES",
    "TORCH_NAMES",
    "dtype_names",
    "is_archive",
    "open_archive",
    "open_torch_file",
    "plain_dict",
    "write_archive",
    "write_torch_file",
]
