"""Show that sums of gradients are right: one hash for every way to train, unequal work, and what exact sums cost.

    python tools/sums.py                 some hundred ways, drawn at random, and the other tables: minutes
    python tools/sums.py --ways 2000     more of them
    python tools/sums.py --no-costs      without measuring

Exit status 1: a hash differs, or a gradient.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam.optim import Muon
from flatparam.wrap import ModuleWrapPolicy
from flatparam_checkpoint import Checkpointer
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, Topology, run_threads
from flatparam_comm.testing import run_processes
from flatparam_sums import Wire

MICRO_BATCHES: Final = 8
OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Muon": lambda parameters: Muon(parameters, lr=0.01),
}
PLACES: Final[dict[str, Callable[[int, int, int], int]]] = {
    "in turn": lambda step, number, ranks: number * ranks // MICRO_BATCHES,
    "5 + 3": lambda step, number, ranks: 0 if number < 5 else ranks - 1,
    "one rank": lambda step, number, ranks: step % ranks,
    "any": lambda step, number, ranks: random.Random(f"{step} {number}").randrange(ranks),
}
"""The rank of a micro-batch, by the step, its number and the number of ranks."""


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self, width: int, inner: int) -> None:
        """Make the layers."""
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make of `x`, added to it."""
        made: Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


def build(width: int = 6, inner: int = 8, blocks: int = 2) -> nn.Sequential:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    made = [Block(width, inner) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(5, width), *made, nn.Linear(width, 3))


WRAPPINGS: Final = {
    "blocks": ModuleWrapPolicy({Block}),
    "layers": ModuleWrapPolicy({nn.Linear}),
    "one unit": None,
}
STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
WORLDS: Final = (1, 2, 3, 4, 8)
TRANSPORTS: Final = ("threads", "gloo", "shared_memory")
Way = tuple[int, str, str, bool, str, str, bool]
"""Ranks, strategy, wrapping, original parameters, transport, place of micro-batches, and whether it resumes."""


def loss(model: nn.Module, step: int, number: int) -> tuple[Tensor, int]:
    """Return the loss of a micro-batch, and its weight; losses are of very different sizes."""
    generator = torch.Generator().manual_seed(MICRO_BATCHES * step + number)
    size = int(torch.randint(1, 7, (1,), generator=generator))
    scale = 10.0 ** int(torch.randint(-3, 2, (1,), generator=generator))
    return model(torch.randn(size, 5, generator=generator) * scale).square().mean(), size


def wrapped(ranks: Collectives | None, way: Way) -> FSDP:
    """Return the model, sharded in this way."""
    size, strategy, wrapping, original, transport, _, _ = way
    where: Any = ranks if transport == "threads" else None if transport == "gloo" else transport
    if strategy == "HYBRID_SHARD" and ranks is not None:
        where = Topology.cut(ranks, [[rank, rank + 1] for rank in range(0, size, 2)])
    return FSDP(
        build(),
        where,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=WRAPPINGS[wrapping],
        use_orig_params=original,
        reduction="exact",
    )


def trained(ranks: Collectives, way: Way, optimizer: str, steps: Sequence[int], folder: str, save: bool) -> str:
    """Train for these steps, from the checkpoint in `folder` if there is one; returns the hash of everything."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = wrapped(ranks, way)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    with Checkpointer(folder, model, stepper) as checkpointer:
        checkpointer.load()
        for step in steps:
            for number in range(MICRO_BATCHES):
                if PLACES[way[5]](step, number, ranks.size) == ranks.rank:
                    with model.accumulate(weight=1 + (MICRO_BATCHES * step + number) % 5):
                        torch.autograd.backward(loss(model, step, number)[0])
            model.reduce_gradients()
            model.clip_grad_norm_(0.5)
            stepper.step()
            stepper.zero_grad()
        if save:
            checkpointer.save(steps[-1] + 1)
    state = FSDP.optim_state_dict(model, stepper)["state"]
    return digest_of(model.state_dict(), *(state[name] for name in sorted(state)))


def digest_of(*trees: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all tensors of more than one element, by name."""
    digest = hashlib.sha256()
    for values in trees:
        for name in sorted(values):
            value = values[name]
            if isinstance(value, Tensor) and value.numel() > 1:
                digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def hash_of(way: Way, optimizer: str, steps: int) -> str:
    """Return the hash of a way, which all its ranks have; one that resumes has run its first half on two ranks."""
    run: Callable[..., list[str]] = run_threads if way[4] == "threads" else run_processes
    with tempfile.TemporaryDirectory() as folder:
        begin = 0
        if way[6]:
            begin = steps // 2
            before = (2, "FULL_SHARD", "blocks", True, "threads", "in turn", False)
            run_threads(2, trained, before, optimizer, range(begin), folder, True)
        kwargs = {"timeout": 600} if way[4] == "threads" else {"timeout": 600, "pg_timeout": 300}
        found = set(run(way[0], trained, way, optimizer, range(begin, steps), folder, False, **kwargs))
    return found.pop() if len(found) == 1 else f"{len(found)} different ones"


def ways(count: int, seed: int) -> list[Way]:
    """Draw ways; each value of each axis is in many of them."""
    axes = (WORLDS, STRATEGIES, WRAPPINGS, (False, True), TRANSPORTS, PLACES, (False, True))
    possible = [
        way
        for way in itertools.product(*axes)
        if not (way[1] == "HYBRID_SHARD" and (way[0] % 2 or way[4] != "threads"))
        and not (way[4] != "threads" and way[0] > 4)
    ]
    return random.Random(seed).sample(possible, min(count, len(possible)))


def show_hashes(count: int, steps: int, seed: int) -> bool:
    """Print how many ways have each hash; returns whether there is one for each optimizer."""
    print(f"Hashes of parameters and optimizer states after {steps} steps of {MICRO_BATCHES} micro-batches:\n")
    print("| optimizer | hash | ways |\n| --- | --- | ---: |")
    is_one = True
    for optimizer in OPTIMIZERS:
        found: dict[str, list[Way]] = {}
        for way in ways(count, seed):
            # Muon is for matrices, which a flat parameter is not.
            way = (*way[:3], True, *way[4:]) if optimizer == "Muon" else way
            found.setdefault(hash_of(way, optimizer, steps), []).append(way)
        for digest, having in found.items():
            print(f"| {optimizer} | `{digest[:16]}` | {len(having)} |")
            if len(found) > 1 and len(having) < count / 2:
                print("\n".join(f"|  | | {way} |" for way in having))
        is_one = is_one and len(found) == 1
    return is_one


def spread(seed: int, size: int) -> list[list[int]]:
    """Draw which micro-batches each rank does; some do none."""
    drawn, found = random.Random(seed), [list[int]() for _ in range(size)]
    for number in drawn.sample(range(MICRO_BATCHES), drawn.randint(1, MICRO_BATCHES)):
        found[drawn.randrange(size)].append(number)
    return found


def gradients_of(ranks: Collectives, seed: int, mine: Sequence[Sequence[int]], strategy: str) -> bytes:
    """Return the bytes of all gradients after this rank's micro-batches, each weighted by its number."""
    model = wrapped(ranks, (ranks.size, strategy, "blocks", True, "threads", "any", False))
    for number in mine[ranks.rank]:
        with model.accumulate(weight=number + 1):
            torch.autograd.backward(loss(model, seed, number)[0])
    model.reduce_gradients()
    with FSDP.summon_full_params(model, with_grads=True):
        return b"".join(each.grad.numpy().tobytes() for each in model.parameters() if each.grad is not None)


def show_unequal(count: int = 30) -> bool:
    """Print how many random distributions of micro-batches have the gradients of one process, to the bit."""
    print(
        f"\n| unequal work, {count} random distributions | " + " | ".join(f"{size} ranks" for size in (2, 3, 4)) + " |"
    )
    print("| --- | ---: | ---: | ---: |")
    is_right = True
    for strategy in STRATEGIES[:3]:
        cells = []
        for size in (2, 3, 4):
            equal = 0
            for seed in range(count):
                mine = spread(seed, size)
                alone = [[number for numbers in mine for number in numbers]]
                expected = run_threads(1, gradients_of, seed, alone, "FULL_SHARD")[0]
                equal += {*run_threads(size, gradients_of, seed, mine, strategy)} == {expected}
            cells.append(f"{equal} of {count}")
            is_right = is_right and equal == count
        print(f"| {strategy}: gradients with the bits of one process | {' | '.join(cells)} |")
    return is_right


def timed(ranks: Collectives, width: int, blocks: int) -> dict[str, float]:
    """Return the seconds of a step of each library, in turn."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    policy: Any = ModuleWrapPolicy({Block})
    kinds: dict[str, Any] = {
        "default": lambda model: FSDP(model, "shared_memory", auto_wrap_policy=policy),
        "exact": lambda model: FSDP(model, "shared_memory", auto_wrap_policy=policy, reduction="exact"),
        "FSDP1, gloo": lambda model: TorchFSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu")),
    }
    models = {name: make(build(width, 4 * width, blocks)) for name, make in kinds.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    inputs, times = torch.randn(64, 5), {name: list[float]() for name in models}
    for _ in range(12):
        for name, model in models.items():
            dist.barrier()
            begin = time.perf_counter()
            model(inputs).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def sent(ranks: Collectives, wire: Any, reduction: Any, several: bool) -> int:
    """Return the bytes that a rank sends in a step for gradients."""
    ledger = ByteLedger()
    model = FSDP(build(64, 64), RecordingCollectives(ranks, ledger), reduction=reduction, wire=wire)
    for _ in range(2 if several else 1):
        with model.accumulate(weight=1):
            torch.autograd.backward(loss(model, 0, ranks.rank)[0])
    model.reduce_gradients()
    by_op = ledger.by_op()
    return sum(by_op[op].sent_nbytes for op in ("reduce_scatter", "all_to_all") if op in by_op)


def show_costs() -> None:
    """Print bytes, and the time of a step on two ranks, beside the default and FSDP1."""
    kinds: dict[str, tuple[Any, str]] = {"default": ("default", "default"), "exact": ("default", "exact")}
    kinds |= {f"wire {name}": (Wire(reduce=name), "default") for name in ("bf16", "int8", "mxfp8")}
    print(f"\n| bytes for gradients, two ranks | {' | '.join(kinds)} |\n| --- |{' ---: |' * len(kinds)}")
    for name, several in (("a micro-batch on each rank", False), ("two on each", True)):
        found = [run_threads(2, sent, *kind, several)[0] for kind in kinds.values()]
        print(f"| {name} | {' | '.join(f'{each:,} ({each / found[0]:.2f} x)' for each in found)} |")
    print("\n| a step on two ranks, shared memory | default | exact | FSDP1, gloo |\n| --- | ---: | ---: | ---: |")
    for name, width, blocks in (("small", 128, 8), ("wide", 768, 2)):
        times = run_processes(2, timed, width, blocks, timeout=600, pg_timeout=300)
        seconds = {kind: max(each[kind] for each in times) for kind in times[0]}
        row = [f"{1000 * value:.1f} ms ({value / seconds['default']:.2f} x)" for value in seconds.values()]
        print(f"| {name} | {' | '.join(row)} |")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=int, default=60, help="ways to train for each optimizer (default: 60)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-costs", action="store_true", help="do not measure")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    is_one = show_hashes(chosen.ways, chosen.steps, chosen.seed)
    is_one = show_unequal() and is_one
    if not chosen.no_costs:
        show_costs()
    return 0 if is_one else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
