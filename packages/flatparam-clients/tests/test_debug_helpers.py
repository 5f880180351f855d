"""What helps to look at a sharded model: the stopwatch, the tree of its modules, the order that a trace finds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._debug_utils as their_debug
import torch.distributed.fsdp._trace_utils as their_trace
import torch.fx
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import _debug_utils, _trace_utils
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from packages.flatparam.tests.models import Block, mlp
from packages.flatparam.tests.worlds import on_ranks

PROFILERS = [_debug_utils.SimpleProfiler, their_debug.SimpleProfiler]


@pytest.fixture(autouse=True)
def _clean() -> None:
    for profiler in PROFILERS:
        profiler.reset()


@pytest.mark.parametrize("profiler", PROFILERS, ids=["ours", "torch's"])
def test_stopwatch(monkeypatch: pytest.MonkeyPatch, profiler: Any) -> None:
    """S-003: seconds add up for each thing, also where a context ends with an exception; as torch's does."""
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    with profiler.profile(profiler.Type.H2D), profiler.profile("mine"):
        assert profiler.profiling == {profiler.Type.H2D, "mine"}
    with pytest.raises(ZeroDivisionError), profiler.profile("mine"):
        raise ZeroDivisionError
    assert dict(profiler.results) == {"H2D": 3.0, "mine": 2.0}
    assert profiler.profiling == set()
    profiler.reset()
    assert dict(profiler.results) == {}


@each_row("profiler", PROFILERS, ids=["ours", "torch's"])
def test_stopwatch_is_not_started_twice(profiler: Any) -> None:
    """S-003: the same seconds are not counted twice: it is an AssertionError, and the first goes on."""
    with profiler.profile("x"):
        with pytest.raises(AssertionError, match="x"), profiler.profile("x"):
            pass
        assert profiler.profiling == {"x"}
    assert list(profiler.results) == ["x"]


def test_names_of_the_stopwatch() -> None:
    """S-003: the usual things to measure have torch's names."""
    ours, theirs = ([(kind.name, kind.value) for kind in profiler.Type] for profiler in PROFILERS)
    assert ours == theirs


def test_ranks_that_are_threads_have_a_stopwatch_each() -> None:
    """A rank measures its own seconds, at the same time as another and under the same name."""

    def measured(ranks: Collectives) -> tuple[set[str], list[str], list[str]]:
        profiler = _debug_utils.SimpleProfiler
        with profiler.profile("all"), profiler.profile(f"of rank {ranks.rank}"):
            ranks.barrier()
            under_way = set(profiler.profiling)
        ranks.barrier()
        before = sorted(profiler.results)
        if ranks.rank == 0:
            profiler.reset()
        ranks.barrier()
        return under_way, before, sorted(profiler.results)

    first, second = on_ranks(2, measured)
    assert first == ({"all", "of rank 0"}, ["all", "of rank 0"], [])
    assert second == ({"all", "of rank 1"}, ["all", "of rank 1"], ["all", "of rank 1"])
    assert dict(_debug_utils.SimpleProfiler.results) == {}, "the thread of the test measured nothing"


@pytest.mark.parametrize("level", ["INFO", "OFF"])
def test_stopwatch_report(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: str) -> None:
    """S-124: rank 0 logs what was measured where TORCH_DISTRIBUTED_DEBUG=INFO, and it is forgotten either way."""
    monkeypatch.setattr(
        "torch.distributed.get_debug_level",
        lambda: getattr(torch.distributed.DebugLevel, level),
    )
    caplog.set_level(logging.INFO)

    def dumped(ranks: Collectives) -> int:
        with _debug_utils.SimpleProfiler.profile("load"):
            pass
        _debug_utils.SimpleProfiler.dump_and_reset(f"rank {ranks.rank} says")
        return len(_debug_utils.SimpleProfiler.results)

    assert on_ranks(2, dumped) == [0, 0]
    messages = [record.getMessage() for record in caplog.records]
    assert [message[: len("rank 0 says {'load'")] for message in messages] == (
        ["rank 0 says {'load'"] if level == "INFO" else []
    )


def test_tree_of_modules(use_orig_params: bool) -> None:
    """The tree has a line for each module, with a mark on units, and the parameters of each unit that has some."""
    model = FSDP(
        nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 2), nn.ReLU())),
        SingleCollectives(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=use_orig_params,
    )
    text, parameters = _debug_utils._get_sharded_module_tree_with_module_name_to_fqns(model.module)
    assert text.splitlines() == [
        "[Sequential] FULLY SHARDED",
        "    0[Linear]",
        "    1[FullyShardedDataParallel]",
        "        1._fsdp_wrapped_module[Sequential] FULLY SHARDED",
        "            1._fsdp_wrapped_module.0[Linear]",
        "            1._fsdp_wrapped_module.1[ReLU]",
    ]
    assert parameters == {
        "[Sequential]": ["0.weight", "0.bias"],
        "1._fsdp_wrapped_module[Sequential]": ["1.0.weight", "1.0.bias"],
    }


def test_tree_of_a_plain_module_is_torchs() -> None:
    """What is not sharded is shown as torch shows it."""
    find = "_get_sharded_module_tree_with_module_name_to_fqns"
    ours, theirs = (getattr(module, find)(mlp()) for module in (_debug_utils, their_debug))
    assert ours == theirs


class Own(nn.Module):
    """Parameters that are used in operations, by name and in a list, beside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(3))
        self.early = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.early) + self.late + self.early


class Outer(nn.Module):
    """One inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Own()
        self.first = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).expand(-1, 3))


def traced(utils: Any, model: nn.Module) -> Any:
    """What a trace notes, by name."""
    names = {module: name for name, module in model.named_modules()}
    parameters = {parameter: name for name, parameter in model.named_parameters()}
    config, watcher = utils.TracingConfig(), utils._ExecOrderTracer()
    with watcher.patch_tracer(config.tracer, model):
        config.tracer.trace(model, config.concrete_args)
    info = watcher.exec_info
    return (
        names[info.curr_module],
        [names[module] for module in info.module_forward_order],
        {
            names[module]: [(names[usage.module], [name for name, _ in usage.named_params]) for usage in usages]
            for module, usages in info.module_to_param_usage_infos.items()
        },
        [parameters[parameter] for parameter in info.param_forward_order],
        sorted(parameters[parameter] for parameter in info.visited_params),
    )


@each_row("make", [mlp, Own, Outer, lambda: Block().mlp])
def test_order_of_a_traced_forward_is_torchs(make: Any) -> None:
    """S-128: the modules, what each uses, and the parameters in their order are those of torch's tracer."""
    model = make()
    ours, theirs = traced(_trace_utils, model), traced(their_trace, model)
    assert ours == theirs
    assert ours[3], "there is something to find"


def test_a_tracer_is_left_as_it_was() -> None:
    """S-128: after the context, also after an exception, a tracer notes nothing more; contexts can be nested."""
    model, tracer = mlp(), torch.fx.Tracer()
    outer, inner = _trace_utils._ExecOrderTracer(), _trace_utils._ExecOrderTracer()
    with outer.patch_tracer(tracer, model):
        with pytest.raises(ZeroDivisionError), inner.patch_tracer(tracer, model):
            raise ZeroDivisionError
        tracer.trace(model)
    tracer.trace(model)
    assert len(outer.exec_info.module_forward_order) == 1 + len(model)
    assert len(inner.exec_info.module_forward_order) == 1
