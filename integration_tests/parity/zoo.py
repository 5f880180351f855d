"""The zoo: models to train, what to feed them, and which of their modules become units.

Everything is a function of the model's name, the step and the rank, so that every process and every way of training
builds the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from integration_tests.parity import models

STEPS = 5

ALL_USED = "torch FSDP1 gives zeros, not None, to parameters that no rank used, so momentum and decay move them"
ONE_DTYPE = "torch FSDP1 refuses a unit with parameters of several dtypes"
NO_SCALAR = "torch FSDP1 refuses 0-d parameters"
ALL_TRAINABLE = "torch FSDP1 refuses frozen and trainable parameters in one unit unless use_orig_params=True"


@attrs.frozen(eq=False)
class Case:
    """A model of the zoo.

    Attributes:
        build: the unsharded model, the same in every call.
        loss: of the model, for a step and a rank.
        units: the modules that become units, innermost first; the whole model becomes the root unit.
        used_once: whether every parameter occurs at most once in each rank's graph. Where it occurs more often, the graph
            of the mean of the ranks' losses sums all occurrences on all ranks in an order of its own.
        not_in_torch: for each value of use_orig_params, why torch FSDP1 cannot train it to the same numbers.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], Tensor]
    units: tuple[str, ...]
    used_once: bool = True
    not_in_torch: dict[bool, str] = attrs.field(factory=dict)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """``make``, with the same random numbers at each call and without touching those of the caller."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return build


def batch(step: int, rank: int, *shape: int, below: int | None = None) -> Tensor:
    """The input of a rank in a step: normal floats, or integers in ``[0, below)``."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    if below is not None:
        return torch.randint(below, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def squares(*shape: int, **arguments: Any) -> Callable[[nn.Module, int, int], Tensor]:
    """The mean square of what the model makes of a batch of this shape."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(batch(step, rank, *shape), **arguments).square().mean()

    return loss


def next_token(vocabulary: int, *shape: int) -> Callable[[nn.Module, int, int], Tensor]:
    """The cross-entropy of predicting each token from those before it."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        tokens = batch(step, rank, *shape, below=vocabulary)
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def by_step(model: nn.Module, step: int, rank: int) -> Tensor:
    """``early`` in steps 1 and 4, ``late`` from step 2 on: in step 0 no rank uses either, so there is no gradient yet."""
    return model(batch(step, rank, 3, 4), early=step in (1, 4), late=step >= 2).square().mean()


def by_rank(model: nn.Module, step: int, rank: int) -> Tensor:
    """Some steps use ``early`` on rank 0 only, some ``late`` on rank 1 only, one both, one neither."""
    early = rank == 0 and step in (1, 3)
    late = rank == 1 and step in (2, 3)
    return model(batch(step, rank, 3, 4), early=early, late=late).square().mean()


def partly(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss reads one of the four outputs."""
    return model(batch(step, rank, 3, 4))["out"].square().mean()


def recomputed(name: str, *, reentrant: bool, outside: bool) -> Case:
    """A case of activation checkpointing."""
    return Case(
        name,
        seeded(lambda: models.Recomputed(reentrant=reentrant, outside=outside)),
        squares(3, 4),
        ("blocks.0", "blocks.1", "blocks.2"),
    )


def nested() -> nn.Module:
    """Unit in unit in unit."""
    return nn.Sequential(models.Level(4, models.Level(4, models.Level(4, nn.Linear(4, 4)))), nn.Linear(4, 2))


CASES = (
    Case("plain", seeded(lambda: nn.Sequential(models.Block(6), models.Block(6, 4))), squares(3, 6), ("0", "1")),
    Case("tied", seeded(models.Tied), next_token(11, 2, 4), ("block",), used_once=False),
    Case(
        "frozen",
        seeded(models.Frozen),
        squares(3, 6),
        ("first", "second", "third"),
        not_in_torch={False: ALL_TRAINABLE},
    ),
    Case(
        "uneven",
        seeded(models.Uneven),
        squares(3, 3),
        ("first", "tiny"),
        not_in_torch={False: NO_SCALAR, True: NO_SCALAR},
    ),
    Case("nested", seeded(nested), squares(3, 4), ("0.inner.inner", "0.inner", "0")),
    Case(
        "by-step",
        seeded(models.Conditional),
        by_step,
        ("branch.inner", "branch"),
        not_in_torch={True: ALL_USED},
    ),
    Case(
        "by-rank",
        seeded(models.Conditional),
        by_rank,
        ("branch.inner", "branch"),
        not_in_torch={True: ALL_USED},
    ),
    Case("twice", seeded(models.Twice), squares(3, 4), ("block", "between"), used_once=False),
    Case("unused", seeded(models.Unused), partly, ("side", "several", "last"), not_in_torch={True: ALL_USED}),
    Case(
        "transformer",
        seeded(models.Transformer),
        next_token(17, 2, 6),
        ("layers.0", "layers.1"),
        used_once=False,
    ),
    Case("convolutions", seeded(models.Convolutions), squares(2, 3, 7, 7), ("first", "second")),
    Case("recurrent", seeded(models.Recurrent), next_token(7, 2, 5), ("lstm",), used_once=False),
    recomputed("checkpoint-around-unit", reentrant=False, outside=True),
    recomputed("checkpoint-in-unit", reentrant=False, outside=False),
    recomputed("reentrant-around-unit", reentrant=True, outside=True),
    recomputed("reentrant-in-unit", reentrant=True, outside=False),
    Case(
        "dtypes",
        seeded(models.Precise),
        squares(3, 5),
        ("block",),
        not_in_torch={False: ONE_DTYPE, True: ONE_DTYPE},
    ),
)

ZOO = {case.name: case for case in CASES}


def named(name: str) -> Case:
    """The case of this name."""
    return ZOO[name]
