"""Copies of wrapped models, compressing hooks on the CPU, and scales that are whole numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from each_row import each_row
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.optim.swa_utils import AveragedModel

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.algorithms._comm_hooks import default_hooks
from flatparam.sharded_grad_scaler import ShardedGradScaler
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from integration_tests.lifted.torch_half import Outcomes

X = torch.ones(2, 4)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def torch_wrapped() -> FullyShardedDataParallel:
    return FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))


def torch_l45_deepcopy(group: Collectives) -> None:
    model = torch_wrapped()
    model(X).sum().backward()
    copy.deepcopy(model)


def torch_l45_save(group: Collectives) -> None:
    model = torch_wrapped()
    model(X).sum().backward()
    torch.save(model, io.BytesIO())


def test_l45_torch_copies_nothing_after_the_first_use(processes: Outcomes) -> None:
    """After a pass torch's wrapper can be neither copied nor saved as a whole."""
    for half in (torch_l45_deepcopy, torch_l45_save):
        assert len(processes.errors(half)) == 2


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@each_row("use_orig_params", [False, True])
@each_row("copied", [copy.deepcopy, through_a_file], ids=["deepcopy", "torch.save"])
def test_l45_a_copy_trains_alike(copied: Callable[[Any], Any], use_orig_params: bool) -> None:
    """After a pass a wrapped model is copied, and saved and read; the copy trains by itself, to the same bits."""

    def trained(model: Any) -> Any:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    def rank(group: Collectives) -> Any:
        model = FSDP(layers(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
        model(X).sum().backward()
        model.zero_grad()
        twin = copied(model)
        return trained(twin), model.state_dict(), trained(model)

    before, after = layers().state_dict(), trained(layers())
    for copy_state, kept, own in run_threads(2, rank):
        for state, expected in ((copy_state, after), (kept, before), (own, after)):
            assert list(state) == list(expected)
            assert all(torch.equal(state[name], expected[name]) for name in expected)


@each_row("use_orig_params", [False, True])
def test_l45_a_moving_average_of_shards(use_orig_params: bool) -> None:
    """torch's `AveragedModel` averages the shards of each rank, and computes as that of the unsharded model."""

    def averaged(model: nn.Module) -> Any:
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            return average(X)

    expected = averaged(layers())
    for found in run_threads(2, lambda group: averaged(FSDP(layers(), use_orig_params=use_orig_params))):
        assert torch.equal(found, expected)


def torch_l30_compress(group: Collectives) -> None:
    model = torch_wrapped()
    model.register_comm_hook(torch_hooks.LowPrecisionState(model.process_group), torch_hooks.bf16_compress_hook)
    model(X).sum().backward()


def test_l30_torch_compresses_on_accelerators_only(processes: Outcomes) -> None:
    """On the CPU torch's compressing hooks fail where they record a stream."""
    assert len(processes.errors(torch_l30_compress)) == 2


@each_row("hook", [default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook])
def test_l30_hooks_compress_on_the_cpu(hook: Any) -> None:
    """The stock hooks average in 16 bits on the CPU: the mean of equal gradients is their rounding."""

    def rank(group: Collectives) -> Any:
        model = FSDP(layers(), use_orig_params=True)
        model.register_comm_hook(default_hooks.LowPrecisionState(model.process_group), hook)
        model(X).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            return [parameter.grad.clone() for parameter in model.parameters()]

    local = layers()
    local(X).sum().backward()
    dtype = torch.float16 if hook is default_hooks.fp16_compress_hook else torch.bfloat16
    for grads in run_threads(2, rank):
        for grad, parameter in zip(grads, local.parameters(), strict=True):
            assert torch.equal(grad, parameter.grad.to(dtype).float())


def torch_l54_new_scale(group: Collectives) -> None:
    scaler = TorchScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(new_scale=2)  # type: ignore[arg-type]


def test_l54_torch_takes_no_whole_number(processes: Outcomes) -> None:
    """Torch's scaler takes a float or a tensor only."""
    processes.assert_raised(torch_l54_new_scale, "AttributeError", "'int' object has no attribute")


def test_l54_a_new_scale_is_a_number() -> None:
    """Ours takes any number."""

    def rank(group: Collectives) -> float:
        scaler = ShardedGradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.update(new_scale=2)
        return scaler.get_scale()

    assert run_threads(2, rank) == [2.0, 2.0]
