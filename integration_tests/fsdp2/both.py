"""Programs that train by `fully_shard`, run with torch's function and with both of flatparam's, on the same ranks."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import flatparam
from flatparam_clients.names import STATE_FUNCTIONS
from flatparam_clients.second_door.door import fsdp2_names
from flatparam_comm import Collectives

STEPS = 4
WIDTH = 12


class Block(nn.Module):
    """A block of a transformer without its attention: a norm, two layers, and a way around them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks and a head, as in the examples of torch's FSDP2; the head may be the embedding's."""

    def __init__(self, *, tied: bool = False, words: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(rank: int, step: int, words: int = 17) -> tuple[Tensor, Tensor]:
    """The tokens and the targets of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(words, (3, 6), generator=generator)
    return tokens, tokens.flip(1)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a rank in a step."""
    tokens, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


class Side:
    """One of the libraries: `fully_shard` and the names around it.

    "ours" is what `flatparam` has, with plain parameters; "door" what `flatparam.install()` puts in torch's places.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        module: Any = flatparam if name == "ours" else importlib.import_module("torch.distributed.fsdp")
        installed = fsdp2_names()
        self.fully_shard: Any = installed[module.__name__, "fully_shard"] if name == "door" else module.fully_shard
        self.MixedPrecisionPolicy: Any = module.MixedPrecisionPolicy
        self.CPUOffloadPolicy: Any = module.CPUOffloadPolicy
        self.register_fsdp_forward_method: Any = (
            module.register_fsdp_forward_method if name == "torch" else flatparam.register_fsdp_forward_method
        )
        states: Any = importlib.import_module("flatparam.checkpoint.state_dict" if name == "ours" else STATE_FUNCTIONS)
        if name == "door":
            known = {at[1]: value for at, value in installed.items() if at[0] == STATE_FUNCTIONS}
            states = SimpleNamespace(StateDictOptions=states.StateDictOptions, **known)
        self.states = states

    def shard(self, model: nn.Module, **arguments: Any) -> Any:
        """Shard the blocks, and then the model, as torch's examples do."""
        for layer in model.layers:  # type: ignore[union-attr]
            self.fully_shard(layer, **arguments)
        return self.fully_shard(model, **arguments)


def full(value: Any) -> Any:
    """A copy of a tensor, which may be a `DTensor`, as a full one."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The full state, from the sharded state dict."""
    return {name: full(value) for name, value in model.state_dict().items()}


def mesh(*sizes: int) -> DeviceMesh:
    """A mesh over the CPU ranks."""
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


Program = Callable[[Side], Any]


def seeded(**arguments: Any) -> Model:
    """The model with the same weights every time."""
    torch.manual_seed(0)
    return Model(**arguments)


def run_both(ranks: Collectives, programs: Sequence[Program]) -> dict[str, tuple[Any, Any, Any]]:
    """What each program returns with torch's library, with ours, and at its door, or the traceback of its error.

    One world of processes runs all of them, because torch's FSDP2 takes seconds to import.
    """
    assert dist.get_rank() == ranks.rank
    return {
        program.__name__: (
            _result(program, Side("torch", ranks.rank)),
            _result(program, Side("ours", ranks.rank)),
            _result(program, Side("door", ranks.rank)),
        )
        for program in programs
    }


def _result(program: Program, side: Side) -> Any:
    try:
        return program(side)
    except Exception:
        return Failed(traceback.format_exc())


@attrs.frozen
class Failed:
    """The result of a program that raised an error."""

    traceback: str


def trained(
    side: Side,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = STEPS,
    first: int = 0,
    clip: float | None = None,
) -> list[Tensor]:
    """The losses of some steps of training, and the norms if gradients are clipped."""
    facts = []
    for step in range(first, first + steps):
        loss = loss_of(model, side.rank, step)
        loss.backward()
        facts.append(loss.detach().clone())
        if clip is not None:
            facts.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return facts


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of torch's examples."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)
