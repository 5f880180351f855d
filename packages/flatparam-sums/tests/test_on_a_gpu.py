"""Exact sums on CUDA: the bits of the CPU, one hash however ranks share the work, and the weights of unequal work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads
from flatparam_runtime import Topology, UnitPlan, clip_grad_norm_, shard_module, summon_full_params
from flatparam_sums import ExactSums, accumulate, expansions, reduce_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize(
    ("numel", "dtype", "divisor"),
    [
        (1000, torch.float32, 2.0),
        (1000, torch.float32, 3.0),
        (1000, torch.bfloat16, 3.0),
        (1000, torch.float16, 8.0),
        (expansions.DEVICE_BLOCK + 5, torch.float32, 3.0),
        (expansions.DEVICE_BLOCK + 5, torch.bfloat16, 2.0),
    ],
)
def test_sums_have_the_bits_of_the_cpu(numel: int, dtype: torch.dtype, divisor: float) -> None:
    """Sums of two and of five rows, of values of any size and with infinities, are the CPU's, below a block and above."""
    generator = torch.Generator().manual_seed(numel)
    scale = torch.randint(-14, 14, (5, numel), generator=generator)
    rows = torch.ldexp(torch.randn(5, numel, generator=generator), scale).to(dtype)
    rows[3, :7] = torch.tensor([float("inf"), float("nan"), -0.0, 0.0, 6e4, -6e4, 2.0**-24])
    for count in (2, 5):
        found = []
        for device in ("cpu", "cuda"):
            output = torch.empty(numel, dtype=dtype, device=device)
            expansions.sum_exactly([*rows[:count].to(device)], [1.0] * count, divisor, output)
            found.append(output.cpu().float())
        assert torch.equal(found[0].nan_to_num(nan=1.5), found[1].nan_to_num(nan=1.5))


def test_the_sum_of_squares_is_exact() -> None:
    """`exact_sum` on a GPU is the sum of fractions."""
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() * 2.0**-60
    numbers[0], numbers[1] = 2.0**300, -(2.0**-1074)
    exact = sum(Fraction(number) for number in numbers.tolist())
    assert Fraction(expansions.exact_sum([numbers.cuda()]), 2**1074) == exact


def build() -> nn.Sequential:
    """Return a model of some layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 3))


def loss(model: nn.Module, number: int) -> Tensor:
    """Return the loss of a micro-batch; gradients are of very different sizes."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4, 64, generator=generator) * 10.0 ** (number % 4 - 2)
    return model(inputs.cuda()).square().mean()


def trained(world: Collectives, mine: Sequence[Sequence[int]], original: bool) -> tuple[str, list[float]]:
    """Train for three steps of the micro-batches that are this rank's; returns the hash and the norms."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    model, norms = build().to(device), []
    made = UnitPlan(Topology(world), sums=ExactSums(), use_orig_params=original)
    for module in (model[2], model):
        shard_module(module, made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(3):
        for number in mine[world.rank]:
            with accumulate(model, weight=1 + number % 5):
                loss(model, 10 * step + number).backward()
        reduce_gradients(model)
        norms.append(float(clip_grad_norm_(model, 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    with summon_full_params(model):
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest(), norms


@pytest.mark.parametrize("original", [False, True])
def test_one_hash(original: bool) -> None:
    """Any spread of six micro-batches over one, two and three ranks that share a GPU ends with the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        spreads = [
            [range(6)],
            [range(3), range(3, 6)],
            [range(5), [5]],
            [[5, 0], [3], [1, 2, 4]],
            [[], range(6)],
        ]
        found = [each for mine in spreads for each in run_threads(len(mine), trained, mine, original)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({str(each) for each in found}) == 1
