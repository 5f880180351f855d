"""Training with layout rules: the numbers are those of the layout that cuts anywhere, to the bit."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    layout,
)
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, gradient_divisors
from flatparam_core import FlatParamError
from flatparam_core.testing import check_invariants

from .models import Block, Transformer, seeded
from .worlds import node_groups, on_ranks

#: A layout of each kind, and one that mixes them.
LAYOUTS: dict[str, Any] = {
    "blocks": layout.by({}, otherwise=layout.blocks(3)),
    "rows": layout.by({}, otherwise=layout.row),
    "whole": layout.by({}, otherwise=layout.whole),
    "chunks": layout.by({}, otherwise=layout.chunk),
    "mixed": layout.by({nn.Embedding: layout.row, "*.mlp.*": layout.whole, "*.bias": layout.blocks(2)}),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
}

pytestmark = pytest.mark.filterwarnings("ignore:the world has one rank")


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def wrapped(world: Collectives, **arguments: Any) -> FullyShardedDataParallel:
    """The sharded model: a unit for each block, and one for the rest, which shares a weight inside."""
    where = {} if "process_group" in arguments else {"process_group": world}
    return FullyShardedDataParallel(
        seeded(Transformer), auto_wrap_policy=ModuleWrapPolicy({Block}), **where, **arguments
    )


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, *, accumulate: int = 1, count: int = 3
) -> None:
    """Train some steps, each on the gradients of `accumulate` batches."""
    for step in range(count):
        optimizer.zero_grad()
        for part in range(accumulate):
            with model.no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                model(tokens(rank, 10 * step + part)).square().mean().backward()
        optimizer.step()


def padding_is_zero(model: nn.Module) -> None:
    """Assert that the shard, its gradient, and all that handles promise are right."""
    for module in model.modules():
        for flat in module.params if isinstance(module, FullyShardedDataParallel) else ():
            handle = flat._held_by()
            check_invariants(handle)
            own = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
            for fragment in flat.flat_layout.fragments(flat.rank):
                own[fragment.in_shard.as_slice()] = True
            for tensor in (flat.detach(), flat.grad):
                assert tensor is None or not tensor[~own].any()


def trained(world: Collectives, make: Callable[..., Any], accumulate: int = 1, **arguments: Any) -> Any:
    """The full parameters after training, and the elements of each rank's part of the model."""
    model = wrapped(world, **arguments)
    steps(model, make(model.parameters()), world.rank, accumulate=accumulate)
    padding_is_zero(model)
    return dict(model.state_dict())


def equal(found: Any, expected: Any) -> bool:
    return all(
        list(mine) == list(other) and all(torch.equal(mine[name], other[name]) for name in other)
        for mine, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_layout_trains_the_same_bits(kind: str, ranks: int, use_orig_params: bool, optimizer: str) -> None:
    """Element-wise optimizers end at the same full parameters, bit for bit, and padding stays zero."""
    make = OPTIMIZERS[optimizer]
    plain, ruled = (
        on_ranks(
            ranks,
            lambda world, rules=rules: trained(world, make, use_orig_params=use_orig_params, layout=rules),
        )
        for rules in (None, LAYOUTS[kind])
    )
    assert equal(ruled, plain)


VARIATIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulate": 4},
    "mixed precision": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "low precision": {"mixed_precision": MixedPrecision(torch.bfloat16)},
    "offload": {"cpu_offload": CPUOffload(True)},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "forward prefetch": {"forward_prefetch": True},
}


@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("kind", ["rows", "mixed"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_setting_trains_the_same_bits(variation: str, kind: str, use_orig_params: bool) -> None:
    """Accumulation, dtypes, offload and strategies do with rules what they do without."""
    settings = {"use_orig_params": use_orig_params, **VARIATIONS[variation]}
    make = OPTIMIZERS["AdamW"]
    plain, ruled = (
        on_ranks(2, lambda world, rules=rules: trained(world, make, layout=rules, **settings))
        for rules in (None, LAYOUTS[kind])
    )
    assert equal(ruled, plain)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_hybrid_sharding_trains_the_same_bits(kind: str) -> None:
    """Rules hold inside each group of ranks, and the groups stay copies."""

    def rank(world: Collectives, rules: Any) -> Any:
        return trained(
            world,
            OPTIMIZERS["AdamW"],
            process_group=node_groups(world),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            layout=rules,
        )

    assert equal(on_ranks(4, rank, LAYOUTS[kind]), on_ranks(4, rank, None))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_padding_counts_nothing_in_a_norm(kind: str, use_orig_params: bool, norm_type: float) -> None:
    """The norm that clipping finds is that of the unsharded gradients, and so is what it leaves."""

    def rank(world: Collectives, rules: Any) -> Any:
        model = wrapped(world, layout=rules, use_orig_params=use_orig_params)
        model(tokens(0, 0)).square().mean().backward()
        norm = model.clip_grad_norm_(0.01, norm_type)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return norm, {name: p.grad.clone() for name, p in model.named_parameters() if use_orig_params}

    plain = seeded(Transformer)
    plain(tokens(0, 0)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    for found, gradients in on_ranks(3, rank, LAYOUTS[kind]):
        torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
        for (name, gradient), (own, p) in zip(gradients.items(), plain.named_parameters(), strict=False):
            assert name == own
            torch.testing.assert_close(gradient, p.grad, rtol=2e-6, atol=1e-9)


class Heads(nn.Module):
    """Heads on one trunk, each with an output, and so with a loss, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.relu(self.trunk(x))
        return [head(x) for head in self.heads]


@each_row("keeps", [False, True])
@each_row("kind", [None, *LAYOUTS])
def test_several_backward_passes_after_one_forward(kind: str | None, keeps: bool) -> None:
    """Each loss in a pass of its own, in any order, trains as in one process, if units were gathered in vain or not."""

    def train(model: nn.Module, order: tuple[int, ...]) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            outputs = model(torch.ones(2, 4) + step)
            for number, head in enumerate(order):
                outputs[head].square().sum().backward(retain_graph=number < len(order) - 1)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    def rank(world: Collectives) -> None:
        for order in itertools.permutations(range(3)):
            model = seeded(Heads)
            for unit in (*model.heads, model):
                fully_shard(unit, layout=None if kind is None else LAYOUTS[kind], reshard_after_forward=not keeps)
            expected = train(seeded(Heads), order)
            for name, value in train(model, order).items():
                told = functools.partial("{} {}: {}".format, order, name)
                torch.testing.assert_close(value, expected[name], msg=told)

    on_ranks(2, rank)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_fully_shard_takes_a_layout(kind: str) -> None:
    """`fully_shard(module, layout=...)` shards by rules as the wrapper does, and trains the same bits."""

    def rank(world: Collectives, rules: Any) -> Any:
        model = seeded(Transformer)
        for block in model.blocks:
            fully_shard(block, mesh=world, layout=rules)
        fully_shard(model, mesh=world, layout=rules)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(tokens(world.rank, step)).square().mean().backward()
            optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert equal(on_ranks(3, rank, LAYOUTS[kind]), on_ranks(3, rank, None))


@each_row("use_orig_params", [False, True])
def test_values_given_from_outside_reach_the_shards(use_orig_params: bool) -> None:
    """A summoned parameter that is written, and its gradient, keep their values in the shards."""

    def rank(world: Collectives) -> None:
        model = wrapped(world, layout=LAYOUTS["mixed"], use_orig_params=use_orig_params)
        model(tokens(0, 0)).square().mean().backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=use_orig_params):
            for number, parameter in enumerate(model.parameters()):
                with torch.no_grad():
                    parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 1000 * number)
                if use_orig_params:
                    parameter.grad.copy_(parameter.detach())
        if use_orig_params:
            for parameter in model.parameters():
                assert not parameter.numel() or torch.equal(parameter, parameter.grad)
        padding_is_zero(model)
        with FullyShardedDataParallel.summon_full_params(model):
            for number, parameter in enumerate(model.parameters()):
                wanted = torch.arange(parameter.numel()).view_as(parameter) + 1000.0 * number
                assert torch.equal(parameter, wanted)

    on_ranks(3, rank)


def test_whole_and_row_rules_keep_shapes() -> None:
    """Whole parameters have their own shape on one rank, rows their own width, and other parts are empty."""

    def rank(world: Collectives) -> Any:
        rules = layout.by({"0.*": layout.whole, "1.*": layout.row})
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)), world, use_orig_params=True, layout=rules
        )
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    found = on_ranks(2, rank)
    assert sorted(each["_fsdp_wrapped_module.0.weight"] for each in found) == [(0, 4), (6, 4)]
    rows = [each["_fsdp_wrapped_module.1.weight"] for each in found]
    assert sum(height for height, _ in rows) == 5
    assert {width for _, width in rows} == {6}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_muon_is_exact_on_whole_matrices(ranks: int, accumulate: int) -> None:
    """`torch.optim.Muon` steps to the bits of one process, its momentum in shape, and Newton-Schulz once a matrix."""
    shapes = [(7, 13), (13, 11), (11, 5)]

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(*shape, bias=False) for shape in shapes]
        return nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in layers)))

    def train(model: nn.Module, copies: int = 1) -> torch.optim.Optimizer:
        """Train on the mean of so many equal gradients, as that many ranks compute it."""
        before, after = gradient_divisors(copies)
        optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(accumulate):
                last = part == accumulate - 1 or copies > 1
                with contextlib.nullcontext() if last else model.no_sync():
                    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + part))
                    model(x).square().mean().backward()
            for parameter in model.parameters() if copies > 1 else ():
                parts = [parameter.grad / before for _ in range(copies)]
                parameter.grad = functools.reduce(torch.add, parts) / after
            optimizer.step()
        return optimizer

    def rank(world: Collectives) -> Any:
        rules = layout.for_optimizer(torch.optim.Muon)
        model = FullyShardedDataParallel(
            build(),
            world,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            layout=rules,
        )
        optimizer = train(model)
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        return dict(model.state_dict()), state, sum(map(bool, optimizer.state.values()))

    plain = build()
    optimizer = train(plain, copies=ranks)
    found = on_ranks(ranks, rank)
    assert sum(stepped for _, _, stepped in found) == len(shapes)
    for values, state, _ in found:
        for name, parameter in plain.named_parameters():
            momentum = optimizer.state[parameter]["momentum_buffer"]
            assert state[name]["momentum_buffer"].shape == momentum.shape
            assert torch.equal(values[name], parameter)
            assert torch.equal(state[name]["momentum_buffer"], momentum)


@each_row("ranks", [2, 4])
def test_adafactor_is_exact_on_whole_parameters(ranks: int) -> None:
    """`torch.optim.Adafactor`, which looks at the rows and the norm of each parameter, steps to the bits of one process."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))

    def train(model: nn.Module) -> nn.Module:
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
        return model

    def rank(world: Collectives) -> Any:
        rules = layout.for_optimizer(torch.optim.Adafactor)
        return dict(train(FullyShardedDataParallel(build(), world, use_orig_params=True, layout=rules)).state_dict())

    expected = dict(train(build()).state_dict())
    assert equal(on_ranks(ranks, rank), [expected] * ranks)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("rules", [layout.row, layout.blocks(4)])
def test_muon_is_refused_where_a_matrix_may_be_cut(rules: Any) -> None:
    """Rows and blocks are not matrices: every rank refuses the step, also one that has nothing to step."""

    def rank(world: Collectives) -> None:
        model = FullyShardedDataParallel(
            nn.Linear(4, 4, bias=False), world, use_orig_params=True, layout=layout.by({}, otherwise=rules)
        )
        optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(FlatParamError, match="Muon looks at the shapes"):
            optimizer.step()

    on_ranks(2, rank)
