"""Programs that read, differentiate, save or step the `DTensor`s themselves: the numbers are those of torch's FSDP2."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import flatparam
from flatparam_clients.second_door.door import fully_shard as ours
from flatparam_comm import Collectives
from flatparam_simdev.worlds import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

Shard = Callable[[Any], Any]
STEPS = 4


def mlp(shard: Shard) -> Any:
    """Return two sharded layers inside of a sharded module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    for module in (model[0], model[2], model):
        shard(module)
    return model


def loss_of(model: Any, step: int) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss: Tensor = (model(x) - 1).square().mean()
    return loss


def trained(model: Any, optimizer: Any, backward: Callable[[Tensor], Any] = torch.autograd.backward) -> list[Any]:
    """Return the losses of some steps, and the weights after them."""
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        losses.append(loss.item())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, *(parameter.full_tensor().tolist() for parameter in model.parameters())]


def penalised(shard: Shard, how: str) -> list[Any]:
    """Add a penalty on the values of the sharded parameters."""
    model = mlp(shard)
    parameters = list(model.parameters())

    def backward(loss: Tensor) -> None:
        if how == "in the loss":
            loss = loss + 0.1 * sum(p.square().sum().full_tensor() for p in parameters)
        elif how == "of local parts":
            loss = loss + 0.1 * sum(p.to_local().square().sum() for p in parameters)
        loss.backward()
        if how == "by itself":
            penalty: Any = 0.1 * sum(p.square().sum() for p in parameters)
            penalty.backward()

    return trained(model, torch.optim.SGD(parameters, lr=0.1), backward)


def clipped(shard: Shard, clip: Callable[..., Tensor]) -> list[Any]:
    """Measure the gradients of losses and penalties, of three batches each, before anything has read `.grad`."""
    model = mlp(shard)
    parameters = list(model.parameters())
    found = []
    for batch in range(3):
        loss_of(model, batch).backward()
        penalty: Any = 0.1 * sum(p.pow(3).sum() for p in parameters)
        penalty.backward()
    # Two sums in different orders differ in their last digits.
    found.append(round(told(clip(parameters, 1e9)), 5))
    return [*found, *(parameter.grad.full_tensor().tolist() for parameter in parameters)]


def watched(shard: Shard) -> list[Any]:
    """Have hooks of parameters look at gradients, of a loss and of a penalty."""
    model = mlp(shard)
    found: list[Any] = []
    for name, parameter in model.named_parameters():
        hook = functools.partial(lambda name, p: found.append([name, told(p.grad.to_local())]), name)
        handle = parameter.register_post_accumulate_grad_hook(hook)
        if name == "2.bias":
            handle.remove()
    loss_of(model, 0).backward()
    model[0].weight.square().sum().backward()
    model.zero_grad()
    (model[0].bias.to_local().sum() + loss_of(model, 1)).backward()
    return sorted(found)


def dropped(shard: Shard) -> list[Any]:
    """Drop gradients that were read, in each way; what somebody has kept stays, and nothing else."""
    model = mlp(shard)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def one_by_one() -> None:
        for parameter in parameters:
            parameter.grad = None

    found: list[Any] = []
    kept: list[Any] = []
    for step, drop in enumerate([optimizer.zero_grad, model.zero_grad, one_by_one, optimizer.zero_grad]):
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(parameters, 0.1)
        memory = [StorageWeakRef(parameter.grad.to_local().untyped_storage()) for parameter in parameters]
        kept.append(parameters[0].grad if step == 2 else None)
        assert parameters[1].grad is parameters[1].grad
        drop()
        found.append([parameter.grad for parameter in parameters])
        if step != 2:
            assert all(each.expired() for each in memory), "no gradient is in memory"
    return [found, told(kept)]


def offloaded(shard: Shard) -> list[Any]:
    """Put other tensors in the places of an optimizer's states, load others, or clear them: the old ones are gone."""
    model = mlp(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def memory() -> list[StorageWeakRef]:
        states = [each for state in optimizer.state.values() for each in state.values()]
        return [StorageWeakRef(each.to_local().untyped_storage()) for each in states if isinstance(each, DTensor)]

    def replace() -> None:
        for state in optimizer.state.values():
            state.update({name: value.clone() for name, value in state.items()})

    def load() -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    losses = []
    for step, change in enumerate([list, replace, load, lambda: optimizer.state.clear()]):
        losses.append(trained_once(model, optimizer, step))
        before = memory()
        change()
        if step:
            assert all(each.expired() for each in before), "no state is in memory twice"
    losses.append(trained_once(model, optimizer, STEPS))
    return [losses, told([*map(dict, optimizer.state.values())])]


def trained_once(model: Any, optimizer: Any, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def clip_of_both(parameters: list[Any], max_norm: float) -> Tensor:
    """Call `flatparam.clip_grad_norm_` for our parameters, and torch's function for torch's."""
    is_ours = hasattr(parameters[0], "original")
    clip: Any = flatparam.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
    norm: Tensor = clip(parameters, max_norm)
    return norm


def penalty_alone(shard: Shard) -> list[Any]:
    """Differentiate nothing but the parameters, twice, and drop the gradients."""
    model = mlp(shard)
    found: list[Any] = []
    for _ in range(2):
        model[0].weight.square().sum().backward()
        found.append(model[0].weight.grad.full_tensor().tolist())
    model.zero_grad()
    return [*found, model[0].weight.grad, type(model[2].weight.grad)]


class TrustRatio(torch.optim.Optimizer):
    """A step as long as the norm of the whole parameter says."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-0.01)


class Outer(torch.optim.SGD):
    """SGD that goes half of the way back to where it was two steps ago."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.lerp_(p, 0.5)
            p.copy_(slow)


def stepped_by(shard: Shard, kind: Callable[[Any], Any], *, two_d: bool = False) -> list[Any]:
    model = mlp(shard)
    if two_d:
        for parameter in (p for p in model.parameters() if p.dim() != 2):
            parameter.requires_grad_(False)
    return trained(model, kind([p for p in model.parameters() if p.requires_grad]))


def closed(shard: Shard, *, named: bool) -> list[Any]:
    """Step with a closure, which clips what the optimizer holds, and looks at its state."""
    model = mlp(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = []

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
        kinds = [isinstance(value, DTensor) for state in optimizer.state.values() for value in state.values()]
        found.append([loss.item(), told(norm), kinds])
        return loss

    for step in range(STEPS):
        at = functools.partial(closure, step)
        found.append(told(optimizer.step(closure=at) if named else optimizer.step(at)))
    return [*found, *(parameter.full_tensor().tolist() for parameter in model.parameters())]


def hooked(shard: Shard) -> list[Any]:
    """Note what hooks of the optimizer see before and after its step."""
    model = mlp(shard)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.1), list[Any]()

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        p = optimizer.param_groups[0]["params"][0]
        known = p in optimizer.state, model[0].weight in optimizer.state
        seen.append((tuple(p.shape), p is model[0].weight, known, p.grad.norm().full_tensor().item()))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    return [trained(model, optimizer), seen]


def hooked_everywhere(shard: Shard) -> list[Any]:
    """Note what hooks of all optimizers in the process see; the one before a step scales gradients by their norms."""
    model, seen = mlp(shard), list[Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            norm = p.grad.norm().full_tensor()
            seen.append((tuple(p.shape), isinstance(p, DTensor), norm.item(), len(optimizer.state)))
            p.grad.div_(1 + norm)

    handles = [register_optimizer_step_pre_hook(look), register_optimizer_step_post_hook(look)]
    found = [trained(model, optimizer), seen]
    for handle in handles:
        handle.remove()
    return found


class ClipsEachAdamW(torch.optim.AdamW):
    """A subclass that looks at norms, and is named as if it did not."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            norm = parameter.grad.norm()
            parameter.grad.div_((norm.full_tensor() if isinstance(norm, DTensor) else norm) + 0.1)
        super().step(closure)


def regrouped(shard: Shard, *, groups: bool) -> list[Any]:
    """Freeze by taking parameters, or a group, out of an optimizer that keeps their states, and give them back."""
    model = mlp(shard)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
    found = [trained(model, optimizer)]
    group = optimizer.param_groups[0]
    if groups:
        del optimizer.param_groups[0]
    else:
        group["params"] = parameters[1:2]
    for _ in range(2):
        found.append(trained(model, optimizer))
        model.zero_grad()
        found.append([len(optimizer.state), [told(state) for state in optimizer.state.values()]])
    if groups:
        optimizer.param_groups.append(group)
    else:
        group["params"] = parameters[:2]
    return [*found, trained(model, optimizer), [tuple(each.shape) for each in optimizer.state]]


def failing(shard: Shard) -> list[Any]:
    """Look at an optimizer, and save its state, after a step that has raised; then go on."""
    model = mlp(shard)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = [trained(model, optimizer)]
    loss_of(model, 0).backward()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("a bad step")

    for closure in (None, fail):
        if closure is None:
            optimizer._init_group = fail
        with pytest.raises(ValueError, match="a bad step"):
            optimizer.step(closure)
        vars(optimizer).pop("_init_group", None)
        held = optimizer.param_groups[0]["params"]
        found.append([tuple(p.shape) for p in held] + [isinstance(p, DTensor) for p in held])
        found.append(told(optimizer.state_dict()))
        whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        found.append(told(whole["state"]))
    return [*found, trained(model, optimizer)]


def compiled(shard: Shard, *, foreach: bool) -> list[Any]:
    """Compile the step of an optimizer."""
    model = mlp(shard)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return trained(model, optimizer)


def saved(shard: Shard) -> list[Any]:
    """Save and copy states, parameters and gradients by other means than torch's checkpoints."""
    model = mlp(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained(model, optimizer)
    loss_of(model, 0).backward()
    weight = model[2].weight
    states: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    states |= {"parameter": weight, "gradient": weight.grad, "detached": weight.detach().detach()}
    found = []
    for value in states.values():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        found.append(told(torch.load(buffer, weights_only=False)))
        found += [told(copy.deepcopy(value)), told(value)]
    return [*found, told(pickle.loads(pickle.dumps(weight.detach())))]


def told(value: Any) -> Any:
    """Return tensors as numbers."""
    if isinstance(value, Mapping):
        return {key: told(each) for key, each in value.items()}
    if isinstance(value, list):
        return [told(each) for each in value]
    return (
        (value.full_tensor() if isinstance(value, DTensor) else value).tolist() if isinstance(value, Tensor) else value
    )


def saved_later(shard: Shard, folder: str) -> list[Any]:
    """Save asynchronously by torch's checkpoints, and load."""
    model = mlp(shard)
    before = told(model.state_dict())
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder).result()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return [before, told(model.state_dict())]


class Odd(nn.Module):
    """Attributes with names that a sharded module uses, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.empty = nn.Linear(4, 4), nn.Parameter(torch.zeros(0, 4), requires_grad=False)
        self.skipped_steps, self._unit, self._units = 3, 4, 5

    def forward(self, x: Tensor) -> Any:
        return self.linear(torch.cat([x, self.empty])) * self.skipped_steps


def odd(shard: Shard) -> list[Any]:
    torch.manual_seed(0)
    model: Any = shard(Odd())
    shapes = [tuple(each.shape) for each in (model.empty, model.empty.to_local(), model.empty.full_tensor())]
    model(torch.ones(2, 4)).sum().backward()
    norm = told(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    model.skipped_steps = model._unit + model._units
    model.zero_grad()
    return [shapes, model(torch.ones(2, 4)).tolist(), norm, model.linear.weight.grad]


PROGRAMS: dict[str, Callable[[Shard], Any]] = {
    **{
        f"penalty {how}": functools.partial(penalised, how=how)
        for how in ("in the loss", "of local parts", "by itself")
    },
    "penalty alone": penalty_alone,
    "clipping with torch's function": functools.partial(clipped, clip=nn.utils.clip_grad_norm_),
    "gradients that are dropped": dropped,
    "states that are replaced": offloaded,
    "clipping with ours": functools.partial(clipped, clip=clip_of_both),
    "an optimizer that looks at norms": functools.partial(stepped_by, kind=TrustRatio),
    "an optimizer with tensors of its own": functools.partial(stepped_by, kind=Outer),
    "torch's Muon": functools.partial(stepped_by, kind=functools.partial(torch.optim.Muon, lr=0.02), two_d=True),
    "an optimizer that looks at norms behind a name": functools.partial(stepped_by, kind=ClipsEachAdamW),
    "hooks of an optimizer": hooked,
    "hooks of all optimizers": hooked_everywhere,
    "a group that is dropped": functools.partial(regrouped, groups=True),
    "parameters that are dropped": functools.partial(regrouped, groups=False),
    "a step that raises": failing,
    "a compiled step": functools.partial(compiled, foreach=False),
    "a compiled step of many": functools.partial(compiled, foreach=True),
    "hooks of parameters": watched,
    "a closure": functools.partial(closed, named=False),
    "a closure by its name": functools.partial(closed, named=True),
    "saved": saved,
    "odd modules": odd,
}


def both(ranks: Collectives, folder: str) -> dict[str, list[Any]]:
    """Run each program with torch's function, and with ours."""
    found = {name: [program(torchs), program(ours)] for name, program in PROGRAMS.items()}
    later = [saved_later(shard, f"{folder}/{shard.__module__}") for shard in (torchs, ours)]
    return {**found, "saved asynchronously": later}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """What each program has printed on each of two ranks."""
    return run_processes(2, both, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("name", [*PROGRAMS, "saved asynchronously"])
def test_as_fsdp2(name: str, results: list[dict[str, list[Any]]]) -> None:
    """Losses, weights, shapes and what is saved are equal, to the bit."""
    for rank in results:
        theirs, mine = rank[name]
        assert mine == theirs
    if name == "saved asynchronously":
        assert mine[0] == mine[1]
