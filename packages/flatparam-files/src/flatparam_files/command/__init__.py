"""The command `flatparam ckpt`, and what other commands of `flatparam` share with it."""

from flatparam_files.command.ckpt_arguments import DTYPES, add, dtype_name, main, natural, nbytes_of
from flatparam_files.command.shared import (
    STATUS,
    ArgumentsError,
    Parser,
    add_command,
    run,
    say,
    scaled,
    shown_nbytes,
)

__all__ = [
    "DTYPES",
    "STATUS",
    "ArgumentsError",
    "Parser",
    "add",
    "add_command",
    "dtype_name",
    "main",
    "natural",
    "nbytes_of",
    "run",
    "say",
    "scaled",
    "shown_nbytes",
]
