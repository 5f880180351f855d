"""What programs do with a model. Each function trains it and returns values that must be the CPU's, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from integration_tests.simulated.models import Model
from integration_tests.simulated.programs import Site, build, clip, optimizer_of, parameters_of, unreduced


def train(site: Site) -> dict[str, Tensor]:
    """Some steps, each of which may accumulate, clip and evaluate."""
    program = site.program
    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(program.steps):
        for number in range(program.micro_batches):
            is_last = number == program.micro_batches - 1
            with unreduced(model, site) if program.no_sync and not is_last else contextlib.nullcontext():
                _pass(model, site, step, number)
        if program.clip:
            site.mark(f"step {step} clip")
            clip(model, site)
        if program.evaluate:
            site.mark(f"step {step} evaluation")
            with torch.no_grad():
                model(site.batches[0])
        _update(optimizer, site, step)
    return parameters_of(model, site)


def _pass(model: nn.Module, site: Site, step: int, number: int = 0) -> None:
    """A forward and a backward pass."""
    site.mark(f"step {step} forward {number}")
    loss: Any = model(site.batches[step + number]).float().square().mean()
    site.mark(f"step {step} backward {number}")
    loss.backward()


def _update(optimizer: torch.optim.Optimizer, site: Site, step: int) -> None:
    site.mark(f"step {step} optimizer")
    optimizer.step()
    optimizer.zero_grad()


# A model that leaves the device between two steps


def asleep(site: Site) -> dict[str, Tensor]:
    """Gradients, parameters and the optimizer's state go to the host and come back."""
    return _asleep(site, None)


def asleep_on_a_disk(site: Site) -> dict[str, Tensor]:
    """The same, to files."""
    with tempfile.TemporaryDirectory() as folder:
        return _asleep(site, folder)


def asleep_after_failures(site: Site) -> dict[str, Tensor]:
    """The same, each time after the last rank has failed while its copies were queued."""
    return _asleep(site, None, fails=not site.is_cpu)


def asleep_in_parts(site: Site) -> dict[str, Tensor]:
    """The gradients and the state come back after the parameters, one by one."""
    from flatparam import offload, onload

    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        _pass(model, site, step)
        with device_changes():
            offload(model, optimizer=optimizer)
            onload(model, gradients=False)
            onload(model, optimizer=optimizer)
        _update(optimizer, site, step)
    return parameters_of(model, site)


def _asleep(site: Site, folder: str | None, *, fails: bool = False) -> dict[str, Tensor]:
    from flatparam import offload, onload

    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        _pass(model, site, step)
        for name, travel in (("sleep", functools.partial(offload, folder=folder)), ("wake", onload)):
            with device_changes():
                if fails:
                    _fail(lambda travel=travel: travel(model, optimizer=optimizer), site)
                site.mark(f"{name} {step}")
                travel(model, optimizer=optimizer)
        _update(optimizer, site, step)
    return parameters_of(model, site)


def _fail(travel: Callable[[], Any], site: Site) -> None:
    from flatparam_comm import FlatParamError
    from flatparam_state import moved_memory as memory

    last = site.program.ranks - 1
    unlucky = mock.patch.object(memory, "_like", side_effect=RuntimeError("no memory is left"))
    told = pytest.raises(FlatParamError, match=f"nothing was changed: rank {last}: .*no memory is left")
    with told, unlucky if site.rank == last else contextlib.nullcontext():
        travel()


def device_changes() -> AbstractContextManager[None]:
    """Inside, `.data =` can take a parameter to a different device, as torch allows it for CUDA."""
    from flatparam_simdev import device

    return device.behaving("data_changes_device", True)


# The optimizer


def optimizer_in_backward(site: Site) -> dict[str, Tensor]:
    """Each parameter is updated in the backward pass, as soon as its gradient is there."""
    from torch.distributed import optim as of_torch

    model = build(site)
    optim: Any = of_torch
    optim._apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    for step in range(site.program.steps):
        _pass(model, site, step)
    return parameters_of(model, site)


def one_unit_ahead(site: Site) -> dict[str, Tensor]:
    """Units are as large as they are in earnest: only one is gathered ahead of the one that computes."""
    with _threshold("runtime.prefetch_nbytes").set_to(1):
        return train(site)


def _threshold(name: str) -> Any:
    from flatparam_core import all_thresholds

    return next(each for each in all_thresholds() if each.name == name)


def stepped_in_buckets(site: Site) -> dict[str, Tensor]:
    """Matrices travel in several buckets, and in every other step a block has no gradient."""
    model: Any = build(site)
    optimizer = optimizer_of(model, site)
    with _threshold("runtime.matrix_bucket_numel").set_to(600):
        for step in range(site.program.steps):
            _pass(model, site, step)
            for name, parameter in model.named_parameters() if step % 2 else ():
                if "blocks.1" in name:
                    parameter.grad = None
            _update(optimizer, site, step)
    return parameters_of(model, site)


def resumed(site: Site) -> dict[str, Tensor]:
    """After the first step the optimizer's state is saved, and loaded into a new optimizer."""
    from flatparam import FullyShardedDataParallel

    model: Any = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        _pass(model, site, step)
        _update(optimizer, site, step)
        if step == 0:
            site.mark("step 0 saved")
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            optimizer = optimizer_of(model, site)
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
    return parameters_of(model, site)


def averaged(site: Site) -> dict[str, Tensor]:
    """An average of the parameters is kept."""
    from flatparam_state import ShardedEMA

    model = build(site)
    optimizer = optimizer_of(model, site)
    average = ShardedEMA(model, 0.9)
    for step in range(site.program.steps):
        _pass(model, site, step)
        _update(optimizer, site, step)
        site.mark(f"step {step} average")
        average.update()
    with average.applied(model):
        return parameters_of(model, site)


def gradients_kept(site: Site) -> dict[str, Tensor]:
    """Nobody sets gradients to None, so that each backward pass adds to those of the steps before."""
    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        _pass(model, site, step)
        site.mark(f"step {step} optimizer")
        optimizer.step()
    return parameters_of(model, site)


def scaled(site: Site) -> dict[str, Tensor]:
    """The loss is scaled, and the gradients are looked at for infinities."""
    from flatparam.sharded_grad_scaler import ShardedGradScaler

    model = build(site)
    optimizer = optimizer_of(model, site)
    scaler: Any = ShardedGradScaler(site.device.type, init_scale=16.0, process_group=site.group)
    for step in range(site.program.steps):
        site.mark(f"step {step} forward")
        loss = model(site.batches[step]).float().square().mean()
        site.mark(f"step {step} backward")
        scaler.scale(loss).backward()
        site.mark(f"step {step} optimizer")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parameters_of(model, site)


# Streams of the program's own


@contextlib.contextmanager
def side_stream(site: Site) -> Iterator[None]:
    """Inside, a stream of its own is current, which begins after the current one; that goes on after it."""
    if site.is_cpu:
        yield
        return
    outside, side = torch.accelerator.current_stream(), torch.Stream(device=site.device)
    side.wait_stream(outside)
    with side:
        yield
    outside.wait_stream(side)


def first_step_on_side_stream(site: Site) -> dict[str, Tensor]:
    """The first step runs on a stream of its own, as before a graph is captured; the others on the default stream."""
    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        with side_stream(site) if step == 0 else contextlib.nullcontext():
            _pass(model, site, step)
            _update(optimizer, site, step)
    return parameters_of(model, site)


def forward_on_side_stream(site: Site) -> dict[str, Tensor]:
    """Forward passes run on a stream of their own; backward passes are called from the default stream."""
    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        with side_stream(site):
            site.mark(f"step {step} forward")
            loss: Any = model(site.batches[step]).float().square().mean()
        site.mark(f"step {step} backward")
        loss.backward()
        _update(optimizer, site, step)
    return parameters_of(model, site)


# Looking at parameters


def evaluated(site: Site) -> dict[str, Tensor]:
    """Nothing but forward passes without gradients, between which the parameters are changed."""
    model = build(site).eval()
    outputs = {}
    with torch.no_grad():
        for step in range(site.program.steps):
            site.mark(f"step {step} forward")
            outputs[f"output {step}"] = model(site.batches[step])
            site.mark(f"step {step} change")
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return {**outputs, **parameters_of(model, site)}


def computed_on_the_host(site: Site) -> dict[str, Tensor]:
    """The model stays on the CPU, and its inputs come from the device."""
    import flatparam
    from flatparam_comm import SingleCollectives

    torch.manual_seed(0)
    model = flatparam.FullyShardedDataParallel(
        Model(2), process_group=SingleCollectives(), device_id=torch.device("cpu")
    )
    return {f"output {step}": model(site.batches[step] * 2) for step in range(site.program.steps)}


def summoned(site: Site) -> dict[str, Tensor]:
    """The full parameters are looked at and changed between steps, in each of several ways."""
    import flatparam

    model = build(site)
    optimizer = optimizer_of(model, site)
    on_host = {"offload_to_cpu": True, "rank0_only": True, "writeback": False}
    with_gradients = {"with_grads": True} if site.program.use_orig_params else {}
    for step in range(site.program.steps):
        _pass(model, site, step)
        for options in ({}, on_host, with_gradients):
            site.mark(f"step {step} summon {options}")
            with flatparam.FullyShardedDataParallel.summon_full_params(model, **options), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        _update(optimizer, site, step)
    return parameters_of(model, site)


def saved(site: Site) -> dict[str, Tensor]:
    """State dicts of all kinds are taken, and the last one is loaded back."""
    from flatparam import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    model: Any = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        _pass(model, site, step)
        _update(optimizer, site, step)
        site.mark(f"step {step} states")
        on_host = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, on_host):
            model.state_dict()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            model.load_state_dict(state)
        FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return parameters_of(model, site)


def checkpointed_asynchronously(site: Site) -> dict[str, Tensor]:
    """Checkpoints are written while training goes on, and the last one is loaded."""
    from flatparam_state import Checkpointer

    model = build(site)
    optimizer = optimizer_of(model, site)
    folders = [tempfile.mkdtemp() if site.rank == 0 else ""]
    torch.distributed.broadcast_object_list(folders)  # over the default group
    with Checkpointer(folders[0], model, optimizer, asynchronous=True) as checkpointer:
        for step in range(site.program.steps):
            _pass(model, site, step)
            _update(optimizer, site, step)
            site.mark(f"step {step} save")
            checkpointer.save(step)
        site.mark("load")
        checkpointer.load()
    return parameters_of(model, site)


# What goes wrong


_Function: Any = torch.autograd.Function


class _Unlucky(_Function):  # type: ignore[misc]  # torch's class is not typed
    """The identity, whose backward fails."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise ArithmeticError("as planned")


def interrupted(site: Site) -> dict[str, Tensor]:
    """A backward pass fails in the middle, in autograd's thread; the next step begins anew."""
    model: Any = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(site.program.steps):
        hook = model.module.blocks[1].register_forward_hook(lambda module, given, output: _Unlucky.apply(output))
        site.mark(f"step {step} interruption")
        loss = model(site.batches[step]).float().square().mean()
        with contextlib.suppress(ArithmeticError):
            loss.backward()
        hook.remove()
        optimizer.zero_grad()
        _pass(model, site, step)
        _update(optimizer, site, step)
    return parameters_of(model, site)
