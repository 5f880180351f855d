"""Whether a device trains to the same losses: those of FSDP1, and those of one model on the mean over the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from bench.contenders import Contender, ours
from bench.training import Setting, Training
from bench.workloads import Workload
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatparam

from .contenders import REFERENCE, with_kept
from .emulated import RANKS
from .facts import Facts
from .measurement import Measurement
from .place import THREADS, Place, Plan, in_emulation, in_processes, in_threads, told
from .sizes import EXACT, TINY

STEPS: Final = 3
RATE: Final = 1e-3
RATE_IN_BF16: Final = 1e-2
"""Steps so large that losses change in bf16."""
ON_THE_MEAN: Final = "plain model on the mean"
OURS: Final = "flatparam"
"""How the names of those begin whose losses have to be the reference's."""

Losses = dict[str, list[float] | str]
"""Of each contender the losses, or why there are none."""


def measure(place: Place, bf16: bool) -> Losses:
    """The losses of this rank's batch, of everybody who shards."""
    return _losses_of(place, with_kept(place.group.size), bf16=bf16)


def measure_emulated(place: Place, bf16: bool) -> Losses:
    """The same over emulated ranks, of those who lay parameters out alike, as all have the same shard."""
    chosen = with_kept(RANKS)
    alike = (OURS, f"{OURS}, SHARD_GRAD_OP", REFERENCE, f"{REFERENCE}, SHARD_GRAD_OP")
    return _losses_of(place, {name: chosen[name] for name in alike}, bf16=bf16)


def measure_threads(place: Place) -> Losses:
    """The same for flatparam in a world of threads, and for a plain model that is trained as they are together."""
    kept = flatparam.ShardingStrategy.SHARD_GRAD_OP
    chosen = {
        OURS: Contender(ours),
        f"{OURS}, original": Contender(partial(ours, use_orig_params=True)),
        f"{OURS}, SHARD_GRAD_OP": Contender(partial(ours, sharding_strategy=kept)),
    }
    found = _losses_of(place, chosen)
    with _exactly():
        found[ON_THE_MEAN] = _on_the_mean(place.setting(_workload(place.plan)))
    return found


def compared(of_ranks: Sequence[Mapping[str, list[float] | str]], reference: str) -> dict[str, Any]:
    """A row for each contender: rank 0's losses, whether those of all ranks are the reference's, and how far off.

    `same` is whether nobody of ours has failed or has other losses.
    """
    rows = {
        name: _row([rank[name] for rank in of_ranks], [rank[reference] for rank in of_ranks]) for name in of_ranks[0]
    }
    same = all(row.get("equal", False) for name, row in rows.items() if name.startswith(OURS))
    first, *_, last = rows[reference].get("losses", [0.0, 0.0])
    same = same and first != last  # who does not train has the losses of anybody else who does not
    return {"reference": reference, "rows": rows, "same": same}


def _row(found: Sequence[list[float] | str], expected: Sequence[list[float] | str]) -> dict[str, Any]:
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        return {"error": errors[0]}
    ours = [loss for losses in found if not isinstance(losses, str) for loss in losses]
    theirs = [loss for losses in expected if not isinstance(losses, str) for loss in losses]
    is_known = len(ours) == len(theirs)
    return {
        "losses": found[0],
        "equal": ours == theirs,
        "difference": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) if is_known else None,
    }


def _losses_of(place: Place, contenders: Mapping[str, Contender], *, bf16: bool = False) -> Losses:
    found: Losses = {}
    for name, contender in contenders.items():
        with _exactly():
            try:
                training = contender.build(place.setting(_workload(place.plan), bf16=bf16))
                _set_optimizer(training, RATE_IN_BF16 if bf16 else RATE)
                found[name] = [training.step() for _ in range(STEPS)]
            except Exception as error:
                found[name] = told(error)
    return found


def _on_the_mean(setting: Setting) -> list[float]:
    """The losses of this rank's batch; the gradients of each batch are added up before they are added to others."""
    training = Training(setting.model(), torch.optim.SGD([torch.zeros(1)]), setting.batch())
    _set_optimizer(training)
    batches = [tuple(t.to(setting.device) for t in setting.workload.batch_of(rank)) for rank in range(THREADS)]
    found = []
    for _ in range(STEPS):
        losses = [training.model(*batch) for batch in batches]
        for loss in losses:
            (loss / THREADS).backward()
        found.append(losses[setting.group.rank].item())
        training.update()
    return found


def _set_optimizer(training: Training, rate: float = RATE) -> None:
    """The same arithmetic for all: torch steps several parameters at once, in other steps, if it knows their class."""
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=rate, foreach=False)


@contextmanager
def _exactly() -> Iterator[None]:
    """Inside, kernels add in the same order each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS reads when it is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _workload(plan: Plan) -> Workload:
    return (TINY if plan.tiny else EXACT).workload


def _processes(plan: Plan, facts: Facts, limit: float, *, bf16: bool = False) -> dict[str, Any]:
    return compared(in_processes(plan, limit, measure, bf16), REFERENCE)


def _emulated(plan: Plan, facts: Facts, limit: float, *, bf16: bool) -> dict[str, Any]:
    return compared([in_emulation(plan, limit, measure_emulated, bf16)], REFERENCE)


def _threads(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    return compared(in_threads(plan, limit, measure_threads), ON_THE_MEAN)


_OF_EIGHT: Final = (
    "over eight emulated ranks. As each rank is taken to have the shard and the batch of the first, they are no "
    "model's, but those of flatparam have to be FSDP1's, bit for bit."
)

MEASUREMENTS: Final = (
    Measurement(
        "losses, eight ranks, fp32",
        f"Three steps in fp32 {_OF_EIGHT}",
        10,
        40,
        partial(_emulated, bf16=False),
        decides=True,
    ),
    Measurement(
        "losses, eight ranks, bf16",
        f"Three steps, computing in bf16, {_OF_EIGHT}",
        10,
        40,
        partial(_emulated, bf16=True),
        decides=True,
    ),
    Measurement(
        "losses",
        "The losses of three steps of a GPT in fp32, with kernels that add in the same order each time, all over the "
        "same process group. Those of flatparam have to be FSDP1's, bit for bit; the run fails where they are not.",
        20,
        60,
        _processes,
        decides=True,
    ),
    Measurement(
        "losses, bf16",
        "The same, computing and reducing in bf16.",
        15,
        60,
        partial(_processes, bf16=True),
        decides=True,
    ),
    Measurement(
        "losses, threads",
        "The same with two ranks that are threads and share the first device. Their losses have to be those of a model "
        "that is not sharded and is trained on the mean of both ranks' losses.",
        10,
        40,
        _threads,
        decides=True,
    ),
)
