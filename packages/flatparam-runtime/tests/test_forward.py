"""Forward calls: a unit is gathered before and freed after, however its module is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import (
    COMPLETED,
    Collectives,
    FlatParamError,
    ForwardingCollectives,
    Pending,
    Residency,
    SingleCollectives,
    Topology,
)
from flatparam_runtime import (
    EventLog,
    Phase,
    UnitPlan,
    observe,
    shard_module,
    summon_full_params,
    unit_of,
    units_in,
)

from .models import WIDTH, Block, Branches, Countdown, Stack, batch
from .worlds import (
    check_at_rest,
    check_same,
    full_gradients,
    is_part_of_shard,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)

BLOCKS = ["blocks.0", "blocks.1"]


def test_full_parameters_are_there_exactly_during_the_call(use_orig_params: bool) -> None:
    """Inside forward a unit's parameters have their shapes and are registered; before and after they are shards."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, use_orig_params=use_orig_params)
    block = module.blocks[0]
    unit = unit_of(block)
    assert unit is not None
    inside: list[Any] = []

    def look(child: nn.Module, args: Any) -> None:
        inside.append((unit.phase, unit.residency, dict(block.named_parameters()).keys(), block.up.weight.shape))

    block.up.register_forward_pre_hook(look)
    assert is_part_of_shard(block.up.weight, unit)
    module(batch())
    phase, residency, names, shape = inside[0]
    assert (phase, residency, shape) == (Phase.FORWARD, Residency.UNSHARDED, (WIDTH, WIDTH))
    assert {"up.weight", "up.bias", "down.weight"} <= names
    assert is_part_of_shard(block.up.weight, unit)
    assert unit.phase is Phase.IDLE
    assert unit.handles[0].buffer.held_nbytes == 0


def test_the_optimizer_never_sees_full_parameters(use_orig_params: bool) -> None:
    """``parameters()`` outside of forward and backward always lists the same objects."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, use_orig_params=use_orig_params)
    before = list(module.parameters())
    for _ in range(2):
        module(batch()).sum().backward()
        assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_what_is_kept_between_forward_and_backward(free_after_forward: bool) -> None:
    """The root keeps its full parameters for the backward pass; a block does if its plan does not free them."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, free_after_forward=free_after_forward)
    output = module(batch())
    root, *blocks = units_in(module)
    assert root.residency is Residency.UNSHARDED
    kept = Residency.SHARDED if free_after_forward else Residency.UNSHARDED
    assert [block.residency for block in blocks] == [kept, kept]
    output.sum().backward()
    check_at_rest(module)


def recursion(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module), 3).square().mean()
    return out


def in_a_loop(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module), "llrlr").square().mean()
    return out


def in_two_calls(module: nn.Module, rank: int) -> Tensor:
    first = module(batch(rank, near=module), "l").square().mean()
    out: Tensor = first + module(batch(rank, 1, near=module), "rl").square().mean()
    return out


@pytest.mark.parametrize(
    ("make", "units", "loss"),
    [
        (Countdown, [], recursion),
        (Branches, ["left", "right"], in_a_loop),
        (Branches, ["left", "right"], in_two_calls),
    ],
    ids=["recursion", "loop", "two calls"],
)
def test_a_module_may_be_called_several_times(
    ranks: int, make: Any, units: list[str], loss: Any, free_after_forward: bool, device: torch.device
) -> None:
    """A module that calls itself, one called five times, a root called twice: gradients are those of a local one."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(make, collectives, units=units, free_after_forward=free_after_forward, device=device)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make, device), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_recursion_frees_once() -> None:
    """A unit that calls itself is gathered once, and freed when the outermost call ends."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Countdown()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x, 3)
            return out

    module = sharded(Outer, SingleCollectives(), units=["inner"])
    log = EventLog()
    with observe(module, log):
        module(batch())
    assert log.lines() == ["unshard inner", "use inner", "reshard inner"]


def test_keyword_and_nested_inputs_are_watched() -> None:
    """Inputs that need a gradient get theirs, wherever they are: by keyword, in a dict, in a list, in an object."""

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, more: dict[str, list[Tensor]], box: Box) -> Tensor:
            out: Tensor = self.layer(x) * self.layer(more["a"][0]) + box.tensor
            return out

    def gradients(module: nn.Module) -> list[Tensor | None]:
        inputs = [batch(i).requires_grad_() for i in range(3)]
        module(inputs[0], more={"a": [inputs[1]]}, box=Box(inputs[2])).square().sum().backward()
        return [each.grad for each in inputs]

    module = sharded(Inputs, SingleCollectives())
    found, expected = gradients(module), gradients(seeded(Inputs))
    check_at_rest(module)
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_nothing(mode: Any, ranks: int, free_after_forward: bool) -> None:
    """Without autograd every unit is freed after its forward, whatever its plan; the output is that of a local module.

    The first forward of all may be one in ``inference_mode``: training afterwards is as ever.
    """

    def loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).square().mean()
        return out

    def step(collectives: Collectives) -> tuple[Tensor, dict[str, Tensor | None]]:
        module = sharded(Stack, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        with mode():
            output = module(batch())
        check_at_rest(module)
        loss(module, collectives.rank).backward()
        with mode():
            again = module(batch())
        check_at_rest(module)
        assert torch.equal(again, output)
        return output.clone(), full_gradients(module)

    local = seeded(Stack)
    expected = mean_gradients(local, loss, ranks)
    for output, found in run(ranks, step):
        assert torch.equal(output, local(batch()))
        check_same(found, expected)


def test_evaluation_between_forward_and_backward(ranks: int, free_after_forward: bool) -> None:
    """An evaluation between a forward and its backward leaves the gradients as they would be without."""

    def loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).square().mean()
        with torch.no_grad():
            module(batch(rank, 5))
        return out

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_the_optimizers_step_is_seen_by_the_next_forward(ranks: int, free_after_forward: bool) -> None:
    """Parameters changed between two forwards are gathered anew, even if a forward had no backward."""

    def outputs(collectives: Collectives) -> tuple[Tensor, Tensor]:
        module = sharded(Stack, collectives, units=BLOCKS, free_after_forward=free_after_forward)
        # The graph of this pass is dropped.
        module(batch())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        return module(batch()).detach(), module.head.weight.detach()

    local = seeded(Stack)
    with torch.no_grad():
        for parameter in local.parameters():
            parameter.mul_(0.5)
    for output, _ in run(ranks, outputs):
        assert torch.equal(output, local(batch()))


def test_user_hooks_see_full_parameters() -> None:
    """Forward hooks of the user run while the parameters are there before, and may replace the input and the output."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    shapes = []
    module.blocks[0].register_forward_pre_hook(lambda m, args: (shapes.append(m.up.weight.shape), (args[0] * 2,))[1])
    module.blocks[0].register_forward_hook(lambda m, args, output: output + 1)
    local = seeded(Stack)
    local.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    local.blocks[0].register_forward_hook(lambda m, args, output: output + 1)
    for _ in range(2):
        zero_gradients(module)
        module(batch()).sum().backward()
        check_at_rest(module)
    assert shapes == [(WIDTH, WIDTH)] * 2
    check_same(full_gradients(module), mean_gradients(local, lambda m, _: m(batch()).sum(), 1))


def test_hooks_from_before_sharding_see_full_parameters(use_orig_params: bool) -> None:
    """Hooks that the user registered before the module was sharded run inside of ours, both before and after forward."""
    module = Block()
    shapes = []
    module.register_forward_pre_hook(lambda m, args: shapes.append(m.up.weight.shape))
    module.register_forward_hook(lambda m, args, output: shapes.append(m.up.weight.shape))
    outer = nn.Sequential(module)
    plan = UnitPlan(Topology(SingleCollectives()), use_orig_params=use_orig_params)
    shard_module(module, plan)
    shard_module(outer, plan)
    outer(batch())
    assert shapes == [(WIDTH, WIDTH)] * 2


class Nowhere(ForwardingCollectives):
    """Collectives that move no bytes, so that tensors without bytes will do."""

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        return COMPLETED

    def _decorate(self, inner: Collectives) -> Collectives:
        return self


@each_row("units", [[], ["layer"]], ids=["its own", "a nested unit's"])
def test_the_roots_inputs_go_to_its_device(units: list[str]) -> None:
    """Inputs of the outermost unit, in any nesting, come to its model's device; what is there already is not copied."""
    seen: list[Tensor] = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, more: dict[str, list[Tensor]]) -> Tensor:
            seen.extend([x, more["a"][0]])
            out: Tensor = self.layer(x)
            return out

    x, y = batch(), torch.arange(3)
    away = Looking().to("meta")
    for each in (*(away.get_submodule(name) for name in units), away):
        shard_module(each, UnitPlan(Topology(Nowhere(SingleCollectives()))))
    with torch.no_grad():
        away(x, more={"a": [y]})
    assert [tensor.device.type for tensor in seen] == ["meta", "meta"]
    seen.clear()
    sharded(Looking, SingleCollectives(), units=units)(x, more={"a": [y]})
    assert seen[0] is x
    assert seen[1] is y


def test_tracing_is_refused_by_name() -> None:
    """torch.jit.trace() of a sharded module says what to trace instead, and not that a process group is missing."""

    def trace(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, units=["blocks.0"])
        for _ in range(2):
            with (
                summon_full_params(module, writeback=False),
                pytest.raises(FlatParamError, match=r"inside torch\.jit\.trace\(\).*load model\.state_dict\(\)"),
            ):
                torch.jit.trace(module, batch(0))
            module(batch(0)).sum().backward()

    run(2, trace)
