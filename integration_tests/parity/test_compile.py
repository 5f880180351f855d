"""`torch.compile` of a wrapped model, and of the blocks before they are wrapped: beside torch's FSDP1, graph by graph."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

import flatparam
import flatparam.wrap
from flatparam_clients.second_door.door import fsdp2_names
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes

WIDTH, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


Report = dict[str, Any]
"""Graphs made, their runs, and the losses."""


def train(group: Collectives, library: str, what: str, **arguments: Any) -> Report:
    """Train for some steps, with the whole wrapped model compiled, each block before it was wrapped, the inner module, or none."""
    torch._dynamo.reset()
    report: Report = {"graphs": 0, "runs": 0, "losses": []}

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        report["graphs"] += 1

        def run(*values: Any) -> Any:
            report["runs"] += 1
            return graph.forward(*values)

        return run

    torch.manual_seed(0)
    model: nn.Module = Model()
    if what == "blocks":
        for block in model.blocks:
            block.compile(backend=backend)
    model = wrap(library, model, **arguments)
    called = model
    if what in ("model", "inner"):
        called = torch.compile(model if what == "model" else model.module, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + group.rank)
        loss = called(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report["losses"].append(loss.item())
    return report


def wrap(library: str, model: nn.Module, **arguments: Any) -> nn.Module:
    if library == "ours":
        policy = flatparam.wrap.ModuleWrapPolicy({Block})
        return flatparam.FullyShardedDataParallel(model, auto_wrap_policy=policy, **arguments)
    from torch.distributed import fsdp

    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **arguments,
    )


def train_all(group: Collectives) -> dict[str, Report]:
    reports = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what in ("model", "blocks", "nothing"):
            for library in ("ours", "torch"):
                reports[f"{library} {what}"] = train(group, library, what, use_orig_params=True)
            reports[f"flat {what}"] = train(group, "ours", what)
        reports["ours inner"] = train(group, "ours", "inner", use_orig_params=True)
        reports["flat inner"] = train(group, "ours", "inner")
    return reports


@functools.cache
def reports() -> list[dict[str, Report]]:
    return run_processes(2, train_all)


@pytest.mark.parametrize("what", ["model", "blocks"])
def test_as_many_graphs_as_of_fsdp1(what: str) -> None:
    """The wrapped model, and blocks that were compiled before, make as many graphs as with FSDP1, run as often."""
    for report in reports():
        ours, torchs = report[f"ours {what}"], report[f"torch {what}"]
        assert (ours["graphs"], ours["runs"]) == (torchs["graphs"], torchs["runs"])
        assert ours["graphs"] > 0


@pytest.mark.parametrize("what", ["model", "blocks", "inner"])
@pytest.mark.parametrize("exposure", ["ours", "flat"])
def test_compiled_training_is_the_same(exposure: str, what: str) -> None:
    """Compiled, with a backend that runs the graphs as they are, a model trains bit for bit as it does uncompiled."""
    for report in reports():
        assert report[f"{exposure} {what}"]["graphs"] > 0
        assert report[f"{exposure} {what}"]["losses"] == report["ours nothing"]["losses"]
        assert report["ours nothing"]["losses"] == report["torch nothing"]["losses"]


def train_by_one_function(group: Collectives, kind: str, backend: str | None) -> list[float]:
    """The losses of steps by one function: forward and backward pass, step and zeros; compiled, if there is a backend."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Model()
    if kind == "door":
        for block in model.blocks:
            fsdp2_names()["torch.distributed.fsdp", "fully_shard"](block)
        fsdp2_names()["torch.distributed.fsdp", "fully_shard"](model)
    else:
        model = wrap("ours", model, use_orig_params=kind == "ours")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if backend is not None:
        step = torch.compile(step, backend=backend)
    inputs = torch.randn(STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(group.rank))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [step(x).item() for x in inputs]


def train_by_functions(group: Collectives) -> dict[tuple[str, str | None], list[float]]:
    kinds, backends = ("ours", "flat", "door"), (None, "eager", "aot_eager")
    return {(k, b): train_by_one_function(group, k, b) for k in kinds for b in backends}


def test_a_function_of_a_whole_step() -> None:
    """A function that also has the backward pass and the optimizer's step trains as it does uncompiled.

    Dynamo of torch 2.11 changes the last bits of a step.
    """
    rounding = 0.0 if torch.__version__ >= "2.13" else 1e-6
    for found in run_processes(2, train_by_functions, timeout=300):
        for losses in found.values():
            assert losses == pytest.approx(found["ours", None], rel=rounding, abs=0.0), found


class Recomputed(nn.Module):
    """A module whose forward pass has a checkpoint around a block, and something of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.gain = block, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x * self.gain, use_reentrant=False)


def train_recomputed(group: Collectives, library: str, how: str, backend: str) -> list[Any]:
    """The losses, and the gradients of the inputs: each block was compiled, then checkpointed, and then made a unit."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = Model()
    kind = {"wrapper": CheckpointWrapper, "inside": Recomputed}[how]
    for at, block in enumerate(model.blocks):
        block.compile(backend=backend)
        model.blocks[at] = kind(block)
    if library == "in place":
        for block in model.blocks:
            flatparam.fully_shard(block)
        flatparam.fully_shard(model)
    elif library == "torch":
        from torch.distributed import fsdp

        policy = fsdp.wrap.ModuleWrapPolicy({kind})
        cpu = torch.device("cpu")
        model = fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)
    elif library != "nothing":
        policy = flatparam.wrap.ModuleWrapPolicy({kind})
        model = flatparam.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=library == "ours")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        # As many rows as columns: no shape tells that recomputed tensors come in a different order.
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), x.grad.tolist()))
    return found


def train_all_recomputed(group: Collectives, backend: str) -> dict[tuple[str, str], list[Any]]:
    cases = itertools.product(("nothing", "ours", "flat", "in place", "torch"), ("wrapper", "inside"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {(library, how): train_recomputed(group, library, how, backend) for library, how in cases}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_is_compiled_and_recomputed_inside_a_unit(backend: str) -> None:
    """A compiled block is recomputed as it ran: the compiler saves the same tensors, in the same order."""
    for found in run_processes(2, train_all_recomputed, backend):
        for (library, how), losses in found.items():
            assert losses == found["nothing", how], (library, how)


def train_outside(group: Collectives, library: str, how: str) -> list[float]:
    """The norms of the inputs' gradients: parts of a unit are compiled, and called inside of checkpoints past the unit."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(2)))
    if library == "in place":
        flatparam.fully_shard(blocks)
    elif library != "nothing":
        # The wrapper may go: its module keeps the unit.
        flatparam.FullyShardedDataParallel(blocks, use_orig_params=library == "ours")
    if how == "module":
        blocks[1].compile(backend="aot_eager")
        part: Callable[..., Any] = blocks[1]
    else:
        part = torch.compile(lambda x: blocks[1](blocks[0](x)), backend="aot_eager")
    found = []
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        y = checkpoint(part, checkpoint(part, x, use_reentrant=False), use_reentrant=False)
        y.square().mean().backward()
        found.append(x.grad.norm().item())
    return found


def train_all_outside(group: Collectives) -> dict[tuple[str, str], list[float]]:
    cases = itertools.product(("nothing", "ours", "flat", "in place"), ("module", "function"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {(library, how): train_outside(group, library, how) for library, how in cases}


def test_what_is_compiled_and_recomputed_outside_of_a_units_call() -> None:
    """The same of modules of a unit that a program calls past the unit's own call."""
    for found in run_processes(2, train_all_outside):
        for (library, how), norms in found.items():
            assert norms == found["nothing", how], (library, how)
