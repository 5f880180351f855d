"""Programs for torch's FSDP2 train to the same bits with flatparam's `fully_shard`, in the same run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

from . import both
from .both import Failed, Side, adamw, full, loss_of, seeded, state_of, trained

pytestmark = pytest.mark.processes


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Demand the same structure, and equal bits."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), f"{where}: {(found - expected).abs().max().item():.3g}"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{number}]")
    else:
        assert found == expected, where


def example(side: Side) -> Any:
    model = side.shard(seeded())
    optimizer = adamw(model)
    return trained(side, model, optimizer), state_of(model)


def keeping(side: Side) -> Any:
    found = []
    for value in (True, False, 2):
        model = side.shard(seeded(), reshard_after_forward=value)
        found.append((trained(side, model, adamw(model)), state_of(model)))
    return found


def of_one_unit(side: Side) -> Any:
    model = side.fully_shard(seeded(), mesh=both.mesh(2))
    return trained(side, model, adamw(model)), state_of(model)


def without_root(side: Side) -> Any:
    # The rest of the model is whole on each rank, so each rank has the same data.
    alike = Side(side.name, 0)
    model = seeded()
    for layer in model.layers:
        side.fully_shard(layer)
    return trained(alike, model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)), state_of(model)


def of_a_list(side: Side) -> Any:
    model = seeded()
    side.fully_shard(model.embedding)
    for layer in model.layers:
        side.fully_shard(layer)
    side.fully_shard([model.norm, model.head], reshard_after_forward=False)
    side.fully_shard(model)
    return trained(side, model, adamw(model)), state_of(model)


def tied(side: Side) -> Any:
    model = side.shard(seeded(tied=True))
    return trained(side, model, adamw(model)), state_of(model)


def frozen(side: Side) -> Any:
    model = seeded()
    model.embedding.requires_grad_(False)
    for layer in model.layers:
        layer.up.requires_grad_(False)
    model = side.shard(model)
    losses = trained(side, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    without = sorted(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
    return losses, without, state_of(model)


def ignored(side: Side) -> Any:
    model = seeded()
    left_out = {model.embedding.weight}
    model = side.shard(model, ignored_params=left_out)
    shape = tuple(model.embedding.weight.shape)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p not in left_out], lr=0.01)
    return trained(side, model, optimizer), shape, state_of(model)


def accumulating(side: Side) -> Any:
    model = side.shard(seeded())
    optimizer, losses = adamw(model), []
    for step in range(both.STEPS):
        for part in range(3):
            is_last = part == 2
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last)
            loss = loss_of(model, side.rank, 10 * step + part)
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def accumulating_reduced(side: Side) -> Any:
    model = side.shard(seeded())
    optimizer, losses = adamw(model), []
    for step in range(both.STEPS):
        for part in range(3):
            loss = loss_of(model, side.rank, 10 * step + part)
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def divided(side: Side) -> Any:
    model = side.shard(seeded())
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(8.0)
            if side.name == "torch":
                # Gloo has no sum that multiplies, which torch asks for otherwise.
                module.set_force_sum_reduction_for_comms(True)
    return trained(side, model, torch.optim.SGD(model.parameters(), lr=0.1)), state_of(model)


def prefetching(side: Side) -> Any:
    model = side.shard(seeded())
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers[:1])
    for before, layer, after in zip([None, *layers], layers, [*layers[1:], None], strict=False):
        layer.set_modules_to_forward_prefetch([after] if after is not None else [])
        layer.set_modules_to_backward_prefetch([before] if before is not None else [])
    optimizer, losses = adamw(model), []
    for step in range(both.STEPS):
        model.unshard(async_op=True)
        loss = loss_of(model, side.rank, step)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def not_unsharded_in_backward(side: Side) -> Any:
    model = seeded()
    side.fully_shard(model.embedding, reshard_after_forward=True)
    model.embedding.set_unshard_in_backward(False)
    model = side.shard(model)
    return trained(side, model, adamw(model)), state_of(model)


def offloaded(side: Side) -> Any:
    model = side.shard(seeded(), offload_policy=side.CPUOffloadPolicy(pin_memory=False))
    return trained(side, model, adamw(model)), state_of(model)


def resharding(side: Side) -> Any:
    model = side.shard(seeded())
    optimizer, found = adamw(model), []
    for step in range(both.STEPS):
        loss = loss_of(model, side.rank, step)
        found.append(tuple(model.head.weight.shape))
        model.reshard()
        loss.backward()
        found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    model.set_reshard_after_forward(False)
    loss_of(model, side.rank, 9)
    found.append(tuple(model.layers[0].up.weight.shape))
    for layer in (*model.layers, model):
        layer.reshard()
    handle = model.layers[1].unshard(async_op=True)
    handle.wait()
    found.append(model.layers[1].down.weight.detach().clone())
    model.layers[1].reshard()
    return found, state_of(model)


def evaluating(side: Side) -> Any:
    model = side.shard(seeded())
    optimizer, found = adamw(model), []
    for step in range(both.STEPS):
        found += trained(side, model, optimizer, steps=1, first=step)
        model.eval()
        with torch.no_grad():
            found.append(loss_of(model, side.rank, 50 + step))
        model.train()
    return found, state_of(model)


def some_unused(side: Side) -> Any:
    model = seeded()
    model.layers[0].extra = nn.Linear(3, 3)
    model = side.shard(model)
    loss_of(model, side.rank, 0).backward()
    return {
        name: None if parameter.grad is None else True
        for name, parameter in model.named_parameters()
        if "extra" in name
    }


def mixed(side: Side) -> Any:
    found = []
    policies = [
        side.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        side.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    ]
    if torch.__version__ < "2.15":
        # From then on FSDP2's reductions in the gradients' own bfloat16 have other last bits than before; ours have not.
        policies.append(side.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for policy in policies:
        model = side.shard(seeded(), mp_policy=policy)
        losses = trained(side, model, adamw(model))
        dtypes = [parameter.dtype for parameter in model.parameters()]
        found.append((losses, dtypes, model(both.batch(side.rank, 0)[0]).dtype, state_of(model)))
    return found


def mixed_by_module(side: Side) -> Any:
    """The root has no parameters and casts; an inner module returns fp32; a block casts no inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    low = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    side.fully_shard(model[0], mp_policy=low)
    side.fully_shard(model[1][0], mp_policy=side.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    # This one has no parameters left.
    side.fully_shard(model[1], mp_policy=side.MixedPrecisionPolicy(param_dtype=torch.float32))
    side.fully_shard(
        model[2], mp_policy=side.MixedPrecisionPolicy(output_dtype=torch.float16, cast_forward_inputs=False)
    )
    side.fully_shard(model, mp_policy=low)
    seen = []
    for module in (model[0], model[1], model[1][0], model[2]):
        module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(side.rank), dtype=torch.float64)
    try:
        model(x).float().square().sum().backward()
    except RuntimeError as error:
        seen.append(str(error))
    return seen


def mixed_accumulating(side: Side) -> Any:
    policy = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = side.shard(seeded(), mp_policy=policy)
    optimizer, losses = adamw(model), []
    for step in range(both.STEPS):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss = loss_of(model, side.rank, 10 * step + part)
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def clipped(side: Side) -> Any:
    """With torch's function, as in torch's example; and by a norm of another order."""
    model = side.shard(seeded())
    found = trained(side, model, adamw(model), clip=0.1)
    loss_of(model, side.rank, 0).backward()
    found.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))))
    some = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    found.append(full(torch.nn.utils.clip_grad_norm_(some, 0.01, norm_type=1.0)))
    return found, state_of(model)


def saved_with_torchs_function(side: Side) -> Any:
    """The sharded state dict has torch's form: the type, the placements, and this rank's chunk."""
    model = side.shard(seeded())
    return {
        name: (type(value), str(value.placements), value.to_local().detach().clone(), tuple(value.shape))
        for name, value in model.state_dict().items()
    }


def checkpointed(side: Side) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = seeded()
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
    model = side.shard(model)
    return trained(side, model, adamw(model)), state_of(model)


def other_method(side: Side) -> Any:
    class WithMethod(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    torch.manual_seed(0)
    model = side.fully_shard(WithMethod(4, 4))
    side.register_fsdp_forward_method(model, "encode")
    plain = nn.Linear(2, 2)
    side.register_fsdp_forward_method(plain, "forward")
    model.encode(torch.ones(2, 4) + side.rank).sum().backward()
    return [full(parameter.grad) for parameter in model.parameters()] if side.name != "ours" else gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    """The full gradients of a model of ours."""
    from flatparam_runtime import summon_full_params

    with summon_full_params(model, with_grads=True):
        return [parameter.grad.detach().clone() for parameter in model.parameters()]


def stepping_in_backward(side: Side) -> Any:
    """Each parameter is stepped by a hook, as soon as its gradient is there."""
    model = side.shard(seeded())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    seen = set()

    def step(parameter: nn.Parameter) -> None:
        seen.add(parameter)
        assert parameter.grad is not None
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for number in range(both.STEPS):
        loss = loss_of(model, side.rank, number)
        loss.backward()
        losses.append(loss.detach().clone())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert seen == {parameter for parameter in model.parameters() if part_of(parameter).numel()}
    return losses, state_of(model)


def part_of(parameter: Any) -> Tensor:
    """This rank's part of a parameter."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def of_a_tied_list(side: Side) -> Any:
    """Torch needs the modules that share a parameter in one list."""
    model = seeded(tied=True)
    for layer in model.layers:
        side.fully_shard(layer)
    side.fully_shard([model.embedding, model.head])
    side.fully_shard(model)
    return trained(side, model, adamw(model)), state_of(model)


def used_again(side: Side) -> Any:
    """A block runs three times in a pass, and the model twice before a backward pass, which runs twice."""
    model = side.shard(seeded(), reshard_after_forward=False)
    model.layers[1] = model.layers[2] = model.layers[0]
    optimizer, losses = adamw(model), []
    for step in range(both.STEPS):
        loss = loss_of(model, side.rank, step) + loss_of(model, side.rank, 10 + step)
        loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def unfrozen(side: Side) -> Any:
    """A block is trained from the third step on, and another no longer."""
    model = seeded()
    model.layers[0].requires_grad_(False)
    side.shard(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(both.STEPS):
        if step == 2:
            model.layers[0].requires_grad_(True)
            model.layers[1].requires_grad_(False)
        loss = loss_of(model, side.rank, step)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def made_before(side: Side) -> Any:
    """Adagrad makes its state of the whole parameters; then it is given the sharded ones, as accelerate does it."""
    model = seeded()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    side.shard(model)
    parameters = iter(model.parameters())
    for group in optimizer.param_groups:
        group["params"] = [next(parameters) for _ in group["params"]]
    return trained(side, model, optimizer), state_of(model)


def in_a_container(side: Side) -> Any:
    """The state of a module that is not sharded has that of a model inside under the names of the model there."""
    outer = nn.ModuleDict({"model": side.shard(seeded()), "other": nn.Linear(2, 2)})
    state = {name: full(value) for name, value in outer.state_dict().items() if name.startswith("model.")}
    return list(outer.state_dict()), state


#: Those that torch's FSDP2 cannot step, and those that look at whole matrices, are refused or tested elsewhere.
OPTIMIZERS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"centered": True}),
)


def optimized(side: Side) -> Any:
    """Optimizers of all kinds: what they return, and the state that they show for each parameter."""
    return stepped(side, OPTIMIZERS)


def optimized_by_some(side: Side) -> Any:
    """The same for three of them."""
    return stepped(side, OPTIMIZERS[::4])


def stepped(side: Side, optimizers: Sequence[tuple[Any, dict[str, Any]]]) -> Any:
    """What these return, and the state that they show."""
    found = []
    for kind, settings in optimizers:
        model = side.shard(seeded())
        optimizer = kind(model.parameters(), **settings)
        losses = trained(side, model, optimizer)
        states = [
            {name: (type(value).__name__, full(value)) for name, value in optimizer.state[parameter].items()}
            for parameter in model.parameters()
        ]
        found.append((losses, states, list(optimizer.state_dict()["state"])))
    return found


def shown(side: Side) -> Any:
    """What programs read of parameters and gradients, and change in them."""
    model, found = side.shard(seeded()), []
    loss_of(model, side.rank, 0).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        with torch.no_grad():
            gradient.mul_(2.0)
            parameter.add_(gradient, alpha=-0.1)
            found.append((parameter**2).sum().full_tensor())
        parameter.grad = gradient.clone()
        facts = (tuple(parameter.shape), parameter.numel(), parameter.stride(), str(parameter.placements))
        found.append((name, *facts, isinstance(parameter, nn.Parameter), parameter.is_leaf))
        found += [full(parameter), full(parameter.grad), parameter.to_local().clone(), parameter.dtype]
        found += [isinstance(parameter, DTensor), isinstance(gradient, DTensor), parameter.requires_grad]
        found += [
            full(copy.deepcopy(parameter)),
            full(copy.deepcopy(parameter).grad),
            full(parameter.detach()),
            str(parameter.device_mesh.shape),
        ]
    model.zero_grad()
    found += [parameter.grad for parameter in model.parameters()]
    return found, trained(side, model, adamw(model)), state_of(model)


class Branches(nn.Module):
    """A model with several outputs: those of all its blocks, side by side on one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, both.WIDTH)
        self.layers = nn.ModuleList(both.Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.embedding(tokens)
        return [layer(x) for layer in self.layers]


def apart(side: Side) -> Any:
    """The losses of several outputs, each in a backward pass of its own, after one forward pass."""
    torch.manual_seed(0)
    model = side.shard(Branches())
    optimizer = adamw(model)
    facts = []
    for step in range(both.STEPS):
        outputs = model(both.batch(side.rank, step)[0])
        for number, output in enumerate(outputs):
            loss = output.square().mean()
            loss.backward(retain_graph=number < len(outputs) - 1)
            facts.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return facts, state_of(model)


def beside_replicate(side: Side) -> Any:
    """`replicate` averages the gradients of what `fully_shard` leaves to it: around a sharded module, and inside one."""
    model = seeded()
    replicate(model.layers[0])
    for module in (*model.layers[1:], model):
        side.fully_shard(module)
    sharded = side.fully_shard(seeded().layers[0])
    around = nn.Sequential(sharded, seeded().layers[1])
    replicate(around)
    x = torch.ones(2, both.WIDTH) * (1 + side.rank)
    for _ in range(2):
        around(x).square().sum().backward()
    found = [full(p.grad) for p in around[1].parameters()]
    return trained(side, model, torch.optim.SGD(model.parameters(), lr=0.1)), found


def converted_inside(side: Side) -> Any:
    """Modules inside a sharded one are converted, or given new memory and values, before the first pass."""
    model = seeded()
    model.layers[1].requires_grad_(False)
    side.shard(model)
    called: list[Any] = []
    if side.name != "ours":
        model.head.weight.register_post_accumulate_grad_hook(lambda found: called.append(full(found.grad)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for inner in (model.layers[0].up, model.layers[1], model.head):
        inner.to(torch.float64).to(torch.float32)
    if side.name != "ours":
        model.embedding.to_empty(device="cpu")
        nn.init.constant_(model.embedding.weight, 0.5)
    else:
        full_values = torch.full((17, both.WIDTH), 0.5)
        model.load_state_dict({**model.state_dict(), "embedding.weight": full_values})
    trains = [p.requires_grad for p in model.parameters()]
    losses = trained(side, model, optimizer)
    assert side.name == "ours" or len(called) == both.STEPS
    return trains, losses, state_of(model)


def converted_between(side: Side) -> Any:
    """The same between a backward pass and the step; FSDP2 goes on with old values, so there is no torch."""
    if side.name == "torch":
        return None
    model = side.shard(seeded())
    optimizer, losses = adamw(model), []
    for step in range(both.STEPS):
        losses.append(trained_once(side, model, step))
        for inner in (model.layers[0].up, model.head):
            inner.to(torch.float64).to(torch.float32)
        optimizer.step()
        model.layers[2].to(torch.float64).to(torch.float32)
        optimizer.zero_grad()
    unchanged = side.shard(seeded())
    return losses, trained(side, unchanged, adamw(unchanged)), state_of(model), state_of(unchanged)


def by_private_state(side: Side) -> Any:
    """What verl and fairseq2 read and set in FSDP2's state of a module, between trained steps."""
    mixed = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, found = side.shard(seeded(), mp_policy=mixed), []
    if side.name == "ours":
        model.set_reshard_after_forward(False)
        return [None, None], [torch.bfloat16, torch.float32, True], trained(side, model, adamw(model)), state_of(model)
    for module in (model, *model.layers):
        state = module._get_fsdp_state()
        state._auto_reshard_after_forward = False
        state._lazy_init()
        group = state._fsdp_param_group
        group.unshard()
        group.reshard()
        assert group.mesh_info.shard_mesh_size == 2
        group.post_forward_mesh_info = None
        found.append(group.post_forward_mesh_info)
    policy = side.fully_shard.state(model)._mp_policy
    facts = [policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs]
    return found[:2], facts, trained(side, model, adamw(model)), state_of(model)


def generating(side: Side) -> Any:
    """As fairseq2 generates: full parameters, each replaced by a cast copy, until they are resharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    side.fully_shard(model[0])
    side.fully_shard(model)
    found = []
    for _ in range(2):
        for module in (model, model[0]):
            module.unshard()
        for module in model:
            module.weight = nn.Parameter(module.weight.detach().to(torch.float32))
        with torch.no_grad():
            found.append(model(torch.ones(1, 4)))
        for module in (model, model[0]):
            module.reshard()
        found.append(trained_here(model, side.rank))
    return found, state_of(model)


def trained_here(model: nn.Module, rank: int) -> Tensor:
    """Step once by hand, and return the loss."""
    loss = model(torch.ones(2, 4) * (rank + 1)).square().mean()
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def replaced_by_plain(ranks: Collectives) -> tuple[bool, bool, Tensor]:
    """What the door shows after a plain parameter was put in a place: the face that an optimizer holds, by its values."""
    side = Side("door", ranks.rank)
    torch.manual_seed(0)
    model = side.fully_shard(nn.Linear(4, 4))
    face, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=0.1)
    model.unshard(async_op=True)
    model.weight = nn.Parameter(torch.full((4, 4), 0.5))
    model.reshard()
    loss = trained_here(model, ranks.rank)
    return model.weight is face, optimizer.param_groups[0]["params"][0] is model.weight, loss


def test_plain_parameters_in_the_places_of_faces() -> None:
    """A plain parameter gives its values to the `DTensor` that stays, also while full parameters are on their way."""
    found = run_processes(2, replaced_by_plain)
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    nn.init.constant_(reference.weight, 0.5)
    losses = [reference(torch.ones(2, 4) * (rank + 1)).square().mean() for rank in range(2)]
    for (is_face, is_held, loss), expected in zip(found, losses, strict=True):
        assert is_face
        assert is_held
        assert_same(loss, expected.detach())


def set_alike(side: Side) -> Any:
    """Ranks that begin with different weights, and then set all of them: nothing is left to warn of."""
    torch.manual_seed(side.rank)
    model = side.fully_shard(nn.Linear(4, 4))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return trained_here(model, side.rank), state_of(model)


PROGRAMS = [
    example,
    converted_inside,
    by_private_state,
    generating,
    set_alike,
    apart,
    beside_replicate,
    stepping_in_backward,
    of_a_tied_list,
    used_again,
    unfrozen,
    in_a_container,
    made_before,
    keeping,
    of_one_unit,
    without_root,
    of_a_list,
    tied,
    frozen,
    ignored,
    accumulating,
    accumulating_reduced,
    divided,
    prefetching,
    not_unsharded_in_backward,
    offloaded,
    resharding,
    evaluating,
    some_unused,
    mixed,
    saved_with_torchs_function,
    mixed_by_module,
    mixed_accumulating,
    checkpointed,
    other_method,
]


@pytest.fixture(scope="module")
def results() -> list[dict[str, tuple[Any, Any, Any]]]:
    """What each program returns on each of two ranks, with torch's library, with ours, and at its door."""
    return run_processes(2, both.run_both, PROGRAMS)


@pytest.mark.parametrize("side", [1, 2], ids=["plain", "door"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_bits(program: Callable[[Side], Any], side: int, results: list[dict[str, tuple[Any, Any, Any]]]) -> None:
    """In fp32 and bf16 on two CPU ranks, every loss, shape and dtype and the final state are FSDP2's, bit for bit."""
    _check_same(results, program, side)


def _check_same(results: list[dict[str, Any]], program: Callable[[Side], Any], side: int) -> None:
    for rank, of_rank in enumerate(results):
        theirs, ours = of_rank[program.__name__][0], of_rank[program.__name__][side]
        for found in (theirs, ours):
            assert not isinstance(found, Failed), found.traceback
        assert_same(ours, theirs, f"{program.__name__}, rank {rank}")


def test_conversions_between_passes() -> None:
    """What is converted between a pass and the step, there and back, is stepped as if nothing had happened."""
    for of_rank in run_processes(2, both.run_both, [converted_between]):
        for found in of_rank["converted_between"][1:]:
            assert not isinstance(found, Failed), found.traceback
            losses, expected, state, expected_state = found
            assert_same(losses, expected)
            assert_same(state, expected_state)


def test_clipping_differs_in_rounding_only() -> None:
    """Clipping by torch's function gives FSDP2's norm of all ranks, but for the order of the sum of squares.

    FSDP2 adds up the squares of each parameter over the chunks of its first dimension; we those of a rank's flat shard.
    """
    for of_rank in run_processes(2, both.run_both, [clipped]):
        theirs, ours, _ = of_rank["clipped"]
        for found in (theirs, ours):
            assert not isinstance(found, Failed), found.traceback
        for mine, expected in zip(ours[0], theirs[0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=2e-6, atol=0)
        for name, expected in theirs[1].items():
            torch.testing.assert_close(ours[1][name], expected, rtol=1e-4, atol=1e-6)


def hybrid(side: Side) -> Any:
    model = side.shard(seeded(), mesh=both.mesh(2, 2))
    return trained(side, model, torch.optim.SGD(model.parameters(), lr=0.1)), state_of(model)


def hybrid_accumulating(side: Side) -> Any:
    model = side.shard(seeded(), mesh=both.mesh(2, 2))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(both.STEPS):
        for part in range(2):
            model.set_requires_all_reduce(part == 1)
            loss = loss_of(model, side.rank, 10 * step + part)
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses, state_of(model)


def to_two_ranks(side: Side) -> Any:
    """Resharded to two ranks: in fp32 and bf16, with frozen weights, and with gradients of two passes added up."""
    mixed = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = side.shard(seeded(), reshard_after_forward=2, mp_policy=mixed)
    found = [trained(side, model, adamw(model))]
    model = seeded()
    model.layers[1].requires_grad_(False)
    side.shard(model, reshard_after_forward=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(both.STEPS):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            found.append(trained_once(side, model, 10 * step + part))
        optimizer.step()
        optimizer.zero_grad()
    return found, state_of(model)


def to_two_ranks_between_others(side: Side) -> Any:
    """Two passes before each backward pass, and an evaluation after it."""
    model = side.shard(seeded(), reshard_after_forward=2)
    optimizer, found = adamw(model), []
    for step in range(both.STEPS):
        loss = loss_of(model, side.rank, step) + loss_of(model, side.rank, 10 + step)
        loss.backward()
        found.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model, side.rank, 50 + step))
    return found, state_of(model)


def trained_once(side: Side, model: nn.Module, step: int) -> Tensor:
    """Compute the gradients of one step, and return its loss."""
    loss = loss_of(model, side.rank, step)
    loss.backward()
    return loss.detach().clone()


def test_four_ranks() -> None:
    """Four ranks get FSDP2's bits: copies across shard groups, and full parameters kept by two of four ranks.

    Sums of plain parameters over more than two ranks have an order of their own.
    """
    programs = [hybrid, hybrid_accumulating, to_two_ranks, to_two_ranks_between_others]
    found = run_processes(4, both.run_both, programs)
    for program in programs:
        for side in (1, 2) if program in (hybrid, hybrid_accumulating) else (2,):
            _check_same(found, program, side)


@pytest.mark.parametrize(
    ("world_size", "stepping"),
    [
        (2, optimized_by_some),
        *(pytest.param(size, optimized, marks=pytest.mark.long) for size in (1, 2, 3, 4)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_door_is_fsdp2(world_size: int, stepping: Callable[[Side], Any]) -> None:
    """On any number of ranks, uneven rows too, programs see FSDP2's tensors, norms and optimizer states, bit for bit."""
    programs = [example, clipped, stepping, mixed, frozen, accumulating, shown]
    found = run_processes(world_size, both.run_both, programs)
    for program in programs:
        _check_same(found, program, 2)


def test_every_optimizer_is_known() -> None:
    """Each class of torch.optim is stepped beside FSDP2, or is one of those that cannot be: a new one is seen here."""
    kinds = {
        each for each in vars(torch.optim).values() if isinstance(each, type) and each is not torch.optim.Optimizer
    }
    kinds = {each for each in kinds if issubclass(each, torch.optim.Optimizer)}
    # Torch's FSDP2 raises in a step of the first two, and sparse gradients are not sharded; the others are refused.
    apart = {"LBFGS", "Rprop", "SparseAdam", "Adafactor", "Muon"}
    assert {each.__name__ for each in kinds} == {each.__name__ for each, _ in OPTIMIZERS} | apart
