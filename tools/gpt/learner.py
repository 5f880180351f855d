"""A model with its optimizer: sharded over the ranks, or as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from attrs import define
from torch import nn
from torch.optim import AdamW, Optimizer

from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam.optim import Muon
from flatparam.wrap import ModuleWrapPolicy
from flatparam_sums import Wire

from .meter import Meter
from .model import GPT, Block
from .options import Options
from .ranks import Ranks

_BETAS: Final = (0.9, 0.95)


@define(eq=False)
class Learner:
    """What is trained: ``model`` as it is called, ``optimizer`` over what this rank holds of it."""

    model: nn.Module
    optimizer: Optimizer

    def without_reduction(self) -> AbstractContextManager[Any]:
        """Keep the gradients of the backward passes inside to this rank."""
        if isinstance(self.model, FullyShardedDataParallel):
            return self.model.no_sync()
        return nullcontext()

    def micro_batch(self) -> AbstractContextManager[None]:
        """Collect the gradients of one micro-batch inside, until `reduce`."""
        assert isinstance(self.model, FullyShardedDataParallel), "exact sums are of a sharded model"
        return self.model.accumulate()

    def reduce(self) -> None:
        """Reduce what micro-batches have collected. A collective."""
        assert isinstance(self.model, FullyShardedDataParallel), "exact sums are of a sharded model"
        self.model.reduce_gradients()

    def hash(self) -> str:
        """Return the SHA-256 of the full parameters. A collective."""
        digest = hashlib.sha256()
        for value in self.model.state_dict().values():
            digest.update(value.cpu().numpy().tobytes())
        return digest.hexdigest()

    def clip(self, largest: float) -> None:
        """Scale the gradients so that the norm over all of them is at most ``largest``. A collective."""
        if isinstance(self.model, FullyShardedDataParallel):
            self.model.clip_grad_norm_(largest)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), largest)


def build(options: Options, ranks: Ranks, meter: Meter) -> Learner:
    """Make the model of ``options`` from its seed, the same on every rank, shard it, and give it an optimizer."""
    torch.manual_seed(options.seed)
    model: nn.Module = GPT(options.shape, recompute=options.checkpoint_activations).to(ranks.device)
    if not options.plain:
        model = FullyShardedDataParallel(
            model,
            process_group=meter.process_group,
            sharding_strategy=ShardingStrategy[options.strategy.upper()],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=options.use_orig_params,
            reduction=options.reduction,
            wire=_wire_of(options),
        )
    return Learner(model, _optimizer(options, model))


def _wire_of(options: Options) -> Any:
    if options.wire == options.gather_wire == "none":
        return "default"
    formats = {"reduce": options.wire, "gather": options.gather_wire}
    return Wire(**{way: name for way, name in formats.items() if name != "none"})  # type: ignore[arg-type]


def optimizer_of(options: Options, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """AdamW over ``parameters``."""
    return AdamW(parameters, lr=options.lr, betas=_BETAS, weight_decay=options.weight_decay)


def _optimizer(options: Options, model: nn.Module) -> Optimizer:
    """The optimizer that was asked for; either takes the same learning rate and weight decay."""
    if options.optimizer == "adamw":
        return optimizer_of(options, model.parameters())
    return Muon(
        list(model.named_parameters()),
        lr=options.lr,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
        adamw_betas=_BETAS,
        adamw_weight_decay=options.weight_decay,
        matrices=lambda name, shape: len(shape) == 2 and "embedding" not in name,
    )
