"""`ShardedGradScaler`: the ranks decide together, as torch's do."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.sharded_grad_scaler import ShardedGradScaler
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, SingleCollectives
from flatparam_comm.testing import run_processes

from .models import mlp, seeded
from .worlds import assert_same_state, on_ranks

Pair = namedtuple("Pair", "first second")

BAD_RANKS: list[dict[int, float]] = [
    {},
    {},
    {1: float("inf")},
    {0: float("nan")},
    {0: float("-inf"), 1: float("nan")},
    {},
    {},
    {},
    {0: float("inf")},
]
"""For each step, the ranks whose gradient is not finite, and what is in it."""


def scaler_of(kind: str, **more: Any) -> Any:
    """A scaler of the CPU, ours or torch's."""
    if kind == "ours":
        return ShardedGradScaler("cpu", **more)
    return Theirs("cpu", **more, process_group=torch.distributed.group.WORLD)


def decisions(ranks: Collectives, kind: str) -> list[tuple[bool, float, list[float]]]:
    """For each step, whether any rank was found to have overflowed, the scale after it, and the parameter."""
    scaler = scaler_of(kind, init_scale=4.0, growth_interval=2)
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    facts = []
    for bad in BAD_RANKS:
        optimizer.zero_grad()
        scaler.scale((parameter * (1 + ranks.rank)).sum()).backward()
        parameter.grad[0] += bad.get(ranks.rank, 0.0)
        scaler.unscale_(optimizer)
        found = any(float(flag) > 0 for flag in scaler._found_inf_per_device(optimizer).values())
        scaler.step(optimizer)
        scaler.update()
        facts.append((found, scaler.get_scale(), parameter.tolist()))
    return facts


def test_the_decisions_are_torchs_on_threads_and_processes() -> None:
    """S-122: what is found on any rank, every rank is told; scales and steps are those of torch's, step by step."""
    on_threads = on_ranks(2, decisions, "ours")
    for rank, (mine, theirs) in enumerate(run_processes(2, in_both_worlds)):
        assert mine == theirs == on_threads[rank]
        assert [found for found, _, _ in theirs] == [bool(bad) for bad in BAD_RANKS]
        assert [scale for _, scale, _ in theirs] == [4, 8, 4, 2, 1, 1, 2, 2, 1]


def in_both_worlds(ranks: Collectives) -> tuple[Any, Any]:
    """Our decisions and torch's, in one process group."""
    return decisions(ranks, "ours"), decisions(ranks, "torch's")


def test_signature() -> None:
    """S-122: the arguments and their defaults are torch's; no group means all ranks there are."""

    def arguments(kind: Any) -> list[Any]:
        return [(p.name, p.default) for p in inspect.signature(kind).parameters.values()]

    assert arguments(ShardedGradScaler) == arguments(Theirs)
    for name in ("scale", "update"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (ShardedGradScaler, Theirs))
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]


def test_it_is_a_grad_scaler() -> None:
    """Clients ask for `torch.amp.GradScaler`; without arguments it is one of the GPU, and does nothing without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = ShardedGradScaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled() == torch.cuda.is_available()


OUTPUTS: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.tensor([1.5, -2.0]),
    "a half": lambda: torch.tensor(1.5, dtype=torch.float16),
    "a bfloat": lambda: torch.tensor([1.5], dtype=torch.bfloat16),
    "a list": lambda: [torch.ones(2), torch.ones(1, dtype=torch.float16)],
    "a tuple": lambda: (torch.ones(2), [torch.ones(1)], ()),
    "a generator": lambda: (torch.full((1,), float(n)) for n in range(3)),
}


def flat(value: Any) -> Any:
    """The structure of `value` with dtypes and numbers instead of tensors, and lists instead of iterators."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value), [flat(item) for item in value]
    return [flat(item) for item in value]


@each_row("name", OUTPUTS)
def test_scaled_outputs_are_torchs(name: str) -> None:
    """S-122: tensors, lists, tuples and iterables are scaled as torch scales them, each in the dtype it had."""
    ours, theirs = (kind("cpu", init_scale=8.0).scale(OUTPUTS[name]()) for kind in (ShardedGradScaler, Theirs))
    assert flat(ours) == flat(theirs)


def test_scaled_structures() -> None:
    """Named tuples and mappings come back as what they were, with their tensors scaled."""
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    pair = scaler.scale(Pair(torch.ones(1), [torch.ones(1)]))
    assert isinstance(pair, Pair)
    assert (pair.first.item(), pair.second[0].item()) == (8.0, 8.0)
    given = OrderedDict(loss=torch.ones(1), logits=torch.ones(2))
    scaled = scaler.scale(given)
    assert isinstance(scaled, OrderedDict)
    assert {k: v.tolist() for k, v in scaled.items()} == {"loss": [8.0], "logits": [8.0, 8.0]}
    assert given["loss"].item() == 1.0, "what was given is left as it was"


@each_row("wrong", [None, 3, "loss", b"loss", [1.0], {"loss": "x"}])
def test_what_cannot_be_scaled(wrong: Any) -> None:
    """S-122: what is neither a tensor nor made of tensors is a ValueError that shows it."""
    with pytest.raises(ValueError, match="expected tensors, or a structure of tensors"):
        ShardedGradScaler("cpu").scale(wrong)


@each_row("new_scale", [2, 2.0, Fraction(2), torch.tensor(2.0), torch.tensor([2])], ids=repr)
def test_a_new_scale(new_scale: Any) -> None:
    """L-54: a scale can be set to any number, or to a tensor of one element."""
    scaler = ShardedGradScaler("cpu", process_group=SingleCollectives())
    scaler.scale(torch.ones(1))
    scaler.update(new_scale)
    assert scaler.get_scale() == 2.0
    assert scaler.scale(torch.ones(1)).tolist() == [2.0]


def test_what_is_no_new_scale() -> None:
    """L-54: anything else is a TypeError that shows it, and the scale stays."""
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    for wrong in ("high", torch.ones(2), [2.0]):
        with pytest.raises(TypeError, match=r"expected a number or a tensor of one element .* found"):
            scaler.update(wrong)
    assert scaler.get_scale() == 8.0


def one_step(
    ranks: Collectives, make: Callable[[Any], torch.optim.Optimizer], bad_rank: int | None, group: Any = None
) -> tuple[list[float], float]:
    """One parameter and the scale after a step in which `bad_rank` has an infinite gradient."""
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=group(ranks) if group else None)
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = make([parameter])
    scaler.scale(parameter.sum()).backward()
    if ranks.rank == bad_rank:
        parameter.grad[1] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    return parameter.tolist(), scaler.get_scale()


@each_row("kind", [torch.optim.SGD, torch.optim.Adam])
def test_fused_optimizers_are_told_too(kind: Any) -> None:
    """An optimizer that unscales by itself skips on every rank where one has overflowed, and steps where none has."""

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.5, fused=True)

    assert on_ranks(2, one_step, fused, 1) == [([1.0, 2.0], 2.0)] * 2
    (first, scale), second = on_ranks(2, one_step, fused, None)
    assert (first, scale) == second
    assert torch.allclose(torch.tensor(first), torch.tensor([0.5, 1.5]))
    assert scale == 4.0


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def rows_and_columns(ranks: Collectives) -> list[Any]:
    """The groups of a grid of two by two that this rank is in."""
    groups = [ranks.subgroup(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return [group for group in groups if group is not None]


@each_row("group", [None, rows_and_columns, lambda ranks: tuple(rows_and_columns(ranks))])
def test_several_groups(group: Any) -> None:
    """L-54: a shard group and a replicate group agree together; what one of four ranks finds, all four know."""
    for bad_rank in range(4):
        assert on_ranks(4, one_step, sgd, bad_rank, group) == [([1.0, 2.0], 2.0)] * 4


def test_ranks_outside_the_group_decide_for_themselves() -> None:
    """Only the ranks of the group agree."""
    found = on_ranks(4, one_step, sgd, 3, lambda ranks: rows_and_columns(ranks)[0])
    assert found == [([0.5, 1.5], 4.0)] * 2 + [([1.0, 2.0], 2.0)] * 2


def test_a_rank_without_gradients() -> None:
    """S-122: a rank that owns no part of what is optimized agrees all the same, and others' overflow counts for it."""

    def stepped(ranks: Collectives, value: float) -> tuple[bool, float]:
        scaler = ShardedGradScaler("cpu", init_scale=4.0)
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler.scale(torch.ones(1))
        if ranks.rank == 1:
            parameter.grad = torch.tensor([value])
        scaler.step(optimizer)
        scaler.update()
        return parameter.item() != 1.0, scaler.get_scale()

    assert on_ranks(2, stepped, float("inf")) == [(False, 2.0), (False, 2.0)]
    assert on_ranks(2, stepped, 4.0) == [(False, 4.0), (True, 4.0)]


def test_one_collective_for_each_step() -> None:
    """Whatever the number of parameters and dtypes, a step costs one all-reduce of one number."""

    def moved(ranks: Collectives) -> list[Any]:
        ledger = ByteLedger(keep=True)
        scaler = ShardedGradScaler("cpu", process_group=RecordingCollectives(ranks, ledger))
        parameters = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float16)]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        scaler.scale(sum(p.float().sum() for p in parameters)).backward()
        scaler.step(optimizer)
        return [(t.op, t.label, t.payload_nbytes) for t in ledger.transfers]

    assert on_ranks(2, moved) == [[("all_reduce", "found_inf", 4)]] * 2


def test_a_disabled_scaler_communicates_nothing() -> None:
    """S-122: a rank may use a disabled scaler by itself: it steps, scales by one and keeps no state."""

    def alone(ranks: Collectives) -> list[float]:
        if ranks.rank == 1:
            return []
        scaler = ShardedGradScaler("cpu", enabled=False)
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        loss = (parameter * 1).sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.update(new_scale="not looked at")
        assert scaler.state_dict() == {}
        return parameter.tolist()

    assert on_ranks(2, alone) == [[0.5], []]


def test_without_any_group() -> None:
    """Where there are no other ranks it is torch's plain scaler."""
    for bad_rank, expected in ((None, ([0.5, 1.5], 4.0)), (0, ([1.0, 2.0], 2.0))):
        assert one_step(SingleCollectives(), sgd, bad_rank) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value", [1.0, 40000.0])
def test_sparse_gradients_are_torchs(torch_world: None, dtype: torch.dtype, value: float) -> None:
    """S-122: values for one place are added before they are looked at, where fp16 may overflow, as torch does."""
    found = []
    for kind in ("ours", "torch's"):
        scaler = scaler_of(kind, init_scale=4.0)
        parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler.scale(torch.ones(1))
        parameter.grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 1]]), torch.full((2,), value, dtype=dtype), (3,), check_invariants=True
        )
        scaler.unscale_(optimizer)
        flags = [float(flag) for flag in scaler._found_inf_per_device(optimizer).values()]
        found.append((any(flags), parameter.grad.to_dense().tolist()))
    assert found[0] == found[1]
    assert found[0][0] == (dtype is torch.float16 and value == 40000.0)


LARGE = 3e38
"""In fp32 twice this is infinite."""


def trained_with(scaler: Any, model: nn.Module, loss: Callable[[int], torch.Tensor]) -> list[float]:
    """The scales after three steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


class Overflowing(nn.Module):
    """A perceptron beside one number, which `scaled` multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.number = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layers(x).square().mean() + factor * self.number


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """In the second step rank 1's gradient of `number` overflows when it is scaled."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, LARGE if (step, rank) == (1, 1) else 0.5)


def test_training_a_sharded_model(use_orig_params: bool) -> None:
    """S-122: an overflow that one rank alone sees, in its shard, is skipped by all: the model is that of one process.

    The scale is a power of two, so scaling loses no bits.
    """
    reference = seeded(Overflowing)
    expected = trained_with(
        torch.amp.GradScaler("cpu", init_scale=4.0),
        reference,
        lambda step: sum(loss_of(reference, step, rank) for rank in range(2)) / 2,
    )
    assert expected == [4.0, 2.0, 2.0]

    def sharded(ranks: Collectives) -> tuple[list[float], Any, bool]:
        model = FSDP(
            seeded(Overflowing),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )
        overflowed = []

        class Watching(ShardedGradScaler):
            def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
                grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
                overflowed.append(any(not g.isfinite().all() for g in grads if g is not None))
                super().unscale_(optimizer)

        scales = trained_with(Watching("cpu", init_scale=4.0), model, lambda step: loss_of(model, step, ranks.rank))
        return scales, model.state_dict(), overflowed[1]

    found = on_ranks(2, sharded)
    assert sorted(overflowed for _, _, overflowed in found) == [False, True], "one rank alone sees it"
    for scales, state, _ in found:
        assert scales == expected
        assert_same_state(state, reference.state_dict())
