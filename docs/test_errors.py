"""The page of errors says what really happens: each row is provoked, and compared with the page word for word.

After a message was changed on purpose, `python docs/test_errors.py` writes the page's tables anew.
"""

import copy
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim.swa_utils import AveragedModel

from flatparam import (
    Checkpointer,
    CheckpointError,
    Mailbox,
    MixedPrecision,
    Receiver,
    ShardedEMA,
    ShardedStateDictConfig,
    ShardingStrategy,
    Slicing,
    StateDictType,
    load_pretrained,
    offload,
    publish,
)
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import fully_shard as our_fully_shard
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_comm import (
    ByteLedger,
    Collectives,
    Fault,
    Kill,
    RankError,
    SingleCollectives,
    Topology,
    run_threads,
)
from flatparam_runtime import UnitPlan, shard_module
from flatparam_state import open_source

PAGE = Path(__file__).resolve().parent / "errors.md"
ROW = re.compile(r"^\| (?P<what>.+?) \| `(?P<kind>\w+)` \| (?P<says>.+) \|$", re.MULTILINE)
ALONE = SingleCollectives()

Provoke = Callable[[], object]


def wrapped(module: nn.Module | None = None, **arguments: Any) -> FSDP:
    return FSDP(nn.Linear(2, 2) if module is None else module, process_group=ALONE, **arguments)


def given_to(wrap: Callable[[nn.Module], object]) -> object:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return wrap(wrapped())
    finally:
        torch.distributed.destroy_process_group()


def trained() -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


# Setting up


def sharded_twice() -> None:
    module = nn.Linear(2, 2)
    for _ in range(2):
        shard_module(module, UnitPlan(Topology(ALONE)))


def wrapped_with_more() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    wrapped(module)
    module.extra = nn.Linear(2, 2)
    wrapped(module)


# Sharding in place


def norm_of_parts(ranks: Collectives) -> None:
    model = our_fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def loaded_from_outside() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    our_fully_shard(model[0], mesh=ALONE)
    model.load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})


def emptied() -> None:
    our_fully_shard(nn.Linear(2, 2), mesh=ALONE).to_empty(device="meta")


def in_place_on_meta() -> None:
    with torch.device("meta"):
        module = Scale()
    our_fully_shard(module, mesh=ALONE)


def in_place_inside() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    our_fully_shard(model, mesh=ALONE)
    our_fully_shard(model[0], mesh=ALONE)


def in_place_twice() -> None:
    our_fully_shard(our_fully_shard(nn.Linear(2, 2), mesh=ALONE), mesh=ALONE)


def to_three_ranks(ranks: Collectives) -> None:
    our_fully_shard(nn.Linear(2, 2), reshard_after_forward=3)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def on_meta() -> None:
    with torch.device("meta"):
        module = Scale()
    wrapped(module)


class Ranks:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def called_without_a_group() -> None:
    FSDP(nn.Linear(2, 2), process_group=Ranks())(torch.ones(1, 2))


def second_hook() -> None:
    model = wrapped()
    for _ in range(2):
        model.register_comm_hook(None, print)


def frozen_on_one(ranks: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    model(torch.ones(1, 2)).sum().backward()
    if ranks.rank == 1:
        model.module.weight.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()


def stepped_by_shape(ranks: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.Adafactor(model.parameters()).step()


def given_to_torchs_zero(ranks: Collectives) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = FSDP(nn.Linear(2, 2))
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)


def left_out_of_an_optimizer(ranks: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2), use_orig_params=True)
    FSDP.optim_state_dict(model, torch.optim.Adam(list(model.parameters())[: 2 - ranks.rank]))
    FSDP.optim_state_dict(model, torch.optim.Adam(list(model.parameters())[ranks.rank :]))


def mixed_ignored_states() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped(module, ignored_states=[module[0], module[1].weight])


class CastsInForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.cast_all()
        return super().forward(input)


def cast_in_forward() -> None:
    module = CastsInForward(2, 2)
    model = wrapped(module)
    module.cast_all = model.half
    model(torch.ones(1, 2))


def replaced(width: int = 2, **arguments: Any) -> None:
    model = wrapped(**arguments)
    model.module.weight = nn.Parameter(torch.zeros(2, width))
    with warnings.catch_warnings():  # torch says that it raises one error and not two
        warnings.simplefilter("ignore")
        model(torch.ones(1, 2))


def replaced_original() -> None:
    replaced(3, use_orig_params=True)


# Training


class SavesInForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.state_dict_of_all()
        return super().forward(input)


def saved_in_forward() -> None:
    module = SavesInForward(2, 2)
    model = wrapped(module)
    module.state_dict_of_all = model.state_dict
    model(torch.ones(1, 2))


def summoned_twice() -> None:
    model = wrapped()
    with FSDP.summon_full_params(model), FSDP.summon_full_params(model, with_grads=True):
        pass


def called_while_summoned() -> None:
    model = wrapped()
    with FSDP.summon_full_params(model, rank0_only=True):
        model(torch.ones(1, 2))


def copied_while_summoned() -> None:
    model = wrapped()
    with FSDP.summon_full_params(model):
        copy.deepcopy(model)


def clipped_infinity() -> None:
    model, _ = trained()
    next(model.parameters()).grad.fill_(torch.inf)
    model.clip_grad_norm_(1.0, error_if_nonfinite=True)


def trained_on(batch: torch.Tensor) -> None:
    model = wrapped(nonfinite="raise")
    model(batch).sum().backward()


def stepped_in_backward() -> None:
    model = wrapped(nonfinite="skip", use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(1, 2, requires_grad=True)
    batch.register_hook(lambda _: optimizer.step())
    model(batch).sum().backward()


def stepped_too_early() -> None:
    model, optimizer = trained()
    loss = model(torch.ones(1, 2)).sum()
    optimizer.step()
    loss.backward()


# State


def loaded(**changes: torch.Tensor | None) -> None:
    model = wrapped()
    state = {**model.state_dict(), **changes}
    model.load_state_dict({name: tensor for name, tensor in state.items() if tensor is not None})


def optimizer_of_another_model() -> None:
    FSDP.optim_state_dict(wrapped(), torch.optim.SGD(nn.Linear(2, 2).parameters()))


def optimizer_state_of_another_shape() -> None:
    model, optimizer = trained()
    state = FSDP.optim_state_dict(model, optimizer)
    state["state"]["weight"]["exp_avg"] = torch.zeros(3)
    FSDP.optim_state_dict_to_load(model, optimizer, state)


def optimizer_group_of_another_model() -> None:
    model, optimizer = trained()
    state = FSDP.optim_state_dict(model, optimizer)
    state["param_groups"][0]["params"] = ["head.weight"]
    FSDP.optim_state_dict_to_load(model, optimizer, state)


# Several ranks


WORLD_SIZES = [2]
"""The last is the number of ranks that the cases run on."""


def on_ranks(program: Callable[[Collectives], object], **options: Any) -> None:
    with pytest.raises(RankError) as caught:
        run_threads(WORLD_SIZES[-1], program, **options)
    assert caught.value.__cause__ is not None
    raise caught.value.__cause__ from None


def only_rank_0_saves(world: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2))
    if world.rank == 0:
        model.state_dict()


def different_steps(world: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2))
    with tempfile.TemporaryDirectory() as parent:
        directory = world.exchange(parent)[0]
        with Checkpointer(directory, model) as checkpointer:
            checkpointer.save(1)
            checkpointer.save(2)
            try:
                checkpointer.load(1 + (world.rank == 1))
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(directory, "runs/a")) from error
            finally:
                world.barrier()


def different_calls(world: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2))
    if world.rank == 0:
        model.clip_grad_norm_(1.0)
    else:
        model.state_dict()


class Blocks(nn.Sequential):
    def __init__(self, depth: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(*(nn.Linear(2, 2, dtype=dtype) for _ in range(depth)))


def different(
    rank: int, depth: int = 2, dtype: torch.dtype = torch.float32, units: bool = True, **arguments: Any
) -> Provoke:
    """A first step where rank 1 has made a different model, or wrapped it otherwise."""

    def program(world: Collectives) -> None:
        torch.manual_seed(0)
        more = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
        if world.rank == rank:
            module = Blocks(depth, dtype)
            model = FSDP(module, **({**more, **arguments} if units else arguments))
        else:
            model = FSDP(Blocks(), **more)
        model(torch.ones(1, 2, dtype=next(model.parameters()).dtype)).sum().backward()

    return partial(on_ranks, program)


def different_models(world: Collectives) -> None:
    model = FSDP(nn.Linear(2, 2 + 2 * world.rank))
    model(torch.ones(1, 2))


def different_weights(world: Collectives) -> None:
    torch.manual_seed(world.rank)
    model = FSDP(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2))


def replaced_after_wrapping(world: Collectives) -> None:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model.module[1] = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2))


def taken_out_after_wrapping(world: Collectives) -> None:
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model.module[1] = nn.Identity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(1, 2))


def swapped_later(world: Collectives) -> None:
    torch.manual_seed(0)
    model = FSDP(Choice())
    model(True).sum().backward()
    model(world.rank == 0).sum().backward()


def left_out(world: Collectives) -> None:
    torch.manual_seed(0)
    model = FSDP(Blocks(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    output = model.module[0](torch.ones(1, 2)) if world.rank else model(torch.ones(1, 2))
    output.sum().backward()


def loaded_in_between() -> None:
    model, _ = trained()
    loss = model(torch.ones(1, 2)).sum()
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    loss.backward()


def data_while_unsharded() -> None:
    model = wrapped(use_orig_params=True)
    loss = model(torch.ones(1, 2)).sum()
    model.module.weight.data = torch.zeros(2, 2)
    loss.backward()


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = FSDP(nn.Linear(2, 2)), FSDP(nn.Linear(2, 2))

    def forward(self, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(torch.ones(1, 2))


def different_units(world: Collectives) -> None:
    torch.manual_seed(0)
    FSDP(Choice())(world.rank == 0).sum().backward()


def wrong_size(world: Collectives) -> None:
    world.all_gather(torch.ones(3), torch.ones(2), label="mine")


# Checkpoints


def in_a_run(action: Callable[[Path, Checkpointer], object]) -> Provoke:
    """Do something in the directory of a run with one checkpoint; what the error says of it, it says of runs/a."""

    def provoke() -> None:
        with tempfile.TemporaryDirectory() as parent:
            directory = Path(parent) / "a"
            model, optimizer = trained()
            checkpointer = Checkpointer(directory, model, optimizer, ranks=ALONE)
            checkpointer.save(10)
            try:
                with checkpointer:
                    action(directory, checkpointer)
            except CheckpointError as error:
                raise CheckpointError(str(error).replace(parent, "runs")) from error

    return provoke


def load_into(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Provoke:
    return in_a_run(lambda directory, _: Checkpointer(directory, model, optimizer, ranks=ALONE).load())


def one_byte_short(directory: Path, checkpointer: Checkpointer) -> None:
    file = directory / "step-00000010" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    checkpointer.load()


def called_while_offloaded() -> None:
    model = wrapped()
    offload(model)
    model(torch.ones(1, 2))


def stepped_while_offloaded() -> None:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload(model)
    optimizer.step()


def averaged_an_early_copy() -> None:
    module = nn.Linear(2, 2)
    average = AveragedModel(module)
    average.update_parameters(wrapped(module))


def updated_while_applied() -> None:
    model = wrapped()
    ema = ShardedEMA(model, 0.9)
    with ema.applied(model):
        ema.update()


CASES: Final[dict[str, dict[str, Provoke]]] = {
    "Setting up": {
        "wrapped without a group of ranks": lambda: FSDP(nn.Linear(2, 2)),
        "passed an unknown group": lambda: FSDP(nn.Linear(2, 2), process_group="gloo"),
        "passed a group and a mesh": lambda: wrapped(device_mesh=ALONE),
        "named a strategy by a string": lambda: wrapped(sharding_strategy="FULL_SHARD"),
        "asked for a hybrid strategy without naming the ranks": lambda: wrapped(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD
        ),
        "passed `True` as `backward_prefetch`": lambda: wrapped(backward_prefetch=True),
        "passed `True` as `cpu_offload`": lambda: wrapped(cpu_offload=True),
        "passed a list as `device_id`": lambda: wrapped(device_id=[0]),
        "ignored both modules and states": lambda: wrapped(ignored_modules=[], ignored_states=[]),
        "ignored an object that is not a module": lambda: wrapped(ignored_modules=["head"]),
        "ignored a mix of modules and parameters": mixed_ignored_states,
        "passed an unknown policy": lambda: wrapped(auto_wrap_policy="blocks"),
        "returned an unknown value from a `CustomPolicy`": lambda: wrapped(
            nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=CustomPolicy(lambda module: "yes")
        ),
        "sharded a module twice": sharded_twice,
        "gave a sharded model to `DistributedDataParallel`": lambda: given_to(nn.parallel.DistributedDataParallel),
        "gave a sharded model to torch's `fully_shard`": lambda: given_to(fully_shard),
        "cast the model inside a pass": cast_in_forward,
        "wrapped a module again that has got a parameter since": wrapped_with_more,
        "left a module on the meta device that has no initialisation": on_meta,
        "called a model whose group is a stand-in with ranks": called_without_a_group,
        "replaced a parameter after wrapping": replaced,
        "replaced an original by one of a different shape": replaced_original,
    },
    "Sharding in place": {
        "passed a `shard_placement_fn` that cuts the second dimension": lambda: our_fully_shard(
            nn.Linear(2, 2), mesh=ALONE, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1)
        ),
        "passed `dp_mesh_dims` to `fully_shard`": lambda: our_fully_shard(
            nn.Linear(2, 2), mesh=ALONE, dp_mesh_dims="shard"
        ),
        "resharded to a number that is no divisor": lambda: run_threads(4, to_three_ranks),
        "sharded a container in place": lambda: our_fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=ALONE),
        "sharded a module in place twice": in_place_twice,
        "sharded a module in place after the one around it": in_place_inside,
        "sharded a module in place that holds a wrapper": lambda: our_fully_shard(nn.Sequential(wrapped()), mesh=ALONE),
        "sharded a module on the meta device in place that has no initialisation": in_place_on_meta,
        "called `to_empty` of a module that is sharded in place, with a different device": emptied,
        "loaded a module in place through one around it": loaded_from_outside,
        "asked torch for the norm of sharded gradients": lambda: run_threads(2, norm_of_parts),
    },
    "Training": {
        "called `state_dict()` inside a forward pass": saved_in_forward,
        "summoned gradients inside a `summon_full_params` without": summoned_twice,
        "called the model while its parameters were summoned on one rank": called_while_summoned,
        "stepped the optimizer between forward and backward": stepped_too_early,
        "loaded a state between forward and backward": loaded_in_between,
        "gave a full parameter different data between forward and backward": data_while_unsharded,
        "copied a wrapped model while its parameters were summoned": copied_while_summoned,
        "divided gradients by zero": lambda: wrapped().set_gradient_divide_factor(0),
        "passed a hook that cannot be called": lambda: wrapped().register_comm_hook(None, "allreduce"),
        "registered a second communication hook": second_hook,
        "named a stage that has no hook": lambda: wrapped().register_comm_hook(None, print, stage="scatter"),
        "clipped a norm that is not finite with `error_if_nonfinite`": clipped_infinity,
        "trained on a batch that is not finite with `nonfinite='raise'`": lambda: trained_on(
            torch.full((1, 2), torch.inf)
        ),
        "stepped inside backward with `nonfinite='skip'`": stepped_in_backward,
        "passed something else as `nonfinite`": lambda: wrapped(nonfinite="warn"),
    },
    "State": {
        "passed the configuration of a different form": lambda: FSDP.set_state_dict_type(
            wrapped(), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()
        ),
        "loaded a tensor of a different shape": partial(loaded, bias=torch.zeros(3)),
        "loaded a state with a name missing": partial(loaded, bias=None),
        "loaded a state with an unexpected name": partial(loaded, scale=torch.zeros(2)),
        "passed the optimizer of a different model": optimizer_of_another_model,
        "called one of torch's own functions for distributed state": lambda: torchs.get_model_state_dict(wrapped()),
        "took the state of the module in a wrapper": lambda: wrapped().module.state_dict(),
        "gave a sharded model to ZeroRedundancyOptimizer": partial(on_ranks, given_to_torchs_zero),
        "loaded optimizer state of a different shape": optimizer_state_of_another_shape,
        "loaded optimizer state of different parameter groups": optimizer_group_of_another_model,
    },
    "Checkpoints": {
        "saved the same step twice": in_a_run(lambda _, checkpointer: checkpointer.save(10)),
        "saved a value that cannot be saved": in_a_run(
            lambda _, checkpointer: checkpointer.save(11, extra={"data": {"reader": object()}})
        ),
        "loaded a step that does not exist": in_a_run(lambda _, checkpointer: checkpointer.load(11)),
        "loaded the checkpoint of a different model": load_into(nn.Linear(2, 3)),
        "loaded into a different dtype": load_into(nn.Linear(2, 2).double()),
        "loaded an optimizer that was not saved": in_a_run(
            lambda directory, checkpointer: Checkpointer(
                directory,
                model := nn.Linear(2, 2),
                {"second": torch.optim.Adam(model.parameters())},
                ranks=ALONE,
            ).load()
        ),
        "loaded a file that has lost a byte": in_a_run(one_byte_short),
        "opened a directory that is not a checkpoint": in_a_run(lambda directory, _: open_source(directory.parent)),
    },
    "Fine-tuning": {
        "called a model that is offloaded": called_while_offloaded,
        "stepped while the model is offloaded": stepped_while_offloaded,
        "offloaded a model that is not sharded": lambda: offload(nn.Linear(2, 2)),
        "updated averages while the model shows them": updated_while_applied,
        "updated torch's average of an early copy": averaged_an_early_copy,
        "loaded averages that were not saved": in_a_run(
            lambda directory, _: Checkpointer(
                directory, model := nn.Linear(2, 2), averages=ShardedEMA(model, 0.9), ranks=ALONE
            ).load()
        ),
        "published two tensors under one name": lambda: publish(nn.Linear(2, 2), print, names=lambda name: "x"),
        "received into a module that lacks a tensor": in_a_run(
            lambda directory, _: (
                publish(nn.Linear(2, 2), Mailbox(directory)),
                Receiver(nn.Linear(2, 2, bias=False), Mailbox(directory)).receive(),
            )
        ),
        "received into a dtype that cannot hold the numbers": in_a_run(
            lambda directory, _: (
                publish(nn.Linear(2, 2), Mailbox(directory)),
                Receiver(nn.Linear(2, 2).half(), Mailbox(directory)).receive(),
            )
        ),
        "cut a tensor into parts that are not equal": lambda: publish(
            nn.Linear(2, 3), Mailbox("somewhere", slicing=Slicing(2, {"weight": 0}))
        ),
        "began with weights of different shapes": in_a_run(
            lambda directory, _: load_pretrained(lambda: nn.Linear(2, 3), directory, process_group=ALONE)
        ),
        "began with weights that lack a name, with `strict=True`": in_a_run(
            lambda directory, _: load_pretrained(
                lambda: nn.Bilinear(2, 2, 2),
                directory,
                mapping={"weight": "other"},
                strict=True,
                process_group=ALONE,
            )
        ),
        "passed `sync_module_states` to `load_pretrained`": lambda: load_pretrained(
            lambda: nn.Linear(2, 2), "runs", sync_module_states=True
        ),
    },
    "Several ranks": {
        "called a collective on one rank only": partial(on_ranks, only_rank_0_saves),
        "called different collectives on different ranks": partial(on_ranks, different_calls),
        "loaded different steps on different ranks": partial(on_ranks, different_steps),
        "made different models on different ranks": partial(on_ranks, different_models),
        "made fewer layers on a rank": different(1, depth=1),
        "used a different dtype on a rank": different(1, dtype=torch.float64),
        "wrapped differently on a rank": different(1, units=False),
        "used a different strategy on a rank": different(1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "used a different mixed precision on a rank": different(
            1, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
        ),
        "used a different `use_orig_params` on a rank": different(1, use_orig_params=True),
        "began with different weights on a rank (a warning)": partial(on_ranks, different_weights),
        "replaced a unit after wrapping (a warning)": partial(on_ranks, replaced_after_wrapping),
        "took a module out after wrapping (a warning)": partial(on_ranks, taken_out_after_wrapping),
        "froze a parameter on a rank": partial(on_ranks, frozen_on_one),
        "stepped an optimizer that depends on shapes": partial(on_ranks, stepped_by_shape),
        "left a parameter out of a rank's optimizer": partial(on_ranks, left_out_of_an_optimizer),
        "ran different units of the same size later on": partial(on_ranks, swapped_later),
        "left a unit out on a rank": partial(on_ranks, left_out),
        "ran different units of the same size on different ranks": partial(on_ranks, different_units),
        "passed tensors that do not fit to a collective": partial(on_ranks, wrong_size),
        "asked for a world of no ranks": lambda: run_threads(0, print),
        "killed a rank that is a thread": lambda: run_threads(2, print, faults=[Fault(action=Kill())]),
        "asked a ledger for transfers that it did not keep": lambda: ByteLedger().transfers,
    },
}


def row_of(what: str, provoke: Provoke) -> str:
    """Return the row of the page for what is raised; line breaks in a message become spaces."""
    try:
        provoke()
    except Exception as error:
        says = " ".join(str(error).split()).replace("|", r"\|").replace("<", "&lt;")
        return f"| {what} | `{type(error).__name__}` | {says} |"
    raise AssertionError(f"nothing was raised where somebody {what}")


def rows() -> Iterator[tuple[str, str, Provoke]]:
    return ((title, what, provoke) for title, cases in CASES.items() for what, provoke in cases.items())


def parts_of_page() -> tuple[str, str]:
    """Return what comes before the first table that is compared, and the rest."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(f"## {next(iter(CASES))}\n")
    return text[:start], text[start:]


def tables() -> str:
    """Return all tables as the page must have them."""
    head = "| you | error | it says |\n| --- | --- | --- |\n"
    return "\n".join(
        f"## {title}\n\n{head}" + "".join(f"{row_of(*case)}\n" for case in cases.items())
        for title, cases in CASES.items()
    )


@pytest.mark.parametrize(("what", "provoke"), [(what, provoke) for _, what, provoke in rows()])
def test_row_says_what_happens(what: str, provoke: Provoke) -> None:
    """The page has the error's class and message, word for word."""
    row = row_of(what, provoke)
    there = row in PAGE.read_text(encoding="utf-8").splitlines()
    assert there, f"docs/errors.md has not this row (`python docs/test_errors.py` writes them):\n{row}"


@pytest.mark.parametrize(
    "provoke",
    [
        pytest.param(provoke, id=what, marks=() if what.startswith("called") else pytest.mark.long)
        for _, what, provoke in rows()
        if isinstance(provoke, partial) and provoke.func is on_ranks
    ],
)
def test_many_ranks_take_few_words(monkeypatch: pytest.MonkeyPatch, provoke: Provoke) -> None:
    """With 64 ranks a message is short, its first line above all, and names sets of ranks by ranges."""
    monkeypatch.setattr(sys.modules[__name__], "WORLD_SIZES", [64])
    with pytest.raises(Exception) as raised:  # noqa: PT011 - every class of error
        provoke()
    lines = str(raised.value).splitlines()
    assert len(lines[0]) <= 200 or not re.search(r"ranks \d", lines[0]), lines[0]
    assert sum(map(len, lines)) < 1000
    assert not re.search(r"\d, \d+, \d+, \d+", str(raised.value))


def test_page_has_no_other_rows() -> None:
    """What is on the page is provoked here, in the order of the page."""
    _, tables = parts_of_page()
    found = [match["what"] for match in ROW.finditer(tables)]
    assert found == [what for _, what, _ in rows()]


if __name__ == "__main__":
    PAGE.write_text(parts_of_page()[0] + tables(), encoding="utf-8")
