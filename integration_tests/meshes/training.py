"""Training on a mesh beside one process that has all data: loss, every gradient, norm and weights of each step."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from integration_tests.meshes.engines import Setting, clip, gradients, made, unsynchronised, weights
from integration_tests.meshes.llama import Llama, backward

MOST = 0.5
STEPS = 3


@attrs.frozen(eq=False)
class Step:
    """What one step has computed."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    """Before clipping, whole, by name."""
    weights: dict[str, Tensor]
    """After the optimizer's step."""


def alone(setting: Setting) -> list[Step]:
    """Train one process on the batches of all data-parallel ranks."""
    torch.manual_seed(0)
    model = Llama()
    optimizer = setting.stepping()(model.parameters())
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [
            backward(model, step * setting.micro_batches + number, rank)
            for number in range(setting.micro_batches)
            for rank in range(setting.data_parallel)
        ]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= setting.data_parallel
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MOST))
        optimizer.step()
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(Step(sum(losses) / setting.data_parallel, norm, grads, after))
    return found


def on_mesh(setting: Setting) -> list[Step]:
    """Train on a mesh; every rank calls it."""
    mesh = setting.mesh()
    model = made(setting, mesh)
    optimizer = setting.stepping()(model.parameters())
    rank = dist.get_rank() // setting.shape[-1]
    return [train_step(setting, model, optimizer, step, rank) for step in range(STEPS)]


def train_step(setting: Setting, model: Any, optimizer: Any, step: int, rank: int) -> Step:
    """Train one step on the batches of this data-parallel `rank`."""
    optimizer.zero_grad()
    mine = 0.0
    for number in range(setting.micro_batches):
        with unsynchronised(setting, model, number == setting.micro_batches - 1):
            at = step * setting.micro_batches + number
            mine += backward(model, at, rank, loss_parallel=setting.loss_parallel)
    loss = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(loss)
    grads = gradients(setting, model)
    norm = clip(setting, model, MOST)
    optimizer.step()
    return Step(float(loss) / dist.get_world_size(), norm, grads, weights(setting, model))


def faults(setting: Setting, wanted: list[Step], found: list[Step]) -> list[str]:
    """Return in words what is wrong, each parameter by its name; nothing if all is right."""
    told = []
    within, drift = (4e-2, 3e-2) if setting.narrow else (2e-5, 2e-5)
    for number, (right, step) in enumerate(zip(wanted, found, strict=True)):
        if abs(step.loss - right.loss) > (2e-2 if setting.narrow else 1e-5):
            told.append(f"step {number}: loss {step.loss}, expected {right.loss}")
        if abs(step.norm / right.norm - 1) > (1e-2 if setting.narrow else 1e-5):
            told.append(f"step {number}: norm {step.norm}, expected {right.norm}")
        if setting.engine != "FSDP1" and step.gradients.keys() != right.gradients.keys():
            told.append(f"step {number}: gradients of other parameters")
        for name, gradient in step.gradients.items():
            off = _off(gradient, right.gradients[name])
            if off > within:
                told.append(f"step {number}: gradient of {name} is off by {off:.1e} of its norm")
        for name, weight in right.weights.items():
            if float((step.weights[name] - weight).abs().max()) > drift:
                told.append(f"step {number}: {name} is a different weight")
    return told


def _off(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found.float() - wanted).norm() / wanted.norm().clamp(min=1e-12))


def compared(ranks: Collectives, setting: Setting) -> tuple[list[str], Any]:
    """Train on the mesh and alone; return what is wrong on this rank, and what all ranks must have alike."""
    logging.disable(logging.WARNING)  # torch warns that it could do with fewer collectives
    found = on_mesh(setting)
    alike = [(step.norm, {n: w.double().sum().item() for n, w in step.weights.items()}) for step in found]
    return faults(setting, alone(setting), found), alike


def _tried(ranks: Collectives, setting: Setting) -> tuple[list[str], Any]:
    try:
        return compared(ranks, setting)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], traceback.format_exc()


def run(setting: Setting, *, catches: bool = False) -> list[str]:
    """Return what is wrong on any rank of forked processes; with `catches`, an exception is a fault too."""
    results = run_processes(setting.ranks, _tried if catches else compared, setting)
    told = [f"rank {rank}: {fault}" for rank, (found, _) in enumerate(results) for fault in found]
    if not told and any(alike != results[0][1] for _, alike in results):
        told.append("the ranks have different norms or weights")
    return told
