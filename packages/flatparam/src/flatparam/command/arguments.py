"""The arguments of the command line. Nothing here imports torch, so that help comes at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NoReturn

from flatparam import __version__
from flatparam.addons import commands, load
from flatparam.command.values import dtype_name, natural, nbytes_of, ranks, tolerance

__all__ = ["EXPORTS", "FORMATS", "STATUS", "parser"]

FORMATS: Final = ("flatparam", "safetensors", "deepspeed", "dcp", "torch")
"""The formats that are read."""
EXPORTS: Final = ("hf", "torch", "dcp")
"""The formats that are written for other programs."""
PARTS: Final = ("model", "optimizer", "extra")
STATUS: Final = """\
exit status:
  0    all is well
  1    the checkpoints differ, or the checkpoint is damaged
  2    the arguments are wrong, or an input cannot be read
  130  interrupted (143: terminated); nothing half written is left
"""
_EXAMPLES: Final = """\
examples:
  flatparam ckpt inspect runs/a                          the latest checkpoint of a run, as a tree
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
_TRACE_EXAMPLES: Final = """\
examples:
  flatparam trace --out traces train.py --steps 3
  torchrun --nproc-per-node 2 -m flatparam trace --out traces train.py --steps 3
  FLATPARAM_TRACE=traces torchrun --nproc-per-node 2 train.py --steps 3
  flatparam trace draw both.svg traces/rank0.json traces/rank1.json
  flatparam trace diff traces/rank0.json plan.json

"""
_RUN_EXAMPLES: Final = """\
examples:
  python -m flatparam run train.py --epochs 3
  torchrun --nproc-per-node 8 -m flatparam run train.py --epochs 3
  accelerate launch --config_file fsdp.yaml -m flatparam run train.py
  flatparam run -m package.train

The exit status is the program's; 2 if there is no such program.
"""


class _Later:
    """A function of a module of the commands, which is imported when it is called."""

    def __init__(self, module: str, function: str) -> None:
        self._module, self._function = module, function

    def __call__(self, chosen: argparse.Namespace) -> int:
        module = importlib.import_module(f"flatparam.command.{self._module}")
        status: int = getattr(module, self._function)(chosen)
        return status


class _Versions(argparse.Action):
    """Show the versions and exit; torch's is read from its metadata."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the versions, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "not installed"
        sys.stdout.write(f"flatparam {__version__}, torch {torch}\n")
        parser.exit()


class _Lacking(argparse.Action):
    """Say what a command lacks, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(2, f"{parser.prog}: error: {self.dest}\n")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, without all options before it."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; what it returns has a function `run` that takes it."""
    top: argparse.ArgumentParser = _Parser(prog="flatparam", description="Tools of the flatparam library.")
    top.add_argument("--version", action=_Versions)
    groups = top.add_subparsers(metavar="COMMAND", required=True)
    checkpoints = groups.add_parser(
        "ckpt",
        help="inspect, verify, compare and convert checkpoints",
        description="Inspect, verify, compare and convert checkpoints, whatever their size.",
        epilog=_EXAMPLES + STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run(groups)
    _add_trace(groups)
    _add_those_of_addons(groups)
    inside = checkpoints.add_subparsers(metavar="COMMAND", required=True)
    _add_inspect(inside)
    _add_verify(inside)
    _add_diff(inside)
    _add_converting(inside)
    return top


def _add_those_of_addons(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add each command of an add-on, or what says why it is lacking."""
    for name, command in commands().items():
        try:
            add = getattr(load(command.module), command.attr)
        except (ImportError, AttributeError) as error:
            # No prefix is that of an option, so whatever follows is taken.
            told = str(error).replace("%", "%%")
            lacking = groups.add_parser(name, help=told, add_help=False, prefix_chars="\0")
            lacking.add_argument(str(error), action=_Lacking, nargs="*")
        else:
            add(groups)


def _add_run(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run`, for its help; `main` takes its arguments apart, because most of them are the program's."""
    added = groups.add_parser(
        "run",
        help="run a program that uses torch's FSDP1 on flatparam, unchanged",
        usage="flatparam run [-h] [--] SCRIPT ...\n       flatparam run [-h] -m MODULE ...",
        description="Run a Python program after flatparam.install(): what it imports of torch's FSDP1 is flatparam's.",
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument("SCRIPT", help="the program's file, and its arguments")
    added.add_argument("-m", metavar="MODULE", help="the program's module, and its arguments")


def _add_trace(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace`, with its commands."""
    text = "record, draw and compare traces: of runs (flatparam.trace) and of plans (flatparam plan --trace)"
    added = groups.add_parser(
        "trace",
        help=text,
        usage="flatparam trace [-h] COMMAND ...\n       flatparam trace --out FOLDER [--] SCRIPT ...\n"
        "       flatparam trace --out FOLDER -m MODULE ...",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=_TRACE_EXAMPLES + STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.add_argument(
        "--out", metavar="FOLDER", help="run a program as `flatparam run` does; each rank leaves a trace here"
    )
    # By default it would be the whole usage above.
    commands = added.add_subparsers(metavar="COMMAND", required=True, prog="flatparam trace")
    draw = _command(
        commands, "draw", "draw the traces of one or more ranks as one SVG picture", "tracing", "draw"
    )
    draw.add_argument("picture", metavar="SVG", type=Path, help="the picture to write")
    draw.add_argument("traces", metavar="TRACE", type=Path, nargs="+", help="a trace")
    diff = _command(commands, "diff", "show where two traces differ, in calls and in time", "tracing", "diff")
    diff.add_argument("first", metavar="A", type=Path, help="a trace")
    diff.add_argument("second", metavar="B", type=Path, help="another")


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inspect`."""
    text = "show what is in a checkpoint, as a tree with shapes, dtypes and bytes, and who wrote it"
    added = _command(commands, "inspect", text, "inspecting", "run")
    added.add_argument("source", metavar="PATH", nargs="?", help="the checkpoint")
    added.add_argument("--json", action="store_true", help="everything as one JSON object")
    added.add_argument("--depth", type=natural, help="show this many levels of the tree")
    _add_reading(added)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `verify`."""
    text = "read every byte of a checkpoint, and compare it with the checksums that its format has"
    added = _command(commands, "verify", text, "verifying", "run")
    added.add_argument("source", metavar="PATH", nargs="?", help="the checkpoint")
    _add_reading(added, parts=False)
    _add_progress(added)


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `diff`."""
    text = "compare two checkpoints of any formats: names, shapes, dtypes, values and every element"
    added = _command(commands, "diff", text, "comparing", "run")
    added.add_argument("first", metavar="A", help="a checkpoint")
    added.add_argument("second", metavar="B", help="another")
    added.add_argument(
        "--tolerance",
        type=tolerance,
        default=0.0,
        help="the largest absolute difference that is none (default: 0)",
    )
    added.add_argument(
        "--ignore-dtype", action="store_true", help="compare elements of different dtypes as numbers"
    )
    added.add_argument("--all", action="store_true", help="show all differences, and not the first twenty")
    _add_reading(added, pair=False)
    _add_progress(added)


def _add_converting(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `reshard`, `import` and `export`."""
    text = (
        "write a checkpoint as a different number of ranks would have written it; loading does not need this"
    )
    _add_own(commands, "reshard", text, needs_world_size=True)
    text = "make a flatparam checkpoint directory from a checkpoint of a different format"
    _add_own(commands, "import", text, needs_world_size=False)
    text = "write a checkpoint in the format of a different program"
    added = _command(commands, "export", text, "converting", "export")
    _add_paths(added, "a new file or directory")
    added.add_argument(
        "--to", choices=EXPORTS, required=True, help="Hugging Face safetensors, torch.save, DCP"
    )
    added.add_argument(
        "--max-shard-size",
        type=nbytes_of,
        metavar="SIZE",
        help="hf: the most bytes of tensors in a file, such as 2GB (default: 5GB)",
    )
    added.add_argument("--world-size", type=ranks, help="dcp: the number of files (default: 1)")
    added.add_argument(
        "--averages",
        metavar="NAME",
        nargs="?",
        const="",
        help="write the averages (those of this name, if there are several) as the model, and nothing else",
    )
    _add_writing(added)


def _add_own(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    *,
    needs_world_size: bool,
) -> None:
    added = _command(commands, name, text, "converting", "write_own")
    _add_paths(added, "the directory of a run; made if it is not there")
    added.add_argument(
        "--world-size",
        type=ranks,
        required=needs_world_size,
        default=1,
        help="the number of ranks" + ("" if needs_world_size else " (default: 1)"),
    )
    added.add_argument("--step", type=natural, help="the step of the new one (default: the same, or 0)")
    _add_writing(added)


def _add_paths(added: argparse.ArgumentParser, destination: str) -> None:
    added.add_argument(
        "source", metavar="SRC", nargs="?", help="the checkpoint to read; or give --model, --optimizer"
    )
    added.add_argument("destination", metavar="DEST", type=Path, help=destination)


def _add_writing(added: argparse.ArgumentParser) -> None:
    added.add_argument(
        "--dtype", type=dtype_name, help="cast the model's floating-point tensors, such as to bfloat16"
    )
    added.add_argument("--dry-run", action="store_true", help="only list what would be written")
    _add_reading(added)
    _add_progress(added)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    module: str,
    function: str,
) -> argparse.ArgumentParser:
    """Add a command that does `text`, by calling a function of a module that is imported when the command is run."""
    added = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=_Later(module, function))
    return added


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
        added.add_argument(
            "--only", choices=PARTS, action="append", help="leave out the other parts; can be repeated"
        )
    if pair:
        added.add_argument("--model", metavar="PATH", help="the model's file, if the optimizer's is separate")
        added.add_argument("--optimizer", metavar="PATH", help="the optimizer's file beside that of --model")


def _add_progress(added: argparse.ArgumentParser) -> None:
    """Add the options of a command that may take long."""
    added.add_argument("--quiet", action="store_true", help="say nothing but errors")
    added.add_argument(
        "--no-progress", action="store_true", help="show no progress bar (there is none in a pipe)"
    )
