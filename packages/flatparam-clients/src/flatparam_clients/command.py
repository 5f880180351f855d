"""The subcommand `flatparam run`. Nothing here imports torch, so that help comes at once."""

from __future__ import annotations

import argparse
from typing import Final

__all__ = ["add"]

_RUN_EXAMPLES: Final = """\
examples:
  python -m flatparam run train.py --epochs 3
  torchrun --nproc-per-node 8 -m flatparam run train.py --epochs 3
  accelerate launch --config_file fsdp.yaml -m flatparam run train.py
  flatparam run -m package.train

The exit status is the program's; 2 if there is no such program.
"""


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run`, for its help; the wrapper's `main` takes its arguments apart: most of them are the program's."""
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
