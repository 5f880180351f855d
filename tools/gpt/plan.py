"""What a run starts from, settled and checked before any model is made."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from .checkpoints import Checkpoint, newest
from .corpus import Corpus, read_corpus
from .errors import UserError
from .options import Options, Recipe


@frozen
class Plan:
    """The text, the recipe, and the checkpoint to go on from, if there is one."""

    corpus: Corpus
    recipe: Recipe
    checkpoints: Path
    resumed: Checkpoint | None

    @property
    def start(self) -> int:
        """Steps done before this run."""
        return self.resumed.step if self.resumed is not None else 0


def make_plan(options: Options, world_size: int) -> Plan:
    """Read the text and find the checkpoint; `UserError` for whatever the user has to put right."""
    options.check_ranks(world_size)
    corpus = read_corpus(options.data)
    corpus.check_context(options.shape.context)
    recipe = options.recipe(corpus.sha256)
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out} is a file; give a folder.")
    checkpoints = options.out / "checkpoints"
    resumed = None if options.fresh else newest(checkpoints, recipe)
    if options.resume and resumed is None:
        raise UserError(f"--resume was given, but {checkpoints} holds no checkpoint.")
    return Plan(corpus, recipe, checkpoints, resumed)
