"""Full parameters on demand: every combination of what may be asked for, contexts in contexts, and forward inside."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy
from flatparam_comm import Collectives
from flatparam_core import FlatParamError
from integration_tests.lifted.our_half import (
    batch,
    both_exposures,
    full_gradients,
    full_parameters,
    mean_gradients,
    mlp,
    on_two_ranks,
    seeded,
    sgd,
    square_loss,
    train_local,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors, gradients_of, parameters_of

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")

NAMES = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")
ALL = [dict(zip(NAMES, flags, strict=True)) for flags in itertools.product([False, True], repeat=4)]

REFUSED = {
    "writeback=True and rank0_only=True": {"rank0_only": True},
    "offload_to_cpu=True and NO_SHARD": {"writeback": False, "offload_to_cpu": True, "no_shard": True},
    "with_grads=True, use_orig_params=False": {"with_grads": True},
    "offload_to_cpu=True is not supported": {
        "writeback": False,
        "with_grads": True,
        "offload_to_cpu": True,
    },
}
"""What torch does not implement: part of what it says, and what is asked for."""


def told(wishes: dict[str, bool]) -> str:
    return "+".join(name for name, wanted in wishes.items() if wanted) or "nothing"


def torch_l27(group: Collectives, use_orig_params: bool) -> list[str]:
    """What torch says to each of the combinations that it refuses; nothing where it does not."""
    messages = []
    for wishes in REFUSED.values():
        asked: dict[str, Any] = dict(wishes)
        strategy = TorchStrategy.NO_SHARD if asked.pop("no_shard", False) else TorchStrategy.FULL_SHARD
        model = fsdp1(seeded(mlp), sharding_strategy=strategy, use_orig_params=use_orig_params)
        message = ""
        try:
            with TorchFSDP.summon_full_params(model, **asked):
                pass
        except NotImplementedError as error:
            message = str(error)
        messages.append(message)
    return messages


def torch_l28_nested(group: Collectives, use_orig_params: bool) -> None:
    model = fsdp1(seeded(mlp), use_orig_params=use_orig_params)
    with TorchFSDP.summon_full_params(model), TorchFSDP.summon_full_params(model):
        pass


def torch_l28_forward(group: Collectives, use_orig_params: bool) -> tuple[Tensor, bool]:
    """The output of a forward pass inside, and whether the parameters are still full after it."""
    model = fsdp1(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
    with TorchFSDP.summon_full_params(model):
        output = model(batch(0, group.rank)).detach()
        return output, all(p.shape == q.shape for p, q in zip(model.parameters(), mlp().parameters(), strict=True))


@functools.cache
def reference_after_backward() -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """The parameters and the gradients that every test here begins with."""
    reference = seeded(mlp)
    mean_gradients(reference, lambda model, rank: square_loss(model, 0, rank).backward())
    return parameters_of(reference), gradients_of(reference)


@both_exposures
def test_l27_torch_refuses_combinations(processes: Outcomes, use_orig_params: bool) -> None:
    """L-27: each of these is a NotImplementedError in torch; gradients of originals on the device are implemented."""
    for messages in processes.values(torch_l27, use_orig_params):
        for (part, wishes), message in zip(REFUSED.items(), messages, strict=True):
            if use_orig_params and wishes == {"with_grads": True}:
                assert message == ""
            else:
                assert part in message


@both_exposures
@pytest.mark.parametrize("wishes", ALL, ids=told)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_l27_every_combination(wishes: dict[str, bool], strategy: str, use_orig_params: bool) -> None:
    """L-27: each shows full parameters where it says, with gradients where it says, and keeps changes where it says."""
    parameters, gradients = reference_after_backward()

    def rank(group: Collectives) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        model = wrapped(
            seeded(mlp),
            nn.Linear,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        square_loss(model, 0, group.rank).backward()
        with FSDP.summon_full_params(model, **wishes):
            if group.rank == 0 or not wishes["rank0_only"]:
                change(model)
        return full_parameters(model), full_gradients(model)

    def change(model: nn.Module) -> None:
        assert_same_tensors(parameters_of(model), parameters, "shown parameter")
        if wishes["with_grads"]:
            assert_same_tensors(gradients_of(model), gradients, "shown gradient")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
                if wishes["with_grads"] and p.grad is not None:
                    p.grad.mul_(4)

    kept = wishes["writeback"]
    expected = {name: p + 1 if kept else p for name, p in parameters.items()}
    factor = 4 if kept and wishes["with_grads"] else 1
    for found, found_gradients in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")
        for name, theirs in gradients.items():
            assert theirs is not None
            assert torch.equal(found_gradients[name], theirs * factor), f"gradient {name}"


@both_exposures
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("offload_to_cpu", [False, True])
def test_l27_rank0_only_shows_nothing_elsewhere(offload_to_cpu: bool, strategy: str, use_orig_params: bool) -> None:
    """L-27: with rank0_only the other ranks do not hold full parameters."""

    def rank(group: Collectives) -> bool:
        model = wrapped(seeded(mlp), sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params)
        before = [id(p) for p in model.parameters()]
        with FSDP.summon_full_params(model, rank0_only=True, offload_to_cpu=offload_to_cpu):
            inside = list(model.parameters())
        assert group.rank > 0 or [p.shape for p in inside] == [p.shape for p in mlp().parameters()]
        return [id(p) for p in inside] != before

    assert on_two_ranks(rank) == [True, False]


@both_exposures
@pytest.mark.parametrize("wishes", ALL, ids=told)
def test_l27_training_goes_on(wishes: dict[str, bool], use_orig_params: bool) -> None:
    """L-27: looking, in each way, between any two steps of training makes no difference to it."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        optimizer = sgd(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            look(model)
            square_loss(model, step, group.rank).backward()
            look(model)
            optimizer.step()
        return full_parameters(model)

    def look(model: nn.Module) -> None:
        with FSDP.summon_full_params(model, **wishes):
            pass

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l28_torch_does_not_nest(processes: Outcomes, use_orig_params: bool) -> None:
    """L-28: a context in a context is an AssertionError in torch."""
    assert processes.error(torch_l28_nested, use_orig_params).startswith("AssertionError")


def test_l28_torch_has_no_forward_inside_for_flat_parameters(processes: Outcomes) -> None:
    """L-28: with use_orig_params=False a forward pass inside breaks the context that it is in, in torch."""
    assert processes.error(torch_l28_forward, False).startswith("AssertionError")


def test_l28_torch_shows_shards_after_a_forward_inside(processes: Outcomes) -> None:
    """L-28: with use_orig_params=True torch 2.13 runs the forward pass, but then the context shows shards."""
    for rank, (found, shows_full) in enumerate(processes.values(torch_l28_forward, True)):
        assert torch.equal(found, seeded(mlp)(batch(0, rank)))
        assert not shows_full


@both_exposures
def test_l28_every_nesting(use_orig_params: bool) -> None:
    """L-28: every combination in every other one shows what it says, or is refused where the outer one shows less.

    Less: on rank 0 only, or no gradients. A refusal leaves the outer context, and the model, as they are.
    """
    parameters, gradients = reference_after_backward()

    def rank(group: Collectives) -> list[str]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        square_loss(model, 0, group.rank).backward()
        wrong = []
        for outer, inner in itertools.product(ALL, ALL):
            shows_less = outer["rank0_only"] > inner["rank0_only"] or outer["with_grads"] < inner["with_grads"]
            expectation = pytest.raises(FlatParamError) if shows_less else contextlib.nullcontext()
            with FSDP.summon_full_params(model, **outer):
                with expectation, FSDP.summon_full_params(model, **inner):
                    if is_wrong(model, group, outer, inner):
                        wrong.append(f"{told(inner)} in {told(outer)}")
                if is_wrong(model, group, outer, outer):
                    wrong.append(f"{told(outer)} after {told(inner)}")
        assert_same_tensors(full_parameters(model), parameters, "parameter")
        assert_same_tensors(full_gradients(model), gradients, "gradient")
        return wrong

    def is_wrong(model: nn.Module, group: Collectives, outer: dict[str, bool], inner: dict[str, bool]) -> bool:
        if group.rank and (outer["rank0_only"] or inner["rank0_only"]):
            return False
        shown = {name: p.detach() for name, p in model.named_parameters()}
        if set(shown) != set(parameters) or not all(torch.equal(shown[name], parameters[name]) for name in shown):
            return True
        return inner["with_grads"] and not all(
            p.grad is not None and torch.equal(p.grad, gradients[name])  # type: ignore[arg-type]
            for name, p in model.named_parameters()
        )

    assert on_two_ranks(rank) == [[], []]


@both_exposures
@pytest.mark.parametrize("recurse", [True, False])
def test_l28_contexts_of_parts(use_orig_params: bool, recurse: bool) -> None:
    """L-28: a unit inside may be summoned in the context of all, or all in that of a unit: changes add up."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        with torch.no_grad():
            with FSDP.summon_full_params(model), FSDP.summon_full_params(model[0], recurse=recurse):
                model[0].weight.add_(1)
            with FSDP.summon_full_params(model[0], recurse=recurse):
                model[0].weight.mul_(2)
                with FSDP.summon_full_params(model):
                    model[0].weight.sub_(3)
                    model[2].weight.add_(1)
        return full_parameters(model)

    expected = parameters_of(seeded(mlp))
    expected["0.weight"] = (expected["0.weight"] + 1) * 2 - 3
    expected["2.weight"] = expected["2.weight"] + 1
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l28_changes_after_an_inner_context(use_orig_params: bool) -> None:
    """L-28: what is changed in the outer context after an inner one has ended is kept, as what came before is."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        with torch.no_grad(), FSDP.summon_full_params(model):
            model[0].bias.add_(1)
            with FSDP.summon_full_params(model):
                model[0].bias.mul_(2)
            model[0].bias.sub_(3)
        return full_parameters(model)

    expected = parameters_of(seeded(mlp))
    expected["0.bias"] = (expected["0.bias"] + 1) * 2 - 3
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@each_row("depth", [1, 2])
def test_l28_training_inside(depth: int, strategy: str, use_orig_params: bool) -> None:
    """L-28: forward and backward passes inside, in one context or two, train to the bits of the unsharded model."""

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(
            seeded(mlp),
            nn.Linear,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        optimizer = sgd(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            with contextlib.ExitStack() as stack:
                for _ in range(depth):
                    stack.enter_context(FSDP.summon_full_params(model))
                square_loss(model, step, group.rank).backward()
            optimizer.step()
        return full_parameters(model)

    reference = seeded(mlp)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
@each_row("wishes", ALL, ids=told)
def test_l28_forward_inside_each_combination(wishes: dict[str, bool], use_orig_params: bool) -> None:
    """L-28: forward inside uses what was changed there; it is refused only where parameters are shown as copies.

    With rank0_only or with_grads, or offload_to_cpu on an accelerator: the error says so on every rank, and the model
    is usable afterwards.
    """
    is_offloaded = wishes["offload_to_cpu"] and torch.get_default_device().type != "cpu"

    def rank(group: Collectives) -> list[Tensor | None]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        inside = None
        refused = wishes["rank0_only"] or wishes["with_grads"] or is_offloaded
        expectation = pytest.raises(FlatParamError, match="summoned") if refused else contextlib.nullcontext()
        with FSDP.summon_full_params(model, **{**wishes, "writeback": False}):
            if not refused:
                with torch.no_grad():
                    model[0].weight.mul_(2)
            with expectation:
                inside = model(batch(0, group.rank)).detach()
        return [inside, model(batch(0, group.rank)).detach()]

    changed = seeded(mlp)
    with torch.no_grad():
        changed[0].weight.mul_(2)
    for number, (inside, after) in enumerate(on_two_ranks(rank)):
        if inside is not None:
            assert torch.equal(inside, changed(batch(0, number)))
        assert torch.equal(after, seeded(mlp)(batch(0, number)))
