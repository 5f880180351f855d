"""The command line as a whole."""

from __future__ import annotations

import argparse
from typing import Final

import torch

from flatparam import __version__
from flatparam.command import comparing, converting, inspecting, verifying
from flatparam.command.options import STATUS

__all__ = ["parser"]

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


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; what it returns has a function `run` that takes it."""
    top = argparse.ArgumentParser(prog="flatparam", description="Tools of the flatparam library.")
    version = f"flatparam {__version__}, torch {torch.__version__}"
    top.add_argument("--version", action="version", version=version)
    groups = top.add_subparsers(metavar="COMMAND", required=True)
    checkpoints = groups.add_parser(
        "ckpt",
        help="inspect, verify, compare and convert checkpoints",
        description="Inspect, verify, compare and convert checkpoints, whatever their size.",
        epilog=_EXAMPLES + STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = checkpoints.add_subparsers(metavar="COMMAND", required=True)
    inspecting.add_to(commands)
    verifying.add_to(commands)
    comparing.add_to(commands)
    converting.add_to(commands)
    return top
