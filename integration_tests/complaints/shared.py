"""What the programs share: small models, the data of each rank, training, and one process beside it."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

RANKS, WORDS, WIDTH = 2, 11, 8
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, dtype: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.down = nn.Linear(3 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(self.norm(x).to(self.up.weight.dtype)).relu()
        return x + self.down(inside).to(x.dtype)


class Model(nn.Module):
    def __init__(self, tied: bool = False, dtype: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def seeded(kind: Callable[..., nn.Module] = Model, **arguments: Any) -> Any:
    """Make a model, with the same weights every time."""
    torch.manual_seed(0)
    return kind(**arguments)


def tokens(rank: int, step: int = 0) -> Tensor:
    """The batch of a rank."""
    return torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    """The loss of a rank."""
    batch = tokens(rank, step)
    return cross_entropy(model(batch).flatten(0, 1).float(), batch.flip(1).flatten())


def shard(fsdp: Any, model: Any, **named: Any) -> Any:
    """Shard the blocks, and then the model."""
    for layer in model.layers:
        fsdp.fully_shard(layer, **named)
    return fsdp.fully_shard(model, **named)


def wrap(fsdp: Any, model: Any, **named: Any) -> Any:
    """Wrap the blocks, and then the model, in FSDP1's class."""
    named.setdefault("device_id", CPU)
    model.layers = nn.ModuleList(fsdp.FullyShardedDataParallel(each, **named) for each in model.layers)
    return fsdp.FullyShardedDataParallel(model, **named)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def backward(model: nn.Module, ranks: Sequence[int], step: int = 0, loss: Any = loss_of) -> None:
    """Run the backward pass of the mean of these ranks' losses: of its own one, or of all."""
    (sum(loss(model, rank, step) for rank in ranks) / len(ranks)).backward()


def train(
    model: nn.Module,
    ranks: Sequence[int],
    loss: Any = loss_of,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 2,
) -> None:
    """Train on the mean of the losses of these ranks."""
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        backward(model, ranks, step, loss)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full state, from the state dict of any library."""
    found = {}
    for name, each in model.state_dict().items():
        full = each.full_tensor() if hasattr(each, "full_tensor") else each
        found[name] = full.detach().double()
    return found


@attrs.frozen
class Off:
    """By how much the training differs from that of one process, as a part of what training has changed."""

    by: float
    most: float = 1e-4


def off(found: Any, expected: Any, start: Any, most: float = 1e-4) -> Off:
    """Compare models, or states: the worst parameter counts."""
    states = (each if isinstance(each, Mapping) else whole(each) for each in (found, expected, start))
    found, expected, start = states
    parts = []
    for name, each in expected.items():
        parts.append((found[name] - each).norm() / ((each - start[name]).norm() or 1))
    return Off(max(part.item() for part in parts), most)


@attrs.frozen
class Leak:
    """The bytes of the host's memory that each step keeps."""

    nbytes: int


class _Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "inuse",
            "free",
            "top",
        ]
    ]


def held() -> int:
    """The bytes that C, C++ and Python hold now."""
    gc.collect()
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Heap
    heap = function()
    return heap.inuse + heap.hblkhd + 48 * sys.getallocatedblocks()


@functools.cache
def _settle() -> None:
    """Fill torch's recorder of the last 2,000 collectives, and have only new objects collected."""
    for _ in range(2000):
        dist.all_reduce(torch.ones(1))
    gc.collect()
    gc.freeze()


def leak(step: Callable[[int], Any], warm: int = 8, steps: int = 12) -> Leak:
    """How much each step keeps for good: in each of three windows, once all is warm."""
    _settle()
    for number in range(warm):
        step(number)
    windows = []
    for window in range(3):
        before = held()
        for number in range(steps):
            step(warm + steps * window + number)
        windows.append((held() - before) // steps)
    return Leak(max(0, min(windows)))


@attrs.frozen
class Work:
    """How many times the calls of Python that plain tensors take."""

    times: float


def calls(function: Callable[[], Any]) -> int:
    """The calls of Python, and from Python, in one call of a function, once it is warm."""
    count = 0

    def saw(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(3):
        function()
    sys.setprofile(saw)
    function()
    sys.setprofile(None)
    return count
