"""The static methods, with every argument, on whatever module their documentation allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from integration_tests.fsdp1.asking import Library, alike, unlike, warned
from integration_tests.fsdp1.subjects import Block, Net, batch, blocks, full, seeded

BOTH = [False, True]
FORMS = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]
CONFIGURATIONS = {
    "FULL_STATE_DICT": ("FullStateDictConfig", "FullOptimStateDictConfig"),
    "LOCAL_STATE_DICT": ("LocalStateDictConfig", "LocalOptimStateDictConfig"),
    "SHARDED_STATE_DICT": ("ShardedStateDictConfig", "ShardedOptimStateDictConfig"),
}


def places(library: Library, module: nn.Module, found: Any) -> list[str]:
    """Where in `module` the wrappers are that were found."""
    names = {id(each): name for name, each in module.named_modules()}
    return [names[id(each)].replace("_fsdp_wrapped_module", "*") for each in found]


def two_roots(library: Library) -> nn.Module:
    """A module that is not wrapped, around two that are, of which one has units inside."""
    module = nn.Module()
    module.left = library.shard(seeded(), auto_wrap_policy=blocks(library))
    module.right = library.shard(nn.Linear(2, 2))
    module.plain = nn.Linear(2, 2)
    return module


# fsdp_modules


@alike(root_only=BOTH, ran=BOTH)
def test_fsdp_modules(library: Library, root_only: bool, ran: bool) -> Any:
    """The wrappers in a module, depth first: the module itself, in a plain one, in a list, in one without any."""
    module = two_roots(library)
    if ran:
        module.left(batch())
    find = library.FSDP.fsdp_modules
    return [
        places(library, module, find(module, root_only)),
        places(library, module, find(module, root_only=root_only)),
        places(library, module, find(module=module.left, root_only=root_only)),
        places(library, module, find(module.left.module, root_only)) if ran else None,
        find(module.plain, root_only),
        find(nn.Identity()),
        type(find(module)),
        places(library, module, find(module)),
    ]


@alike(ran=BOTH)
def test_root_modules_below_the_root(library: Library, ran: bool) -> Any:
    """Asked of a unit below a root that has run, there is no root in it; `check_is_root` says the same."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    if ran:
        model(batch())
    below = model.blocks[0]
    found = library.FSDP.fsdp_modules(below, root_only=True)
    return places(library, model, found), below.check_is_root(), len(library.FSDP.fsdp_modules(below))


@alike()
def test_a_module_in_two_places(library: Library) -> Any:
    """A wrapper that is reached by two paths is found once."""
    layer = library.shard(nn.Linear(2, 2))
    return len(library.FSDP.fsdp_modules(nn.Sequential(layer, nn.ReLU(), layer)))


# set_state_dict_type, get_state_dict_type, state_dict_type


def configured(library: Library, form: str, **fields: Any) -> list[Any]:
    """The form with both of its configurations."""
    model, optimizer = (getattr(library, name) for name in CONFIGURATIONS[form])
    return [library.StateDictType[form], model(**fields), optimizer(**fields)]


@alike(form=FORMS, how=["alone", "model_config", "both", "by_name", "nones", "offload"])
def test_set_state_dict_type(library: Library, form: str, how: str) -> Any:
    """Each form, with each of the configurations, passed or not, by position and by name: what is set, what is returned."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    kind, config, optimizer_config = configured(library, form, offload_to_cpu=how == "offload")
    given: dict[str, Any] = {
        "alone": [kind],
        "model_config": [kind, config],
        "both": [kind, config, optimizer_config],
        "nones": [kind, None, None],
        "offload": [kind, config, optimizer_config],
    }
    if how == "by_name":
        before = library.FSDP.set_state_dict_type(
            module=model,
            state_dict_type=kind,
            state_dict_config=config,
            optim_state_dict_config=optimizer_config,
        )
    else:
        before = library.FSDP.set_state_dict_type(model, *given[how])
    after = library.FSDP.get_state_dict_type(module=model)
    inside = library.FSDP.get_state_dict_type(model.blocks[1])
    again = library.FSDP.set_state_dict_type(model, library.StateDictType.FULL_STATE_DICT)
    return [before, after, inside, again, after == again, after is not None]


@alike(form=FORMS)
def test_state_dict_type(library: Library, form: str) -> Any:
    """The context sets a form and ends with the one before, also one in another; on a wrapper as on the class."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    tell = library.FSDP.get_state_dict_type
    told = [tell(model)]
    kind, config, optimizer_config = configured(library, form)
    with library.FSDP.state_dict_type(model, kind, config, optimizer_config) as entered:
        told.append(tell(model))
        with model.state_dict_type(model, state_dict_type=library.StateDictType.FULL_STATE_DICT):
            told.append(model.get_state_dict_type(model))
        told.append(tell(model))
    return [*told, tell(model), entered]


@alike(ranks=2)
def test_state_dict_type_in_a_plain_module(library: Library) -> Any:
    """The module that is passed need not be a wrapper: all that are inside are set."""
    module = two_roots(library)
    library.FSDP.set_state_dict_type(module, library.StateDictType.SHARDED_STATE_DICT)
    told = [library.FSDP.get_state_dict_type(each) for each in (module, module.left, module.right)]
    kinds = {name: type(value) for name, value in module.state_dict().items()}
    return told, kinds


@alike()
def test_no_settings_without_wrappers(library: Library) -> Any:
    """A module without wrappers has no settings; setting some returns settings of nothing."""
    plain = nn.Linear(2, 2)
    before = library.FSDP.set_state_dict_type(plain, library.StateDictType.FULL_STATE_DICT)
    return [library.FSDP.get_state_dict_type(plain), before]


@alike()
def test_settings_of_one_class_with_other_fields(library: Library) -> Any:
    """Wrappers whose configurations differ in a field only can be set together; the first one's settings are returned."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    kind, config, optimizer_config = configured(library, "FULL_STATE_DICT", offload_to_cpu=True)
    library.FSDP.set_state_dict_type(model.blocks[0], kind, config, optimizer_config)
    return library.FSDP.set_state_dict_type(model, library.StateDictType.SHARDED_STATE_DICT)


@alike(how=["get_fields", "get_forms", "set_forms", "context_forms"])
def test_settings_that_differ(library: Library, how: str) -> Any:
    """Where wrappers differ there is no one setting to tell; where their forms differ, none to return either."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    form = "FULL_STATE_DICT" if how == "get_fields" else "SHARDED_STATE_DICT"
    library.FSDP.set_state_dict_type(model.blocks[0], *configured(library, form, offload_to_cpu=True))
    full_form = library.StateDictType.FULL_STATE_DICT
    if how == "set_forms":
        library.FSDP.set_state_dict_type(model, full_form)
    elif how == "context_forms":
        with library.FSDP.state_dict_type(model, full_form):
            pass
    else:
        library.FSDP.get_state_dict_type(model)


@alike(form=FORMS, wrong=[*FORMS, "base", "dict"], part=["model", "optimizer"])
def test_configurations_that_do_not_fit(library: Library, form: str, wrong: str, part: str) -> Any:
    """A configuration of another form, of no form, or none at all is a RuntimeError, whichever of the two it is."""
    model = library.shard(nn.Linear(2, 2))
    kind, *configurations = configured(library, form)
    index = ["model", "optimizer"].index(part)
    if wrong == "base":
        configurations[index] = [library.StateDictConfig, library.OptimStateDictConfig][index]()
    elif wrong == "dict":
        configurations[index] = {"offload_to_cpu": True}
    else:
        configurations[index] = configured(library, wrong)[1 + index]
    library.FSDP.set_state_dict_type(model, kind, *configurations)
    return library.FSDP.get_state_dict_type(model)


@unlike("A model without wrappers", ours=["Tensor", "Tensor"])
def test_a_form_for_a_plain_model(library: Library) -> Any:
    """FSDP1's context ends with a KeyError."""
    plain = nn.Linear(2, 2)
    with library.FSDP.state_dict_type(plain, library.StateDictType.SHARDED_STATE_DICT):
        state = plain.state_dict()
    return [type(value).__name__ for value in state.values()]


@unlike("No deprecation warnings.", ours=[[], []])
def test_warnings_of_settings(library: Library) -> Any:
    """FSDP1 says at each setting that there is something newer."""
    model = library.shard(nn.Linear(2, 2))
    with warned() as setting:
        library.FSDP.set_state_dict_type(model, library.StateDictType.FULL_STATE_DICT)
    with warned() as entering, library.FSDP.state_dict_type(model, library.StateDictType.FULL_STATE_DICT):
        pass
    return [setting, entering]


# summon_full_params


@alike(ranks=2, recurse=BOTH, writeback=BOTH, originals=BOTH)
def test_summon_full_params(library: Library, recurse: bool, writeback: bool, originals: bool) -> Any:
    """What is shown inside, what is kept of changes to it, by position and by name."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals)
    summon = library.FSDP.summon_full_params
    with summon(model, recurse, writeback) as entered:
        state = model.training_state, model.blocks[0].training_state
        own = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if not name.startswith("blocks")
        }
        names = sorted(model._parameters), len(list(model.parameters()))
        with torch.no_grad():
            model.module.head.weight.fill_(7.0)
            if recurse:
                model.module.blocks[0].module.up.bias.fill_(8.0)
    with summon(module=model, recurse=True, writeback=False, rank0_only=False, offload_to_cpu=False, with_grads=False):
        everything = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    listed = [name for name, _ in model.named_parameters()]
    return [entered, state, own, names if originals else None, everything, listed, model.training_state]


@alike(ranks=2, originals=BOTH)
def test_summon_of_rank_0_only(library: Library, originals: bool) -> Any:
    """Full parameters on the first rank; what the others list are the shards."""
    model = library.shard(seeded(lambda: nn.Linear(3, 4, bias=False)), use_orig_params=originals)
    with library.FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        shown = [(name, p.numel()) for name, p in model.named_parameters()]
    return shown, [(name, p.numel()) for name, p in model.named_parameters()]


def shown(module: nn.Module) -> list[Any]:
    """How many elements each wrapper in `two_roots` lists now, and what each is doing."""
    wrappers = {"left": module.left, "right": module.right, "below": module.left.blocks[1]}
    return [(name, sum(p.numel() for p in each.parameters()), each.training_state) for name, each in wrappers.items()]


@alike(ranks=2, where=["plain", "plain_parent", "unit_below", "right"], recurse=BOTH)
def test_summon_elsewhere(library: Library, where: str, recurse: bool) -> Any:
    """On a module without wrappers, on a parent that is none, on a unit below, on a wrapper beside others."""
    module = two_roots(library)
    module.left(batch())
    target = {
        "plain": module.plain,
        "plain_parent": module,
        "unit_below": module.left.blocks[1],
        "right": module.right,
    }[where]
    with library.FSDP.summon_full_params(target, recurse=recurse, writeback=False):
        inside = shown(module)
    return inside, shown(module)


@unlike(
    "`summon_full_params()` takes every combination of its arguments",
    ranks=2,
    ours=["TrainingState.SUMMON_FULL_PARAMS"] * 3,
)
def test_summon_of_a_wrapped_module(library: Library) -> Any:
    """Of the module inside a wrapper FSDP1 shows the units below alone."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library))
    with library.FSDP.summon_full_params(model.module, writeback=False):
        return [each.training_state for each in library.FSDP.fsdp_modules(model)]


@unlike(
    "`summon_full_params()` takes every combination of its arguments",
    ranks=2,
    ours=[0.0, 0.0],
    strategy=["NO_SHARD"],
)
def test_summon_without_writeback_of_copies(library: Library, strategy: str) -> Any:
    """Where nothing is sharded FSDP1 keeps changes also with `writeback=False`."""
    module = seeded(lambda: nn.Linear(3, 2))
    nn.init.zeros_(module.bias)
    model = library.shard(module, sharding_strategy=library.ShardingStrategy[strategy])
    with library.FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.module.bias.fill_(1.0)
    with library.FSDP.summon_full_params(model, writeback=False):
        return model.module.bias.tolist()


@alike(ranks=2)
def test_summon_with_gradients(library: Library) -> Any:
    """With `with_grads` the full gradients are there too, and changes to them are kept."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=True)
    model(batch()).square().mean().backward()
    with library.FSDP.summon_full_params(model, with_grads=True):
        before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad.mul_(2)
    with library.FSDP.summon_full_params(model, with_grads=True, writeback=False):
        after = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return before, after


class Summons(nn.Module):
    """A module whose forward pass asks for full parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.summon: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In the middle of it."""
        with self.summon():
            return self.layer(x)


@alike(ranks=2, originals=BOTH)
def test_summon_in_a_forward_pass(library: Library, originals: bool) -> Any:
    """It is torch's class of error to ask for full parameters in a forward pass of the same wrapper."""
    model = library.shard(seeded(Summons), use_orig_params=originals)
    model.module.summon = lambda: library.FSDP.summon_full_params(model)
    model(batch())


@alike(ranks=2, originals=BOTH)
def test_summon_ends_with_an_exception(library: Library, originals: bool) -> Any:
    """The sharded form is back, and what was changed until then is kept."""
    model = library.shard(seeded(), use_orig_params=originals)
    try:
        with library.FSDP.summon_full_params(model):
            with torch.no_grad():
                model.module.head.bias.fill_(3.0)
            raise KeyError("stop")
    except KeyError:
        pass
    return [model.training_state, full(library, model), model(batch())]


@alike(strategy=["FULL_SHARD", "NO_SHARD"], ranks=2, originals=BOTH)
def test_summon_and_names(library: Library, strategy: str, originals: bool) -> Any:
    """Inside names are the module's own, of parameters and of buffers; outside they have the wrapper's part."""
    model = library.shard(
        seeded(Net),
        auto_wrap_policy=library.ModuleWrapPolicy({Block}),
        sharding_strategy=library.ShardingStrategy[strategy],
        use_orig_params=originals,
    )

    def names() -> Any:
        return (
            [name for name, _ in model.named_parameters()],
            [name for name, _ in model.named_parameters(prefix="p")],
            [name for name, _ in model.named_parameters("p", False)],
            [name for name, _ in model.named_parameters(remove_duplicate=False)],
            [name for name, _ in model.named_buffers()],
            [name for name, _ in model.named_buffers("b", recurse=False)],
            [name for name, _ in model.named_buffers(prefix="b", remove_duplicate=False)],
        )

    outside = names()
    with library.FSDP.summon_full_params(model, writeback=False):
        inside = names()
    with library.FSDP.summon_full_params(model, recurse=False, writeback=False):
        own = names()[4:]
    return outside, inside, own, names() == outside
