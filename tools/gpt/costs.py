"""What sharding should cost, by formula: bytes held and bytes moved."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from .options import Options
from .shape import Shape

_FLOAT32: Final = 4
_ON_THE_WIRE: Final = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "mxfp8": 1 + 1 / 32}
"""The bytes of an element in each format, without what a block's last row is filled up with."""
_FINGERPRINT = 16
_HELD_PER_PARAMETER: Final = 4 * _FLOAT32
"""Parameter, gradient and AdamW's two moments, in float32."""


@frozen
class Costs:
    """Formulas for one run, all in bytes of one rank and without padding.

    A ring all-gather or reduce-scatter of n bytes over w ranks sends n (w - 1) / w bytes from each rank. In one pass
    forward and backward, FULL_SHARD gathers each block twice; the root unit stays until its backward and is gathered
    once, as is every unit under SHARD_GRAD_OP. Each reduced pass reduce-scatters every unit once, and all-reduces one
    byte for each parameter, which sends twice as much as a reduce-scatter of it.
    """

    shape: Shape
    ranks: int
    strategy: str
    accumulate: int
    no_sync: bool
    plain: bool
    optimizer: str = "adamw"
    widths: int = 1
    gathered_nbytes: float = 4.0
    reduced_nbytes: float = 4.0

    @classmethod
    def of(cls, options: Options, ranks: int) -> Costs:
        """The formulas for these options on ``ranks`` ranks."""
        return cls(
            options.shape,
            ranks,
            options.strategy,
            options.accumulate,
            options.no_sync or options.reduction == "exact",
            options.plain,
            options.optimizer,
            # The sums of several parts travel in float64.
            2 if options.reduction == "exact" and options.accumulate > 1 and options.wire == "none" else 1,
            _ON_THE_WIRE[options.gather_wire],
            _ON_THE_WIRE[options.wire],
        )

    @property
    def held_by_ddp(self) -> int:
        """Parameters, gradients and the optimizer's state, all on every rank."""
        held = _HELD_PER_PARAMETER * self.shape.numel
        # Muon has one number for each element of a block's matrices, not two.
        saved = _FLOAT32 * self.shape.layers * 12 * self.shape.width**2 if self.optimizer == "muon" else 0
        return held - saved

    def held_in_words(self) -> str:
        """The formula of `held_by_ddp`."""
        return "16 bytes x parameters" + (" - 4 bytes x matrices" if self.optimizer == "muon" else "")

    @property
    def held_at_rest(self) -> int:
        """The same, each rank its share."""
        return -(-self.held_by_ddp // self.ranks)

    @property
    def gathered_numel(self) -> int:
        """Elements all-gathered in one step."""
        if self.plain:
            return 0
        blocks = self.shape.layers * self.shape.block_numel
        if self.strategy == "full_shard":
            # The last block of the forward pass, known from the second step on, is not gathered again.
            return self.accumulate * (2 * blocks - self.shape.block_numel + self.shape.root_numel)
        return (1 if self.no_sync else self.accumulate) * self.shape.numel

    @property
    def reduced_numel(self) -> int:
        """Elements reduce-scattered in one step."""
        if self.plain:
            return 0
        return self.widths * (1 if self.no_sync else self.accumulate) * self.shape.numel

    @property
    def moved_per_step(self) -> int:
        """Bytes that one rank sends in one step."""
        nbytes = int(self.gathered_nbytes * self.gathered_numel + self.reduced_nbytes * self.reduced_numel)
        return nbytes * (self.ranks - 1) // self.ranks + self.flags_per_step * 2 * (self.ranks - 1) // self.ranks

    @property
    def flags_per_step(self) -> int:
        """Bytes all-reduced in one step: which parameters got a gradient on any rank, and that all ranks did alike.

        One for each parameter, and 16.
        """
        if self.plain:
            return 0
        return (1 if self.no_sync else self.accumulate) * (self.shape.tensors + _FINGERPRINT)

    @property
    def moved_by_ddp(self) -> int:
        """Bytes that one rank of DDP sends in one step: a ring all-reduce of every gradient, in each reduced pass."""
        passes = 1 if self.no_sync else self.accumulate
        return 2 * _FLOAT32 * passes * self.shape.numel * (self.ranks - 1) // self.ranks

    def moved_in_words(self) -> str:
        """The formula of `moved_per_step` with its numbers."""
        if self.ranks == 1:
            return "one rank sends nothing"
        return (
            f"{self.ranks - 1}/{self.ranks} x ({self.gathered_nbytes:.4g} bytes x {self.gathered_numel:,} gathered + "
            f"{self.reduced_nbytes:.4g} bytes x {self.reduced_numel:,} reduced), and flags"
        )
