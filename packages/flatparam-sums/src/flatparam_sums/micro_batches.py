"""Gradients of micro-batches of any number and weight on each rank: their weighted mean over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_comm import telling
from flatparam_runtime import FlatParamError, UnitTree, no_sync, tree_of, units_in
from flatparam_sums.exact import ExactSums
from flatparam_sums.following import HAS_ENDED, Following
from flatparam_sums.weighing import MOST, Weighing, told, understood

_STATE: Final = "_flatparam_micro_batches"
"""The attribute of a module that holds the state of its accumulation."""


@final
@attrs.define(eq=False)
class _Accumulation:
    """The micro-batches of one model since its last reduction."""

    tree: UnitTree
    weighing: Weighing
    is_weighted: bool | None = None
    """Whether the micro-batches of this step have weights; None before the first one."""
    is_uneven: bool = False
    """Whether ranks whose data have ended serve the others."""
    is_inside: bool = False
    """Whether a micro-batch is under way."""

    _following: Following | None = None

    @property
    def following(self) -> Following:
        """The ranks that may have fewer micro-batches than others; see `Following.of` for what it raises."""
        if self._following is None:
            self._following = Following.of(self.tree)
        return self._following

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the modules begins anew.
        return _nothing, ()

    @property
    def who(self) -> str:
        """The model and this rank, for messages."""
        return f"unit {self.tree.root.name!r}, rank {self.tree.root.topology.rank}"

    def check_weighted(self, is_weighted: bool) -> None:
        """Note whether a micro-batch of this step has a weight.

        Raises:
            FlatParamError: if others of the step differ in this.
        """
        if not self.weighing.weights:
            self.is_weighted = is_weighted
        if is_weighted is not self.is_weighted:
            raise FlatParamError(
                f"{self.who}: expected a weight for each micro-batch of a step, or for none, found both; without "
                "weights every rank has equally many"
            )

    @property
    def exact(self) -> list[ExactSums]:
        """The exact sums of units, if they have any."""
        found = dict.fromkeys(unit.reducer.sums for unit in self.tree.units)
        return [each for each in found if isinstance(each, ExactSums)]

    def forget(self) -> None:
        """Drop what this rank has collected in this step, with its weights."""
        for unit in self.tree.units:
            unit.reducer.forget()
            for handle in unit.handles:
                handle.drop_gradients()
        self.weighing.reset()

    def reduce(self, *, has_ended: bool) -> bool:
        """Reduce what all ranks have collected; returns whether the data of all ranks have ended.

        Args:
            has_ended: whether this rank's have.
        """
        weighing, exact, topology = self.weighing, self.exact, self.tree.root.topology
        widths = max((each.widen(len(weighing.weights) > 1) for each in exact), default=0)
        if weighing.weights and not self.is_weighted:
            # Every rank has had as many.
            total = math.fsum(weighing.weights) * topology.data_parallel_size
            weights: list[float] = []
            if widths:
                widths = max(topology.exchange(widths, label="widths of exact sums"))
        else:
            own = HAS_ENDED if has_ended else told(math.fsum(weighing.weights), widths)
            values = self.following.meet(own)
            done = [understood(value) for value in values if value != HAS_ENDED]
            total, all_ended = math.fsum(weight for weight, _ in done), not done
            widths = max((width for _, width in done), default=0)
            weights = [0.0 if value == HAS_ENDED else understood(value)[0] for value in values]
            if topology.replicate is not None:
                groups = topology.replicate.exchange((total, all_ended, widths), label="micro-batches")
                total, all_ended = math.fsum(each[0] for each in groups), all(each[1] for each in groups)
                widths = max(each[2] for each in groups)
            if all_ended:
                return True
        weighing.end(total)
        for each in exact:
            each.begin_step(total or 1.0, widths, weights)
        with torch.no_grad():
            self.tree.reduce_waiting()
        weighing.reset()
        for each in exact:
            each.reset()
        return False


def _nothing() -> None:
    """`None`, which a copy of a module has instead of an accumulation."""


def _accumulation_of(module: nn.Module) -> _Accumulation:
    units = units_in(module)
    if not units:
        raise ValueError(f"expected a sharded module, found {type(module).__name__} without a unit in it")
    tree = tree_of(units[0])
    if set(tree.units) != set(units):
        raise FlatParamError(
            f"unit {units[0].name!r}, rank {units[0].topology.rank}: expected the outermost unit of a model, found "
            "one inside another, or several models; call it with one whole model"
        )
    held = tree.root.module.__dict__
    found: _Accumulation | None = held.get(_STATE)
    if found is None or found.tree is not tree:
        found = held[_STATE] = _Accumulation(tree, Weighing())
    ranks = tree.root.topology.data_parallel_size
    for each in tree.units:
        each.reducer.weighing = found.weighing
        # Of experts on some of the ranks, that is the number of those whose tokens they get.
        is_of_all = (each.reducer.divide_factor or ranks) == ranks
        if not is_of_all or (each.reducer.divide_factor and each.topology.data_parallel_size == ranks):
            raise FlatParamError(
                f"unit {each.name!r}, rank {each.topology.rank}: expected gradients that are divided by the sum of "
                "the weights, found a divisor that set_gradient_divide_factor has set; set it to None"
            )
    tree.introduce()
    return found


@contextmanager
def accumulate(module: nn.Module, weight: float | Tensor | None = None) -> Iterator[None]:
    """Compute one micro-batch inside: the forward and backward passes of one mean loss. Nothing is reduced.

    Any rank may have any number of micro-batches in a step, also none; `reduce_gradients` ends the step. In between no
    rank does anything else with the model. After an exception inside, what this rank has collected in the step is gone,
    with its weights.

    Args:
        module: the outermost sharded module.
        weight: what the micro-batch counts, at least 0: its tokens or samples, as a number or a tensor of one.
            Gradients are multiplied by it when they are collected, in the reduction dtype. `None` for all micro-batches
            of a step says that every rank has equally many, which count alike; then ranks tell each other nothing.

    Raises:
        ValueError: for a weight that is no number of at least 0, or is infinite.
        FlatParamError: inside another `accumulate`, on a unit that is not the outermost one, or if the micro-batch
            gathers other units than the first one did.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if weight is not None:
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not (is_number and 0 <= weight < math.inf):
            raise ValueError(f"expected a weight of at least 0, found {weight!r}")
    with telling("accumulate()"):
        state = _accumulation_of(module)
        if state.is_inside:
            raise FlatParamError(f"{state.who}: expected accumulate() after the last one has ended, found it inside")
        state.check_weighted(weight is not None or state.is_uneven)
        exact = state.exact
        if exact and weight is not None and (weight != int(weight) or weight >= MOST):
            raise ValueError(
                f"{state.who}: expected a whole number below 2**29 as weight, whose sum over ranks is exact, as "
                f"reduction='exact' and a wire have it, found {weight!r}"
            )
        state.is_inside = True
        try:
            state.weighing.begin(1.0 if weight is None else float(weight))
            for summing in exact:
                summing.weight = state.weighing.weight
            with no_sync(module):
                if state.is_weighted:
                    with state.following.leading():
                        yield
                else:
                    yield
            state.weighing.weights.append(state.weighing.weight)
        except BaseException:
            state.forget()
            raise
        finally:
            state.is_inside = False


def reduce_gradients(module: nn.Module) -> None:
    """Give each parameter the weighted mean of the gradients of all micro-batches of all ranks; every rank calls it.

    The gradient is `sum(w_i g_i) / sum(w_i)` over the micro-batches since the last call, and is added to `.grad`. A
    rank that comes early gathers what the others' micro-batches need, without computing. Ranks wait for each other
    once, with 8 bytes each; not at all if no micro-batch has a weight. If all weights are 0, gradients are 0.

    Raises:
        FlatParamError: inside `accumulate`.
    """
    with telling("reduce_gradients()"):
        state = _accumulation_of(module)
        if state.is_inside:
            raise FlatParamError(f"{state.who}: expected reduce_gradients() after accumulate(), found it inside")
        state.reduce(has_ended=False)


@contextmanager
def uneven_inputs(module: nn.Module, step: Callable[[], object]) -> Iterator[None]:
    """Train inside with data that end earlier on some ranks; these serve the others until all data have ended.

    Inside, each step is `accumulate` for each micro-batch, `reduce_gradients` and what `step` does. At the end of the
    context a rank whose data have ended takes part in the steps of the others, with no micro-batch.

    Args:
        module: the outermost sharded module.
        step: what every rank does after `reduce_gradients`: clip, step the optimizer, zero the gradients. A rank whose
            data have ended calls it for each step of the others.
    """
    if not callable(step):
        raise TypeError(f"expected a function to call after each reduction, found {type(step).__name__}")
    with telling("uneven_inputs()"):
        state = _accumulation_of(module)
        state.is_uneven = True
        try:
            yield
            if state.weighing.weights:
                raise FlatParamError(
                    f"{state.who}: expected reduce_gradients() after the last micro-batch, found the end of "
                    "uneven_inputs()"
                )
            while not state.reduce(has_ended=True):
                step()
        finally:
            state.is_uneven = False
