"""Every argument of the constructor, with every kind of value that its documentation names."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from integration_tests.fsdp1.asking import Library, alike, unlike, warned
from integration_tests.fsdp1.subjects import Block, Net, Normed, blocks, facts, seeded, seen_and_trained

BOTH = [False, True]

# module


class OnlyBuffers(nn.Module):
    """A module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("twice", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        return x * self.twice


MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "one_element": lambda: nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 2)),
    "net": Net,
    "norm": Normed,
    "nothing": nn.Identity,
    "only_buffers": OnlyBuffers,
    "sequence": lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))),
}


@alike(ranks=2, module=[name for name in MODULES if name not in ("nothing", "only_buffers")], originals=BOTH)
def test_module(library: Library, module: str, originals: bool) -> Any:
    """Each kind of module is wrapped in place, shows the same names and facts, and trains to the same values."""
    return seen_and_trained(library, library.shard(seeded(MODULES[module]), use_orig_params=originals))


@alike(module=["nothing", "only_buffers"], originals=BOTH)
def test_module_without_parameters(library: Library, module: str, originals: bool) -> Any:
    """A module without parameters is a unit without any."""
    model = library.shard(seeded(MODULES[module]), use_orig_params=originals)
    return [facts(library, model), model(torch.ones(2)), model.params, list(model.parameters())]


@alike(kind=["ModuleList", "ModuleDict", "Sequential"])
def test_containers_are_warned_of(library: Library, kind: str) -> Any:
    """A container without a forward pass is warned of, another module is not."""
    layers = [nn.Linear(2, 2)]
    module = nn.ModuleDict({"a": layers[0]}) if kind == "ModuleDict" else getattr(nn, kind)(layers)
    with warned() as plainly:
        library.shard(nn.Linear(2, 2))
    with warned() as found:
        library.shard(module)
    return found, plainly


@alike(ranks=2, originals=BOTH)
def test_wrapped_bottom_up(library: Library, originals: bool) -> Any:
    """Units that are wrapped by hand keep their parameters; the parent has the rest."""
    module = seeded()
    for number, block in enumerate(module.blocks):
        module.blocks[number] = library.shard(block, use_orig_params=originals)
    module.head = library.shard(module.head, use_orig_params=originals)
    return seen_and_trained(library, library.shard(module, use_orig_params=originals))


@alike(ranks=2, originals=BOTH)
def test_parameters_that_are_shared_inside(library: Library, originals: bool) -> Any:
    """Two names of one parameter stay one parameter of the unit."""
    module = seeded()
    module.blocks[1].up.weight = module.blocks[0].up.weight
    return seen_and_trained(library, library.shard(module, use_orig_params=originals))


# process_group, device_mesh


@alike(ranks=2, group=["none", "world", "new", "one", "mesh", "named_mesh"], originals=BOTH)
def test_groups(library: Library, group: str, originals: bool) -> Any:
    """The default group, one that is passed, a group of this rank alone, and a mesh say which ranks share the model."""
    given: dict[str, Any] = {}
    if group == "world":
        given["process_group"] = dist.group.WORLD
    elif group == "new":
        given["process_group"] = dist.new_group([0, 1])
    elif group == "one":
        given["process_group"] = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    elif group == "mesh":
        given["device_mesh"] = init_device_mesh("cpu", (2,))
    elif group == "named_mesh":
        given["device_mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals, **given)
    same = [wrapper.process_group == model.process_group for wrapper in library.FSDP.fsdp_modules(model)]
    return [seen_and_trained(library, model), same, isinstance(model.process_group, dist.ProcessGroup)]


@alike(ranks=2, strategy=["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"], how=["pair", "mesh"], originals=BOTH)
def test_groups_of_hybrid_strategies(library: Library, strategy: str, how: str, originals: bool) -> Any:
    """A pair of groups, or a mesh of two dimensions, says who shares a shard, and who has a copy of it."""
    given: dict[str, Any] = {}
    if how == "pair":
        alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
        given["process_group"] = (dist.group.WORLD, alone)
    else:
        given["device_mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shard"))
    strategy = library.ShardingStrategy[strategy]
    model = library.shard(seeded(), sharding_strategy=strategy, use_orig_params=originals, **given)
    return seen_and_trained(library, model)


def _wrong_groups(library: Library, wrong: str) -> dict[str, Any]:
    world = dist.group.WORLD
    hybrid = library.ShardingStrategy.HYBRID_SHARD
    return {
        "both": {"process_group": world, "device_mesh": init_device_mesh("cpu", (2,))},
        "no_pair": {"process_group": world, "sharding_strategy": hybrid},
        "three": {"process_group": (world, world, world), "sharding_strategy": hybrid},
        "a_list": {"process_group": [world, world], "sharding_strategy": hybrid},
        "no_groups": {"process_group": (1, 2), "sharding_strategy": hybrid},
        "flat_mesh": {"device_mesh": init_device_mesh("cpu", (2,)), "sharding_strategy": hybrid},
        "nothing": {"sharding_strategy": hybrid},
    }[wrong]


@alike(
    ranks=2,
    wrong=["both", "no_pair", "three", "a_list", "no_groups", "flat_mesh", "nothing"],
)
def test_groups_that_do_not_fit(library: Library, wrong: str) -> Any:
    """Groups that exclude each other or that do not fit the strategy are refused with torch's class of error."""
    library.shard(nn.Linear(2, 2), **_wrong_groups(library, wrong))


@unlike("A mesh of two dimensions is for the hybrid strategies", ranks=2, ours=ValueError)
def test_a_mesh_of_two_dimensions(library: Library) -> Any:
    """FSDP1 shards over the first one."""
    library.shard(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (2, 1)))


# sharding_strategy


@alike(ranks=2, strategy=["None", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], originals=BOTH)
def test_sharding_strategy(library: Library, strategy: str, originals: bool) -> Any:
    """Each strategy, and None for the default; and what is warned of."""
    chosen = None if strategy == "None" else library.ShardingStrategy[strategy]
    with warned() as found:
        model = library.shard(seeded(), sharding_strategy=chosen, use_orig_params=originals)
    return [seen_and_trained(library, model), found]


@alike(strategy=["None", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_sharding_strategy_of_one_rank(library: Library, strategy: str) -> Any:
    """A world of one shards nothing, whatever is asked for; and what is warned of."""
    chosen = None if strategy == "None" else library.ShardingStrategy[strategy]
    with warned() as found:
        model = library.shard(seeded(), sharding_strategy=chosen)
    return [facts(library, model), found]


# cpu_offload


@alike(ranks=2, value=["None", "default", "False"])
def test_cpu_offload(library: Library, value: str) -> Any:
    """None and a configuration that offloads nothing mean the same."""
    given = {
        "None": None,
        "default": library.CPUOffload(),
        "False": library.CPUOffload(offload_params=False),
    }[value]
    return seen_and_trained(library, library.shard(seeded(), cpu_offload=given))


# auto_wrap_policy


def _every_second(module: nn.Module, recurse: bool, nonwrapped_numel: int, at_least: int = 20) -> bool:
    return recurse or (nonwrapped_numel >= at_least and isinstance(module, (nn.Linear, Block)))


def _policy(library: Library, name: str) -> Any:
    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, Block):
            return {"sharding_strategy": library.ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": None}
        return isinstance(module, nn.Linear) and module.out_features == 2

    return {
        "classes": library.ModuleWrapPolicy([Block, nn.LayerNorm]),
        "no_classes": library.ModuleWrapPolicy(set()),
        "root_class": library.ModuleWrapPolicy({Net, Block}),
        "custom": library.CustomPolicy(choose),
        "custom_nothing": library.CustomPolicy(lambda module: {}),
        "function": _every_second,
        "partial": functools.partial(_every_second, at_least=24),
        "always": library.always_wrap_policy,
        "size": functools.partial(library.size_based_auto_wrap_policy, min_num_params=20),
        "size_default": library.size_based_auto_wrap_policy,
        "transformer": functools.partial(library.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "lambda": functools.partial(
            library.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
        ),
        "called": lambda module, recurse, nonwrapped_numel: library.ModuleWrapPolicy({Block})(
            module, recurse, nonwrapped_numel
        ),
    }[name]


POLICIES = [
    "classes",
    "no_classes",
    "root_class",
    "custom",
    "custom_nothing",
    "function",
    "partial",
    "size",
    "size_default",
    "transformer",
    "lambda",
    "called",
]


@alike(ranks=2, policy=POLICIES, originals=BOTH)
def test_auto_wrap_policy(library: Library, policy: str, originals: bool) -> Any:
    """Each way to say which modules become units gives the same tree, and trains to the same values."""
    model = library.shard(seeded(), auto_wrap_policy=_policy(library, policy), use_orig_params=originals)
    return seen_and_trained(library, model)


@alike()
def test_always_wrap_policy(library: Library) -> Any:
    """Every module becomes a unit, containers too."""
    return facts(library, library.shard(seeded(), auto_wrap_policy=_policy(library, "always")))


# backward_prefetch, forward_prefetch, limit_all_gathers


@alike(ranks=2, prefetch=["None", "BACKWARD_PRE", "BACKWARD_POST"], forward=BOTH)
def test_prefetching(library: Library, prefetch: str, forward: bool) -> Any:
    """When units are gathered changes no number."""
    model = library.shard(
        seeded(),
        auto_wrap_policy=blocks(library),
        backward_prefetch=None if prefetch == "None" else library.BackwardPrefetch[prefetch],
        forward_prefetch=forward,
        limit_all_gathers=not forward,
    )
    return seen_and_trained(library, model)


# mixed_precision

PRECISIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "param": {"param_dtype": torch.bfloat16},
    "reduce": {"reduce_dtype": torch.bfloat16},
    "buffer": {"buffer_dtype": torch.bfloat16},
    "all": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), torch.bfloat16),
    "keep": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "keep_low_precision_grads": False},
    "cast": {"param_dtype": torch.bfloat16, "cast_forward_inputs": True},
    "no_root_cast": {"buffer_dtype": torch.float32, "cast_root_forward_inputs": False},
    "ignore_nothing": {"param_dtype": torch.bfloat16, "_module_classes_to_ignore": ()},
    "ignore_norms": {"param_dtype": torch.bfloat16, "_module_classes_to_ignore": (nn.LayerNorm,)},
}


@alike(ranks=2, precision=list(PRECISIONS), policy=BOTH)
def test_mixed_precision(library: Library, precision: str, policy: bool) -> Any:
    """Each field, with and without a policy; and what is warned of."""
    with warned() as found:
        model = library.shard(
            seeded(),
            auto_wrap_policy=blocks(library) if policy else None,
            mixed_precision=library.MixedPrecision(**PRECISIONS[precision]),
        )
    return [seen_and_trained(library, model), found]


@alike(ranks=2, policy=BOTH, originals=BOTH)
def test_mixed_precision_leaves_norms_out(library: Library, policy: bool, originals: bool) -> Any:
    """With a policy a BatchNorm is a unit of its own in full precision, which is warned of; without one it is not."""
    with warned() as found:
        model = library.shard(
            seeded(Normed),
            auto_wrap_policy=library.ModuleWrapPolicy({nn.Linear}) if policy else None,
            mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16),
            use_orig_params=originals,
        )
    return [facts(library, model), model(torch.ones(4, 3)), found]


@alike(ranks=2)
def test_mixed_precision_of_nested_wrappers(library: Library) -> Any:
    """The example of the documentation: a root in bf16 around a unit in fp16, each casting its inputs."""
    seeded()
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1] = library.shard(
        module[1],
        mixed_precision=library.MixedPrecision(param_dtype=torch.float16, cast_forward_inputs=True),
    )
    model = library.shard(
        module, mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    )
    return seen_and_trained(library, model)


# ignored_modules, ignored_states

KINDS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


@alike(ranks=2, argument=["ignored_modules", "ignored_states"], kind=list(KINDS))
def test_ignored_modules(library: Library, argument: str, kind: str) -> Any:
    """Any collection of modules, with either argument; their buffers and children are left whole too."""
    module = seeded()
    given = {argument: KINDS[kind]([module.blocks[0], module.head])}
    policy = blocks(library) if kind in ("list", "set") else None
    return seen_and_trained(library, library.shard(module, auto_wrap_policy=policy, **given))


@alike(ranks=2, kind=[*KINDS, "iterator"], originals=BOTH)
def test_ignored_parameters(library: Library, kind: str, originals: bool) -> Any:
    """Any collection of parameters."""
    module = seeded()
    parameters = [module.offset, module.blocks[0].up.weight]
    given = iter(parameters) if kind == "iterator" else KINDS[kind](parameters)
    model = library.shard(module, ignored_states=given, use_orig_params=originals)
    return seen_and_trained(library, model)


@alike(ranks=2, originals=BOTH)
def test_ignored_states_from_an_iterator(library: Library, originals: bool) -> Any:
    """An iterator over modules as `ignored_states`."""
    module = seeded()
    given = iter([module.head, module.stem])
    return seen_and_trained(library, library.shard(module, ignored_states=given, use_orig_params=originals))


@unlike("Parameters that an inner unit ignores stay whole", ours=["head.bias", "head.weight"])
def test_ignored_modules_from_an_iterator(library: Library) -> Any:
    """FSDP1 reads it twice, the second time to no avail."""
    module = seeded()
    model = library.shard(module, ignored_modules=iter([module.head]))
    return sorted(name.partition(".")[2] for name, _ in model.named_parameters() if "head" in name)


@alike(argument=["ignored_modules", "ignored_states"], policy=BOTH)
def test_ignoring_nothing(library: Library, argument: str, policy: bool) -> Any:
    """An empty collection is as None."""
    return facts(
        library,
        library.shard(seeded(), auto_wrap_policy=blocks(library) if policy else None, **{argument: []}),
    )


@alike()
def test_ignoring_the_module_itself(library: Library) -> Any:
    """All of it is ignored, and warned of."""
    module = seeded()
    with warned() as found:
        model = library.shard(module, ignored_modules=[module])
    return [found, sorted(name for name, _ in model.named_parameters()), model.params]


@alike(ranks=2, originals=BOTH)
def test_ignored_modules_with_units_inside(library: Library, originals: bool) -> Any:
    """Units below an ignored module are not ignored, and what they ignore stays ignored."""
    module = seeded()
    module.blocks[0].up = library.shard(module.blocks[0].up, use_orig_params=originals)
    module.blocks[1] = library.shard(
        module.blocks[1], ignored_modules=[module.blocks[1].norm], use_orig_params=originals
    )
    model = library.shard(module, ignored_modules=[module.blocks[0]], use_orig_params=originals)
    return seen_and_trained(library, model)


def _wrong_ignored(library: Library, wrong: str) -> dict[str, Any]:
    module = nn.Linear(2, 2)
    return {
        "both": {"ignored_modules": [module], "ignored_states": [module]},
        "both_empty": {"ignored_modules": [], "ignored_states": []},
        "mixed": {"ignored_states": [module, module.weight]},
        "a_number": {"ignored_states": [1]},
        "a_tensor": {"ignored_states": [torch.ones(2)]},
        "a_number_among_modules": {"ignored_modules": [module, 1]},
        "parameters_as_modules": {"ignored_modules": [module.weight]},
        "no_collection": {"ignored_modules": 1},
        "no_collection_of_states": {"ignored_states": 1},
        "a_unit": {"ignored_modules": [library.shard(nn.Linear(2, 2))]},
    }[wrong]


@alike(
    wrong=[
        "both",
        "both_empty",
        "mixed",
        "a_number",
        "a_tensor",
        "a_number_among_modules",
        "parameters_as_modules",
        "no_collection",
        "no_collection_of_states",
        "a_unit",
    ]
)
def test_what_cannot_be_ignored(library: Library, wrong: str) -> Any:
    """Two arguments at once, mixtures, and what is no collection or no module is refused with torch's class of error."""
    library.shard(nn.Linear(2, 2), **_wrong_ignored(library, wrong))


# param_init_fn


def _fill(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        value = torch.full_like(parameter, 0.25 if name == "weight" else 0.5, device="cpu")
        setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.full_like(buffer, 2.0, device="cpu"))


def _on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


@alike(ranks=2, policy=BOTH, originals=BOTH)
def test_param_init_fn(library: Library, policy: bool, originals: bool) -> Any:
    """A function that gives a module on the meta device values."""
    model = library.shard(
        _on_meta(Net),
        param_init_fn=_fill,
        auto_wrap_policy=blocks(library) if policy else None,
        use_orig_params=originals,
    )
    return seen_and_trained(library, model)


@alike(ranks=2, originals=BOTH)
def test_no_param_init_fn(library: Library, originals: bool) -> Any:
    """Without one, `reset_parameters()` of each module that has something."""
    module = _on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    return seen_and_trained(library, library.shard(module, use_orig_params=originals))


@alike(ranks=2)
def test_param_init_fn_for_a_module_that_is_there(library: Library) -> Any:
    """It is not called for a module that has values."""
    called: list[str] = []
    model = library.shard(seeded(), param_init_fn=lambda module: called.append(type(module).__name__))
    return [seen_and_trained(library, model), called]


@alike(wrong=["not_callable", "raises", "no_reset"])
def test_values_that_cannot_be_made(library: Library, wrong: str) -> Any:
    """What is no function, a function that raises, and a module without `reset_parameters()`: torch's class of error."""

    def fail(module: nn.Module) -> None:
        raise KeyError("not today")

    if wrong == "no_reset":
        library.shard(_on_meta(Net))
    library.shard(_on_meta(Net), param_init_fn={"not_callable": "a", "raises": fail}[wrong])


@unlike("Arguments are always checked", ours=ValueError)
def test_a_param_init_fn_that_is_not_needed(library: Library) -> Any:
    """FSDP1 does not look at it."""
    library.shard(nn.Linear(2, 2), param_init_fn="a")


# device_id


@alike(ranks=2, device=["device", "words"])
def test_device_id(library: Library, device: str) -> Any:
    """A device."""
    given = {"device": torch.device("cpu"), "words": "cpu"}[device]
    return seen_and_trained(library, library.shard(seeded(), device_id=given))


@alike(device=["what", "1.5"])
def test_what_is_no_device(library: Library, device: str) -> Any:
    """What names no device is refused with torch's class of error."""
    library.shard(nn.Linear(2, 2), device_id={"what": "what", "1.5": 1.5}[device])


# use_orig_params


@alike(ranks=2, policy=BOTH)
def test_use_orig_params(library: Library, policy: bool) -> Any:
    """The originals stay the objects that they are, under their names; there is no shape of any but 1-D here."""
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    before = dict(module.named_parameters())
    model = library.shard(
        module,
        use_orig_params=True,
        auto_wrap_policy=library.ModuleWrapPolicy({nn.Linear}) if policy else None,
    )
    after = {name.replace("_fsdp_wrapped_module.", ""): parameter for name, parameter in model.named_parameters()}
    kept = [after[name] is parameter for name, parameter in before.items()]
    return [list(after), kept, [type(parameter) for parameter in after.values()], facts(library, model)]


# All of them by position


@alike(ranks=2, originals=BOTH)
def test_all_by_position(library: Library, originals: bool) -> Any:
    """The sixteen arguments, in torch's order."""
    model = library.FSDP(
        seeded(),
        dist.group.WORLD,
        library.ShardingStrategy.SHARD_GRAD_OP,
        library.CPUOffload(),
        blocks(library),
        library.BackwardPrefetch.BACKWARD_POST,
        library.MixedPrecision(param_dtype=torch.bfloat16),
        None,
        None,
        torch.device("cpu"),
        False,
        True,
        False,
        originals,
        None,
        None,
    )
    return seen_and_trained(library, model)


@alike()
def test_unknown_arguments(library: Library) -> Any:
    """An argument that FSDP1 has not is a TypeError, unless it is one of ours."""
    library.shard(nn.Linear(2, 2), flatten_parameters=True)
