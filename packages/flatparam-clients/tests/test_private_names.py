"""FSDP1's private names that programs reach for."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs_fsdp
from each_row import each_row
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_clients.handle_view import HandleTrainingState, TrainingState
from flatparam_comm import Collectives, SingleCollectives, run_threads
from flatparam_runtime import EventLog, observe
from packages.flatparam.tests.worlds import on_ranks

LINEAR = ModuleWrapPolicy({nn.Linear})


class Looking(nn.Linear):
    """Notes in which state its wrapper is while it runs."""

    def forward(self, input: Tensor) -> Tensor:
        self.seen = self.wrapper.training_state
        return super().forward(input)


def test_the_state_of_a_wrapper() -> None:
    """S-073: idle between passes, in a pass within, and while parameters are summoned."""

    def rank(world: Collectives) -> None:
        module = Looking(2, 2)
        model = FSDP(module)
        object.__setattr__(module, "wrapper", model)
        assert model.training_state is TrainingState.IDLE
        model(torch.ones(1, 2)).sum().backward()
        assert module.seen is TrainingState.FORWARD_BACKWARD
        with FSDP.summon_full_params(model):
            assert model.training_state is TrainingState.SUMMON_FULL_PARAMS

    on_ranks(2, rank)


def test_an_unexpected_state_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """S-073: `_assert_state` raises ValueError with both states, and rank 0 logs it; the right one passes."""

    def rank(world: Collectives) -> None:
        model = FSDP(nn.Linear(2, 2))
        model._assert_state([TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS])
        with pytest.raises(ValueError, match=r"FORWARD_BACKWARD.*found TrainingState.IDLE"):
            model._assert_state(TrainingState.FORWARD_BACKWARD)
        with model._use_training_state(TrainingState.FORWARD_BACKWARD, HandleTrainingState.BACKWARD_PRE):
            model._assert_state(TrainingState.FORWARD_BACKWARD)
            assert model._handle_training_state is HandleTrainingState.BACKWARD_PRE
            model._unshard()
        assert model._handle_training_state is HandleTrainingState.IDLE
        model._assert_state(TrainingState.IDLE)

    with caplog.at_level(logging.ERROR):
        on_ranks(2, rank)
    assert len(caplog.records) == 1


@each_row(("depth", "ahead"), [(1, 1), (2, 2)])
def test_how_far_ahead_units_are_gathered(depth: int, ahead: int) -> None:
    """L-47: the two limits of `_exec_order_data` say how many units are gathered ahead."""

    def rank(world: Collectives) -> Any:
        model = FSDP(
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
            auto_wrap_policy=LINEAR,
            forward_prefetch=True,
        )
        model._exec_order_data._forward_prefetch_limit = depth
        model._exec_order_data._backward_prefetch_limit = depth
        assert model._exec_order_data._forward_prefetch_limit == depth
        assert model._exec_order_data._backward_prefetch_limit == depth
        log = EventLog()
        model(torch.ones(1, 2)).sum().backward()
        with observe(model, log):
            model(torch.ones(1, 2)).sum().backward()
        lines = log.lines()
        before_first_use = [line for line in lines[: lines.index("use 0")] if line.startswith("unshard")]
        backward = lines[lines.index("use 3") + 1 :]  # unit 3 is kept for its backward
        last = backward[: backward.index("reshard 3")]
        return len(before_first_use) - 1, sum(line.startswith("unshard") for line in last)

    for forward, backward in run_threads(2, rank):
        assert (forward, backward) == (ahead, ahead)


class Seen(nn.Linear):
    """A layer that notes the dtype that it computes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.add(self.weight.dtype)
        return super().forward(x.to(self.weight.dtype)).float()


SEEN: set[torch.dtype] = set()


def upcast(kind: Any, use_orig_params: bool) -> tuple[Any, ...]:
    """The dtypes of a model that is cast as accelerate casts one: computed in, of gradients, and in a state."""
    SEEN.clear()
    torch.manual_seed(0)
    model = kind(
        nn.Sequential(Seen(4, 4), Seen(4, 2)).bfloat16(),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    for wrapper in kind.fsdp_modules(model):
        wrapper._flat_param.data = wrapper._flat_param.data.to(torch.float32)
        wrapper._handle._orig_param_dtype = torch.float32
    gradients = []
    for step in range(2):
        model.zero_grad()
        model(torch.ones(2, 4) * (step + 1)).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    dtypes = {value.dtype for value in model.state_dict().values()} | {p.dtype for p in model.parameters()}
    return {*SEEN}, {each.dtype for step in gradients for each in step}, dtypes, gradients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_flat_parameter_that_is_cast(torch_world: None, use_orig_params: bool) -> None:
    """A model in bf16 whose flat parameters are given data in fp32, as accelerate does, computes in bf16, as in FSDP1.

    Its parameters, gradients and state are in fp32.
    """
    *theirs, expected = upcast(torchs_fsdp.FullyShardedDataParallel, use_orig_params)
    *ours, found = upcast(FSDP, use_orig_params)
    assert ours == theirs == [{torch.bfloat16}, {torch.float32}, {torch.float32}]
    for step, other in zip(found, expected, strict=True):
        assert sorted(each.sum().item() for each in step) == sorted(each.sum().item() for each in other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_facts_of_a_flat_parameter_are_torchs(torch_world: None, use_orig_params: bool) -> None:
    """S-101: the shapes, strides, lengths and gaps of the original parameters, under FSDP1's names."""

    def facts(model: Any) -> dict[str, Any]:
        flat_param = model._flat_param
        found = {
            name: list(getattr(flat_param, name))
            for name in ("_fqns", "_shapes", "_strides", "_contiguities", "_numels")
        }
        found |= {name: list(getattr(flat_param, name)) for name in ("_numels_with_padding", "_is_padding_mask")}
        sizes = ("_sharded_size", "_unpadded_unsharded_size")
        found |= {name: getattr(flat_param, name) for name in sizes}
        return found | {"modules": len(flat_param._modules), "params": flat_param._num_params}

    def conv() -> nn.Module:
        return nn.Conv2d(3, 3, 1).to(memory_format=torch.channels_last)

    for make in (lambda: nn.Linear(3, 2), conv):
        theirs = torchs_fsdp.FullyShardedDataParallel(
            make(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        assert facts(FSDP(make(), SingleCollectives(), use_orig_params=use_orig_params)) == facts(theirs)


def test_the_length_of_a_shard() -> None:
    """The length of the full flat parameter with and without the gap at its end, and of a rank's part."""

    def rank(world: Collectives) -> Any:
        flat_param = FSDP(nn.Linear(3, 3, bias=False))._flat_param
        assert flat_param is not None
        names = ("_sharded_size", "_unpadded_unsharded_size", "_padded_unsharded_size", "_shard_numel_padded")
        return [getattr(flat_param, name) for name in names]

    assert on_ranks(2, rank) == [[torch.Size([5]), torch.Size([9]), torch.Size([10]), gap] for gap in (0, 1)]


def test_one_flat_parameter_of_several() -> None:
    """Who takes the first flat parameter of a unit for all of its parameters is warned, and named another one."""
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inner[0].requires_grad_(False)
    model = FSDP(inner, SingleCollectives(), use_orig_params=True)
    uniform = FSDP(nn.Linear(3, 3), SingleCollectives(), use_orig_params=True)
    with pytest.warns(UserWarning, match="_flat_param is the first of 2 flat parameters of unit .* is in another"):
        flat_param = model._flat_param
    assert flat_param is model._unit.handles[0].flat_param
    with pytest.warns(UserWarning, match="_handle is the first of 2 flat parameters"):
        assert model._handle is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uniform._flat_param is not None
        assert uniform._handle is not None
