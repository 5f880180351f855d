"""What a model of the table is: how it is built, what it is fed, and which of its modules become units.

Everything is a function of the model's name, the step and the rank, so that every process and every way of training
builds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor, nn

from integration_tests.parity.zoo import seeded

STEPS = 3

Loss = Callable[[nn.Module, int, int], Tensor]
"""Of the model, for a step and a rank."""

Feed = Callable[[torch.Generator], Mapping[str, Tensor]]
"""What the model is called with; the numbers come out of the generator."""

BLOCKS, LAYERS = "blocks", "layers"

TIES = "torch FSDP1 unties parameters of several units"
ALL_TRAINABLE = "torch FSDP1 refuses frozen and trainable parameters in one unit unless use_orig_params=True"


@attrs.frozen(eq=False)
class Model:
    """A model of the table.

    Attributes:
        make: the model as its class builds it; `build` is with the same random numbers at each call.
        feed: the arguments of a training call.
        loss_of: the loss, out of what the call returns and its arguments.
        blocks: the names of the classes whose modules become units; the whole model becomes the root unit.
        layers: the names of the classes whose modules become units where every layer is one; empty where that is not
            tried.
        blocks_in_torch: the same for torch FSDP1, where it cannot have these; numbers do not depend on the units.
        generate: tokens that the model makes; None where it cannot.
        checkpoint: has the model compute its blocks again in the backward pass.
        checkpoint_is_exact: whether the unsharded model trains to the same bits then.
        pretrained: whether it has transformers' `save_pretrained`, `from_pretrained` and `_init_weights`.
        not_in_torch: for kinds of units and values of use_orig_params, why torch FSDP1 cannot train it.
    """

    name: str
    make: Callable[[], nn.Module]
    feed: Feed
    blocks: tuple[str, ...]
    layers: tuple[str, ...] = ()
    loss_of: Callable[[object, Mapping[str, Tensor]], Tensor] = lambda output, _: output.loss
    generate: Callable[[nn.Module], Tensor] | None = None
    blocks_in_torch: tuple[str, ...] = ()
    checkpoint: Callable[[nn.Module], object] = lambda model: model.gradient_checkpointing_enable()
    checkpoint_is_exact: bool = True
    pretrained: bool = False
    not_in_torch: Mapping[tuple[str, bool], str] = attrs.field(factory=dict)

    def build(self, seed: int = 0) -> nn.Module:
        """The unsharded model in training mode, on the CPU, in fp32."""
        return seeded(self.make, seed)().train()

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """A training call's; what the model draws at random depends on the step and the rank alone."""
        torch.manual_seed(1000 * step + rank + 1)
        fed = self.feed(torch.Generator().manual_seed(1000 * step + rank + 1))
        return self.loss_of(model(**fed), fed)

    def classes(self, module: nn.Module, units: str, in_torch: bool = False) -> set[type[nn.Module]]:
        """The classes whose modules become units."""
        blocks = (in_torch and self.blocks_in_torch) or self.blocks
        names = blocks if units == BLOCKS else self.layers
        found = {type(each).__name__: type(each) for each in module.modules()}
        return {found[name] for name in names}


def tokens(generator: torch.Generator, vocabulary: int, *shape: int, first: int = 3) -> Tensor:
    """Random tokens; those below `first` mean something."""
    return torch.randint(first, vocabulary, shape, generator=generator)


def language(vocabulary: int, sequences: int = 2, length: int = 16) -> Feed:
    """Sequences whose next tokens are to be predicted."""

    def feed(generator: torch.Generator) -> Mapping[str, Tensor]:
        ids = tokens(generator, vocabulary, sequences, length)
        return {"input_ids": ids, "labels": ids}

    return feed
