"""Every attribute without an underscore that FSDP1's objects have is here, with the same value."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from integration_tests.fsdp1.asking import Library, alike, plain, unlike
from integration_tests.fsdp1.subjects import Net, batch, blocks, seeded

BOTH = [False, True]


def public(value: Any, *without: Any) -> list[str]:
    """The names of its attributes, but for those with an underscore and those that each of `without` has."""
    known = {name for each in without for name in dir(each)}
    return sorted(name for name in dir(value) if not name.startswith("_") and name not in known)


def names_of_fsdp1s(originals: bool) -> list[str]:
    """The public attributes of one of torch's wrappers, after a step, beyond those of a module and of methods' names."""
    model = torch.distributed.fsdp.FullyShardedDataParallel(
        nn.Linear(3, 2), device_id=torch.device("cpu"), use_orig_params=originals
    )
    model(batch()).sum().backward()
    return public(model, nn.Linear(3, 2))


def attributes(wrapper: Any, names: list[str]) -> dict[str, Any]:
    """Their values; of a method that it is one."""
    found = {}
    for name in names:
        value = getattr(wrapper, name, "missing")
        found[name] = "callable" if callable(value) and not isinstance(value, nn.Module) else value
    return found


SETTINGS: dict[str, Any] = {
    "default": lambda library: {},
    "grad_op": lambda library: {"sharding_strategy": library.ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": lambda library: {"sharding_strategy": library.ShardingStrategy.NO_SHARD},
    "post": lambda library: {
        "backward_prefetch": library.BackwardPrefetch.BACKWARD_POST,
        "forward_prefetch": True,
    },
    "never": lambda library: {"backward_prefetch": None, "limit_all_gathers": False},
    "bf16": lambda library: {"mixed_precision": library.MixedPrecision(torch.bfloat16, None, torch.float32)},
    "offload": lambda library: {"cpu_offload": library.CPUOffload(False)},
}


@alike(ranks=2, setting=list(SETTINGS), originals=BOTH)
def test_attributes_of_wrappers(library: Library, setting: str, originals: bool) -> Any:
    """All that torch's wrapper has, of a root and of units below, before and after a step."""
    names = [name for name in names_of_fsdp1s(originals) if name != "params"]
    model = library.shard(
        seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals, **SETTINGS[setting](library)
    )
    wrappers = library.FSDP.fsdp_modules(model)
    before = [attributes(wrapper, names) for wrapper in wrappers]
    model(batch()).sum().backward()
    return [names, before, [attributes(wrapper, names) for wrapper in wrappers]]


@alike(ranks=2, originals=BOTH)
def test_params(library: Library, originals: bool) -> Any:
    """`params` holds the flat parameters of the wrapper, each a part of this rank's; an empty list where there are none."""
    model = library.shard(
        seeded(lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False))),
        auto_wrap_policy=library.ModuleWrapPolicy({nn.Linear}),
        use_orig_params=originals,
    )
    wrappers = library.FSDP.fsdp_modules(model)
    flat = [parameter for wrapper in wrappers for parameter in wrapper.params]
    kinds = [(type(p).__name__, isinstance(p, library.FlatParameter), isinstance(p, nn.Parameter)) for p in flat]
    listed = [any(p is each for each in model.parameters()) for p in flat]
    return [
        [len(wrapper.params) for wrapper in wrappers],
        [tuple(p.shape) for p in flat],
        kinds[0][1:],
        listed,
    ]


@alike(ranks=2, when=["None", "BACKWARD_PRE", "BACKWARD_POST"], originals=BOTH)
def test_settings_that_are_changed(library: Library, when: str, originals: bool) -> Any:
    """The prefetch settings can be set later, and then tell what they were set to; training goes on to the same values."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals)
    for wrapper in library.FSDP.fsdp_modules(model):
        wrapper.backward_prefetch = None if when == "None" else library.BackwardPrefetch[when]
        wrapper.forward_prefetch = True
        wrapper.limit_all_gathers = False
    losses = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses.append(loss)
    told = [
        (wrapper.backward_prefetch, wrapper.forward_prefetch, wrapper.limit_all_gathers)
        for wrapper in library.FSDP.fsdp_modules(model)
    ]
    return told, losses


@alike()
def test_attributes_of_the_module(library: Library) -> Any:
    """What the wrapper has not is the module's: attributes, methods, classes' attributes; what nobody has is an error."""
    model = library.shard(seeded())
    return [
        model.note,
        model.greeting(),
        model.greeting(name="me"),
        type(model.blocks),
        model.head.out_features,
        hasattr(model, "nothing"),
        getattr(model, "nothing", "else"),
        model.training,
        model.module is model._fsdp_wrapped_module,
        isinstance(model, library.FSDP),
        isinstance(model.module, Net),
    ]


@alike()
def test_attributes_that_are_set(library: Library) -> Any:
    """Attributes are set on the wrapper, not on the module; what is set there is read there."""
    model = library.shard(seeded())
    model.note = "mine"
    model.extra = 3
    return [model.note, model.module.note, model.extra, hasattr(model.module, "extra"), model.greeting()]


@alike()
def test_an_attribute_that_nobody_has(library: Library) -> Any:
    """It is an AttributeError."""
    return library.shard(seeded()).nothing


@alike(originals=BOTH, policy=BOTH)
def test_how_it_is_shown(library: Library, originals: bool, policy: bool) -> Any:
    """`repr` of the wrapper."""
    return repr(
        library.shard(seeded(), auto_wrap_policy=blocks(library) if policy else None, use_orig_params=originals)
    )


def quiet_hook(state: Any, full: torch.Tensor, shard: torch.Tensor) -> None:
    """A hook in the place of the reduction."""
    shard.fill_(1.0)


@alike(ranks=2)
def test_settings_with_an_underscore(library: Library) -> Any:
    """What programs read of the wrappers' settings: synchronisation, communication hooks, the form of the state."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    wrappers = library.FullyShardedDataParallel.fsdp_modules(model)

    def settings() -> list[Any]:
        return [
            [
                wrapper._sync_gradients,
                wrapper._comm_hook is quiet_hook,
                wrapper._comm_hook_state,
                wrapper._state_dict_type,
                wrapper._state_dict_config,
                wrapper._optim_state_dict_config,
            ]
            for wrapper in wrappers
        ]

    found = [settings()]
    with model.no_sync():
        found.append(settings())
    with library.FullyShardedDataParallel.state_dict_type(model, library.StateDictType.SHARDED_STATE_DICT):
        found.append(settings())
    for wrapper in wrappers:
        wrapper._sync_gradients = False
    model(batch()).sum().backward()
    for wrapper in wrappers:
        wrapper._sync_gradients = True
    model(batch()).sum().backward()
    # The sum of both passes.
    found.append([parameter.grad for parameter in model.parameters()])
    model.register_comm_hook("the state", quiet_hook)
    return [*found, settings()]


@alike(originals=BOTH, meshed=BOTH, ranks=2)
def test_what_was_given(library: Library, originals: bool, meshed: bool) -> Any:
    """Programs read the mesh, and the parameters that are ignored, of the wrapper."""
    module = seeded()
    where = {"device_mesh": init_device_mesh("cpu", (2,))} if meshed else {}
    ignored = next(iter(module.children()))
    model = library.shard(module, ignored_modules=[ignored], use_orig_params=originals, **where)
    mesh = model._device_mesh
    shapes = sorted(tuple(each.shape) for each in model._ignored_params)
    return [mesh and mesh.mesh.tolist(), shapes, model._ignored_modules == {*ignored.modules()}]


@alike(kind=["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"])
def test_enums(library: Library, kind: str) -> Any:
    """Members, in order, with their values; by name, by value, as words; what is no member is the same error."""
    members = list(getattr(library, kind))
    found = [(m.name, m.value, str(m), repr(m), getattr(library, kind)(m.value) is m) for m in members]
    for wrong in ("name", "value"):
        try:
            _ = getattr(library, kind)["NOTHING"] if wrong == "name" else getattr(library, kind)(99)
        except (KeyError, ValueError) as error:
            found.append(type(error).__name__)
    return found


CONFIGURATIONS = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
]


@alike(kind=CONFIGURATIONS)
def test_configurations(library: Library, kind: str) -> Any:
    """Fields and defaults, by position and by name; equality; the fields can be set later."""
    make = getattr(library, kind)
    value, other = make(), make(True)
    changed = make()
    for name in vars(value):
        setattr(changed, name, "changed")
    names = [name for name in vars(value) if name != "dim_0_chunks"]
    bases = [base.__name__ for base in make.__mro__]
    return [
        value,
        names,
        other,
        value == make(),
        value == other,
        bases,
        {n: getattr(changed, n) for n in names},
    ]


@alike()
def test_settings_of_states(library: Library) -> Any:
    """`StateDictSettings` has three fields, all needed."""
    settings = library.StateDictSettings(
        library.StateDictType.FULL_STATE_DICT,
        library.FullStateDictConfig(),
        library.FullOptimStateDictConfig(),
    )
    try:
        library.StateDictSettings()
    except TypeError:
        return settings, "needed"


@alike()
def test_attributes_of_a_flat_parameter(library: Library) -> Any:
    """A flat parameter has no attribute without an underscore that an ordinary one has not, unless it is ours."""
    flat = library.shard(nn.Linear(3, 2)).params[0]
    return [isinstance(flat, nn.Parameter), flat.requires_grad, flat.is_leaf, flat.dim(), flat._is_flat_param]


@unlike(
    "The handle of a flat parameter is a different class",
    ranks=2,
    ours=[
        "device",
        "flat_param",
        "flat_param_to",
        "needs_unshard",
        "process_group",
        "rank",
        "reshard",
        "unshard",
        "uses_sharded_strategy",
        "world_size",
    ],
)
def test_attributes_of_a_handle(library: Library) -> Any:
    """FSDP1's has many more."""
    theirs = torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
    handle = library.shard(nn.Linear(3, 2))._handle
    return [name for name in public(theirs._handle) if hasattr(handle, name)]


@alike(ranks=2, originals=BOTH)
def test_values_of_a_handle(library: Library, originals: bool) -> Any:
    """Where it is, of which rank, and the flat parameter."""
    model = library.shard(nn.Linear(3, 2), use_orig_params=originals)
    handle = model._handle
    return [
        handle.device,
        handle.rank,
        handle.flat_param is model.params[0],
        handle.flat_param is model._flat_param,
    ]


@alike()
def test_attributes_of_a_scaler(library: Library) -> Any:
    """Those of torch's scaler, and the group."""
    scaler = library.ShardedGradScaler("cpu", 8.0)
    names = public(torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler("cpu"))
    return [
        names,
        [name for name in names if not hasattr(scaler, name)],
        plain(scaler.state_dict()),
        type(scaler),
    ]
