"""From the arguments of a process to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flatparam.addons import load
from flatparam.command.arguments import parser

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: those after the name of the program; by default those of this process.

    Returns:
        The exit status: 0 if all is well, 1 if checkpoints differ or one is damaged, 2 if the arguments or
        an input cannot be used, 130 and 143 after an interrupt and a termination. Whatever it is, no output is left
        half written.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):
        # Its arguments are the program's, and so are its signals and its errors.
        return _run_program(given[1:])
    if given[:1] == ["trace"] and given[1:2] and given[1].startswith("--out="):
        given[1:2] = given[1].split("=", 1)
    if given[:2] == ["trace", "--out"] and len(given) > 3:
        return _run_program(given[3:], traces=given[2])
    try:
        shared = load("flatparam_files.command")
    except ModuleNotFoundError as error:
        sys.stderr.write(f"flatparam: error: {error}\n")
        return 2
    status: int = shared.run(parser(shared).parse_args(given))
    return status


def _run_program(arguments: Sequence[str], *, traces: str | None = None) -> int:
    """Run a program on flatparam, if the add-on that does it is installed; otherwise say what to install.

    Args:
        traces: the folder where the program, and processes that it starts, leave traces.
    """
    try:
        programs = load("flatparam_clients.programs")
    except ModuleNotFoundError as error:
        if error.name != "flatparam_clients":
            raise
        sys.stderr.write(f"flatparam {'run' if traces is None else 'trace'}: error: {error}\n")
        return 2
    if traces is not None:
        # This imports torch.
        from flatparam.resolving import TRACE_FOLDER

        os.environ[TRACE_FOLDER] = os.path.abspath(traces)
    status: int = programs.run_program(arguments)
    return status
