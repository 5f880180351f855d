"""The state of a sharded model, under the names that the unsharded model has, in any of the forms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import nn

from flatparam_runtime import (
    FLAT_PARAM,
    Phase,
    check_same_between_passes,
    clean_fqn,
    full_views,
    gather_full,
    inspecting,
    memory_view,
    shown,
    units_in,
)
from flatparam_state.forms.flat_tensor import FlatTensor
from flatparam_state.forms.state_form import FormKind, StateForm, Wanted
from flatparam_state.places import Place, check_names, gather, places_in, places_of, shard_of

IN_FLAT: Final = "flatparam"
"""In the metadata of a module in a local state: for each of its flat parameters, the names of those in it, in order."""


@final
@attrs.define(eq=False)
class StandIns:
    """Values that take the places of the stand-ins that torch found in the modules, once it has collected the state."""

    _values: dict[int, Any] = attrs.field(factory=dict)
    """By the stand-in's storage, which an alias of it shares."""
    _added: dict[str, Any] = attrs.field(factory=dict)
    _named: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    _kept: list[nn.Parameter] = attrs.field(factory=list)

    def stand_in(self, like: torch.Size | tuple[int, ...], dtype: torch.dtype, value: Any) -> nn.Parameter:
        """Return a parameter without memory that stands for `value`."""
        parameter = nn.Parameter(torch.empty(like, dtype=dtype, device="meta"), requires_grad=False)
        self._values[parameter.untyped_storage()._cdata] = value
        self._kept.append(parameter)
        return parameter

    def add(self, key: str, value: Any, fqns: Sequence[str] = ()) -> None:
        """Have `value` in the state under `key`; if it is a flat parameter of `fqns`, the metadata name them."""
        self._added[key] = value
        if fqns:
            self._named[key] = tuple(fqns)

    def resolve(self, state: MutableMapping[str, Any], prefix: str = "") -> None:
        """Put the values into `state`, in which the model's names begin with `prefix`."""
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, nn.Parameter) and value.is_meta:
                state[key] = self._values.get(value.untyped_storage()._cdata, value)
        state.update((prefix + key, value) for key, value in self._added.items())
        metadata = getattr(state, "_metadata", None)
        if metadata is None:
            return
        for key, fqns in self._named.items():
            module, _, name = (prefix + key).rpartition(".")
            metadata.setdefault(module, {}).setdefault(IN_FLAT, {})[name] = fqns


@contextlib.contextmanager
def state_shown(model: nn.Module, form: StateForm) -> Iterator[StandIns]:
    """Have `model.state_dict()` find parameters, in their own dtype, in the given form; every rank enters it.

    Full tensors: the units are gathered one after the other; the extra memory is the full state itself and one unit.
    Sharded and local ones are there once the state has been resolved (see `StandIns`). What is inside already (a
    submodule's `state_dict` in its parent's) is left alone.
    """
    units = dict.fromkeys(each for unit in units_in(model) for each in (*unit.links.lenders, unit))
    if form.kind is FormKind.FULL and not any(unit.phase is Phase.INSPECTING for unit in units):
        check_same_between_passes([*units], label="state_dict()")
    stand_ins, places = StandIns(), list(places_in(model))
    prefixes = {id(place.handle): place.prefix for place in places}
    check_names(places, form)
    with contextlib.ExitStack() as stack:
        for unit in units:
            if unit.phase is Phase.INSPECTING:
                continue
            stack.enter_context(inspecting(unit))
            values = []
            for number, place in enumerate(places_of(unit)[: len(unit.handles)]):
                values.append(_values(place, form.at(place), stand_ins))
                if form.at(place).kind is FormKind.LOCAL and id(place.handle) in prefixes:
                    name = prefixes[id(place.handle)] + local_name(number)
                    stand_ins.add(name, _local(place, form), place.handle.layout.fqns)
            stack.enter_context(shown(unit, values))
        yield stand_ins


def local_name(number: int) -> str:
    """Under which name, in its unit, the flat parameter `number` is in a local state."""
    return f"{FLAT_PARAM}_{number}" if number else FLAT_PARAM


def _values(place: Place, form: StateForm, stand_ins: StandIns) -> list[nn.Parameter | None]:
    """Return the values that the modules show for the parameters of `place` while torch collects the state."""
    handle = place.handle
    if form.kind is FormKind.FULL:
        full = _full(place, form.device, form.keeps(place))
        return [
            nn.Parameter(handle.present(index, tensor), requires_grad=False) for index, tensor in enumerate(full)
        ] or [None] * len(place.fqns)
    if form.kind is FormKind.LOCAL:
        return [None] * len(place.fqns)
    values = form.sharded(place, _shard(place), handle.present)
    return [
        stand_ins.stand_in(slot.spec.shape, handle.layout.dtype, value)
        for slot, value in zip(handle.layout.slots, values, strict=True)
    ]


def _full(place: Place, device: torch.device | None, keep: bool) -> list[torch.Tensor]:
    """Copies of the full parameters; of summoned ones as they are now, with what was changed there."""
    if not place.unit.showing.pins:
        return gather(place, place.handle.flat_param.detach(), device=device, keep=keep)
    return [leaf.detach().to(device or leaf.device, copy=True) for leaf in place.handle.leaves if keep]


def _shard(place: Place) -> torch.Tensor:
    """Return this rank's shard; of summoned parameters as they are now."""
    shard = place.handle.flat_param.detach()
    if not place.unit.showing.pins:
        return shard
    return shard_of(place, [own_part(place, index) for index in range(len(place.fqns))], shard)


def _local(place: Place, form: StateForm) -> Any:
    """Return the flat parameter as local states have it.

    The unit is gathered if what a rank saves lies on its neighbours, as alignment has moved it.
    """
    flat = FlatTensor.of(place.handle)
    if not flat.moves:
        elements = flat.held(_shard(place))
    elif place.unit.showing.pins:
        elements = flat.of_full([leaf.detach() for leaf in place.handle.leaves])
    else:
        full = gather_full(place.unit, place.handle, place.handle.flat_param.detach())
        elements = flat.of_full(full_views(place.handle, full))
    wanted = attrs.evolve(Wanted.of_flat_parameter(place), span_of=flat.saved_span)
    return form.owned(wanted, elements, place)


def model_state_dict(
    model: nn.Module, *, offload_to_cpu: bool = False, rank0_only: bool = False, form: StateForm | None = None
) -> dict[str, Any]:
    """Return the state of `model` under clean names, in full unless another `form` is given; every rank calls it.

    Args:
        offload_to_cpu: put the full parameters on the CPU.
        rank0_only: only rank 0 of each unit keeps them; elsewhere the parameters are absent from the state.
        form: instead of the two; see `StateForm`.
    """
    form = form or StateForm(offload_to_cpu=offload_to_cpu, rank0_only=rank0_only)
    with state_shown(model, form) as stand_ins:
        state = model.state_dict()
    clean_keys(state, "")
    stand_ins.resolve(state)
    return state


def clean_keys(state: MutableMapping[str, Any], prefix: str) -> None:
    """Rename the entries of `state` below `prefix` to their names in the unsharded model, in place."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + clean_fqn(key[len(prefix) :])] = state.pop(key)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        for key in list(metadata):
            metadata[clean_fqn(key)] = metadata.pop(key)


def own_part(place: Place, index: int) -> torch.Tensor:
    """Return this rank's elements of parameter `index`: of the shard, or of the full parameter if that is summoned."""
    handle = place.handle
    fragment = handle.layout.fragment(index, handle.rank)
    if place.unit.showing.pins:
        return memory_view(handle.leaves[index].detach(), handle.layout.slots[index].spec)[fragment.in_param.as_slice()]
    return handle.flat_param.detach()[fragment.in_shard.as_slice()]
