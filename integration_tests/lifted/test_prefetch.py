"""How far ahead units are gathered, and in how much memory: rows L-47 and L-48 of the specification."""

from __future__ import annotations

import inspect
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue

from flatparam import BackwardPrefetch
from flatparam_comm import Collectives, resolve_topology, run_threads
from flatparam_core import clean_fqn
from flatparam_runtime import (
    ROOT_NAME,
    BackwardOrder,
    Event,
    EventLog,
    PrefetchPlan,
    UnitPlan,
    observe,
    shard_module,
)
from integration_tests.lifted.our_half import (
    FSDP,
    assert_trains_as_one,
    full_gradients,
    give_gradients,
    gradient_of,
    seeded,
    square_loss,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.models import Level
from integration_tests.parity.runs import assert_same_tensors, gradients_of
from integration_tests.parity.sharded import replace

X = torch.ones(3, 4)
UNITS = ("0.inner", "0", "1.inner", "1", "")


def levels() -> nn.Module:
    """Two units, each with one inside, and a root with parameters of its own."""
    return seeded(lambda: nn.Sequential(Level(4, nn.Linear(4, 4)), Level(4, nn.Linear(4, 4)), nn.Linear(4, 2)))


class Changing(nn.Module):
    """Runs its layers in order in the first pass, and in the other direction from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        order = self.layers if not self.passes else reversed(self.layers)
        self.passes += 1
        for layer in order:
            x = torch.tanh(layer(x))
        return self.head(x)


LAYERS = ("layers.0", "layers.1", "layers.2", "")


def wrap_all(model: nn.Module, units: tuple[str, ...], wrap: Callable[[nn.Module], Any]) -> Any:
    """Wrap the modules of these paths, innermost first; the last path is that of the model itself."""
    for path in units[:-1]:
        replace(model, path, wrap)
    return wrap(model)


def torch_prefetches(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Which unit torch gathers ahead, and at which, while ``run`` runs."""
    wrappers = [(n, m) for n, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)]
    names = {id(wrapper._handle): clean_fqn(name) for name, wrapper in wrappers}
    choose, found = _runtime_utils._get_handle_to_prefetch, []

    def note(state: Any, current: Any) -> Any:
        target = choose(state, current)
        if target is not None:
            found.append(f"{names[id(current)]}: {names[id(target)]}")
        return target

    with unittest.mock.patch.object(_runtime_utils, "_get_handle_to_prefetch", note):
        run()
    return found


def torch_l47_nested(group: Collectives) -> list[str]:
    def wrap(module: nn.Module) -> Any:
        return fsdp1(module, backward_prefetch=TorchPrefetch.BACKWARD_POST)

    model = wrap_all(levels(), UNITS, wrap)
    return torch_prefetches(model, square_loss(model, 0, group.rank).backward)


def torch_l47_learned(group: Collectives) -> list[list[str]]:
    model = wrap_all(seeded(Changing), LAYERS, lambda module: fsdp1(module, forward_prefetch=True))
    found = []
    for _ in range(3):
        found.append(torch_prefetches(model, lambda: model(X)))
        model(X).sum().backward()
    return found


def torch_l47_limit(group: Collectives) -> list[int]:
    model = fsdp1(nn.Sequential(*(fsdp1(nn.Linear(4, 4)) for _ in range(4))))
    model(X).sum().backward()
    order = model._exec_order_data
    limits = [order._backward_prefetch_limit, order._forward_prefetch_limit]
    model(X)
    order._backward_prefetch_limit = 2
    handles = [wrapper._handle for wrapper in model.module]
    return [*limits, handles.index(order.get_handle_to_backward_prefetch(handles[3]))]


def test_l47_torch_looks_one_unit_ahead(processes: Outcomes) -> None:
    """Torch's two limits are fixed at 1, and with the larger one its loop still returns one unit only: the farthest."""
    assert processes.values(torch_l47_limit) == [[1, 1, 1]] * 2


def test_l47_torch_gathers_one_of_two_nested_units_ahead(processes: Outcomes) -> None:
    """Torch's BACKWARD_POST gathers the next outer unit when an inner one ends, and never the inner ones."""
    assert processes.values(torch_l47_nested) == [["1.inner: 0"]] * 2


def test_l47_torch_keeps_the_order_of_the_first_pass(processes: Outcomes) -> None:
    """Torch's forward prefetch goes by the first pass for ever: here it gathers the layer that runs last, first."""
    assert processes.values(torch_l47_learned) == [[[], [": layers.0"], [": layers.0"]]] * 2


def events_of(model: nn.Module, rank: int, passes: int = 2) -> tuple[list[Event], list[Event]]:
    """What happens in the last of some forward and backward passes."""
    for _ in range(passes - 1):
        square_loss(model, 0, rank).backward()
    model.zero_grad()
    log = EventLog()
    with observe(model, log):
        loss = square_loss(model, 0, rank)
        forward = list(log.events)
        loss.backward()
    return forward, log.events[len(forward) :]


def ahead(events: Sequence[Event]) -> dict[str, list[str]]:
    """For each unit, when it begins to compute, those that are on their way already, the first to begin first."""
    found, waiting = {}, []
    for event in events:
        if event.kind == "unshard":
            waiting.append(event.unit)
        elif event.kind == "use":
            waiting.remove(event.unit)
            found[event.unit] = list(waiting)
        elif event.kind == "reshard" and event.unit in waiting:
            raise AssertionError(f"{event.unit} was gathered in vain")
    return found


def test_l47_the_order_is_learned_again() -> None:
    """The third pass gathers ahead in the order of the second, which was not that of the first."""

    def rank(group: Collectives) -> tuple[list[Event], list[Event]]:
        model = wrap_all(seeded(Changing), LAYERS, lambda module: FSDP(module, forward_prefetch=True))
        return events_of(model, group.rank, passes=3)

    for forward, _ in run_threads(2, rank):
        assert ahead(forward) == {
            ROOT_NAME: ["layers.2"],
            "layers.2": ["layers.1"],
            "layers.1": ["layers.0"],
            "layers.0": [],
        }


ORDER = [ROOT_NAME, "0", "0.inner", "1", "1.inner"]
BACKWARD_ORDER = ["1", "1.inner", "0", "0.inner"]
"""Without the root, which stays."""


@each_row("depth", [1, 2, 3])
def test_l47_several_units_ahead_in_the_forward_pass(depth: int) -> None:
    """forward_prefetch=k has the next k units on their way when a unit computes; it trains to the same bits."""

    def wrap(model: nn.Module, group: Collectives) -> nn.Module:
        return wrap_all(model, UNITS, lambda module: FSDP(module, forward_prefetch=depth))

    for forward, _ in run_threads(2, lambda group: events_of(wrap(levels(), group), group.rank)):
        assert ahead(forward) == {unit: ORDER[i + 1 : i + 1 + depth] for i, unit in enumerate(ORDER)}
    assert_trains_as_one(levels, wrap)


@each_row("depth", [1, 2, 3])
def test_l47_several_units_ahead_in_the_backward_pass(depth: int) -> None:
    """A plan with a backward depth of k has the next k units, nested ones too, on their way; the same gradients."""

    def rank(group: Collectives) -> Any:
        prefetch = PrefetchPlan(0, BackwardOrder.BEFORE_COMPUTE, depth)
        plan = UnitPlan(resolve_topology(None), prefetch=prefetch)
        model = levels()
        for path in UNITS:
            shard_module(model.get_submodule(path), plan)
        return ahead(events_of(model, group.rank)[1]), full_gradients(model)

    model = levels()
    give_gradients(model, [gradient_of(model, [0], rank) for rank in range(2)])
    for found, gradients in run_threads(2, rank):
        assert found == {unit: BACKWARD_ORDER[i + 1 : i + 1 + depth] for i, unit in enumerate(BACKWARD_ORDER)}
        assert_same_tensors(gradients, gradients_of(model), "gradient")


def with_lists(model: nn.Module, group: Collectives) -> Any:
    """Levels of which each names the units that are gathered when it begins."""
    made = wrap_all(model, UNITS, lambda module: FSDP(module, backward_prefetch=None))
    first, second = made.module[0], made.module[1]
    made.set_modules_to_forward_prefetch([first, first.inner])
    first.set_modules_to_forward_prefetch([second.inner])
    made.set_modules_to_backward_prefetch([second.inner, second])
    second.set_modules_to_backward_prefetch([first, first.inner])
    return made


def test_l47_lists_of_what_to_gather() -> None:
    """A unit gathers what its lists say and is not kept, also what comes much later; it trains to the same bits."""

    def rank(group: Collectives) -> tuple[list[Event], list[Event]]:
        return events_of(with_lists(levels(), group), group.rank)

    for forward, backward in run_threads(2, rank):
        assert ahead(forward) == {
            ROOT_NAME: ["0", "0.inner"],
            "0": ["0.inner", "1.inner"],
            "0.inner": ["1.inner"],
            "1": ["1.inner"],
            "1.inner": [],
        }
        assert ahead(backward) == {  # unit 1 ended last, so it is there
            "1.inner": ["0", "0.inner"],
            "0": ["0.inner"],
            "0.inner": [],
        }
    assert_trains_as_one(levels, with_lists)


def torch_l48(group: Collectives) -> list[Any]:
    return [
        _FreeEventQueue()._max_num_inflight_all_gathers,
        len(inspect.signature(_FreeEventQueue).parameters),
    ]


def test_l48_torch_has_two_gathers_in_flight(processes: Outcomes) -> None:
    """Torch's limiter has a limit of 2 that no argument changes; that it blocks the host needs a GPU to be seen."""
    assert processes.values(torch_l48) == [[2, 0]] * 2


DEPTH = 5
LAYER_NBYTES = 4 * (4 * 4 + 4)


def chain() -> nn.Module:
    """Layers of equal size, and a root with a layer of its own."""
    return seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(DEPTH + 1))))


def peak_nbytes(events: Sequence[Event], held: int = 0) -> int:
    """The most bytes of full parameters that there are at once; ``held`` at the beginning."""
    peak = held
    for event in events:
        held += {"unshard": event.nbytes, "reshard": -event.nbytes}.get(event.kind, 0)
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("ahead_in_backward", [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_l48_the_peak_is_a_formula(depth: int, ahead_in_backward: BackwardPrefetch | None, limited: bool) -> None:
    """At most the root, the unit that computes and those that the depth allows are held, in every run alike."""

    def rank(group: Collectives) -> list[Any]:
        def wrap(module: nn.Module) -> Any:
            return FSDP(
                module,
                backward_prefetch=ahead_in_backward,
                forward_prefetch=depth,
                limit_all_gathers=limited,
            )

        model = wrap_all(chain(), (*map(str, range(DEPTH)), ""), wrap)
        return [events_of(model, group.rank, passes) for passes in (2, 3)]

    of_ranks = run_threads(2, rank)
    assert of_ranks == run_threads(2, rank), "another run, another schedule"
    for (forward, backward), (again, backward_again) in of_ranks:
        assert (again, backward_again) == (forward, backward)
        assert peak_nbytes(forward) == (1 + 1 + depth) * LAYER_NBYTES
        in_advance = ahead_in_backward is BackwardPrefetch.BACKWARD_PRE
        kept = 2 * LAYER_NBYTES  # the root, and the unit that ended last
        assert peak_nbytes(backward, kept) == (1 + 1 + in_advance) * LAYER_NBYTES
