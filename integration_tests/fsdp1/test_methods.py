"""The methods of a wrapper, with every argument, of a root and of a unit below."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from integration_tests.fsdp1.asking import Library, alike, unlike
from integration_tests.fsdp1.subjects import Normed, batch, blocks, full, rank, seeded

BOTH = [False, True]


def model_of(library: Library, originals: bool = False, **arguments: Any) -> Any:
    """The net with its blocks as units."""
    return library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals, **arguments)


# check_is_root


@alike(ran=BOTH)
def test_check_is_root(library: Library, ran: bool) -> Any:
    """Of a root, and once that is known of a unit below."""
    model = model_of(library)
    if ran:
        model(batch())
    return [model.check_is_root(), model.blocks[0].check_is_root(), model.check_is_root()]


# apply


@alike(ranks=2, originals=BOTH)
def test_apply(library: Library, originals: bool) -> Any:
    """The function is called with every module inside, innermost first, and then the wrapper, with full parameters."""
    model = model_of(library, originals)
    called = []

    def fill(module: nn.Module) -> None:
        called.append((type(module).__name__, getattr(module, "training_state", None)))
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(0.5 + module.in_features)
                called.append(tuple(module.weight.shape))

    returned = model.apply(fill) is model
    ran = model(batch())
    return [returned, called, ran, full(library, model)]


@unlike("`summon_full_params()` takes every combination of its arguments", ours=[True, [3.0, 3.0]])
def test_apply_while_summoned(library: Library) -> Any:
    """FSDP1 refuses it."""
    model = library.shard(seeded(lambda: nn.Linear(3, 2)))

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.fill_(3.0)

    with library.FSDP.summon_full_params(model):
        returned = model.apply(fill) is model
    with library.FSDP.summon_full_params(model):
        return [returned, model.module.bias.tolist()]


@alike(ranks=2)
def test_apply_on_a_unit_below(library: Library) -> Any:
    """It changes that unit, and the root is the root as before."""
    model = model_of(library)
    model.blocks[0].apply(lambda module: None)
    model.blocks[1].apply(lambda module: module.weight.data.zero_() if isinstance(module, nn.Linear) else None)
    return [model.check_is_root(), model.blocks[1].check_is_root(), full(library, model)]


# forward


class Flexible(nn.Module):
    """A module that takes and returns anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, *args: Any, scale: Any = None, **others: Any) -> Any:
        """What came, and what was computed."""
        y = self.layer(args[0] if args else others["x"])
        if scale is not None:
            y = y * scale
        return {"y": y, "n": len(args), "others": sorted(others), "t": (y.sum(), None, "word")}


@alike(ranks=2, how=["position", "name", "both", "nested"])
def test_forward(library: Library, how: str) -> Any:
    """Arguments by position and name, outputs of any structure."""
    model = library.shard(seeded(Flexible))
    x = batch()
    given = {
        "position": lambda: model(x, 1, None),
        "name": lambda: model(x=x, why=2),
        "both": lambda: model(x, scale=2.0, why=[x]),
        "nested": lambda: model.forward(x, {"a": x}, [x, (x,)]),
    }[how]()
    given["y"].sum().backward()
    return [given, type(given["t"])]


@alike(ranks=2, kind=["list", "tuple", "dict", "dataclass"])
def test_inputs_are_cast(library: Library, kind: str) -> Any:
    """With mixed precision floating-point inputs of the root are cast, wherever they are; others are not."""
    seen: list[Any] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
            items = more.values() if isinstance(more, dict) else more
            seen.extend(item.dtype for item in items)
            return self.layer(x)

    model = library.shard(seeded(Watching), mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16))
    items = [batch(), torch.ones(2, dtype=torch.int64), batch().double(), torch.ones(1, dtype=torch.bool)]
    more = {"list": items, "tuple": tuple(items), "dict": dict(enumerate(items))}.get(kind, items)
    y = model(batch(), more=more)
    return [seen, y.dtype]


# no_sync


@alike(ranks=2, originals=BOTH, strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_no_sync(library: Library, originals: bool, strategy: str) -> Any:
    """Gradients of passes inside are reduced with the first pass outside; the context gives nothing."""
    model = model_of(library, originals, sharding_strategy=library.ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        with model.no_sync() as entered:
            model(batch(10 * step + rank())).square().mean().backward()
        model(batch(10 * step + 5 + rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [entered, full(library, model)]


@unlike(
    "`no_sync()`, `clip_grad_norm_()` and `register_comm_hook()` work on any wrapper",
    ranks=2,
    ours=None,
    method=["no_sync", "clip_grad_norm_", "register_comm_hook"],
)
def test_below_the_root(library: Library, method: str) -> Any:
    """FSDP1 refuses them on a unit below the root."""
    model = model_of(library)
    model(batch()).sum().backward()
    below = model.blocks[0]
    if method == "no_sync":
        with below.no_sync():
            pass
    elif method == "clip_grad_norm_":
        below.clip_grad_norm_(1.0)
    else:
        below.register_comm_hook(None, lambda state, gradient, shard: None)


# clip_grad_norm_


@alike(ranks=2, how=["FULL_SHARD", "NO_SHARD"])
def test_clip_grad_norm(library: Library, how: str) -> Any:
    """Numbers whole and not, the infinity norm as a word: the norm, its dtype and shape, and the gradients."""
    model = model_of(library, sharding_strategy=library.ShardingStrategy[how])
    found = []
    cases = ((0.1, 1), (2, 2), (0.1, 2.0), (1e6, 1.5), (1e6, 3), (1e6, 3.5), (0.01, "inf"), (0, math.inf))
    for max_norm, norm_type in cases:
        model.zero_grad()
        model(batch(rank())).square().mean().backward()
        norm = model.clip_grad_norm_(max_norm, norm_type)
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([max_norm, norm_type, norm, norm.requires_grad, gradients])
    return found


@alike(ranks=2, originals=BOTH)
def test_clip_by_name(library: Library, originals: bool) -> Any:
    """Both arguments by name; the second one's default. The last bit of a norm depends on where the gradients lie."""
    model = model_of(library, originals)
    model(batch(rank())).square().mean().backward()
    first = model.clip_grad_norm_(max_norm=0.5)
    norms = [first, model.clip_grad_norm_(max_norm=0.25, norm_type=2.0), model.clip_grad_norm_(0.25)]
    return [f"{norm.item():.5g}" for norm in norms]


@alike(ranks=2, how=["keep", "upcast", "partly"])
def test_the_dtype_of_a_norm(library: Library, how: str) -> Any:
    """The widest that the gradients have."""
    precision = library.MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=how != "upcast")
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    if how == "partly":
        module[0] = library.shard(module[0])
    model = library.shard(module, mixed_precision=precision)
    x = batch()
    if how == "partly":
        model.module[0].register_forward_hook(lambda module, args, y: y.bfloat16())
        model.register_forward_pre_hook(lambda module, args: args)
    try:
        model(x).float().square().mean().backward()
    except RuntimeError:
        return "dtypes"
    return model.clip_grad_norm_(1e6).dtype


# register_comm_hook


@alike(ranks=2, strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_register_comm_hook(library: Library, strategy: str) -> Any:
    """The hook gets the state and the flat gradient, and a place for this rank's part where there are parts."""
    called = []

    def hook(state: Any, gradient: torch.Tensor, *shard: torch.Tensor) -> None:
        called.append((state, gradient.dim(), str(gradient.dtype), len(shard), [each.dim() for each in shard]))
        for each in shard:
            each.fill_(2.0)
        if not shard:
            gradient.fill_(2.0)

    model = library.shard(
        seeded(lambda: nn.Linear(3, 4, bias=False)), sharding_strategy=library.ShardingStrategy[strategy]
    )
    returned = model.register_comm_hook("state", hook)
    model(batch()).sum().backward()
    return [returned, called, [parameter.grad for parameter in model.parameters()]]


@alike()
def test_what_is_no_hook(library: Library) -> Any:
    """What cannot be called is a ValueError."""
    library.shard(nn.Linear(2, 2)).register_comm_hook(None, "a word")


# train, eval, zero_grad, requires_grad_, to, half, ...


@alike(ranks=2, originals=BOTH)
def test_modes(library: Library, originals: bool) -> Any:
    """`train` and `eval` reach all that is inside and return the wrapper."""
    model = library.shard(seeded(Normed), use_orig_params=originals)
    told = []
    for switch in (model.eval, model.train, lambda: model.train(False), lambda: model.train(mode=True)):
        told.append([switch() is model, [module.training for module in model.modules()]])
    return told


@alike(ranks=2, originals=BOTH, to_none=BOTH)
def test_zero_grad(library: Library, originals: bool, to_none: bool) -> Any:
    """Gradients are gone, or zero."""
    model = model_of(library, originals)
    model(batch()).sum().backward()
    model.zero_grad(set_to_none=to_none)
    first = [parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()]
    model(batch()).sum().backward()
    return [first, all(p.grad is not None or p.numel() == 0 or originals for p in model.parameters())]


@alike(ranks=2, originals=BOTH, how=["double", "to_double", "half_cast_back", "float", "cpu", "to_cpu"])
def test_moving_and_casting(library: Library, originals: bool, how: str) -> Any:
    """They return the wrapper and change all that floats in it."""
    model = model_of(library, originals)
    if how == "half_cast_back":
        returned = model.bfloat16().float()
    else:
        returned = {
            "double": model.double,
            "to_double": lambda: model.to(torch.float64),
            "float": model.float,
            "cpu": model.cpu,
            "to_cpu": lambda: model.to("cpu", non_blocking=True),
        }[how]()
    y = model(batch().to(next(model.parameters()).dtype))
    y.sum().backward()
    dtypes = [str(each.dtype) for each in (*model.parameters(), *model.buffers(), y)]
    return [returned is model, dtypes, y, full(library, model)]


@alike(ranks=2, originals=BOTH)
def test_frozen_after_wrapping(library: Library, originals: bool) -> Any:
    """`requires_grad_` of the whole model, there and back."""
    model = model_of(library, originals)
    frozen = model.requires_grad_(False) is model
    first = [parameter.requires_grad for parameter in model.parameters()]
    returned = model.requires_grad_(requires_grad=True) is model
    y = model(batch())
    y.sum().backward()
    return [frozen, first, returned, y.requires_grad, full(library, model)]


# __getitem__, iteration, len


@alike(where=["Sequential", "nested", "with_units"])
def test_indexing(library: Library, where: str) -> Any:
    """Items of a sequence: by number, from the end, a slice."""
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    policy = library.ModuleWrapPolicy({nn.Linear}) if where == "with_units" else None
    model = library.shard(module, auto_wrap_policy=policy)
    if where == "nested":
        model = library.shard(nn.Sequential(model))[0]
    kinds = [type(model[0]), type(model[-1]), type(model[1:]), len(model[1:])]
    return [kinds, model[0] is module[0], model[2] is module[2]]


@alike(index=[7, "name"])
def test_an_item_that_is_not_there(library: Library, index: Any) -> Any:
    """The error is the sequence's."""
    return library.shard(nn.Sequential(nn.Linear(2, 2)))[index]


# state_dict, load_state_dict


@alike(ranks=2, originals=BOTH, how=["plain", "prefix", "destination", "by_position", "keep_vars"])
def test_state_dict(library: Library, originals: bool, how: str) -> Any:
    """Prefix, destination and `keep_vars`, by name and by position: names, values, the object that is returned."""
    model = model_of(library, originals)
    into: dict[str, Any] = {"there": torch.ones(1)}
    state = {
        "plain": lambda: model.state_dict(),
        "prefix": lambda: model.state_dict(prefix="model."),
        "destination": lambda: model.state_dict(destination=into, prefix="model."),
        "by_position": lambda: model.state_dict(into, "m.", False),
        "keep_vars": lambda: model.state_dict(keep_vars=True),
    }[how]()
    grads = {name: value.requires_grad for name, value in state.items()} if how != "keep_vars" else None
    return [list(state), state, state is into, grads, type(state)]


@alike(ranks=2, originals=BOTH, below=BOTH)
def test_load_state_dict(library: Library, originals: bool, below: bool) -> Any:
    """A state is loaded, what is returned lists nothing; of a unit below as of the root."""
    model = model_of(library, originals)
    model(batch())
    target = model.blocks[1] if below else model
    state = {name: value * 2 for name, value in target.state_dict().items()}
    loaded = target.load_state_dict(state)
    named = target.load_state_dict(state_dict=state, strict=True)
    return [loaded.missing_keys, loaded.unexpected_keys, repr(named), type(loaded), full(library, model)]


@alike(ranks=2, originals=BOTH, wrong=["missing", "unexpected", "both", "shape", "type"], strict=BOTH)
def test_a_state_that_does_not_fit(library: Library, originals: bool, wrong: str, strict: bool) -> Any:
    """Missing and unexpected names are an error where it is strict and are listed where it is not."""
    model = model_of(library, originals)
    state = dict(model.state_dict())
    if wrong in ("missing", "both"):
        del state["blocks.0.up.weight"]
    if wrong in ("unexpected", "both"):
        state["blocks.0.other"] = torch.ones(1)
    if wrong == "shape":
        state["head.weight"] = torch.ones(3, 3)
    if wrong == "type":
        state["head.weight"] = [1.0]
    loaded = model.load_state_dict(state, strict=strict)
    return [loaded.missing_keys, loaded.unexpected_keys]


@alike(ranks=2, originals=BOTH)
def test_a_state_in_a_parent(library: Library, originals: bool) -> Any:
    """A plain module around the wrapper saves and loads it under its own name."""
    parent = nn.ModuleDict({"model": model_of(library, originals), "head": seeded(lambda: nn.Linear(2, 2))})
    state = parent.state_dict()
    loaded = parent.load_state_dict({name: value + 1 for name, value in state.items()})
    return [list(state), repr(loaded), parent.state_dict()]
