"""Under `torch.autocast` a unit leaves no casts of its weights behind: neither their memory nor their old values."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flatparam_comm import Collectives

from .models import WIDTH, Block, Stack, batch
from .worlds import check_at_rest, check_same, full_parameters, run, seeded, sharded

BLOCKS = [f"blocks.{number}" for number in range(4)]


class Checkpointed(Stack):
    """A stack that computes each of its blocks again in the backward pass."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__(depth)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


class Twice(Block):
    """A block that uses one of its weights twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(torch.tanh(self.up(x)))


class OfTwice(Stack):
    """A stack of such blocks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__(depth)
        self.blocks = nn.ModuleList(Twice() for _ in range(depth))


class Casts(TorchDispatchMode):
    """Knows the weights in bfloat16 that were made of others and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Not the head's weight, which has the shape of a batch.
        is_weight = func._schema.name == "aten::_to_copy" and out.shape in ((WIDTH, WIDTH), (WIDTH,), (3,))
        if is_weight and out.dtype == torch.bfloat16:
            self.made.append(weakref.ref(out))
        return out

    @property
    def alive(self) -> int:
        return sum(made() is not None for made in self.made)


def autocast() -> Any:
    return torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("frees", [True, False])
def test_evaluation_keeps_no_casts(ranks: int, frees: bool, use_orig_params: bool) -> None:
    """Whenever a unit begins, no cast of another unit's weights is alive, and none is behind the pass, nested or not."""

    def rank(world: Collectives) -> tuple[list[int], int, int]:
        module = sharded(
            lambda: Stack(4), world, units=BLOCKS, use_orig_params=use_orig_params, free_after_forward=frees
        )
        seen: list[int] = []
        with torch.no_grad(), Casts() as casts, autocast():
            for block in module.blocks[1:]:
                block.register_forward_pre_hook(lambda *_: seen.append(casts.alive))
            module(batch(world.rank))
            with torch.autocast(torch.get_default_device().type, enabled=False):
                module(batch(world.rank))
            module(batch(world.rank))
            return seen, casts.alive, len(casts.made)

    for seen, after, made in run(ranks, rank):
        assert set(seen) == {0}
        assert len(seen) == 9
        assert after == 0
        assert made == 2 * 15  # all weights and biases, in each pass anew


@pytest.mark.parametrize("make", [Stack, Checkpointed])
def test_training_keeps_only_what_autograd_saves(make: Any, use_orig_params: bool) -> None:
    """With checkpoints no block's cast outlives its forward; without, none is left when the backward pass is over."""

    def rank(world: Collectives) -> tuple[int, int]:
        module = sharded(lambda: make(4), world, units=BLOCKS, use_orig_params=use_orig_params)
        with Casts() as casts, autocast():
            loss = module(batch(world.rank)).square().mean()
            before = casts.alive
            loss.backward()
            return before, casts.alive

    for before, after in run(2, rank):
        # Autograd saves the weights that inputs' gradients need: those of the blocks, without the biases.
        assert before == (0 if make is Checkpointed else 8)
        assert after == 0


@pytest.mark.parametrize("make", [Stack, Checkpointed, OfTwice])
@pytest.mark.parametrize("frees", [True, False])
def test_steps_inside_one_region(make: Any, frees: bool, use_orig_params: bool) -> None:
    """Steps inside one region are those with a region each, bit for bit, and those of one process with a region each."""

    def train(module: nn.Module, once: bool, ranks: range) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with autocast() if once else contextlib.nullcontext():
            for _ in range(3):
                with contextlib.nullcontext() if once else autocast():
                    outputs = [module(batch(rank, near=module)) for rank in ranks]
                torch.stack([out.float().square().mean() for out in outputs]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    def rank(world: Collectives, once: bool) -> dict[str, Tensor]:
        module = sharded(
            lambda: make(4), world, units=BLOCKS, use_orig_params=use_orig_params, free_after_forward=frees
        )
        train(module, once, range(world.rank, world.rank + 1))
        check_at_rest(module)
        return full_parameters(module)

    def alone() -> dict[str, Tensor]:
        module = seeded(lambda: make(4))
        train(module, False, range(1))
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    (together,), (apart,) = run(1, rank, True), run(1, rank, False)
    check_same(together, apart)
    check_same(apart, alone())
    for found, expected in zip(run(2, rank, True), run(2, rank, False), strict=True):
        check_same(found, expected)
