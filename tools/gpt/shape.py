"""The shape of the model, and the presets of ``--size``."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from .errors import UserError

VOCABULARY: Final = 256
"""One token per byte value."""


@frozen
class Shape:
    """How large the model is. Each head is ``width / heads`` wide, an even number."""

    layers: int
    width: int
    heads: int
    context: int

    def __attrs_post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, and is {getattr(self, name)}.")
        if self.width % self.heads:
            raise UserError(
                f"--width {self.width} is not a multiple of --heads {self.heads}; each head takes an equal part of it."
            )

        if self.width // self.heads % 2:
            raise UserError(
                f"--width {self.width} over --heads {self.heads} makes heads of odd width "
                f"{self.width // self.heads}; rotary positions turn pairs, so it must be even."
            )

    @property
    def block_numel(self) -> int:
        """Elements of one transformer block: attention 4 c^2, MLP 8 c^2, two layer norms 2 c each (no other biases)."""
        return 12 * self.width**2 + 4 * self.width

    @property
    def root_numel(self) -> int:
        """Elements outside the blocks: byte embedding (tied to the head) and last layer norm."""
        return (VOCABULARY + 2) * self.width

    @property
    def tensors(self) -> int:
        """How many parameters there are: eight in each block, and three outside."""
        return 8 * self.layers + 3

    @property
    def numel(self) -> int:
        """All parameters, the tied embedding counted once."""
        return self.layers * self.block_numel + self.root_numel


@frozen
class Preset:
    """What ``--size`` chooses: a shape, and a learning rate and batch that suit it."""

    shape: Shape
    lr: float
    batch: int


PRESETS: Final[dict[str, Preset]] = {
    "tiny": Preset(Shape(layers=4, width=64, heads=4, context=128), lr=5e-3, batch=16),
    "small": Preset(Shape(layers=5, width=128, heads=4, context=128), lr=4e-3, batch=16),
    "medium": Preset(Shape(layers=8, width=320, heads=5, context=256), lr=1.5e-3, batch=16),
    "large": Preset(Shape(layers=10, width=512, heads=8, context=256), lr=8e-4, batch=16),
    "xl": Preset(Shape(layers=15, width=768, heads=12, context=256), lr=5e-4, batch=8),
}
"""About 0.2, 1, 10, 32 and 107 million parameters."""
