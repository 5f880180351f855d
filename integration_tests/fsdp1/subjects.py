"""The modules that the questions of this folder are about, and what can be seen of a wrapped one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from integration_tests.fsdp1.asking import Library


class Block(nn.Module):
    """Two layers, a norm and a buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor, *, again: bool = False) -> Tensor:
        """Call it once or twice."""
        y = x + self.scale * self.norm(self.down(torch.tanh(self.up(x))))
        return self.forward(y) if again else y


class Net(nn.Module):
    """A stem, two blocks in a list, a head, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.offset = nn.Parameter(torch.randn(2))
        self.note = "a note"

    def forward(self, x: Tensor) -> Tensor:
        """The head's output."""
        y = self.stem(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y) + self.offset

    def greeting(self, name: str = "you") -> str:
        """Something that wrappers pass on."""
        return f"{self.note} to {name}"


class Normed(nn.Module):
    """A layer, a BatchNorm, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.last(self.norm(self.first(x)))


def seeded(make: Any = Net) -> Any:
    """A module with the same values at every call."""
    torch.manual_seed(1)
    return make()


def batch(seed: int = 0, size: int = 5) -> Tensor:
    """Inputs."""
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


def rank() -> int:
    """This process's, among all."""
    return torch.distributed.get_rank()


def blocks(library: Library) -> Any:
    """A policy that makes each block a unit."""
    return library.ModuleWrapPolicy({Block})


def facts(library: Library, model: nn.Module) -> dict[str, Any]:
    """What can be seen of a model with wrappers in it, without computing with it."""
    wrappers = {
        name: {
            "sharding_strategy": wrapper.sharding_strategy,
            "rank": wrapper.rank,
            "world_size": wrapper.world_size,
            "mixed_precision": wrapper.mixed_precision,
            "cpu_offload": wrapper.cpu_offload,
            "compute_device": wrapper.compute_device,
            "state": wrapper.training_state,
            "module": wrapper.module,
        }
        for name, wrapper in model.named_modules()
        if isinstance(wrapper, library.FSDP)
    }
    return {
        "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
        "parameters": [(name, p.requires_grad, str(p.dtype)) for name, p in model.named_parameters()],
        "buffers": [(name, str(b.dtype), tuple(b.shape)) for name, b in model.named_buffers()],
        "wrappers": wrappers,
    }


def full(library: Library, model: nn.Module, **arguments: Any) -> dict[str, Tensor]:
    """A copy of each full parameter and buffer."""
    with library.FSDP.summon_full_params(model, writeback=False, **arguments):
        values = [*model.named_parameters(), *model.named_buffers()]
        return {name.replace("_fsdp_wrapped_module.", ""): value.detach().clone() for name, value in values}


def trained(library: Library, model: nn.Module, steps: int = 2) -> dict[str, Any]:
    """What training comes to: losses, and then every full parameter and buffer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for step in range(steps):
        loss = model(batch(2 * step + rank())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "values": full(library, model)}


def seen_and_trained(library: Library, model: nn.Module) -> list[Any]:
    """All of it."""
    return [facts(library, model), trained(library, model), facts(library, model)]
