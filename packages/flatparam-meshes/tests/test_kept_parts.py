"""`reshard_after_forward` is a number of ranks: what is gathered from whom, what is held, and the same bits."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatparam
from flatparam_comm import ByteLedger, Collectives, Pending, RecordingCollectives
from flatparam_comm.collectives import ContinuedPending
from flatparam_comm.testing import run_processes, run_threads
from flatparam_core import FlatLayout
from flatparam_meshes import KeptParts
from flatparam_runtime import units_in

WIDTH, DEPTH = 6, 3


def sharded(ranks: Collectives, after_forward: Any, **settings: Any) -> nn.Sequential:
    """Return the model of seed 0: each layer is a unit of 42 elements, of which each of four ranks has 11 at most."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in model:
        flatparam.fully_shard(layer, mesh=ranks, reshard_after_forward=after_forward, **settings)
    return flatparam.fully_shard(model, mesh=ranks, reshard_after_forward=after_forward, **settings)  # type: ignore[return-value]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Demand as many tensors, and equal bits."""
    assert found
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def step(model: nn.Module, rank: int, number: int) -> Tensor:
    """Compute the gradients of a step, and return its loss."""
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def trained(ranks: Collectives, after_forward: Any, **settings: Any) -> list[Tensor]:
    """Return the losses of four steps and the parameters after them; in the last two the module decides anew."""
    model = sharded(ranks, after_forward, **settings)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for number in range(4):
        if number == 2:
            model.set_reshard_after_forward(True)  # type: ignore[operator]
        found.append(step(model, ranks.rank, number))
        with torch.no_grad():
            found.append(model(torch.ones(1, WIDTH)))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layout": flatparam.layout.by({"weight": flatparam.layout.WHOLE})},
        {"layout": flatparam.layout.by({}, shares=(3, 1, 2, 1))},
        {"mp_policy": flatparam.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"offload_policy": flatparam.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["even", "wholes", "shares", "mixed", "offloaded"],
)
def test_bits(settings: Any) -> None:
    """Whoever keeps the parts, and however they are laid out and travel, losses and parameters are those of `True`."""

    def both(ranks: Collectives) -> None:
        assert_same(trained(ranks, 2, **settings), trained(ranks, True, **settings))

    run_threads(4, both)


def test_bytes() -> None:
    """A backward pass sends a part to one neighbour, where it sent a shard to three ranks; then no part is left."""

    def sent(ranks: Collectives) -> None:
        ledger = ByteLedger(keep=True)
        model = sharded(RecordingCollectives(ranks, ledger), 2)
        kept: Any = [unit.plan.gathers for unit in units_in(model) if unit.handles]
        padded = 44
        for number in range(2):
            ledger.reset()
            loss = model(torch.ones(1, WIDTH)).sum()
            forward = [each.sent_nbytes for each in ledger.transfers if each.op == "all_gather"]
            assert forward == [3 * padded // 4 * 4] * DEPTH
            assert [[*map(Tensor.numel, each._parts.values())] for each in kept] == [[padded // 2]] * DEPTH
            ledger.reset()
            loss.backward()
            backward = [each.sent_nbytes for each in ledger.transfers if each.op == "all_gather"]
            assert backward == [padded // 2 * 4] * DEPTH, number
            assert not any(each._parts for each in kept)

    run_threads(4, sent)


def test_two_backward_passes_and_passes_in_vain() -> None:
    """A second pass through a graph gathers from all ranks, and what no backward pass takes is replaced."""

    def passes(ranks: Collectives) -> None:
        gradients = []
        for after_forward in (True, 2):
            model = sharded(ranks, after_forward)
            model(torch.ones(1, WIDTH))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            loss = model(torch.ones(1, WIDTH)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert_same(*gradients)

    run_threads(4, passes)


def test_copies() -> None:
    """A deep copy keeps parts of its own, by the same group."""

    def copied(ranks: Collectives) -> None:
        model = sharded(ranks, 2)
        kept: Any = [[unit.plan.gathers for unit in units_in(each)] for each in (model, copy.deepcopy(model))]
        assert all(one is not other and one._group is other._group for one, other in zip(*kept, strict=True))
        twin = copy.deepcopy(model)
        assert_same([step(twin, ranks.rank, 0)], [step(model, ranks.rank, 0)])

    run_threads(4, copied)


def saved_and_loaded(ranks: Collectives) -> bool:
    """Whether a model that was written to a file and read again has the losses of the one that was written."""
    model, file = sharded(ranks, 2), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    is_kept = all(isinstance(unit.plan.gathers, KeptParts) for unit in units_in(again))
    return is_kept and torch.equal(step(again, ranks.rank, 0), step(model, ranks.rank, 0))


@pytest.mark.processes
def test_files() -> None:
    """A model that was read from a file goes on with its number of ranks."""
    assert run_processes(4, saved_and_loaded) == [True] * 4


class Rounded:
    """A gather of a unit's own, which rounds what it gathers to halves."""

    rounds = True

    def gather(
        self, group: Collectives, layout: FlatLayout, full: Tensor, shard: Tensor, label: str, hook: Any
    ) -> Pending:
        """Gather, and round after that."""
        gathered = group.all_gather(full, shard, label=label)
        return ContinuedPending(gathered, lambda: full.copy_((2 * full).round() / 2))


def test_gathers_of_other_kinds() -> None:
    """Parts are of what the unit's own way to gather has given, and the user's hook is called as before."""

    def gathered(ranks: Collectives) -> None:
        found: list[list[Tensor]] = []
        for kind in (True, 2):
            model, calls = sharded(ranks, True), []
            for unit in units_in(model):
                own: Any = Rounded()
                unit.change_plan(gathers=KeptParts.over(unit.topology, kind, own) if kind == 2 else own)
            found.append([step(model, ranks.rank, 0)])
            found[-1] += [p.grad.clone() for p in model.parameters() if p.grad is not None]

            def hook(shard: Tensor, full: Tensor, calls: list[int] = calls) -> None:
                calls.append(full.numel())
                ranks.all_gather(full, shard).wait()

            for unit in units_in(model):
                unit.change_plan(gathers=KeptParts.over(unit.topology, 2) if kind == 2 else None)
                unit.reducer.hooks.all_gather = hook
            found[-1].append(step(model, ranks.rank, 1))
            assert len(calls) == (DEPTH if kind == 2 else 2 * DEPTH)
        assert_same(*found)

    run_threads(4, gathered)


def test_refusals() -> None:
    """Numbers that do not divide the ranks are refused, and 1 keeps the full parameters."""

    def refused(ranks: Collectives) -> None:
        for number in (0, -2, 3, 8):
            with pytest.raises(
                ValueError, match=f"expected a divisor of the 4 ranks of the shard group, found {number}"
            ):
                flatparam.fully_shard(nn.Linear(2, 2), mesh=ranks, reshard_after_forward=number)
        for number, frees in ((1, False), (4, True)):
            model = flatparam.fully_shard(nn.Linear(2, 2), mesh=ranks, reshard_after_forward=number)
            (unit,) = units_in(model)
            assert (unit.plan.free_after_forward, unit.plan.gathers) == (frees, None)

    run_threads(4, refused)
