"""The exponential moving average of a sharded model, of which each rank keeps the part that it has of the model."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_runtime import FlatParamError, Phase, note_between_passes, units_in
from flatparam_state.at_rest import Home, allow_steps, bring_to_rest, gradients_aside, homes_in, refuse_steps

_SHOWS_AVERAGES: Final = (
    "the model shows its averages, which a step would change; leave ShardedEMA.applied(model) first"
)


@final
@attrs.define(eq=False)
class Average:
    """The average of one tensor of a model, which has that tensor's shape."""

    home: Home
    values: Tensor

    def beside(self) -> Tensor:
        """Return the average, on the device where the model's tensor is now; it stays there."""
        device = self.home.now().device
        if self.values.device != device:
            self.values = self.values.to(device)
        return self.values


@contextlib.contextmanager
def exchanged(averages: Sequence[Average], *, in_own_dtype: bool = False) -> Iterator[None]:
    """Have the model use the averages' memory; after the context, also after an exception, its own again.

    Extra memory: none for an average of the dtype that its tensor has; of the others a copy in the tensor's dtype.

    Args:
        in_own_dtype: show each average in its own dtype, whatever the model's is.
    """
    shown: list[tuple[Home, Tensor]] = []
    parameters = [each for average in averages for each in average.home.parameters()]
    with gradients_aside([average.home for average in averages]):
        refuse_steps(parameters, _SHOWS_AVERAGES)
        try:
            for average in averages:
                own, values = average.home.now(), average.beside()
                # First noted: an interrupt may come between the two.
                shown.append((average.home, own))
                average.home.give(values if in_own_dtype else values.to(own.dtype))
            yield
        finally:
            allow_steps(parameters, _SHOWS_AVERAGES)
            for home, own in shown:
                home.give(own)


# The averages


T = TypeVar("T")


@final
class ShardedEMA:
    """The exponential moving average of a model's parameters, shard by shard: no rank communicates for it.

    `update()` does to the shards what `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` does to
    a whole model, to the same bits: the first update copies, each later one takes `average.lerp(parameter, 1 - decay)`.
    Parameters that are whole on every rank are averaged too; buffers are copied at each update. Make it after the
    model is sharded, by whatever means, and after a checkpoint of other weights is loaded.

    Memory: this rank's shards once more, in `dtype`.
    """

    def __init__(
        self, model: nn.Module, decay: float, dtype: torch.dtype | None = None, *, use_buffers: bool = False
    ) -> None:
        """Begin with the values that the model has now.

        Args:
            model: sharded, or not.
            decay: the weight of the average in an update, from 0 to 1; the rest is the weight of the parameters.
            dtype: of the averages of floating-point parameters; None keeps that of each parameter. For a model in 16
                bits, pass `torch.float32`: what an update adds is mostly too small for 16 bits.
            use_buffers: average the buffers too, as `AveragedModel(use_buffers=True)` does.

        Raises:
            ValueError: if `decay` is not from 0 to 1, or `dtype` is not a floating-point one of at least 16 bits.
        """
        if dtype is not None and not (dtype.is_floating_point and dtype.itemsize >= 2):
            raise ValueError(f"ShardedEMA: expected a floating-point dtype of at least 16 bits, found {dtype}")
        self.decay = decay
        self._model = model
        self._use_buffers = use_buffers
        self._updates = 0
        self._is_applied = False
        with torch.no_grad():
            self._averages = [Average(home, _begun(home.now(), dtype)) for home in homes_in(model)]

    def __repr__(self) -> str:
        return f"ShardedEMA({type(self._model).__name__}, decay={self.decay}, {self._updates} updates)"

    @property
    def decay(self) -> float:
        """The weight of the average in the next update; it may be changed between updates, to warm up."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        given: object = decay
        if not isinstance(given, (int, float)) or not 0 <= given <= 1:
            raise ValueError(f"ShardedEMA: expected a decay from 0 to 1, found {given!r}")
        self._decay = float(given)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model

    @property
    def updates(self) -> int:
        """How often the average was updated."""
        return self._updates

    @updates.setter
    def updates(self, updates: int) -> None:
        if type(updates) is not int or updates < 0:
            raise ValueError(f"ShardedEMA: expected a number of updates of at least 0, found {updates!r}")
        self._updates = updates

    @property
    def nbytes(self) -> int:
        """The bytes of the averages on this rank."""
        return sum(average.values.nbytes for average in self._averages)

    # Updating

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now into the average; call it after each step of the optimizer.

        One call of torch for each dtype and device updates all parameters. If an average has a different dtype than its
        parameters, these are cast for the time of the call.

        Raises:
            FlatParamError: while full parameters are summoned, inside `applied`, or if the model was changed so that a
                parameter has a different shape; nothing is changed.
        """
        self._check_can_update()
        pairs = [(average.beside(), average.home.now()) for average in self._averages]
        self._check_shapes(pairs)
        note_between_passes(
            units_in(self._model), f"ShardedEMA.update() number {self._updates + 1} with decay={self._decay!r}"
        )
        averaged = [self._is_averaged(average) for average in self._averages]
        for group in _alike([pair for pair, moves in zip(pairs, averaged, strict=True) if not moves]):
            torch._foreach_copy_([average for average, _ in group], [tensor for _, tensor in group])
        for group in _alike([pair for pair, moves in zip(pairs, averaged, strict=True) if moves]):
            _average(group, self._decay)
        self._updates += 1

    def _is_averaged(self, average: Average) -> bool:
        """Return whether an update averages the tensor, and does not copy it."""
        if not self._updates:
            return False
        if average.home.is_buffer:
            return self._use_buffers
        # The bytes of quantised parameters are no numbers.
        return average.values.is_floating_point() or average.values.is_complex()

    def _check_can_update(self) -> None:
        if self._is_applied:
            raise FlatParamError("ShardedEMA.update(): the model shows its averages; leave applied(model) first")
        for unit in units_in(self._model):
            unit.take_over()
            if unit.showing.pins or unit.phase is Phase.INSPECTING:
                raise FlatParamError(
                    f"unit {unit.name!r}: its average cannot be updated while full parameters are summoned, because "
                    "the shards do not have the changes yet; leave summon_full_params() first"
                )

    def _check_shapes(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for average, (mine, found) in zip(self._averages, pairs, strict=True):
            if mine.shape != found.shape:
                raise FlatParamError(
                    f"ShardedEMA.update(): {average.home.name!r} has a different shape than when its average began: "
                    f"expected {tuple(mine.shape)}, found {tuple(found.shape)}; if the model was sharded since, make "
                    "the ShardedEMA after that"
                )

    # Using

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Have `model` compute with the averages inside the context; every rank enters it, at the same place.

        The model uses the averages' memory itself, and gets its own back at the end, also after an exception. No bytes
        are copied or communicated, unless an average has a different dtype: then a copy in the model's dtype is shown.
        Full parameters that are in memory are freed, so the next pass gathers the averages, and later the parameters.

        Inside, the model can be evaluated, generate, and be saved: `model.state_dict()`, which every rank calls, is an
        ordinary state of the averages. What is loaded into the model is loaded into the averages. Gradients are put
        aside: those of a backward pass inside are dropped at the end. An optimizer of the model cannot step.

        Args:
            model: the model that was given to the constructor.

        Raises:
            ValueError: for a different model.
            FlatParamError: inside a forward or backward pass, while full parameters are summoned, or if the averages
                are applied already.
        """
        if model is not self._model:
            raise ValueError(
                f"ShardedEMA.applied(): expected the {type(self._model).__name__} that the averages are of, found a "
                f"different {type(model).__name__}"
            )
        if self._is_applied:
            raise FlatParamError("ShardedEMA.applied(): the model shows its averages already")
        bring_to_rest(model)
        note_between_passes(units_in(model), "begin of ShardedEMA.applied()")
        self._is_applied = True
        try:
            with exchanged(self._averages):
                try:
                    yield
                finally:
                    # A pass that an exception has interrupted ends here.
                    bring_to_rest(model)
        finally:
            self._is_applied = False
            note_between_passes(units_in(model), "end of ShardedEMA.applied()")

    @property
    def is_applied(self) -> bool:
        """Whether the model shows the averages now: inside `applied`."""
        return self._is_applied

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averages; every rank calls it.

        Returns:
            `"averages"`, the state of the model with the averages, in their dtype, as `model.state_dict()` gives it
            (full, sharded, local), and `"updates"`, a number.
        """
        return {"averages": self.in_place(self._model.state_dict), "updates": self._updates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, in any form that the model can load; every rank calls it.

        The number of ranks, the wrapping and the strategy may be different ones. The decay is that of this object.

        Raises:
            ValueError: if it is not the state of averages.
            RuntimeError: naming what does not fit; nothing is changed.
        """
        if not {"averages", "updates"} <= set(state_dict):
            raise ValueError(
                "ShardedEMA.load_state_dict(): expected the keys 'averages' and 'updates', found "
                f"{sorted(map(str, state_dict))[:5]}; to load a model's state, enter applied(model) and load it there"
            )
        before, self.updates = self.updates, int(state_dict["updates"])
        try:
            self.in_place(lambda: self._model.load_state_dict(state_dict["averages"]))
        except BaseException:
            self.updates = before
            raise

    def in_place(self, action: Callable[[], T]) -> T:
        """Return what `action()` returns while the model has the averages in the places of its values.

        Not as in `applied`, the averages keep their own dtype, whatever the model's is: for saving and loading them.
        """
        bring_to_rest(self._model)
        with exchanged(self._averages, in_own_dtype=True):
            return action()


def _begun(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor, dtype=wanted).copy_(tensor)


def _alike(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """`pairs` of averages and tensors, grouped by the dtype and the device of the average."""
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for average, tensor in pairs:
        groups[average.dtype, average.device].append((average, tensor))
    return list(groups.values())


def _average(pairs: Sequence[tuple[Tensor, Tensor]], decay: float) -> None:
    """Move the averages, which have one dtype, towards the tensors, by torch's formula."""
    averages = [average for average, _ in pairs]
    if averages[0].is_floating_point() or averages[0].is_complex():
        tensors = [tensor.to(average.dtype) for average, tensor in pairs]
        torch._foreach_lerp_(averages, tensors, 1 - decay)
        return
    for average, tensor in pairs:
        average.copy_(average * decay + tensor * (1 - decay))
