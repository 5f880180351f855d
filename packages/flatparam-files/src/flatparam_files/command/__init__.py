"""The command `flatparam ckpt`, and what other commands of `flatparam` share with it."""

from flatparam_files.command.arguments import add
from flatparam_files.command.numbers import scaled, shown_nbytes
from flatparam_files.command.output import say
from flatparam_files.command.running import main, run
from flatparam_files.command.shared import STATUS, ArgumentsError, Parser, add_command
from flatparam_files.command.values import DTYPES, dtype_name, natural, nbytes_of

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
