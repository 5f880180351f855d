"""Which rows of the text each step, each rank and each evaluation gets."""

from __future__ import annotations

import torch
from attrs import field, frozen
from torch import Tensor

from .corpus import Corpus


@frozen
class Rows:
    """Some rows of text: int64 tensors ``[rows, context]``, ``targets`` one byte further on than ``tokens``."""

    tokens: Tensor
    targets: Tensor


@frozen
class Batches:
    """Rows of fixed length out of a text. Step n's rows follow from (seed, n) alone, so the data position is n.

    The rows of a step are the *global* batch, the same for any number of ranks. It is cut into equal consecutive
    parts, and part ``i`` of ``n`` is the same rows wherever it is worked through.
    """

    training: Tensor = field(repr=False)
    held_out: Tensor = field(repr=False)
    batch: int
    context: int
    seed: int

    @classmethod
    def of(cls, corpus: Corpus, *, batch: int, context: int, seed: int) -> Batches:
        """Cut the corpus into training and held-out text."""
        corpus.check_context(context)
        text = torch.frombuffer(bytearray(corpus.text), dtype=torch.uint8)
        return cls(text[: corpus.boundary], text[corpus.boundary :], batch, context, seed)

    def training_part(self, step: int, part: int, parts: int) -> Rows:
        """Part ``part`` of ``parts`` of the global batch of step ``step`` (1 is the first)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.training) - self.context, (self.batch,), generator=generator)
        return self._rows(self.training, starts.chunk(parts)[part])

    def held_out_part(self, index: int, batches: int, part: int, parts: int) -> Rows:
        """Part ``part`` of ``parts`` of evaluation batch ``index`` of ``batches``: rows spread evenly over the text."""
        last = len(self.held_out) - self.context - 1
        starts = torch.linspace(0, last, batches * self.batch, dtype=torch.float64).long()
        return self._rows(self.held_out, starts.chunk(batches)[index].chunk(parts)[part])

    def _rows(self, text: Tensor, starts: Tensor) -> Rows:
        columns = starts[:, None] + torch.arange(self.context + 1)
        rows = text[columns].long()
        return Rows(rows[:, :-1], rows[:, 1:])
