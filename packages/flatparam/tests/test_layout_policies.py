"""Layout policies: which parameter gets which rule, through the tree, and what is refused."""

import functools
import warnings
from typing import Any

import pytest
import torch
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatparam import FullyShardedDataParallel, fully_shard, layout
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_core import FlatParameter, LayoutError, LayoutRule, owner_of
from flatparam_runtime import OptimizerKind, kind_of_optimizer

from .models import Block, Transformer, seeded
from .worlds import facts_of, on_ranks


def rules_of(model: nn.Module) -> dict[str, str]:
    """The rule of each parameter in the layouts of a sharded model, by its name below its unit."""
    found = {}
    for module in model.modules():
        for flat in module.params if isinstance(module, FullyShardedDataParallel) else ():
            for slot in flat.flat_layout.slots:
                found[slot.spec.fqn] = str(slot.spec.rule)
    return found


def wrapped(rules: Any, build: Any = Transformer, **arguments: Any) -> dict[str, str]:
    """The rules that two ranks find, which have to be the same."""

    def rank(world: Collectives) -> Any:
        return rules_of(FullyShardedDataParallel(build(), world, layout=rules, **arguments))

    first, second = on_ranks(2, rank)
    assert first == second
    return first  # type: ignore[no-any-return]


def test_without_a_layout_all_is_cut_anywhere() -> None:
    """The default is the rule `element` for all."""
    assert set(wrapped(None).values()) == {"element"}


def test_the_first_case_that_fits_counts() -> None:
    """Classes and patterns of names are tried in order; the rest gets the other rule."""
    policy = layout.by(
        {"blocks.0.mlp.0.*": layout.element, nn.Linear: layout.row, "*.norm.weight": layout.whole},
        otherwise=layout.blocks(8),
    )
    found = wrapped(policy)
    assert found["blocks.0.mlp.0.weight"] == "element"
    assert found["blocks.0.mlp.2.weight"] == found["blocks.1.mlp.0.bias"] == "row"
    assert found["blocks.0.norm.weight"] == "whole"
    assert found["blocks.0.norm.bias"] == "block of 8"


def test_names_are_those_of_the_whole_model() -> None:
    """Inside units that a policy chose, names are still those below the module that the layout was given for."""
    policy = layout.by({"blocks.1.*": layout.whole, "embed.*": layout.row})
    found = {}

    def rank(world: Collectives) -> Any:
        model = FullyShardedDataParallel(
            Transformer(), world, layout=policy, auto_wrap_policy=ModuleWrapPolicy({Block})
        )
        units = FullyShardedDataParallel.fsdp_modules(model)
        return [{str(slot.spec.rule) for slot in unit.params[0].flat_layout.slots} for unit in units]

    found = on_ranks(2, rank)[0]
    assert found == [{"row", "element"}, {"element"}, {"whole"}]


def test_a_function_sees_full_parameters() -> None:
    """A plain function is called once for each parameter, with its full name and its full shape."""
    seen: dict[str, tuple[int, ...]] = {}

    def choose(name: str, parameter: nn.Parameter) -> LayoutRule:
        seen.setdefault(name, tuple(parameter.shape))
        return layout.whole if parameter.dim() > 1 else layout.element

    found = wrapped(choose, auto_wrap_policy=ModuleWrapPolicy({Block}))
    plain = dict(Transformer().named_parameters(remove_duplicate=False))
    assert seen == {name: tuple(parameter.shape) for name, parameter in plain.items()}
    assert found["embed.weight"] == "whole"


def test_a_shared_parameter_has_the_strictest_rule() -> None:
    """A weight that an embedding and a head share keeps together what either of its rules does."""
    found = wrapped(layout.by({nn.Embedding: layout.row, "head.*": layout.whole}))
    assert found["embed.weight"] == "whole"
    found = wrapped(layout.by({nn.Embedding: layout.row, "head.*": layout.blocks(2)}))
    assert found["embed.weight"] == "row"


def test_a_policy_may_change_the_layout_of_a_module() -> None:
    """An argument that a wrapping policy gives a module replaces what it has from the wrapper around it."""
    own = layout.by({}, otherwise=layout.whole)
    policy = CustomPolicy(lambda module: {"layout": own} if isinstance(module, Block) else False)

    def rank(world: Collectives) -> Any:
        model = FullyShardedDataParallel(
            Transformer(), world, layout=layout.by({}, otherwise=layout.row), auto_wrap_policy=policy
        )
        units = FullyShardedDataParallel.fsdp_modules(model)
        return [{str(slot.spec.rule) for slot in unit.params[0].flat_layout.slots} for unit in units]

    assert on_ranks(2, rank)[0] == [{"row"}, {"whole"}, {"whole"}]


def test_modules_from_the_meta_device_have_their_rules() -> None:
    """A rule belongs to a place in a module, so it is there for the parameter that is made later."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

    found = wrapped(layout.by({"0.weight": layout.whole, "1.weight": layout.row}), build)
    assert found["0.weight"] == "whole"
    assert found["1.weight"] == "row"


def test_outer_rules_leave_inner_units_alone() -> None:
    """A module that was wrapped before, with rules or without, keeps its layout."""

    def rank(world: Collectives) -> Any:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        model[0] = FullyShardedDataParallel(model[0], world, use_orig_params=True)
        outer = FullyShardedDataParallel(
            model, world, layout=layout.by({}, otherwise=layout.whole), use_orig_params=True
        )
        return rules_of(outer)

    assert on_ranks(2, rank)[0] == {
        "weight": "element",
        "bias": "element",
        "1.weight": "whole",
        "1.bias": "whole",
    }


def test_fully_shard_gives_rules() -> None:
    """`fully_shard` takes the same policies; names are those below each module."""

    def rank(world: Collectives) -> Any:
        model = seeded(Transformer)
        fully_shard(model, mesh=world, layout=layout.by({"head.*": layout.whole, nn.LayerNorm: layout.blocks(4)}))
        (flat,) = {id(p): p for p in map(_flat_of, model.parameters())}.values()
        return {slot.spec.fqn: str(slot.spec.rule) for slot in flat.flat_layout.slots}

    found = on_ranks(2, rank)[0]
    assert found["embed.weight"] == "whole"
    assert found["extras.norm.weight"] == "block of 4"
    assert found["extras.scale.weight"] == "element"


def _flat_of(parameter: nn.Parameter) -> FlatParameter:
    owner = owner_of(parameter)
    assert owner is not None
    return owner[0].flat_param


def optimizer_named(name: str) -> type[torch.optim.Optimizer]:
    return type(name, (torch.optim.Optimizer,), {})


@each_row(
    ("name", "of_matrix", "of_bias"),
    [
        ("SGD", "element", "element"),
        ("AdamW", "element", "element"),
        ("Muon", "whole", "element"),
        ("DistributedShampoo", "whole", "element"),
        ("SOAP", "whole", "element"),
        ("Adafactor", "whole", "whole"),
        ("FusedLAMB", "whole", "whole"),
        ("LAMB8bit", "whole", "whole"),
        ("LARS8bit", "whole", "whole"),
        ("AdamW8bit", "block of 5120", "element"),
        ("AdamW4bit", "block of 5120", "element"),
        ("GaLoreAdamW8bit", "whole", "element"),
        ("AdamMini", "whole", "whole"),
        ("KFAC", "whole", "whole"),
        ("SPAM", "whole", "whole"),
        ("AdEMAMix", "element", "element"),
        ("SophiaG", "element", "element"),
    ],
)
def test_rules_for_optimizers(name: str, of_matrix: str, of_bias: str) -> None:
    """What an optimizer looks at decides: matrices, all shapes, blocks, or nothing but elements."""
    policy = layout.for_optimizer(getattr(torch.optim, name, optimizer_named(name)))
    linear = nn.Linear(96, 160)
    assert str(policy.rule("weight", linear.weight, linear)) == of_matrix
    assert str(policy.rule("bias", linear.bias, linear)) == of_bias


@each_row("kind", [torch.optim.LBFGS, optimizer_named("Prodigy")])
def test_no_layout_helps_what_looks_at_all_parameters(kind: type[torch.optim.Optimizer]) -> None:
    """The error says what does: no sharding."""
    with pytest.raises(ValueError, match="no layout makes it exact on shards; use sharding_strategy=NO_SHARD"):
        layout.for_optimizer(kind)


@given(st.integers(0, 200_000), st.booleans())
@settings(deadline=None)
def test_parts_are_quantised_if_the_whole_is(numel: int, is_round: bool) -> None:
    """Optimizers of 8 bits quantise 4,096 elements or more, torchao's only whole blocks of 256: also each part, or none."""
    numel -= numel % 256 * is_round
    policy = layout.for_optimizer(optimizer_named("AdamW8bit"))
    parameter = nn.Parameter(torch.empty(numel, device="meta"))
    rule = policy.rule("weight", parameter, nn.Module())
    if rule.kind == "block":
        length = rule.block_numel
        assert length % 256 == numel % 256 == 0
        assert length >= 4096
        assert numel % length == 0 or numel % length >= 4096
    else:
        assert rule == (layout.element if numel < 4096 else layout.whole)
        assert numel < 4096 or numel % 256


@each_row("name", ["Adam_mini", "KFAC", "Prodigy", "MuonWithAuxAdam", "Mystery"])
def test_a_name_counts_more_than_a_base_with_a_different_step(name: str) -> None:
    """A layout is made, and a step on shards is refused, by one list: what AdamW's base class does says nothing."""
    made = type(name, (torch.optim.AdamW,), {"step": lambda self, closure=None: None})
    kind = kind_of_optimizer(made)
    assert kind is not OptimizerKind.ELEMENTS
    if kind in (None, OptimizerKind.ALL):
        with pytest.raises(ValueError, match="NO_SHARD|give the rules yourself"):
            layout.for_optimizer(made)
    else:
        linear = nn.Linear(3, 3)
        assert layout.for_optimizer(made).rule("weight", linear.weight, linear) == layout.whole


def test_a_subclass_has_the_rules_of_its_base() -> None:
    """The first class in the order of resolution whose name is known counts."""

    class Mine(torch.optim.AdamW):
        pass

    linear = nn.Linear(3, 3)
    assert layout.for_optimizer(Mine).rule("weight", linear.weight, linear) == layout.element


REFUSED: list[Any] = [
    (
        lambda: layout.for_optimizer(optimizer_named("Mystery")),
        ValueError,
        "does not know the rule of Mystery",
    ),
    (
        lambda: layout.for_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)),
        TypeError,
        "a class",
    ),
    (
        lambda: layout.by({3: layout.row}),
        TypeError,
        "classes of modules or patterns of names as keys, found 3",
    ),
    (lambda: layout.by({torch.Tensor: layout.row}), TypeError, "classes of modules"),
    (
        lambda: layout.by({nn.Linear: "row"}),
        TypeError,
        "a rule such as flatparam.layout.row for .*Linear.*, found 'row'",
    ),
    (lambda: layout.by({}, otherwise=4), TypeError, "found 4"),
    (lambda: layout.by(7), TypeError, "a mapping, or a function"),
    (lambda: layout.blocks(0), LayoutError, "at least 1"),
]


@each_row(("make", "kind", "message"), REFUSED)
def test_policies_that_say_nothing_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    """The error says what was expected and what was found."""
    with pytest.raises(kind, match=message):
        make()


@each_row(
    ("asked", "message"),
    [
        (layout.row, "layout: expected flatparam.layout.by"),
        ("row", "layout: expected flatparam.layout.by"),
        (lambda name, parameter: "row", "a rule for '0.weight', such as flatparam.layout.row, found 'row'"),
        (functools.partial(lambda *_, **__: None), "a rule for '0.weight'"),
    ],
)
@each_row("wrap", [FullyShardedDataParallel, fully_shard])
def test_what_is_no_layout_is_refused_before_anything_changes(wrap: Any, asked: Any, message: str) -> None:
    """A wrong layout is a TypeError that names the argument, or the parameter, and the module stays as it was."""

    def rank(world: Collectives) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        before = facts_of(model)
        ranks = {"mesh": world} if wrap is fully_shard else {"process_group": world}
        with pytest.raises(TypeError, match=message):
            wrap(model, layout=asked, **ranks)
        assert facts_of(model) == before

    on_ranks(2, rank)


def test_ranks_with_different_rules_are_told(use_orig_params: bool) -> None:
    """Rules that differ between ranks are an error on every rank that names a parameter and both rules."""

    def rank(world: Collectives) -> str:
        rule = layout.row if world.rank else layout.blocks(2)
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), world, use_orig_params=use_orig_params, layout=lambda *_: rule
        )
        with pytest.raises(Exception, match="different models") as caught:
            model(torch.ones(1, 4))
        return str(caught.value)

    for message in on_ranks(2, rank):
        assert "parameter 'weight'" in message
        assert "kept together by row" in message
        assert "kept together by block of 2" in message


def test_a_pattern_that_fits_nothing_gets_a_warning() -> None:
    """A misspelt pattern is told with names of the model; not if the layout may be for other modules, too."""

    def rank(world: Collectives) -> list[list[str]]:
        rules = layout.by({"blocks.*.mlp.*": layout.row, "block.*.norm.*": layout.whole, nn.GRU: layout.row})
        inner = Transformer()
        inner.blocks[0] = FullyShardedDataParallel(inner.blocks[0], world, layout=rules)
        told = []
        for module, policy in (
            (Transformer(), ModuleWrapPolicy({Block})),
            (inner, ModuleWrapPolicy({Block})),
            (Block(), None),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                FullyShardedDataParallel(module, world, layout=rules, auto_wrap_policy=policy)
            told.append([str(each.message) for each in caught if "fits no parameter" in str(each.message)])
        return told

    for model, mixed, block in on_ranks(2, rank):
        assert len(model) == 1
        assert "layout: 'block.*.norm.*' fits no parameter" in model[0]
        assert "the names are 'blocks.0" in model[0] or "the names are 'embed" in model[0], model
        assert mixed == block == []


def test_a_layout_that_is_mostly_padding_gets_a_warning() -> None:
    """One matrix on four ranks takes four times its memory: the warning says so, and what to do; on two it is silent."""

    def rank(world: Collectives) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FullyShardedDataParallel(nn.Linear(8, 8, bias=False), world, layout=layout.by({}, otherwise=layout.whole))
        return [str(each.message) for each in caught]

    told = [message for messages in on_ranks(4, rank) for message in messages]
    assert any("takes 4.0 times the memory of its parameters on 4 ranks" in message for message in told)
    assert not [message for messages in on_ranks(2, rank) for message in messages]
