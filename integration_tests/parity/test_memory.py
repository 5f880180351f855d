"""How much memory full parameters and unsharded gradients take: exactly what a formula says.

``F[k]`` are the bytes of unit ``k``'s full parameters, padding included, ``G[k]`` those of its unsharded gradients; unit 0
is the root. The units differ in size, so that a formula with the wrong unit in it gives another number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs
import pytest
import torch
from bench.memory import Allocator
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from flatparam import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SilentCollectives, SingleCollectives, run_threads
from flatparam_runtime import Event, observe, units_in
from integration_tests.parity import models
from integration_tests.parity.meter import Meter, held
from integration_tests.parity.schedules import Passes, accumulate, one_step
from integration_tests.parity.sharded import Setting, optimizer_of, wrap
from integration_tests.parity.zoo import Case, named, seeded, squares

HIDDEN = (3, 9, 2, 8, 5)


def uneven_chain() -> nn.Module:
    """A layer of the root, blocks of different sizes, and another layer of the root."""
    blocks = [models.Block(6, hidden) for hidden in HIDDEN]
    return nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 2))


CHAIN = Case("uneven chain", seeded(uneven_chain), squares(3, 4), tuple(str(k + 1) for k in range(len(HIDDEN))))


def full_nbytes(world_size: int, *, aligned: bool) -> list[int]:
    """``F``, worked out by hand: the parameters end to end (each at a multiple of 16 bytes), padded for the ranks."""
    units = [[24, 6, 12, 2], *([6 * hidden, hidden, hidden * 6, 6] for hidden in HIDDEN)]
    sizes = []
    for numels in units:
        end = 0
        for numel in numels:
            end = (-(-end // 4) * 4 if aligned else end) + numel
        sizes.append(-(-end // world_size) * world_size * 4)
    return sizes


def peaks(group: Collectives, setting: Setting, passes: Passes = one_step) -> dict[str, int]:
    """The most bytes held in each part of the second step."""
    model = wrap(CHAIN, setting, group)
    optimizer = optimizer_of(model, setting)
    found: dict[str, int] = {}
    for _ in range(2):
        optimizer.zero_grad()
        with Meter(model) as meter:
            for name in passes(model, functools.partial(CHAIN.loss, model, rank=group.rank)):
                found[name] = meter.flat_nbytes
                meter.reset()
        optimizer.step()
    return found


Formula = Callable[[Sequence[int], Sequence[int]], int]


def forward_one(F: Sequence[int], G: Sequence[int]) -> int:
    """The root and one unit."""
    return F[0] + max(F[1:])


def forward_two(F: Sequence[int], G: Sequence[int]) -> int:
    """The root, one unit, and the one that is gathered ahead."""
    return F[0] + max(F[k] + F[k + 1] for k in range(1, len(F) - 1))


def forward_all(F: Sequence[int], G: Sequence[int]) -> int:
    """Everything."""
    return sum(F)


def backward_two(F: Sequence[int], G: Sequence[int]) -> int:
    """The root and its gradients; the unit at work, and then its gradients in its place; and the unit before it."""
    return F[0] + G[0] + max(max(F[k], G[k]) + (F[k - 1] if k > 1 else 0) for k in range(1, len(F)))


def backward_one(F: Sequence[int], G: Sequence[int]) -> int:
    """The root and its gradients; the unit at work, and then its gradients in its place."""
    return F[0] + G[0] + max(max(F[k], G[k]) for k in range(1, len(F)))


def backward_one_early(F: Sequence[int], G: Sequence[int]) -> int:
    """As ``backward_one``, but the unit before is gathered while the gradients of the one that is done are reduced."""
    handing_over = max(G[k] + F[k - 1] for k in range(2, len(F)))
    return max(backward_one(F, G), F[0] + G[0] + handing_over)


def backward_all(F: Sequence[int], G: Sequence[int]) -> int:
    """Everything that is not done, the root's gradients, and those of the unit at work once that is done."""
    return G[0] + max(sum(F[:k]) + max(F[k], G[k]) for k in range(1, len(F)))


PEAKS: dict[tuple[str, bool, str | None], tuple[Formula, Formula]] = {
    ("FULL_SHARD", False, "BACKWARD_PRE"): (forward_one, backward_two),
    ("FULL_SHARD", False, "BACKWARD_POST"): (forward_one, backward_one_early),
    ("FULL_SHARD", False, None): (forward_one, backward_one),
    ("FULL_SHARD", True, "BACKWARD_PRE"): (forward_two, backward_two),
    ("SHARD_GRAD_OP", False, "BACKWARD_PRE"): (forward_all, backward_all),
    ("SHARD_GRAD_OP", True, None): (forward_all, backward_all),
}


@pytest.mark.parametrize(("strategy", "ahead", "order"), PEAKS)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_peak_of_a_step(strategy: str, ahead: bool, order: str | None, original: bool, ranks: int) -> None:
    """The forward and the backward pass take, at their peaks, exactly the bytes of the strategy's formula."""
    setting = Setting(strategy, original, forward_prefetch=ahead, backward_prefetch=order)
    full = full_nbytes(ranks, aligned=original)
    forward, backward = PEAKS[strategy, ahead, order]
    expected = {"forward": forward(full, full), "backward": backward(full, full)}
    assert run_threads(ranks, peaks, setting) == ranks * [expected]


def test_peak_of_accumulation() -> None:
    """no_sync holds the gradients of all units it has been through; the synchronised pass gives them back one by one."""
    F = G = full_nbytes(2, aligned=False)
    units = range(1, len(F))
    before = {k: F[k - 1] if k > 1 else 0 for k in units}
    expected = {
        "quiet forward": forward_one(F, G),
        "quiet backward": F[0] + G[0] + max(max(F[k], G[k]) + before[k] + sum(G[k + 1 :]) for k in units),
        "forward": sum(G) + forward_one(F, G),
        "backward": F[0] + max(F[k] + before[k] + sum(G[: k + 1]) for k in units),
    }
    assert run_threads(2, peaks, Setting("FULL_SHARD"), accumulate) == 2 * [expected]


def test_peak_of_accumulation_without_freeing() -> None:
    """Under SHARD_GRAD_OP the full parameters stay beside the collected gradients."""
    F = G = full_nbytes(2, aligned=False)
    found = run_threads(2, peaks, Setting("SHARD_GRAD_OP"), accumulate)
    everything = sum(F) + sum(G)
    expected = {
        "quiet forward": sum(F),
        "quiet backward": everything,
        "forward": everything,
        "backward": everything,
    }
    assert found == 2 * [expected]


def frozen_buffers(group: Collectives) -> list[tuple[bool, int]]:
    """For each flat parameter, whether it is trained, and the bytes that its gradients took at most."""
    model = wrap(named("frozen"), Setting(), group)
    handles = [handle for unit in units_in(model) for handle in unit.handles]
    most = [0] * len(handles)

    @attrs.frozen
    class Look:
        def on_event(self, event: Event) -> None:
            for number, handle in enumerate(handles):
                most[number] = max(most[number], held([handle.gradients.buffer.tensor]))

    with observe(model, Look()):
        named("frozen").loss(model, 0, group.rank).backward()
    return [(handle.flat_param.requires_grad, size) for handle, size in zip(handles, most, strict=True)]


def test_frozen_parameters_take_no_gradient_memory() -> None:
    """The gradient buffer of a frozen flat parameter is never allocated; that of every trained one is."""
    for of_rank in run_threads(2, frozen_buffers):
        assert {trained for trained, _ in of_rank} == {True, False}
        assert all((size > 0) == trained for trained, size in of_rank)


def copies_after_forward(group: Collectives, original: bool) -> tuple[list[int], list[int]]:
    """The full parameters that a forward pass leaves, and those that gradients of the pass leave, unit by unit."""
    block, mixed = ModuleWrapPolicy({models.Block}), MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        uneven_chain(),
        group,
        ShardingStrategy.NO_SHARD,
        auto_wrap_policy=block,
        mixed_precision=mixed,
        use_orig_params=original,
    )

    def left() -> list[int]:
        handles = [handle for unit in units_in(model) for handle in unit.handles]
        return [handle.full_nbytes() if handle.is_unsharded else 0 for handle in handles]

    for _ in range(2):
        loss = model(torch.ones(3, 4)).float().square().mean()
        after = left()
        loss.backward()
    return after, left()


@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated", "ignore:the world has one rank")
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_in_the_compute_dtype(original: bool, ranks: int) -> None:
    """Without shards, too, a unit's bfloat16 copy goes after its forward: only those that backward begins with stay."""
    root, *_, last = (nbytes // 2 for nbytes in full_nbytes(1, aligned=original))
    after, at_rest = run_threads(ranks, copies_after_forward, original)[0]
    assert ([*map(bool, after)], at_rest) == ([True, *[False] * (len(HIDDEN) - 1), True], [0] * (1 + len(HIDDEN)))
    assert sum(after) >= root + last


def at_rest(group: Collectives, setting: Setting) -> dict[str, int]:
    """The bytes of all that stays between two steps."""
    model = wrap(CHAIN, setting, group)
    optimizer = optimizer_of(model, setting)
    for step in range(2):
        optimizer.zero_grad()
        CHAIN.loss(model, step, group.rank).backward()
        optimizer.step()
    parameters = list(model.parameters())
    handles = [handle for unit in units_in(model) for handle in unit.handles]
    moments = [t for p in parameters for name, t in optimizer.state[p].items() if name != "step"]
    return {
        "parameters": held([p.detach() for p in parameters] + [h.flat_param.detach() for h in handles]),
        "gradients": held([p.grad for p in parameters if p.grad is not None]),
        "moments": held(moments),
        "full": held([t for h in handles for t in (h.buffer.tensor, h.gradients.buffer.tensor)]),
        "leaves' gradients": sum(leaf.grad is not None for h in handles for leaf in h.leaves),
    }


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_at_rest(strategy: str, original: bool, ranks: int) -> None:
    """Between steps each rank holds its part of the parameters, of the gradients and of AdamW's moments, and no more."""
    shard = sum(full_nbytes(ranks, aligned=original)) // ranks
    found = run_threads(ranks, at_rest, Setting(strategy, original, "adamw"))
    for of_rank in found:
        assert (of_rank["parameters"], of_rank["gradients"]) == (shard, shard)
        assert (of_rank["full"], of_rank["leaves' gradients"]) == (0, 0)
        assert of_rank["moments"] <= 2 * shard
    # The originals' moments have no padding at the end of the last shard; a flat parameter's have.
    whole = sum(full_nbytes(1, aligned=True)) if original else ranks * shard
    assert sum(of_rank["moments"] for of_rank in found) == 2 * whole


WIDTH, LAYERS = 64, 6
LAYER = WIDTH * WIDTH * 4
ACTIVATION = WIDTH * 4


def wide() -> nn.Module:
    """Layers without bias, large beside the activations of a batch of one."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


WIDE = Case("wide", seeded(wide), squares(1, WIDTH), tuple(str(k) for k in range(LAYERS)))


def live_peaks(group: Collectives, setting: Setting) -> tuple[int, int]:
    """The most bytes of all tensors made in a forward pass, and in the backward pass after it."""
    # What the transport itself takes is its own affair: here it takes nothing (and the numbers are wrong).
    model: FullyShardedDataParallel = wrap(WIDE, setting, SilentCollectives(group))
    WIDE.loss(model, 0, group.rank).backward()
    model.zero_grad()
    with Meter(model) as meter:
        loss = WIDE.loss(model, 0, group.rank)
        forward = meter.live_nbytes
        meter.reset()
        loss.backward()
    return forward, meter.live_nbytes


SECOND_LAYER = 3 + (LAYERS - 2) / 2
"""Its parameters and those of the first, its gradient, and the sharded gradients of those after it."""
FIRST_LAYER = 2 + (LAYERS - 1) / 2
"""Its gradient as autograd makes it and in its slot, and the sharded gradients of all others."""


@pytest.mark.parametrize(
    ("strategy", "order", "forward", "backward"),
    [
        ("FULL_SHARD", "BACKWARD_PRE", 1, SECOND_LAYER),
        ("FULL_SHARD", "BACKWARD_POST", 1, FIRST_LAYER),
        ("SHARD_GRAD_OP", "BACKWARD_PRE", LAYERS, LAYERS + 1),
    ],
)
def test_everything_that_is_live(strategy: str, order: str, forward: int, backward: float) -> None:
    """All tensors together take what the formula says, and activations; nothing of a layer's size else.

    The sharded gradients grow by half a layer with each layer, so that the worst moment of FULL_SHARD is at the end: at
    the second layer, beside which the first is gathered ahead, or at the first layer. SHARD_GRAD_OP begins with all layers and one gradient that autograd has made,
    and only gets smaller. The activations: per layer its input and a gradient of it, and some more at the ends.
    """
    activations = 2 * (LAYERS + 4) * ACTIVATION
    for forward_peak, backward_peak in run_threads(2, live_peaks, Setting(strategy, backward_prefetch=order)):
        assert forward * LAYER <= forward_peak <= forward * LAYER + activations
        assert backward * LAYER <= backward_peak <= backward * LAYER + activations


ROWS, BLOCKS, BLOCK_HIDDEN = 8, 4, 96


def saved_by_forward(group: Collectives, original: bool, order: str, reentrant: bool) -> list[int]:
    """The bytes that live after the forward pass, of each of two steps."""

    def checkpoint(module: nn.Module, kind: type[nn.Module]) -> None:
        implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        apply_activation_checkpointing(
            module,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
            check_fn=lambda child: isinstance(child, kind) and child is not module,
        )

    # As above: the meter would see the memory of another rank if its thread moved the bytes of both.
    silent = SilentCollectives(group)
    module = nn.Sequential(*(models.Block(WIDTH, BLOCK_HIDDEN) for _ in range(BLOCKS)))
    if order == "before wrapping":
        checkpoint(module, models.Block)
    wrapped = (FullyShardedDataParallel(block, silent, use_orig_params=original) for block in module)
    model = FullyShardedDataParallel(nn.Sequential(*wrapped), silent, use_orig_params=original)
    if order == "after wrapping":
        checkpoint(model, models.Block)
    if order == "around units":
        checkpoint(model, FullyShardedDataParallel)
    saved = []
    for _ in range(2):
        with Meter(model) as meter:
            loss = model(torch.ones(ROWS, WIDTH, requires_grad=True)).sum()
            saved.append(meter.live_now())
            loss.backward()
    return saved


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("order", ["before wrapping", "after wrapping", "around units"])
def test_checkpointing_saves_memory(order: str, original: bool, reentrant: bool) -> None:
    """Whenever blocks are checkpointed, of each only its input stays until the backward pass; bits cannot tell that.

    From the second step on, the last unit keeps its parameters for the backward pass; not if a reentrant checkpoint is
    around it, inside of which autograd does not record.
    """
    plain = run_threads(2, saved_by_forward, original, "never", reentrant)
    found = run_threads(2, saved_by_forward, original, order, reentrant)
    hidden = BLOCKS * ROWS * BLOCK_HIDDEN * 4
    block = (2 * WIDTH * BLOCK_HIDDEN + BLOCK_HIDDEN + WIDTH) * 4
    freed = block if order == "around units" and reentrant else 0
    assert found == [[first - hidden, second - hidden - freed] for first, second in plain]


def test_the_instrument_sees_a_leak() -> None:
    """The meter is not blind: it counts what a local variable keeps alive, by storage and once, and lets go with it."""
    model = nn.Linear(2, 2)
    with Meter(model) as meter:
        kept = torch.zeros(100)
        again = kept.view(10, 10) + 0
        assert meter.live_nbytes == 800
        del kept, again
        meter.reset()
        torch.zeros(10)
        assert meter.live_nbytes == 40


@pytest.mark.parametrize("original", [False, pytest.param(True, marks=pytest.mark.long)])
def test_temporaries_of_an_optimizer_step(original: bool) -> None:
    """From the second step on AdamW needs three tensors of a piece, however long a parameter is, and counts of steps."""
    model = FullyShardedDataParallel(nn.Linear(1024, 1024), SingleCollectives(), use_orig_params=original)
    optimizer = torch.optim.AdamW(model.parameters())
    piece = 2**18  # with one thread
    longest = max(parameter.numel() for parameter in model.parameters())
    counts = 4 * (-(-longest // piece))
    found = []
    for _ in range(3):
        model(torch.ones(2, 1024)).sum().backward()
        found.append(Allocator().during(optimizer.step))
        optimizer.zero_grad()
    assert found[0].peak > 3 * 4 * longest
    for memory in found[1:]:
        assert memory.at_rest == 0
        assert 3 * 4 * piece <= memory.peak <= 3 * 4 * piece + counts + 64
