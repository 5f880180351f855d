"""Programs, which say what is trained and how, and configurations, which say how it is sharded. Both print as code."""

from __future__ import annotations

from typing import TypeAlias

import attrs
import torch

from integration_tests.programs.trees import Block, Recipe, Tie


@attrs.frozen(repr=False)
class Micro(Recipe):
    """One micro-batch.

    Attributes:
        quiet: which part of it is inside of `no_sync()`: "", "forward", "backward" or "both".
        forwards: how many forward passes the loss is the sum of.
        again: whether the graph is kept, and gone through once more.
        evaluates: whether the model is evaluated between the forward and the backward pass.
    """

    quiet: str = ""
    forwards: int = 1
    again: bool = False
    evaluates: bool = False

    @property
    def passes(self) -> int:
        """How many forward passes there are."""
        return self.forwards + self.evaluates

    @property
    def is_reduced(self) -> bool:
        """Whether gradients are synchronised: the backward pass decides."""
        return self.quiet in ("", "forward")


@attrs.frozen(repr=False)
class Evaluation(Recipe):
    """A forward pass without gradients, in inference mode or not."""

    inference: bool = False

    @property
    def passes(self) -> int:
        """How many forward passes there are."""
        return 1


Operation: TypeAlias = Micro | Evaluation


@attrs.frozen(repr=False)
class Step(Recipe):
    """What leads to one step of the optimizer.

    Attributes:
        operations: the last micro-batch among them is synchronised.
        clip: the order of the norm that gradients are clipped to; 0 for none. The orders 1 and infinity are exact.
        set_to_none: how gradients are zeroed afterwards.
        look: how the parameters are looked at afterwards, beside through what the optimizer holds: "", "summon", "save"
            or "reload".
        flipped: the parameters that are frozen during this step if they are trained in the recipe, and trained if they
            are frozen there. A flat parameter is flipped with any that is in it.
    """

    operations: tuple[Operation, ...] = (Micro(),)
    clip: float = 0.0
    set_to_none: bool = True
    look: str = ""
    flipped: tuple[str, ...] = ()


@attrs.frozen(repr=False)
class Program(Recipe):
    """A model and what is done with it.

    Attributes:
        optimizer: "sgd", "adamw" or "adagrad" for all parameters; or "groups" of AdamW, or "two" optimizers, AdamW and
            SGD, where some parameters are apart from the others.
        differentiates_inputs: whether gradients of the inputs are asked for, too.
        apart: which these are: those of the first "place", of the "dtype" float64, or every "bias".
    """

    tree: Block
    ties: tuple[Tie, ...] = ()
    steps: tuple[Step, ...] = (Step(),)
    optimizer: str = "sgd"
    differentiates_inputs: bool = False
    apart: str = ""

    def is_apart(self, name: str, dtype: torch.dtype) -> bool:
        """Whether a parameter is in the second group, or belongs to the second optimizer."""
        if self.apart == "dtype":
            return dtype == torch.float64
        return name.startswith("0.") if self.apart == "place" else name.endswith("bias")


@attrs.frozen(repr=False)
class Configuration(Recipe):
    """How a model is sharded. The upper-case strings are names of members of FSDP1's enums.

    Attributes:
        shard_size: how many ranks share a shard, for the hybrid strategies.
        units: the modules that become units; the whole model becomes one, too, unless `has_plain_parent`.
        use_orig_params: "no", "yes", or "inside": in all units but the root.
        precision: a key of `PRECISIONS`.
        forward_prefetch: how many units ahead.
        ignored: frozen layers that are not sharded.
        checkpointed: the modules that get activation checkpointing (not the reentrant kind) after all has been wrapped,
            those that are units inside of them.
        turned: whether each rank's optimizer begins its list of parameters at another one.
        thresholds: names and values of those that are set.
    """

    ranks: int = 2
    strategy: str = "FULL_SHARD"
    shard_size: int = 0
    units: tuple[str, ...] = ()
    use_orig_params: str = "no"
    precision: str = ""
    offload: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: int = 0
    limit_all_gathers: bool = True
    ignored: tuple[str, ...] = ()
    has_plain_parent: bool = False
    checkpointed: tuple[str, ...] = ()
    turned: bool = False
    thresholds: tuple[tuple[str, int], ...] = ()

    @property
    def in_order(self) -> tuple[str, ...]:
        """The units, and last the root where it is one, in the order in which they are made."""
        inside = sorted(self.units, key=lambda name: (-name.count("."), name))
        return tuple(inside) if self.has_plain_parent else (*inside, "")

    @property
    def group_size(self) -> int:
        """How many ranks together hold every parameter once."""
        if self.strategy == "NO_SHARD":
            return 1
        return self.shard_size if "HYBRID" in self.strategy else self.ranks

    def lists_originals(self, unit: str) -> bool:
        """Whether `parameters()` lists the original parameters of this unit."""
        return self.use_orig_params == "yes" or (self.use_orig_params == "inside" and unit != "")


PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "": (None, None),
    "reduced in fp64": (None, torch.float64),
    "reduced in fp32": (None, torch.float32),
    "reduced in bf16": (None, torch.bfloat16),
    "reduced in fp16": (None, torch.float16),
    "computed in bf16": (torch.bfloat16, torch.float32),
    "bf16": (torch.bfloat16, None),
    "bf16 twice": (torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp16": (torch.bfloat16, torch.float16),
    "computed in fp16": (torch.float16, torch.float32),
    "fp16": (torch.float16, None),
    "fp16 twice": (torch.float16, torch.float16),
    "fp16, reduced in bf16": (torch.float16, torch.bfloat16),
}
"""The dtypes of computation and of reduction. All of them hold small multiples of 3/4 exactly, and so the reference is the
unsharded model in the dtype of computation, whatever gradients are reduced in."""
