"""CUDA graphs of the compiler are refused where parameters move; everything else of it is not."""

from __future__ import annotations

from typing import Any, Final

import attrs
import pytest
import torch

from integration_tests.simulated.models import Block, Model, batch
from integration_tests.simulated.worlds import World, on_simulated

pytestmark = [pytest.mark.processes, pytest.mark.long]

GRAPHS: Final[dict[str, dict[str, Any]]] = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "option": {"options": {"triton.cudagraphs": True}},
}
WITHOUT: Final[dict[str, dict[str, Any]]] = {
    "default": {},
    "max-autotune-no-cudagraphs": {"mode": "max-autotune-no-cudagraphs"},
    "eager": {"backend": "eager"},
}


@attrs.frozen
class Row:
    """What is compiled, how, and of what kind of unit the parameters are; `named` is in the error, if there is one."""

    way: str
    how: dict[str, Any]
    kind: str = "flat"
    strategy: str = "FULL_SHARD"
    named: str = ""


REFUSED: Final = {
    **{f"a block, {name}": Row("after", how, named="'blocks.1'") for name, how in GRAPHS.items()},
    "a block, before it is wrapped": Row("before", GRAPHS["option"], named="'blocks.1'"),
    "a block that is wrapped by torch's class": Row("optimised", GRAPHS["option"], named="'blocks.1'"),
    "the model": Row("model", GRAPHS["option"], named="'OptimizedModule'"),
    "the model, in place": Row("in place", GRAPHS["option"], named="'FullyShardedDataParallel'"),
    "originals": Row("after", GRAPHS["option"], kind="originals", named="'blocks.1'"),
    "fully_shard": Row("after", GRAPHS["option"], kind="fully_shard", named="'blocks.1'"),
    "SHARD_GRAD_OP": Row("after", GRAPHS["option"], strategy="SHARD_GRAD_OP", named="'blocks.1'"),
    "NO_SHARD, flat": Row("after", GRAPHS["option"], strategy="NO_SHARD", named="'blocks.1'"),
}
ALLOWED: Final = {
    **{f"a block, {name}": Row("after", how) for name, how in WITHOUT.items()},
    "NO_SHARD, originals": Row("after", GRAPHS["option"], kind="originals", strategy="NO_SHARD"),
    "a module without parameters": Row("relu", GRAPHS["option"]),
}
"""Nothing moves there, or there are no graphs."""


def refusals(world: World, rows: list[Row]) -> list[str]:
    """What is raised for each row; a rank does it."""
    return [_refusal(world, row) for row in rows]


def _refusal(world: World, row: Row) -> str:
    import flatparam
    from flatparam.wrap import ModuleWrapPolicy
    from flatparam_core import FlatParamError
    from flatparam_runtime import units_in
    from flatparam_runtime.passes.tree import check_no_graphs

    model: Any = Model(2).to(world.device)
    model.relu = torch.nn.ReLU()
    if row.way == "before":
        model.blocks[1].compile(**row.how)
    if row.way == "optimised":
        model.blocks[1] = torch.compile(model.blocks[1], **row.how)
    if row.kind == "fully_shard":
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            flatparam.fully_shard(block, mesh=world.group)
        flatparam.fully_shard(model, mesh=world.group)
    else:
        model = flatparam.FullyShardedDataParallel(
            model,
            process_group=world.group,
            device_id=world.device,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=flatparam.ShardingStrategy[row.strategy],
            use_orig_params=row.kind == "originals",
        )
    inner = model if row.kind == "fully_shard" else model.module
    if row.way == "after":
        inner.blocks[1].compile(**row.how)
    if row.way == "relu":
        inner.relu.compile(**row.how)
    if row.way == "in place":
        model.compile(**row.how)
    units = tuple(units_in(model))
    try:
        if row.way == "model":
            torch._dynamo.config.suppress_errors = True  # Dynamo knows no such device
            torch.compile(model, **row.how)(batch(0, world.rank).to(world.device))
        elif row.named:
            model(batch(0, world.rank).to(world.device))
        else:  # Inductor knows no such device
            check_no_graphs(units[0], units)
    except FlatParamError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """Of each row, what is raised on each rank."""
    rows = [*REFUSED.values(), *ALLOWED.values()]
    return dict(zip([*REFUSED, *ALLOWED], map(list, zip(*on_simulated(2, refusals, rows), strict=True)), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_of_parameters_that_move_are_refused(told: dict[str, list[str]], name: str) -> None:
    """The first pass names the module, on every rank, before anything is gathered."""
    for rank, message in enumerate(told[name]):
        assert f"rank {rank}: module {REFUSED[name].named} is compiled with CUDA graphs" in message


@pytest.mark.parametrize("name", [name for name in ALLOWED])
def test_nothing_else_is_refused(told: dict[str, list[str]], name: str) -> None:
    """Nor are parameters that stay where they are."""
    assert told[name] == ["", ""]
