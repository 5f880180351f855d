"""The command `flatparam ckpt`, and what other commands of `flatparam` share with it."""

from flatparam_files.command.ckpt_arguments import DTYPES, add, dtype_name, existing, main, natural, nbytes_of
from flatparam_files.command.shared import (
    ArgumentsError,
    Parser,
    add_command,
    exit_statuses,
    run,
    say,
    scaled,
    shown_nbytes,
)

__all__ = [
    "DTYPES",
    "ArgumentsError",
    "Parser",
    "add",
    "add_command",
    "dtype_name",
    "existing",
    "exit_statuses",
    "main",
    "natural",
    "nbytes_of",
    "run",
    "say",
    "scaled",
    "shown_nbytes",
]
