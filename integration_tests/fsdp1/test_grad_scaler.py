"""`ShardedGradScaler`, argument by argument and method by method."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from integration_tests.fsdp1.asking import Library, alike, unlike, warned
from integration_tests.fsdp1.subjects import batch, full, rank, seeded

BOTH = [False, True]


def told(scaler: Any) -> list[Any]:
    """What a scaler says of itself."""
    return [
        scaler.is_enabled(),
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
        scaler.state_dict(),
    ]


ARGUMENTS: dict[str, Any] = {
    "device": (["cpu"], {}),
    "by_position": (["cpu", 8.0, 0.25, 4.0, 3, True, None], {}),
    "by_name": (
        [],
        {
            "device": "cpu",
            "init_scale": 4.0,
            "backoff_factor": 0.1,
            "growth_factor": 1.5,
            "growth_interval": 1,
            "enabled": True,
            "process_group": None,
        },
    ),
    "disabled": (["cpu"], {"enabled": False}),
    "disabled_by_position": (["cpu", 2.0, 0.5, 2.0, 5, False], {}),
    "world": (["cpu"], {"process_group": "world"}),
    "growth_of_one": (["cpu"], {"growth_factor": 1.0}),
    "backoff_of_one": (["cpu"], {"backoff_factor": 1.0}),
}


@alike(given=list(ARGUMENTS))
def test_arguments(library: Library, given: str) -> Any:
    """Each argument by position and by name; a growth or backoff of one is refused with torch's class of error."""
    positions, names = ARGUMENTS[given]
    if "process_group" in names and names["process_group"] == "world":
        names = {**names, "process_group": dist.group.WORLD}
    with warned() as found:
        scaler = library.ShardedGradScaler(*positions, **names)
    return told(scaler), found, isinstance(scaler, torch.amp.GradScaler)


@alike()
def test_no_arguments(library: Library) -> Any:
    """It is one for CUDA, which warns and does nothing without it."""
    with warned() as found:
        scaler = library.ShardedGradScaler()
    return [told(scaler), found]


@alike(enabled=BOTH, what=["tensor", "half", "list", "tuple", "nested", "generator", "set", "number", "none"])
def test_scale(library: Library, enabled: bool, what: str) -> Any:
    """Tensors, lists, tuples and iterables; what is none of these is torch's class of error, if the scaler is enabled."""
    scaler = library.ShardedGradScaler("cpu", 8.0, enabled=enabled)
    tensors = [torch.ones(2), torch.ones((), dtype=torch.float16), torch.ones(1, dtype=torch.bfloat16)]
    value = {
        "tensor": lambda: tensors[0],
        "half": lambda: tensors[1],
        "list": lambda: tensors,
        "tuple": lambda: tuple(tensors),
        "nested": lambda: [tensors, (tensors[0], [])],
        "generator": lambda: (each for each in tensors),
        "set": lambda: {tensors[0]},
        "number": lambda: 1.0,
        "none": lambda: None,
    }[what]()
    scaled = scaler.scale(value)
    if scaled is value:
        return "itself"
    if what in ("generator", "set"):
        return list(scaled)
    return scaled, type(scaled)


def stepped(library: Library, scaler: Any, gradients: list[float], **settings: Any) -> list[Any]:
    """A parameter through steps with these gradients."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, **settings)
    found = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        returned = scaler.step(optimizer)
        scaler.update()
        found.append([returned, parameter, parameter.grad, scaler.get_scale(), scaler._get_growth_tracker()])
    return found


@alike(interval=[1, 2, 2000], enabled=BOTH)
def test_steps(library: Library, interval: int, enabled: bool) -> Any:
    """Finite gradients step and let the scale grow after the interval; others are skipped and let it shrink."""
    scaler = library.ShardedGradScaler("cpu", 4.0, 0.5, 2.0, interval, enabled)
    return stepped(library, scaler, [1.0, math.inf, 1.0, math.nan, 2.0, 3.0])


@alike(ranks=2, where=["none", "first", "second", "both"], originals=BOTH)
def test_a_sharded_model(library: Library, where: str, originals: bool) -> Any:
    """What one rank finds, every rank skips."""
    model = library.shard(seeded(), use_orig_params=originals)
    scaler = library.ShardedGradScaler("cpu", 16.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(3):
        loss = model(batch(step + rank())).square().mean()
        if step == 1 and where in ("both", ["first", "second"][rank()]):
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if not originals:  # whose norms FSDP1 adds up in another order
            model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, full(library, model)


@alike(wrong=["twice", "after_step", "update_first", "step_first", "unscale_first", "step_twice"])
def test_a_wrong_order(library: Library, wrong: str) -> Any:
    """Unscaling twice, after a step, an update or a step before anything was scaled: torch's class of error."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    if wrong == "step_first":
        scaler.step(optimizer)
    if wrong == "unscale_first":
        scaler.unscale_(optimizer)
    scaler.scale(parameter.sum()).backward()
    if wrong == "update_first":
        scaler.update()
    if wrong == "twice":
        scaler.unscale_(optimizer)
    if wrong in ("after_step", "step_twice"):
        scaler.step(optimizer)
    if wrong == "step_twice":
        scaler.step(optimizer)
    scaler.unscale_(optimizer)


@alike()
def test_two_optimizers(library: Library) -> Any:
    """Each is asked for itself; the scale follows any."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in parameters]
    scaler.scale((parameters[0] * math.inf + parameters[1]).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return parameters, scaler.get_scale()


@alike(new=["None", "2.5", "tensor", "by_name", "double"], enabled=BOTH)
def test_update(library: Library, new: str, enabled: bool) -> Any:
    """A new scale as a number with a point, or as a tensor of one element."""
    scaler = library.ShardedGradScaler("cpu", 4.0, enabled=enabled)
    stepped(library, scaler, [1.0])
    parameter = nn.Parameter(torch.zeros(1))
    scaler.scale(parameter.sum()).backward()
    scaler.step(torch.optim.SGD([parameter], lr=1.0))
    value = torch.full((), 3.0)
    returned = {
        "None": lambda: scaler.update(None),
        "2.5": lambda: scaler.update(2.5),
        "tensor": lambda: scaler.update(value),
        "by_name": lambda: scaler.update(new_scale=6.0),
        "double": lambda: scaler.update(torch.full((), 3.0, dtype=torch.float64)),
    }[new]()
    value.fill_(9.0)
    return returned, scaler.get_scale()


@unlike("`ShardedGradScaler` takes more", ours=2.0, new=["number", "tensor"])
def test_update_to_more(library: Library, new: str) -> Any:
    """FSDP1 takes a whole number for a tensor, and a tensor of one dimension fails inside."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    stepped(library, scaler, [1.0])
    scaler.update({"number": 2, "tensor": torch.tensor([2.0])}[new])
    return scaler.get_scale()


@unlike("`ShardedGradScaler` takes more", ours={"loss": 8.0})
def test_a_mapping_is_scaled(library: Library) -> Any:
    """FSDP1 goes through its keys."""
    scaled = library.ShardedGradScaler("cpu", 8.0).scale({"loss": torch.ones(())})
    return {name: value.item() for name, value in scaled.items()}


@unlike("The class of an error", ours=TypeError, new=["two", "word"])
def test_what_is_no_new_scale(library: Library, new: str) -> Any:
    """FSDP1 asserts."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    stepped(library, scaler, [1.0])
    scaler.update({"two": torch.ones(2), "word": "two"}[new])


@alike()
def test_a_state_that_is_loaded(library: Library) -> Any:
    """`state_dict` of one goes into another; an empty one is torch's class of error."""
    one, other = library.ShardedGradScaler("cpu", 4.0, growth_interval=7), library.ShardedGradScaler("cpu")
    stepped(library, one, [1.0, math.inf, 1.0])
    other.load_state_dict(one.state_dict())
    state = told(other)
    try:
        other.load_state_dict({})
    except RuntimeError:
        return state, "refused"


@alike(name=["growth_factor", "backoff_factor", "growth_interval"])
def test_what_can_be_set(library: Library, name: str) -> Any:
    """Factors and interval can be set later."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    getattr(scaler, f"set_{name}")(3)
    return told(scaler)


@alike(dtype=["float16", "bfloat16", "float32"], bad=BOTH)
def test_gradients_of_any_dtype(library: Library, dtype: str, bad: bool) -> Any:
    """Gradients in low precision are unscaled too."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    kind = getattr(torch, dtype)
    parameter = nn.Parameter(torch.zeros(2, dtype=kind))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(torch.zeros(1))
    parameter.grad = torch.tensor([4.0, math.inf if bad else 8.0]).to(kind)
    scaler.unscale_(optimizer)
    returned = scaler.step(optimizer)
    scaler.update()
    return [returned, parameter, parameter.grad, scaler.get_scale()]


@alike()
def test_no_gradients(library: Library) -> Any:
    """An optimizer without gradients has found nothing infinite."""
    scaler = library.ShardedGradScaler("cpu", 4.0)
    scaler.scale(torch.zeros(1))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    returned = scaler.step(optimizer)
    scaler.update()
    return [returned, scaler.get_scale()]
