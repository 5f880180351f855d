"""What the commands have in common: arguments, and the checkpoint that they open."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Final, TextIO

import torch

from flatparam_state import FORMATS, CheckpointError, Source, open_source, select

__all__ = [
    "PARTS",
    "STATUS",
    "ArgumentsError",
    "add_reading",
    "command",
    "dtype_of",
    "natural",
    "nbytes_of",
    "opened",
    "positive",
    "say",
    "shown_nbytes",
]


class ArgumentsError(CheckpointError):
    """The arguments do not say what to do."""


PARTS: Final = ("model", "optimizer", "extra")
STATUS: Final = """\
exit status:
  0    all is well
  1    the checkpoints differ, or the checkpoint is damaged
  2    the arguments are wrong, or an input cannot be read
  130  interrupted (143: terminated); nothing half written is left
"""
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B?", re.IGNORECASE)


def nbytes_of(text: str) -> int:
    """The bytes of a size such as `5GB`, `512 MiB` or `1000`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 512MiB, found {text!r}")
    number, unit, binary = found.groups()
    factor = _UNITS[unit.upper()]
    if binary:
        factor = 1024 ** list(_UNITS).index(unit.upper())
    nbytes = int(float(number) * factor)
    if nbytes < 1:
        raise argparse.ArgumentTypeError("expected a size of at least one byte")
    return nbytes


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return number


def natural(text: str) -> int:
    """A number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return int(text)


_DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a name such as `bfloat16`."""
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_DTYPES)}, found {text!r}")
    return _DTYPES[text]


def shown_nbytes(nbytes: int) -> str:
    """A size for people: `1.2 GB`."""
    size, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def say(line: str, stream: TextIO | None = None) -> None:
    """Write a line, to stdout by default; what is no text in it (names are from files) is escaped."""
    stream = stream or sys.stdout
    if not line.isprintable():
        line = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in line
        )
    encoding = stream.encoding or "utf-8"
    stream.write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add a command that does `text` by calling `run`."""
    added = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=run)
    return added


def add_reading(added: argparse.ArgumentParser, *, parts: bool = True, pair: bool = True) -> None:
    """Add the options of a command that reads a checkpoint."""
    added.add_argument(
        "--from", dest="format", choices=FORMATS, help="its format; found out by looking otherwise"
    )
    added.set_defaults(only=None)
    if parts:
        added.add_argument(
            "--only", choices=PARTS, action="append", help="leave out the other parts; can be repeated"
        )
    if pair:
        added.add_argument(
            "--model", metavar="PATH", help="the model's file, where there is one for the optimizer too"
        )
        added.add_argument("--optimizer", metavar="PATH", help="the optimizer's file beside that of --model")


def opened(chosen: argparse.Namespace) -> Source:
    """The checkpoint that the arguments name.

    Raises:
        ArgumentsError: where they name none, or both a path and a pair of files.
        CheckpointError: where it cannot be opened.
    """
    pair = [path for path in (chosen.model, chosen.optimizer) if path is not None]
    if bool(pair) == (chosen.source is not None):
        raise ArgumentsError("give either the path of a checkpoint, or --model and --optimizer")
    return parts_of(open_source(*(pair or [chosen.source]), format=chosen.format), chosen.only)


def parts_of(source: Source, only: list[str] | None) -> Source:
    """The parts of a source that were asked for.

    Raises:
        CheckpointError: where it has none of them.
    """
    if not only:
        return source
    chosen = select(source, only)
    if not chosen.tensors and not chosen.values:
        raise CheckpointError(f"the checkpoint has no {' and no '.join(only)}")
    return chosen
