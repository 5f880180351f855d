"""A model of long parameters without biases, each a unit of its own, and how a rank trains it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatparam_comm import Collectives

VOCABULARY: Final = 700
WIDTH: Final = 96
HIDDEN: Final = 11008
STEPS: Final = 3


class Long(nn.Module):
    """An embedding, two projections and an output layer; nothing in it has a bias, and the root no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, added: Tensor) -> Tensor:
        """The logits of the next tokens, after `added` was added to what is embedded."""
        x = self.embedding(tokens) + added
        result: Tensor = self.output(x + self.down(torch.tanh(self.up(x))))
        return result


@attrs.frozen
class Way:
    """How it is sharded.

    Attributes:
        precision: "" for float32, or what parameters are computed in: "bfloat16" or "float16".
        differentiates_inputs: whether what is added to the embedding gets a gradient, too.
        lowers_thresholds: whether every threshold is as low as can be, and not as it is by default.
    """

    precision: str = ""
    use_orig_params: bool = False
    differentiates_inputs: bool = False
    lowers_thresholds: bool = False
    strategy: str = "FULL_SHARD"


def train(group: Collectives, way: Way) -> dict[str, Tensor]:
    """Some steps of a rank: the losses, the gradients of the inputs, and the whole parameters."""
    with _thresholds(way):
        return _train(group, way)


def _train(group: Collectives, way: Way) -> dict[str, Tensor]:
    from flatparam import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from flatparam.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    dtype = getattr(torch, way.precision) if way.precision else None
    model = FullyShardedDataParallel(
        Long(),
        group,
        ShardingStrategy[way.strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Embedding, nn.Linear}),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None,
        use_orig_params=way.use_orig_params,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
        added = torch.randn(2, 8, WIDTH, generator=generator).requires_grad_(way.differentiates_inputs)
        logits = model(tokens[:, :-1], added).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
        if added.grad is not None:
            found[f"gradient {step}"] = added.grad
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        found |= {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


@contextlib.contextmanager
def _thresholds(way: Way) -> Iterator[None]:
    from flatparam_core import all_thresholds

    least = {"runtime.step_numel": 2**12}  # else a step is hundreds of thousands of pieces
    with contextlib.ExitStack() as stack:
        for each in all_thresholds() if way.lowers_thresholds else ():
            stack.enter_context(each.set_to(max(each.least, least.get(each.name, 0))))
        yield
