"""What the command line says, checked once and frozen."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, frozen

from .errors import UserError
from .shape import PRESETS, Shape


@frozen
class Recipe:
    """Everything that decides the loss curve (rounding apart). A checkpoint is resumed only by the same recipe.

    The number of ranks, the strategy, accumulation and checkpointing of activations are not here: they change how
    the curve is computed, not what it is. ``--steps`` is not here either, so that a finished run can go on.
    """

    shape: Shape
    batch: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    text_sha256: str
    optimizer: str = "adamw"

    def to_json(self) -> dict[str, Any]:
        """The recipe as one flat JSON object."""
        flat = asdict(self)
        recipe = {**flat.pop("shape"), **flat}
        if self.optimizer == "adamw":
            # Checkpoints from before there was a choice do not name it.
            del recipe["optimizer"]
        return recipe


@frozen
class Options:
    """The options of one run, as given or as their defaults."""

    shape: Shape
    size: str
    data: Path | None
    batch: int
    accumulate: int
    no_sync: bool
    steps: int
    minutes: float | None
    lr: float
    warmup: int
    weight_decay: float
    optimizer: str
    clip: float
    seed: int
    eval_every: int
    eval_batches: int
    checkpoint_every: int
    out: Path
    resume: bool
    fresh: bool
    ranks: int | None
    plain: bool
    strategy: str
    reduction: Literal["default", "exact"]
    wire: Literal["none", "bf16", "int8", "mxfp8"]
    gather_wire: Literal["none", "bf16", "int8", "mxfp8"]
    use_orig_params: bool
    checkpoint_activations: bool
    threads: int | None
    device: str
    sample_bytes: int
    prompt: str
    temperature: float
    control: Path | None

    def __attrs_post_init__(self) -> None:
        for name in ("batch", "accumulate", "steps", "eval_every", "eval_batches", "checkpoint_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "weight_decay", "clip", "sample_bytes", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("lr", "temperature"):
            _positive(name, getattr(self, name))
        for name in ("minutes", "ranks", "threads"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.resume and self.fresh:
            raise UserError("--resume and --fresh exclude each other.")
        if not self.prompt:
            raise UserError("--prompt must hold at least one byte; the sample goes on from it.")

    def recipe(self, text_sha256: str) -> Recipe:
        """The part of the options that decides the loss curve on the text with this hash."""
        return Recipe(
            shape=self.shape, batch=self.batch, lr=self.lr, warmup=self.warmup, weight_decay=self.weight_decay,
            clip=self.clip, seed=self.seed, text_sha256=text_sha256, optimizer=self.optimizer,
        )  # fmt: skip

    def check_ranks(self, world_size: int) -> None:
        """Raise `UserError` unless the global batch can be cut into equal parts for ``world_size`` ranks."""
        if self.ranks is not None and self.ranks != world_size:
            raise UserError(f"--ranks {self.ranks} was given, but torchrun started {world_size}; leave --ranks out.")
        if self.plain and world_size > 1:
            raise UserError("--plain trains an ordinary module in one process: give it --ranks 1 or no --ranks.")
        parts = world_size * self.accumulate
        if self.batch % parts:
            raise UserError(
                f"--batch {self.batch} cannot be cut into {world_size} ranks x {self.accumulate} accumulated parts; "
                f"use a multiple of {parts}."
            )


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise UserError(f"--{name.replace('_', '-')} must be at least {least}, and is {value}.")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise UserError(f"--{name.replace('_', '-')} must be greater than 0, and is {value}.")


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process on a misspelt option, `UserError` is for a wrong value."""
    given = vars(_parser().parse_args(arguments))
    preset = PRESETS[given["size"]]
    overrides = {name: given.pop(name) for name in ("layers", "width", "heads", "context")}
    chosen = {name: value for name, value in overrides.items() if value is not None}
    shape = Shape(**{**asdict(preset.shape), **chosen})
    given["lr"] = preset.lr if given["lr"] is None else given["lr"]
    given["batch"] = preset.batch if given["batch"] is None else given["batch"]
    if given["plain"] and (given["wire"], given["gather_wire"]) != ("none", "none"):
        raise UserError("--wire and --gather-wire are for a sharded model: leave --plain out.")
    if given["reduction"] == "exact":
        if given["plain"]:
            raise UserError("--reduction exact is for a sharded model: leave --plain out.")
        # The bits of a product depend on the threads.
        given["threads"] = given["threads"] or 1
    return Options(shape=shape, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a byte-level GPT with FullyShardedDataParallel over text that is on every machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_text_and_model(parser.add_argument_group("text and model"))
    _add_training(parser.add_argument_group("training"))
    _add_ranks(parser.add_argument_group("ranks and sharding"))
    _add_output(parser.add_argument_group("output"))
    parser.add_argument("--control", type=Path, default=None, help=argparse.SUPPRESS)
    return parser


def _add_text_and_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", type=Path, help="file or folder to train on (default: the standard library's source)")
    group.add_argument("--size", choices=list(PRESETS), default="small", help="preset for the options below")
    for name in ("layers", "width", "heads", "context"):
        group.add_argument(f"--{name}", type=int, help=f"{name} (default: from --size)")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=int, default=400, help="optimizer steps in all, those before a resume included")
    group.add_argument("--minutes", type=float, help="stop cleanly after this long, if the steps are not done before")
    group.add_argument("--batch", type=int, help="rows of --context bytes per step over all ranks (default: by --size)")
    group.add_argument("--accumulate", type=int, default=1, help="parts in which each rank works through its rows")
    group.add_argument("--no-sync", action="store_true", help="reduce gradients only at the last accumulated part")
    group.add_argument(
        "--optimizer", choices=("adamw", "muon"), default="adamw",
        help="muon: flatparam.optim.Muon for the blocks' matrices, AdamW for the rest",
    )  # fmt: skip
    group.add_argument("--lr", type=float, help="highest learning rate (default: by --size)")
    group.add_argument("--warmup", type=int, default=40, help="steps of linear warm-up before the cosine")
    group.add_argument("--weight-decay", type=float, default=0.1, help="on every parameter")
    group.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0 leaves gradients as they are")
    group.add_argument("--seed", type=int, default=0, help="for the initial weights, the rows of each step, the sample")
    group.add_argument("--eval-every", type=int, default=50, help="steps between evaluations on held-out text")
    group.add_argument("--eval-batches", type=int, default=8, help="batches in one evaluation")


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ranks", type=int, help="processes to train on (default: 2, or torchrun's number)")
    group.add_argument("--plain", action="store_true", help="the reference: one process, an ordinary module")
    group.add_argument("--strategy", choices=("full_shard", "shard_grad_op"), default="full_shard", help="strategy")
    group.add_argument(
        "--reduction", choices=("default", "exact"), default="default",
        help="exact: the same bits on any number of ranks with as many parts in all, whose hash is shown",
    )  # fmt: skip
    for name, what in (("--wire", "gradients"), ("--gather-wire", "parameters to compute with")):
        group.add_argument(
            name,
            choices=("none", "bf16", "int8", "mxfp8"),
            default="none",
            help=f"the format that {what} travel in",
        )
    group.add_argument(
        "--use-orig-params", action=argparse.BooleanOptionalAction, default=False,
        help="the optimizer sees the original parameters, not the flat ones",
    )  # fmt: skip
    group.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in backward")
    group.add_argument("--threads", type=int, help="threads per rank (default: the cores shared out)")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda takes one GPU per rank, by NCCL")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for checkpoints, metrics and plots")
    group.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    group.add_argument(
        "--resume", action="store_true", help="insist on a checkpoint (without it: resume if there is one)"
    )
    group.add_argument("--fresh", action="store_true", help="start over, and remove the checkpoints in --out")
    group.add_argument("--sample-bytes", type=int, default=400, help="length of the text generated at the end")
    group.add_argument("--prompt", default="\ndef ", help="what the generated text goes on from")
    group.add_argument("--temperature", type=float, default=0.7, help="of the sampling")
