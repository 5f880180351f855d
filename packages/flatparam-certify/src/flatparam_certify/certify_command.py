"""`flatparam certify`: its arguments, and from them to a table or JSON. Nothing imports torch for its help."""

from __future__ import annotations

import argparse
import json
import os
from typing import Final

from flatparam_certify.meshes import DIMENSIONS, OF_DATA, CertifyError, MeshSizes
from flatparam_certify.settings import OPTIMIZERS, PRECISIONS, STEPS, number_of_settings, settings_for
from flatparam_files.command import ArgumentsError, existing, exit_statuses, say
from flatparam_files.disk.progress import progress_bar

ENGINES: Final = ("flatparam", "fully_shard", "torch-fsdp1", "torch-fsdp2", "torch-ddp", "plain")
"""The engines with a name."""
_EXAMPLES: Final = """\
examples:
  flatparam certify case.py
  flatparam certify case.py --engine torch-fsdp2 --mesh dp_replicate=2,dp_shard=2 --wrap Block
  flatparam certify case.py --engine my_trainer.py:engine --mesh dp_shard=2,tp=2
  flatparam certify models:case --engine my_trainer:engine --mesh ep=2 --precision fp32 --json

CASE has three functions, build(), batch(step, micro_batch, data_rank) and loss(model, batch). An engine of yours is a
function of a model and a DeviceMesh that returns a module, or a flatparam_certify.Trainer. Ranks are processes on this
CPU, over gloo.

"""

_QUIETER: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR", "MKL_CBWR": "AVX2,STRICT", "OMP_NUM_THREADS": "1"}
"""The environment of the ranks, if nobody has set it: no warnings of DDP about parameters that are used,
and products of matrices whose bits do not depend on where their operands lie."""


def _importable(text: str) -> str:
    """Return the name of something to import; a file has to be there, which is found out before torch is imported."""
    file, _, _ = text.rpartition(":") if ":" in text else (text, "", "")
    if file.endswith(".py"):
        existing(file)
    return text


def add(groups: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `certify` to the commands of `flatparam`."""
    added = groups.add_parser(
        "certify",
        help="whether an engine computes the right gradients, on CPU, beside one process",
        description="Check the gradients of any sharding engine, on CPU, beside one process that does all the work.",
        epilog=_EXAMPLES + exit_statuses("something is wrong, or the engine failed"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=_run)
    added.add_argument(
        "case",
        metavar="CASE",
        type=_importable,
        help="FILE.py or MODULE with the three functions, or FILE.py:NAME, MODULE:NAME",
    )
    added.add_argument(
        "--engine",
        default="flatparam",
        metavar="NAME",
        type=_importable,
        help=f"{', '.join(ENGINES)}, or FILE.py:NAME, MODULE:NAME of yours (default: flatparam)",
    )
    added.add_argument(
        "--wrap",
        action="append",
        default=[],
        metavar="CLASS",
        help="a class of units, for built-in engines; repeatable",
    )
    ranks = added.add_argument_group("ranks")
    ranks.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        help=f"ranks along {', '.join(DIMENSIONS)}; 1 each by default, dp_shard=2 if none is given",
    )
    ranks.add_argument(
        "--data",
        type=_names,
        default=OF_DATA,
        metavar="NAME,...",
        help=f"the dimensions whose ranks have batches of their own (default: {','.join(OF_DATA)})",
    )
    ranks.add_argument("--no-groups-of-one", action="store_true", help="leave out the meshes with a group of one rank")
    ranks.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds for a setting (default: 120)")
    _add_training(added)
    output = added.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="everything as one JSON object")
    output.add_argument("--quiet", action="store_true", help="write nothing if all is right")


def _add_training(added: argparse.ArgumentParser) -> None:
    training = added.add_argument_group("training")
    training.add_argument(
        "--precision", action="append", choices=PRECISIONS, help=f"repeatable (default: {' and '.join(PRECISIONS)})"
    )
    training.add_argument(
        "--optimizer", action="append", choices=OPTIMIZERS, help=f"repeatable (default: {' and '.join(OPTIMIZERS)})"
    )
    training.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="those of an accumulated step (default: 3, or another number that is no size of the mesh)",
    )
    training.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"those of a run (default: {STEPS})")
    training.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")


def _names(text: str) -> tuple[str, ...]:
    """Return names that commas separate."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _run(chosen: argparse.Namespace) -> int:
    """Certify what the arguments say; returns 1 if something is wrong."""
    # Imports torch, which takes seconds: not for help.
    from flatparam_certify.certifying import certify

    for name, value in _QUIETER.items():
        os.environ.setdefault(name, value)
    precisions, optimizers = chosen.precision or PRECISIONS, chosen.optimizer or OPTIMIZERS
    mesh = chosen.mesh or ("dp_shard=1" if chosen.engine == "plain" else "dp_shard=2")
    try:
        sizes = MeshSizes.read(mesh, chosen.data)
        settings = settings_for(sizes, precisions, optimizers, chosen.micro_batches, chosen.steps)
        total = number_of_settings(sizes, settings, not chosen.no_groups_of_one)
        # A bar that nobody asked for is shown after a second, on a terminal.
        with progress_bar("certify", total, False if chosen.quiet else None, unit=" runs") as observe:
            found = certify(
                chosen.case,
                chosen.engine,
                mesh,
                wrap=chosen.wrap,
                of_data=chosen.data,
                groups_of_one=not chosen.no_groups_of_one,
                precisions=precisions,
                optimizers=optimizers,
                micro_batches=chosen.micro_batches,
                steps=chosen.steps,
                seed=chosen.seed,
                timeout=chosen.timeout,
                observe=observe,
            )
    except CertifyError as error:
        raise ArgumentsError(str(error)) from error
    if chosen.json:
        for line in json.dumps(found.facts(), indent=1, allow_nan=False).splitlines():
            say(line)
    elif not (chosen.quiet and found.is_right):
        for line in found.table().splitlines():
            say(line)
    return 0 if found.is_right else 1
