"""The arguments of `flatparam plan`, and their values. Nothing here imports torch, so that help comes at once."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import Any, Final

from flatparam_files.command import DTYPES, dtype_name, exit_statuses, natural, nbytes_of

_EXAMPLES: Final = """\
examples:
  flatparam plan models:make --wrap Block --world 8
  flatparam plan models:make --arg layers=80 --wrap Block --world 64 --dtype bf16 --reduce-dtype fp32
  flatparam plan LlamaConfig --arg num_hidden_layers=32 --wrap LlamaDecoderLayer --batch 2 --sequence 4096
  flatparam plan config.json --wrap LlamaDecoderLayer --world 8..4096
  flatparam plan models:make --wrap Block --compare full,grad_op,hybrid:8 --profile h100
  flatparam plan models:make --world 64 --fit 80GB --profile h100
  flatparam plan models:make --wrap Block --world 2 --profile this-machine
  flatparam plan models:make --wrap Block --world 8 --check

Nothing is allocated, computed or sent, except by --profile this-machine. The wrapper, the runtime and the optimizer run
a few steps on tensors without memory, as one rank of a world in which no other exists: bytes and numbers of collectives
are exact.

"""


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `plan` to the commands of `flatparam`."""
    added = groups.add_parser(
        "plan",
        help="what training a model will cost each rank, before it runs: memory, bytes sent, time",
        description="Say what training a model will cost each rank, before it runs.",
        epilog=_EXAMPLES + exit_statuses("--check has found a difference"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=_run)
    added.add_argument(
        "model",
        metavar="MODEL",
        help="MODULE:FUNCTION that makes the model, a config.json, or a config class of transformers",
    )
    added.add_argument(
        "--arg", type=_named_value, action="append", default=[], metavar="NAME=VALUE", help="for MODEL; repeatable"
    )
    added.add_argument("--on-cpu", action="store_true", help="make the model on the CPU; by default on the meta device")
    added.add_argument(
        "--inputs", metavar="MODULE:FUNCTION", help="makes what the model is called with, of (batch, sequence)"
    )
    _add_step(added)
    _add_ranks(added)
    _add_output(added)


def _add_step(added: argparse.ArgumentParser) -> None:
    step = added.add_argument_group("a step")
    step.add_argument("--batch", type=_positive, default=1, help="rows of a micro-batch on a rank (default: 1)")
    step.add_argument("--sequence", type=_positive, default=128, help="tokens of a row (default: 128)")
    step.add_argument("--accumulate", type=_positive, default=1, help="micro-batches of a step (default: 1)")
    step.add_argument("--clip", type=_norm, metavar="NORM", help="clip gradients to this norm")
    step.add_argument("--optimizer", default="adamw", help="adamw (default), adam, sgd, momentum, adagrad or none")
    step.add_argument(
        "--checkpointing",
        action="append",
        default=[],
        metavar="CLASS",
        help="recompute the activations of the modules of this class, or of this name (blocks.3); repeatable",
    )
    step.add_argument("--steps", type=_positive, default=2, help="steps to run (default: 2)")


def _add_ranks(added: argparse.ArgumentParser) -> None:
    ranks = added.add_argument_group("ranks and sharding")
    ranks.add_argument(
        "--world", type=_worlds, default=[8], metavar="N", help="ranks: 8, or 8,16, or 8..4096 (default: 8)"
    )
    ranks.add_argument("--ranks-per-host", type=_positive, default=8, metavar="N", help="default: 8")
    ranks.add_argument("--rank", type=natural, default=0, help="the rank to plan (default: 0)")
    ranks.add_argument("--strategy", help="full (default), grad_op, no_shard, hybrid:N, hybrid_grad_op:N")
    ranks.add_argument("--compare", metavar="A,B", help="plan these strategies, side by side")
    ranks.add_argument("--wrap", action="append", metavar="CLASS", help="a class of units; repeatable")
    ranks.add_argument("--wrap-numel", type=_positive, metavar="N", help="units of at least so many elements")
    dtypes = ", ".join(DTYPES)
    ranks.add_argument("--dtype", type=dtype_name, help=f"to compute in: {dtypes}")
    ranks.add_argument("--reduce-dtype", type=dtype_name, help="to reduce gradients in")
    ranks.add_argument("--offload", action="store_true", help="keep shards and states in the host's memory")
    ranks.add_argument("--use-orig-params", action="store_true", help="list the original parameters")
    ranks.add_argument(
        "--forward-prefetch", type=natural, default=0, metavar="N", help="units gathered ahead (default: 0)"
    )
    ranks.add_argument("--backward-prefetch", choices=("pre", "post", "none"), default="pre")
    ranks.add_argument(
        "--transport",
        choices=("direct", "gloo", "shared_memory"),
        default="direct",
        help="how bytes travel, as far as memory shows it (default: direct, as NCCL)",
    )
    ranks.add_argument(
        "--device", choices=("cpu", "accelerator"), help="whose schedule (default: the profile's, or cpu)"
    )


def _add_output(added: argparse.ArgumentParser) -> None:
    output = added.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything as one JSON object")
    output.add_argument(
        "--check", action="store_true", help="also run it for real, as the only rank, and show every difference"
    )
    output.add_argument(
        "--profile",
        metavar="NAME",
        help="predict the time: h100, h200, a100, mi300x, or a TOML file; this-machine or this-machine:gloo starts the "
        "ranks here and measures their steps, in about 15 seconds",
    )
    output.add_argument(
        "--fit",
        type=nbytes_of,
        metavar="SIZE",
        help="choose units, what is kept, recomputation and strategy for the fastest step whose peak is at most SIZE",
    )
    output.add_argument("--svg", type=Path, metavar="FILE", help="draw the predicted step")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write the predicted step for Perfetto")


def _run(chosen: argparse.Namespace) -> int:
    # Imports torch, which takes seconds: not for help.
    from flatparam_plan.command.plan_command import run

    return run(chosen)


# From the text of an argument to its value


def _positive(text: str) -> int:
    """Return a number of at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return number


def _norm(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return number


def _named_value(text: str) -> tuple[str, Any]:
    """Return a name and a value such as `layers=4`; what is no Python literal is a text."""
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, found {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _worlds(text: str) -> list[int]:
    """World sizes: `8`, `8,16,24`, or `8..4096` for its powers of two."""
    first, separator, last = text.partition("..")
    if not separator:
        return [_positive(each) for each in text.split(",")]
    sizes = [_positive(first)]
    if _positive(last) < sizes[0]:
        raise argparse.ArgumentTypeError(f"expected the smaller number of ranks first, as in 8..64, found {text!r}")
    while sizes[-1] * 2 <= _positive(last):
        sizes.append(sizes[-1] * 2)
    return sizes
