"""Muon over sharded parameters beside what others do: time, bytes, memory, and whether the numbers are right.

    python tools/matrix_optimizers.py            # write the table into docs/guides/optimizers.md
    python tools/matrix_optimizers.py --print    # print it only
    python tools/matrix_optimizers.py --owners   # how even owners' work is, by numbers alone

Each contender trains the same model on two processes over gloo, on batches that are the same on both, so that the mean
of the gradients is the gradient of one process; the step alone is timed, the contenders in turn, round after round.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from layouts_page import MODELS
from pages import fill, table
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives
from flatparam_comm.testing import run_processes
from flatparam_optim.matrices.matrix_owners import Job, choose_owners, lower_bound, newton_schulz_flops

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "guides" / "optimizers.md"
PEERS = ("<!-- peers: tools/matrix_optimizers.py -->", "<!-- end of peers -->")
OWNERS = ("<!-- owners: tools/matrix_optimizers.py -->", "<!-- end of owners -->")
COLUMNS: Final = ("---", "--:")
WORLD_SIZES: Final = (2, 8, 64, 125, 256, 1024)
RANKS, BLOCKS, WIDTH, STEPS, ROUNDS = 2, 4, 128, 3, 5


class Block(nn.Module):
    """The matrices of a transformer's block, without its attention."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.mix = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        for layer in self.mix:
            x = x + torch.tanh(layer(x))
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def build() -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def matrices_of(parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the rest."""
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def plain_optimizers(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """torch's own."""
    matrices, others = matrices_of(parameters)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


@define(eq=False)
class Contender:
    """One way to train with Muon on this rank."""

    model: nn.Module
    optimizers: Sequence[Any]
    sent: Callable[[], int | None]
    """The bytes that this rank has sent; `None` if nobody counts them."""
    full: Callable[[], dict[str, Tensor]]
    step: Callable[[], None] = field()
    backward: Callable[[Tensor], object] = Tensor.backward
    state_nbytes: Callable[[], int] = field()

    @step.default
    def _step_all(self) -> Callable[[], None]:
        def step() -> None:
            for each in self.optimizers:
                each.step()

        return step

    @state_nbytes.default
    def _count(self) -> Callable[[], int]:
        return lambda: sum(
            _local(value).nbytes
            for each in self.optimizers
            for state in each.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def ours(ranks: Collectives) -> Contender:
    """flatparam, FULL_SHARD."""
    from flatparam import FullyShardedDataParallel as FSDP
    from flatparam.optim import Muon
    from flatparam.wrap import ModuleWrapPolicy

    ledger = ByteLedger()
    model = FSDP(
        build(),
        RecordingCollectives(ranks, ledger),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )
    optimizer = Muon(model.parameters(), lr=0.02, adamw_lr=0.01)
    return Contender(model, [optimizer], lambda: ledger.sent_nbytes, lambda: dict(model.state_dict()))


def fsdp2(ranks: Collectives) -> Contender:
    """torch's fully_shard, whose parameters are DTensors, with torch's optimizers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = build()
    mesh = init_device_mesh("cpu", (ranks.size,))
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = plain_optimizers(list(model.parameters()))

    def full() -> dict[str, Tensor]:
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for name, value in model.named_parameters()
        }

    # What DTensors send inside a step does not pass where it could be counted.
    return Contender(model, optimizers, lambda: None, full)


def fsdp1_gathering(ranks: Collectives) -> Contender:
    """torch's FSDP1; each rank gathers all gradients, and steps copies of all parameters with torch's optimizers."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = TorchFSDP(
        build(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    copy = build()
    optimizers = plain_optimizers(list(copy.parameters()))
    counted = [0]

    def step() -> None:
        with TorchFSDP.summon_full_params(model, writeback=True, with_grads=True):
            shards = list(model.parameters())
            for own, full in zip(copy.parameters(), shards, strict=True):
                own.data.copy_(full)
                own.grad = None if full.grad is None else full.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            for own, full in zip(copy.parameters(), shards, strict=True):
                full.data.copy_(own)
        # Parameters and gradients are gathered; each rank writes its own part back.
        counted[0] += 2 * sum(p.nbytes for p in copy.parameters()) * (RANKS - 1) // RANKS

    def full() -> dict[str, Tensor]:
        return {name: value.detach() for name, value in copy.named_parameters()}

    return Contender(model, optimizers, lambda: counted[0], full, step)


def deepspeed_zero(ranks: Collectives, stage: int) -> Contender:
    """DeepSpeed, which makes updates of whole matrices in its backward pass (stages 1, 2) or in its step (stage 3)."""
    # It would compile its functions for ten minutes, and looks for its ranks in the environment.
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.rank), LOCAL_SIZE=str(ranks.size))
    os.environ.update(WORLD_SIZE=str(ranks.size), DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo", verbose=False)
    model = build()
    settings = {"lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.0, "ns_method": "standard"}
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_batch_size": ranks.size,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Muon", "params": settings},
            # Stage 3 refuses to go on otherwise.
            "zero_optimization": {"stage": stage, "reduce_scatter": stage != 3},
        },
    )

    def full() -> dict[str, Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return {name: value.detach().clone() for name, value in model.named_parameters()}

    def state_nbytes() -> int:
        states = optimizer.optimizer.state.values()
        return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))

    return Contender(engine, [engine], lambda: None, full, engine.step, engine.backward, state_nbytes=state_nbytes)


CONTENDERS: Final[dict[str, Callable[[Collectives], Contender]]] = {
    "flatparam, `flatparam.optim.Muon`": ours,
    "FSDP2, `torch.optim.Muon` on DTensors": fsdp2,
    "FSDP1, each rank gathers everything": fsdp1_gathering,
    "DeepSpeed ZeRO 2, its Muon": functools.partial(deepspeed_zero, stage=2),
    "DeepSpeed ZeRO 3, its Muon": functools.partial(deepspeed_zero, stage=3),
}


def measure(ranks: Collectives) -> dict[str, Any]:
    """What this rank finds of each contender: seconds, bytes, state, and its full parameters."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    contenders = {}
    for name, make in CONTENDERS.items():
        try:
            contenders[name] = make(ranks)
            found[name] = {"seconds": [], "failed": ""}
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    for step in range(STEPS + ROUNDS):
        for name, contender in contenders.items():
            told = found[name]
            if told["failed"]:
                continue
            contender.model.zero_grad()
            for optimizer in contender.optimizers:
                optimizer.zero_grad()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = contender.model(x).square().mean()
            ranks.barrier()
            try:
                forth = time.perf_counter()
                contender.backward(loss)
                ranks.barrier()
                sent, begin = contender.sent(), time.perf_counter()
                contender.step()
            except Exception as error:
                told["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            ranks.barrier()
            told["seconds"].append(time.perf_counter() - begin)
            told.setdefault("with_backward", []).append(time.perf_counter() - forth)
            after = contender.sent()
            told["sent"] = None if sent is None or after is None else after - sent
            told["state"] = contender.state_nbytes()
            if step == STEPS - 1:
                told["full"] = {key: value.clone() for key, value in contender.full().items()}
    return found


def in_one_process() -> dict[str, Tensor]:
    """What torch's optimizers end with on the plain model."""
    torch.set_num_threads(1)
    model = build()
    optimizers = plain_optimizers(list(model.parameters()))
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def peers() -> str:
    """The table of all contenders, in Markdown."""
    expected = run_processes(1, _one)[0]
    ranks = run_processes(RANKS, measure, timeout=1800)
    alone = run_processes(1, measure, timeout=1800)[0]
    lines = [["", "ms a step", "ms with the backward pass", "MB sent a step", "MB of state", "largest difference"]]
    for name in CONTENDERS:
        told = [rank[name] for rank in ranks]
        if told[0]["failed"]:
            lines.append([name, f"does not run: {told[0]['failed'][:80]}", *[""] * 4])
            continue
        if name.startswith("DeepSpeed"):
            # Its iteration and its other settings are not torch's; it is to agree with itself.
            expected = alone[name]["full"]
        seconds, both = (statistics.median(told[0][key][STEPS:]) for key in ("seconds", "with_backward"))
        differences = [
            float((each["full"][key] - value).abs().max()) for each in told for key, value in expected.items()
        ]
        state = max(each["state"] for each in told) / 1e6
        counts = [each["sent"] for each in told if each["sent"] is not None]
        sent = f"{max(counts) / 1e6:.2f}" if counts else "not counted"
        times = [f"{1e3 * each:.0f}" for each in (seconds, both)]
        lines.append([name, *times, sent, f"{state:.2f}", f"{max(differences):.2g}"])
    return table(lines, COLUMNS)


def owners() -> str:
    """How even the work of Newton-Schulz is on owners, in Markdown: the busiest over the lower bound, and the mean."""
    lines = [["matrices of", *(f"{ranks:,} ranks" for ranks in WORLD_SIZES)]]
    for name in ("Llama-3-70B", "Kimi-K2"):
        # The last unit has embedding and head, which are left to AdamW.
        units = [shapes for count, shapes in MODELS[name].units[:-1] for _ in range(count)]
        cells = []
        for ranks in WORLD_SIZES:
            jobs = [job for shapes in units for job in _jobs(shapes, ranks)]
            load = [0] * ranks
            for job, owner in zip(jobs, choose_owners(jobs, ranks), strict=True):
                load[owner] += job.cost
            bound = lower_bound([job.cost for job in jobs], ranks)
            cells.append(f"{max(load) / bound:.3f} ({max(load) * ranks / sum(load):.2f})")
        lines.append([name, *cells])
    return table(lines, COLUMNS)


def _jobs(shapes: Sequence[tuple[int, ...]], ranks: int) -> Iterator[Job]:
    """The matrices of a unit whose parameters lie end to end in shards of equal length."""
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    shard = -(-ends[-1] // ranks)
    for shape, end in zip(shapes, ends, strict=True):
        start = end - math.prod(shape)
        found = range(start // shard, (end - 1) // shard + 1)
        held = [(rank, min(end, (rank + 1) * shard) - max(start, rank * shard)) for rank in found]
        if len(shape) == 2:
            yield Job(newton_schulz_flops(shape[0], shape[1], 5), held)


def _one(ranks: Collectives) -> dict[str, Tensor]:
    return in_one_process()


def main() -> int:
    """Write the table, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--print", action="store_true", help="print the table, and leave the page as it is")
    parser.add_argument("--owners", action="store_true", help="only the table of owners, which takes no training")
    asked = parser.parse_args()
    tables = {OWNERS: owners(), **({} if asked.owners else {PEERS: peers()})}
    print("\n".join(tables.values()))
    if not asked.print:
        fill(PAGE, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
