"""State between any two layouts: every form, checkpoint directories and `torch.distributed.checkpoint`."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam import FullyShardedDataParallel, StateDictType, layout
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_core import FlatParamError

from .models import Block, Transformer, seeded
from .worlds import on_ranks

RULES: dict[str, Any] = {
    "element": None,
    "blocks": layout.by({}, otherwise=layout.blocks(3)),
    "rows": layout.by({}, otherwise=layout.row),
    "whole": layout.by({}, otherwise=layout.whole),
    "chunks": layout.by({}, otherwise=layout.chunk),
}
PAIRS = [pytest.param(*pair, id="-".join(pair)) for pair in itertools.product(RULES, RULES)]

#: The ranks that write, and those that read.
WRITERS, READERS = 2, 3

pytestmark = pytest.mark.filterwarnings("ignore:the world has one rank")


def built(world: Collectives | None, kind: str, use_orig_params: bool, seed: int = 0) -> Any:
    """A sharded model with its optimizer; whoever reads begins with other weights, under one unit only."""
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        seeded(Transformer) if seed == 0 else Transformer(),
        world,
        auto_wrap_policy=ModuleWrapPolicy({Block}) if seed == 0 else None,
        use_orig_params=use_orig_params,
        layout=RULES[kind],
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0) -> None:
    """Three steps, the same on any number of ranks that is a power of two."""
    for step in range(start, start + 3):
        tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def full(model: Any, optimizer: Any) -> dict[str, Any]:
    """The full state of both, flattened."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        values = dict(model.state_dict())
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return values | {f"{name}/{key}": value for name, own in state.items() for key, value in own.items()}


def expected() -> dict[str, Any]:
    """The full state of a model that has no rules, where all others have to get to."""

    def rank(world: Collectives) -> Any:
        model, optimizer = built(world, "element", False)
        train(model, optimizer)
        return full(model, optimizer)

    return on_ranks(WRITERS, rank)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    torch.set_num_threads(1)
    return expected()


def assert_equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Assert the same names, and tensors of the same shapes and bits."""
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_directories_go_between_layouts(
    source: str, target: str, use_orig_params: bool, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    """What two ranks save, three ranks load under the other rule, one unit and the other exposure, bit for bit."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def save(world: Collectives) -> None:
        model, optimizer = built(world, source, use_orig_params)
        train(model, optimizer)
        assert_equal(full(model, optimizer), wanted)
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=3)

    def load(world: Collectives) -> None:
        model, optimizer = built(world, target, not use_orig_params, seed=1)
        assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        assert_equal(full(model, optimizer), wanted)

    on_ranks(WRITERS, save)
    on_ranks(READERS, load)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_full_states_go_between_layouts(
    source: str, target: str, use_orig_params: bool, wanted: dict[str, Any]
) -> None:
    """Full states of the model and the optimizer load under the other rule at another number of ranks."""
    kinds = StateDictType.FULL_STATE_DICT

    def save(world: Collectives) -> Any:
        model, optimizer = built(world, source, use_orig_params)
        train(model, optimizer)
        with FullyShardedDataParallel.state_dict_type(model, kinds):
            return dict(model.state_dict()), FullyShardedDataParallel.optim_state_dict(model, optimizer)

    values, states = on_ranks(WRITERS, save)[0]

    def load(world: Collectives) -> None:
        model, optimizer = built(world, target, not use_orig_params, seed=1)
        with FullyShardedDataParallel.state_dict_type(model, kinds):
            model.load_state_dict(values)
            converted = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states)
            optimizer.load_state_dict(converted)
        assert_equal(full(model, optimizer), wanted)

    on_ranks(READERS, load)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_resumed_run_goes_on_with_the_same_bits(kind: str, use_orig_params: bool, tmp_path: Path) -> None:
    """Saved without rules by two ranks, a run goes on under rules on two other ranks as if it had not stopped."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def whole_run(world: Collectives) -> Any:
        model, optimizer = built(world, "element", use_orig_params)
        train(model, optimizer)
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(step=3)
        train(model, optimizer, start=3)
        return full(model, optimizer)

    def resumed(world: Collectives) -> Any:
        model, optimizer = built(world, kind, use_orig_params)
        assert Checkpointer(tmp_path, model, optimizer, ranks=world).load() is not None
        train(model, optimizer, start=3)
        return full(model, optimizer)

    goal = on_ranks(2, whole_run)[0]
    for found in on_ranks(2, resumed):
        assert_equal(found, goal)


@pytest.mark.processes
def test_a_local_state_is_refused_where_rules_have_moved_parameters() -> None:
    """A flat shard does not tell how parameters lie: with rules it is neither saved nor loaded, and the error says so."""
    run_processes(WRITERS, local_states)


def local_states(ranks: Collectives) -> None:
    plain, _ = built(None, "element", False)
    whole, _ = built(None, "whole", False)
    with FullyShardedDataParallel.state_dict_type(plain, StateDictType.LOCAL_STATE_DICT):
        state = plain.state_dict()
    with FullyShardedDataParallel.state_dict_type(whole, StateDictType.LOCAL_STATE_DICT):
        with pytest.raises(FlatParamError, match="rules of its layout have moved the parameters"):
            whole.state_dict()
        with pytest.raises(FlatParamError, match="use a full or a sharded state"):
            whole.load_state_dict(state)


# Over process groups: ShardedTensors and DTensors

FORMS = ["sharded", "chunked", "dtensor"]


def settings_of(form: str) -> tuple[Any, Any, Any]:
    chunks = {"dim_0_chunks": True} if form == "chunked" else {}
    return (
        StateDictType.SHARDED_STATE_DICT,
        flatparam.ShardedStateDictConfig(**chunks),
        flatparam.ShardedOptimStateDictConfig(**chunks),
    )


def in_form(kind: str, form: str, use_orig_params: bool, seed: int = 0) -> Any:
    mesh = None
    if form == "dtensor":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        seeded(Transformer) if seed == 0 else Transformer(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_mesh=mesh,
        layout=RULES[kind],
    )
    FullyShardedDataParallel.set_state_dict_type(model, *settings_of(form))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def distributed_state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def save_all(ranks: Collectives, root: Path, form: str) -> None:
    """Write a distributed checkpoint of each rule."""
    import torch.distributed.checkpoint as dcp

    for number, kind in enumerate(RULES):
        model, optimizer = in_form(kind, form, use_orig_params=number % 2 == 0)
        train(model, optimizer)
        dcp.save(distributed_state(model, optimizer), checkpoint_id=root / kind)


def load_each(
    ranks: Collectives, root: Path, form: str, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Load the source of each pair under its target; the full states that were loaded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultLoadPlanner

    found = {}
    for number, (source, target) in enumerate(pairs):
        model, optimizer = in_form(target, form, number % 2 == 0, seed=1)
        train(model, optimizer)
        state = distributed_state(model, optimizer)
        # See integration_tests/state/ours.py: torch's planner loses chunks otherwise.
        planner = DefaultLoadPlanner(flatten_sharded_tensors=form != "chunked")
        dcp.load(state, checkpoint_id=root / source, planner=planner)
        model.load_state_dict(state["model"])
        converted = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"])
        optimizer.load_state_dict(converted)
        found[source, target] = full(model, optimizer)
    return found


#: Every pair of rules is in one of these, and every rule is a source and a target in each.
# Each rule is a source once and a target once in all of them.
SOME = [
    [
        (source, target)
        for at, (source, target) in enumerate(zip(RULES, [*RULES][2:] + [*RULES][:2], strict=True))
        if at % 3 == third
    ]
    for third in range(3)
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "pairs"),
    [
        *(pytest.param(form, third, id=form) for form, third in zip(FORMS, SOME, strict=True)),
        *(
            pytest.param(form, list(itertools.product(RULES, RULES)), marks=pytest.mark.long, id=f"{form}-all")
            for form in FORMS
        ),
    ],
)
def test_distributed_checkpoints_go_between_layouts(
    form: str, pairs: list[tuple[str, str]], tmp_path: Path, wanted: dict[str, Any]
) -> None:
    """What `dcp.save` wrote on two ranks, `dcp.load` gives three ranks under the other rule, bit for bit."""
    run_processes(WRITERS, save_all, tmp_path, form)
    for each in run_processes(READERS, load_each, tmp_path, form, pairs):
        for source, target in pairs:
            assert_equal(each[source, target], wanted)
