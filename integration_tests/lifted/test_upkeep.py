"""What a context or a pass leaves behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType

from flatparam import FullStateDictConfig, StateDictType
from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives
from flatparam_runtime import tree_of
from flatparam_runtime.agreement import fingerprint
from integration_tests.lifted.our_half import (
    batch,
    both_exposures,
    mlp,
    on_two_ranks,
    seeded,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1

PASSES = 4
MANY = 20


def torch_l10(group: Collectives, use_orig_params: bool) -> list[str]:
    model = fsdp1(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
    with (
        pytest.raises(ZeroDivisionError),
        TorchFSDP.state_dict_type(model, TorchType.SHARDED_STATE_DICT),
    ):
        raise ZeroDivisionError
    return [wrapper._state_dict_type.name for wrapper in TorchFSDP.fsdp_modules(model)]


def torch_l11(group: Collectives, use_orig_params: bool) -> list[int]:
    """How long torch's list of the units of "this" pass is after each of some passes without a backward."""
    model = fsdp1(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
    lengths = []
    for _ in range(PASSES):
        with torch.no_grad():
            model(batch(0, group.rank))
        lengths.append(len(model._exec_order_data.handles_post_forward_order))
    return lengths


@both_exposures
def test_l10_torch_keeps_the_type_of_a_failed_context(processes: Outcomes, use_orig_params: bool) -> None:
    """L-10: an exception in torch's state_dict_type() leaves the new type set on every wrapper."""
    for types in processes.values(torch_l10, use_orig_params):
        assert set(types) == {"SHARDED_STATE_DICT"}


@both_exposures
def test_l10_a_failed_context_restores_the_type(use_orig_params: bool) -> None:
    """L-10: every wrapper has its own settings back, also where contexts were nested."""

    full = StateDictType.FULL_STATE_DICT

    def rank(group: Collectives) -> None:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        wrappers = FSDP.fsdp_modules(model)
        FSDP.set_state_dict_type(model, full, FullStateDictConfig(rank0_only=True))
        before = [FSDP.get_state_dict_type(wrapper) for wrapper in wrappers]
        with (
            pytest.raises(ZeroDivisionError),
            FSDP.state_dict_type(model, full, FullStateDictConfig(offload_to_cpu=True)),
            FSDP.state_dict_type(model[2], full, FullStateDictConfig(True, True)),
        ):
            raise ZeroDivisionError
        assert [FSDP.get_state_dict_type(wrapper) for wrapper in wrappers] == before

    on_two_ranks(rank)


@both_exposures
def test_l11_torch_grows_in_inference(processes: Outcomes, use_orig_params: bool) -> None:
    """L-11: each forward pass without a backward adds all of its units to a list of torch's that nothing empties."""
    for lengths in processes.values(torch_l11, use_orig_params):
        assert lengths == [lengths[0] * count for count in range(1, PASSES + 1)]
        assert lengths[0] > 0


@both_exposures
@pytest.mark.parametrize("recorded", [False, True], ids=["no-grad", "graph-dropped"])
def test_l11_inference_leaves_nothing(use_orig_params: bool, recorded: bool) -> None:
    """L-11: forward passes without a backward do not each add an object or a reference to what hangs on a model."""

    def rank(group: Collectives) -> list[int]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        return [references_after(model, group, passes, recorded) for passes in (5, MANY)]

    for few, many in on_two_ranks(rank):
        assert few > 0
        assert many - few < MANY


def references_after(model: nn.Module, group: Collectives, passes: int, recorded: bool) -> int:
    """How many references the objects of ours, containers and tensors hold that hang on a model, after these passes."""
    with torch.set_grad_enabled(recorded):
        for _ in range(passes):
            model(batch(0, group.rank))
    seen: dict[int, object] = {}
    references = 0
    todo: list[object] = [vars(model)]
    while todo:
        thing = todo.pop()
        of_ours = type(thing).__module__.startswith("flatparam")
        if id(thing) in seen or not (of_ours or isinstance(thing, CONTAINERS)):
            continue
        seen[id(thing)] = thing
        referents = gc.get_referents(thing)
        references += len(referents)
        todo.extend(referents)
    return references


@both_exposures
def test_l11_the_log_of_collectives_is_bounded(use_orig_params: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """L-11: what is noted for a comparison that does not come, since no backward does, is thrown away at a limit."""
    monkeypatch.setattr(fingerprint.LOG_LENGTH, "value", 16)

    def rank(group: Collectives) -> list[int]:
        model = wrapped(seeded(mlp), nn.Linear, use_orig_params=use_orig_params)
        lengths = []
        for _ in range(MANY):
            model(batch(0, group.rank))
            lengths.append(len(tree_of(model._unit).fingerprint._log))
        return lengths

    for lengths in on_two_ranks(rank):
        assert 0 < max(lengths) <= 16


CONTAINERS = (dict, list, tuple, set, torch.Tensor, nn.Module)
