"""The arguments of `flatparam ckpt`, and their values. Nothing here imports torch, so that help comes at once."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from flatparam_files.command.shared import Commands, Parser, add_command, exit_statuses, run

FORMATS: Final = ("flatparam", "safetensors", "deepspeed", "dcp", "torch")
"""The formats that are read."""
EXPORTS: Final = ("hf", "torch", "dcp")
"""The formats that are written for other programs."""
_HERE: Final = "flatparam_files.command"
PARTS: Final = ("model", "optimizer", "extra")
_EXAMPLES: Final = """\
examples:
  flatparam ckpt inspect runs/a                          a summary of the latest checkpoint of a run
  flatparam ckpt inspect runs/a --depth 99               every tensor, with shape and dtype
  flatparam ckpt verify runs/a/step-00001000             compare every byte with its checksum
  flatparam ckpt diff runs/a model.safetensors --only model
  flatparam ckpt reshard runs/a runs/b --world-size 64   for 64 ranks (any number can load any checkpoint)
  flatparam ckpt export runs/a hf --to hf --max-shard-size 2GB --dtype bfloat16
  flatparam ckpt export runs/a dcp --to dcp              for torch.distributed.checkpoint.load
  flatparam ckpt import zero3/ runs/c                    from DeepSpeed, DCP, torch.save or safetensors
  flatparam ckpt import runs/d --model pytorch_model_fsdp.bin --optimizer optimizer.bin

formats that are read: flatparam, torch (torch.save), dcp (torch.distributed.checkpoint), safetensors (Hugging Face),
deepspeed (ZeRO). A path's format is found out by looking. No process group, no GPU and no code of the model is needed,
and no code in a checkpoint is run.

"""


def add(groups: Commands) -> None:
    """Add `ckpt` to the commands of `flatparam`."""
    checkpoints = groups.add_parser(
        "ckpt",
        help="inspect, verify, compare and convert checkpoints",
        description="Inspect, verify, compare and convert checkpoints, whatever their size.",
        epilog=_EXAMPLES + exit_statuses("the checkpoints differ, or the checkpoint is damaged"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = checkpoints.add_subparsers(metavar="COMMAND", required=True)
    _add_inspect_and_verify(commands)
    _add_diff(commands)
    _add_converting(commands)


def _add_inspect_and_verify(commands: Commands) -> None:
    text = "show a summary of a checkpoint: who wrote it, its parts and their bytes; --depth shows its tensors"
    added = add_command(commands, "inspect", text, f"{_HERE}.ckpt_commands", "inspect")
    added.add_argument("source", metavar="PATH", nargs="?", type=existing, help="the checkpoint")
    added.add_argument("--json", action="store_true", help="everything as one JSON object")
    added.add_argument(
        "--depth", type=natural, default=2, help="show so many levels of the tree: 2, or 99 for all (default: 2)"
    )
    _add_reading(added)
    text = "read every byte of a checkpoint, and compare it with the checksums that its format has"
    added = add_command(commands, "verify", text, f"{_HERE}.ckpt_commands", "verify", one="it is damaged")
    added.add_argument("source", metavar="PATH", nargs="?", type=existing, help="the checkpoint")
    _add_reading(added, parts=False)
    _add_progress(added)


def _add_diff(commands: Commands) -> None:
    text = "compare two checkpoints of any formats: names, shapes, dtypes, values and every element"
    added = add_command(commands, "diff", text, f"{_HERE}.ckpt_commands", "diff", one="they differ")
    added.add_argument("first", metavar="A", type=existing, help="a checkpoint")
    added.add_argument("second", metavar="B", type=existing, help="another")
    added.add_argument(
        "--tolerance", type=_tolerance, default=0.0, help="the largest absolute difference that is none (default: 0)"
    )
    added.add_argument("--ignore-dtype", action="store_true", help="compare elements of different dtypes as numbers")
    added.add_argument("--all", action="store_true", help="show all differences, and not the first twenty")
    _add_reading(added, pair=False)
    _add_progress(added)


def _add_converting(commands: Commands) -> None:
    text = "write a checkpoint as a different number of ranks would have written it; loading does not need this"
    _add_own(commands, "reshard", text, needs_world_size=True)
    text = "make a flatparam checkpoint directory from a checkpoint of a different format"
    _add_own(commands, "import", text, needs_world_size=False)
    text = "write a checkpoint in the format of a different program"
    added = add_command(commands, "export", text, f"{_HERE}.ckpt_commands", "export")
    _add_paths(added, "a new file or directory")
    added.add_argument("--to", choices=EXPORTS, required=True, help="Hugging Face safetensors, torch.save, DCP")
    added.add_argument(
        "--max-shard-size",
        type=nbytes_of,
        metavar="SIZE",
        help="hf: the most bytes of tensors in a file, such as 2GB (default: 5GB)",
    )
    added.add_argument("--world-size", type=_ranks, help="dcp: the number of files (default: 1)")
    added.add_argument(
        "--averages",
        metavar="NAME",
        nargs="?",
        const="",
        help="write the averages (those of this name, if there are several) as the model, and nothing else",
    )
    _add_writing(added)


def _add_own(commands: Commands, name: str, text: str, *, needs_world_size: bool) -> None:
    added = add_command(commands, name, text, f"{_HERE}.ckpt_commands", "write_own")
    _add_paths(added, "the directory of a run; made if it is not there")
    added.add_argument(
        "--world-size",
        type=_ranks,
        required=needs_world_size,
        default=1,
        help="the number of ranks" + ("" if needs_world_size else " (default: 1)"),
    )
    added.add_argument("--step", type=natural, help="the step of the new one (default: the same, or 0)")
    _add_writing(added)


def _add_paths(added: argparse.ArgumentParser, destination: str) -> None:
    added.add_argument(
        "source", metavar="SRC", nargs="?", type=existing, help="the checkpoint to read; or give --model, --optimizer"
    )
    added.add_argument("destination", metavar="DEST", type=Path, help=destination)


def _add_writing(added: argparse.ArgumentParser) -> None:
    added.add_argument("--dtype", type=dtype_name, help="cast the model's floating-point tensors, such as to bfloat16")
    added.add_argument("--dry-run", action="store_true", help="only list what would be written")
    _add_reading(added)
    _add_progress(added)


def _add_reading(added: argparse.ArgumentParser, *, parts: bool = True, pair: bool = True) -> None:
    """Add the options of a command that reads a checkpoint."""
    added.add_argument("--from", dest="format", choices=FORMATS, help="its format; by default it is detected")
    added.add_argument(
        "--prefix",
        metavar="KEYS",
        help="dcp, torch: the keys above the model and the optimizer, such as app; by default they are found",
    )
    added.set_defaults(only=None)
    if parts:
        added.add_argument("--only", choices=PARTS, action="append", help="leave out the other parts; can be repeated")
    if pair:
        added.add_argument("--model", metavar="PATH", type=existing, help="the model's file, without the optimizer's")
        added.add_argument("--optimizer", metavar="PATH", type=existing, help="the optimizer's file, beside --model")


def _add_progress(added: argparse.ArgumentParser) -> None:
    """Add the options of a command that may take long."""
    added.add_argument("--quiet", action="store_true", help="say nothing but errors, and show no bar")
    added.add_argument(
        "--no-progress",
        dest="bar",
        action="store_false",
        default=None,
        help="show no progress bar (there is none in a pipe, or with FLATPARAM_PROGRESS=0)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this package alone, `python -m flatparam_files ckpt ...`.

    Args:
        arguments: those after the name of the program; by default those of this process.

    Returns:
        The exit status, as `run` has it.
    """
    parser: argparse.ArgumentParser = Parser(prog="flatparam", description="Tools of the flatparam library.")
    add(parser.add_subparsers(metavar="COMMAND", required=True))
    return run(parser.parse_args(arguments))


# From the text of an argument to its value


_MOST_RANKS: Final = 2**20
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B?", re.IGNORECASE)


def nbytes_of(text: str) -> int:
    """Return the bytes of a size such as `5GB`, `512 MiB` or `1000`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 512MiB, found {text!r}")
    number, unit, binary = found.groups()
    factor = 1024 ** list(_UNITS).index(unit.upper()) if binary else _UNITS[unit.upper()]
    nbytes = int(float(number) * factor)
    if nbytes < 1:
        raise argparse.ArgumentTypeError("expected a size of at least one byte")
    return nbytes


def existing(text: str) -> str:
    """Return the path of something that is there."""
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"the path {text} does not exist; check the path")
    return text


def _ranks(text: str) -> int:
    """Return a number of ranks, each of which gets a file of its own."""
    number = int(text) if text.isdecimal() else 0
    if not 1 <= number <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {_MOST_RANKS}, found {text!r}")
    return number


def natural(text: str) -> int:
    """Return a number of at least 0, of 63 bits at most."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0 and at most 2**63 - 1, found {text!r}")
    return int(text)


DTYPES: Final = {
    **{name: name for name in ("float64", "float32", "float16", "bfloat16")},
    **{"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
}
"""The dtypes that can be asked for, and what torch calls them."""


def dtype_name(text: str) -> str:
    """Torch's name of a dtype such as `bfloat16` or `bf16`."""
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, found {text!r}")
    return DTYPES[text]


def _tolerance(text: str) -> float:
    """Return a finite number of at least 0, with a fraction or not."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return number
