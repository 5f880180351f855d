"""The policies and wrapping functions, called as they are documented, argument by argument."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from integration_tests.fsdp1.asking import Library, alike, plain, unlike, warned
from integration_tests.fsdp1.subjects import Block, Net, blocks, facts, seeded

BOTH = [False, True]
MODULES = {
    "linear": lambda: nn.Linear(3, 2),
    "list": lambda: nn.ModuleList([nn.Linear(3, 2)]),
    "dict": lambda: nn.ModuleDict(),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "block": Block,
}


class Recording(nn.Module):
    """A wrapper that knows what it was made with."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.inner = module
        self.arguments = arguments


def tree(module: nn.Module) -> list[Any]:
    """The names, classes and wrapper arguments of all modules."""
    return [
        (name, type(each).__name__, plain(getattr(each, "arguments", None))) for name, each in module.named_modules()
    ]


@alike(module=list(MODULES), recurse=BOTH, numel=[0, 10, int(1e8)])
def test_policy_functions(library: Library, module: str, recurse: bool, numel: int) -> Any:
    """What each says about a module, by position and by name, with each form of each of its arguments."""
    one = MODULES[module]()
    classes = {nn.Linear, Block}
    either = [
        functools.partial(library.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        functools.partial(library.lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, Block)),
    ]
    size = library.size_based_auto_wrap_policy
    return [
        library.always_wrap_policy(),
        library.always_wrap_policy(one, recurse, numel),
        library.always_wrap_policy(module=one, recurse=recurse, nonwrapped_numel=numel, more=1),
        library.lambda_auto_wrap_policy(one, recurse, numel, lambda each: True),
        library.lambda_auto_wrap_policy(
            module=one, recurse=recurse, nonwrapped_numel=numel, lambda_fn=lambda each: False
        ),
        library.transformer_auto_wrap_policy(one, recurse, numel, classes),
        library.transformer_auto_wrap_policy(one, recurse, numel, transformer_layer_cls=tuple(classes)),
        library.transformer_auto_wrap_policy(one, recurse, numel, transformer_layer_cls=[]),
        library._module_wrap_policy(one, recurse, numel, classes),
        library._module_wrap_policy(module=one, recurse=recurse, nonwrapped_numel=numel, module_classes=classes),
        library._wrap_module_cls_individually(one, [nn.Linear], recurse, numel),
        library._or_policy(one, recurse, numel, either),
        library._or_policy(one, recurse, numel, policies=()),
        size(one, recurse, numel),
        size(one, recurse, numel, 10),
        size(module=one, recurse=recurse, nonwrapped_numel=numel, min_num_params=0),
        size(one, recurse, numel, 1, {nn.Linear}, set()),
        size(one, recurse, numel, min_num_params=1, force_leaf_modules=set(), exclude_wrap_modules={Block}),
        size(one, recurse, numel, min_num_params=1, force_leaf_modules=None, exclude_wrap_modules=None),
        library.ModuleWrapPolicy(classes)(one, recurse),
        library.ModuleWrapPolicy(classes)(one, recurse, numel),
        library.ModuleWrapPolicy(list(classes))(module=one, recurse=recurse, nonwrapped_numel=numel),
        library.ModuleWrapPolicy(iter(classes))(one, recurse=recurse),
    ]


@alike()
def test_attributes_of_the_size_policy(library: Library) -> Any:
    """Its defaults stand on the function."""
    policy = library.size_based_auto_wrap_policy
    return [policy.FORCE_LEAF_MODULES, policy.EXCLUDE_WRAP_MODULES]


@alike(policy=["functions", "sizes"])
def test_who_is_asked(library: Library, policy: str) -> Any:
    """A policy function is asked by name about each module on the way down and on the way up, with what is left."""
    asked: list[Any] = []

    def choose(module: nn.Module, recurse: bool, nonwrapped_numel: int, **others: Any) -> bool:
        asked.append((type(module).__name__, recurse, nonwrapped_numel, sorted(others)))
        if policy == "functions":
            return recurse or isinstance(module, Block)
        return library.size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, 24)

    library.shard(seeded(), auto_wrap_policy=choose)
    return asked


@alike(policy=["ModuleWrapPolicy", "CustomPolicy"], ignored=BOTH)
def test_run_policy(library: Library, policy: str, ignored: bool) -> Any:
    """What a policy object chooses, with the arguments for each: copies of the root's, or changed."""
    module = seeded()
    found = []

    def choose(each: nn.Module) -> Any:
        found.append(type(each).__name__)
        return {"forward_prefetch": True} if isinstance(each, Block) else isinstance(each, nn.Linear)

    chooser = (
        library.ModuleWrapPolicy([Block, nn.LayerNorm])
        if policy == "ModuleWrapPolicy"
        else library.CustomPolicy(lambda_fn=choose)
    )
    left_out = set(module.blocks[0].modules()) if ignored else set()
    arguments = {"forward_prefetch": False, "mixed_precision": None}
    targets = chooser._run_policy(module, ignored_modules=left_out, root_kwargs=arguments)
    names = {each: name for name, each in module.named_modules()}
    chosen = {names[each]: given for each, given in targets.items()}
    return [chosen, [given is arguments for given in targets.values()], arguments, found]


@alike(answer=["None", "1", "word", "module"])
def test_what_a_custom_policy_must_not_answer(library: Library, answer: str) -> Any:
    """Anything but a bool or a dict is a ValueError."""
    wrong = {"None": None, "1": 1, "word": "yes", "module": nn.Linear(1, 1)}[answer]
    library.shard(seeded(), auto_wrap_policy=library.CustomPolicy(lambda module: wrong))


@alike(
    override=[
        "sharding_strategy",
        "mixed_precision",
        "backward_prefetch",
        "use_orig_params",
        "unknown",
        "cpu_offload",
    ],
    ranks=2,
)
def test_arguments_of_a_custom_policy(library: Library, override: str) -> Any:
    """A dict changes the arguments for that module; one that is not an argument is torch's class of error."""
    given = {
        "sharding_strategy": {"sharding_strategy": library.ShardingStrategy.NO_SHARD},
        "mixed_precision": {"mixed_precision": library.MixedPrecision(param_dtype=torch.float16)},
        "backward_prefetch": {"backward_prefetch": None, "forward_prefetch": True, "limit_all_gathers": True},
        "use_orig_params": {"use_orig_params": False},
        "unknown": {"unknown": 1},
        "cpu_offload": {"cpu_offload": library.CPUOffload()},
    }[override]
    module = seeded()
    policy = library.CustomPolicy(lambda each: given if each is module.blocks[0] else isinstance(each, Block))
    model = library.shard(module, auto_wrap_policy=policy)
    told = [
        (each.backward_prefetch, each.forward_prefetch, each.limit_all_gathers)
        for each in library.FSDP.fsdp_modules(model)
    ]
    return facts(library, model), told


@unlike("Parameters that an inner unit ignores stay whole", ours=["norm.bias", "norm.weight"])
def test_what_a_custom_policy_has_left_whole(library: Library) -> Any:
    """FSDP1 gives it to the root."""
    module = seeded()
    given = {"ignored_states": [module.blocks[0].norm]}
    policy = library.CustomPolicy(lambda each: given if each is module.blocks[0] else False)
    model = library.shard(module, auto_wrap_policy=policy)
    return sorted(".".join(name.split(".")[-2:]) for name, _ in model.named_parameters() if "norm" in name)


@alike(only_children=BOTH, policy=["always", "size", "classes", "lambda"], ignored=BOTH)
def test_recursive_wrap(library: Library, only_children: bool, policy: str, ignored: bool) -> Any:
    """The wrapped tree and the number of elements, with what each wrapper was made with."""
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Block()))
    chosen = {
        "always": library.always_wrap_policy,
        "size": functools.partial(library.size_based_auto_wrap_policy, min_num_params=18),
        "classes": library.ModuleWrapPolicy({Block, nn.LayerNorm}),
        "lambda": functools.partial(
            library.lambda_auto_wrap_policy, lambda_fn=lambda each: isinstance(each, nn.Sequential)
        ),
    }[policy]
    left_out = set(module[2].modules()) if ignored else set()
    wrapped, numel = library._recursive_wrap(
        module,
        auto_wrap_policy=chosen,
        wrapper_cls=Recording,
        ignored_modules=left_out,
        ignored_params={parameter for each in left_out for parameter in each.parameters()},
        only_wrap_children=only_children,
        more=3,
    )
    return tree(wrapped), numel


@alike(where=["outside", "inside", "overridden", "own_overrides", "function"])
def test_wrap(library: Library, where: str) -> Any:
    """Outside a context the module itself; inside the wrapper, whose arguments `wrap`'s and then the module's own change."""
    module = nn.Linear(2, 2)
    if where == "outside":
        return tree(library.wrap(module)), library.wrap(module=module, a=1) is module
    if where == "own_overrides":
        module._wrap_overrides = {"a": 5}
    made = Recording if where != "function" else functools.partial(Recording, by="hand")
    with library.enable_wrap(wrapper_cls=made, a=1, b=2) as entered:
        if where == "overridden":
            wrapped = library.wrap(module, b=3, c=4)
        else:
            wrapped = library.wrap(module)
    return [tree(wrapped), entered, tree(library.wrap(nn.Linear(1, 1)))]


@alike(wrong=["position", "nothing"])
def test_how_a_context_is_not_made(library: Library, wrong: str) -> Any:
    """The wrapper's class is needed, by name."""
    with library.enable_wrap(Recording) if wrong == "position" else library.enable_wrap(a=1):
        pass


@alike()
def test_a_context_that_ends_with_an_exception(library: Library) -> Any:
    """After it nothing is wrapped."""
    try:
        with library.enable_wrap(wrapper_cls=Recording):
            raise KeyError("stop")
    except KeyError:
        pass
    return tree(library.wrap(nn.Linear(1, 1)))


@unlike("Nested `enable_wrap`", ours=[{"b": 2, "a": 1}])
def test_nested_contexts(library: Library) -> Any:
    """FSDP1 refuses them."""
    with library.enable_wrap(wrapper_cls=Recording, a=1), library.enable_wrap(wrapper_cls=Recording, b=2):
        return [library.wrap(nn.Linear(1, 1)).arguments]


@alike(ranks=2, originals=BOTH)
def test_wrap_with_the_real_wrapper(library: Library, originals: bool) -> Any:
    """A model that wraps its layers while it is made, as the documentation shows."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = library.wrap(nn.Linear(3, 4))
            self.second = library.wrap(nn.Linear(4, 2), backward_prefetch=None)

    with library.enable_wrap(wrapper_cls=library.FSDP, device_id=torch.device("cpu"), use_orig_params=originals):
        model = library.wrap(Made())
    return [facts(library, model), [each.backward_prefetch for each in library.FSDP.fsdp_modules(model)]]


@unlike("A policy may meet wrappers", ours=["FullyShardedDataParallel"] * 3)
def test_a_policy_meets_a_wrapper(library: Library) -> Any:
    """FSDP1 refuses it."""
    module = seeded()
    module.blocks[0] = library.shard(module.blocks[0])
    return library.FSDP.fsdp_modules(library.shard(module, auto_wrap_policy=blocks(library)))


@alike(originals=BOTH)
def test_warnings_of_a_policy(library: Library, originals: bool) -> Any:
    """A plain model with a policy is warned of as FSDP1 warns: that one rank shards nothing."""
    with warned() as found:
        library.shard(seeded(Net), auto_wrap_policy=blocks(library), use_orig_params=originals)
    return found
