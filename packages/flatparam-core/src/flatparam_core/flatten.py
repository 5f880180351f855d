"""From a module to the handles of its flat parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure import BoundParameter, discover, mark_owner
from flatparam_core.geometry import (
    CHUNK,
    ELEMENT,
    FlatLayout,
    LayoutRule,
    ParamSpec,
    contiguous_stride,
    pack_parameter,
    plan_layouts,
)
from flatparam_core.handle import FlatParamHandle
from flatparam_core.names import FLAT_PARAM
from flatparam_core.storage import Precision
from flatparam_core.thresholds import Threshold

RuleOf: TypeAlias = Callable[[BoundParameter], LayoutRule]
"""Says what of a parameter stays on one rank."""

ALIGNMENT_NBYTES: Final = Threshold(
    "core.alignment_nbytes",
    16,
    "On an accelerator each parameter and each rank's shard begin at a multiple of so many bytes, in every dtype that "
    "the flat parameter is held in; on a CPU each parameter does with `use_orig_params=True`.",
    least=0,
    most=2**12,
)
"""The alignment that fast kernels for products, and collectives, ask for; 0 leaves no gap between parameters."""
CPU_ALIGNMENT_NBYTES: Final = Threshold(
    "core.cpu_alignment_nbytes",
    0,
    "The same for shards on a CPU, and for parameters there with `use_orig_params=False`; with 0 as in FSDP1.",
    least=0,
    most=2**12,
)
"""Cut as in FSDP1, gradients have its norm to the last bit, and no kernel of a CPU is much slower."""


@final
@attrs.define(eq=False)
class Flattening:
    """The way of a module to flat parameters: the shards are filled one parameter at a time, then they take over.

    A parameter can thus be made, packed and dropped before the next one is made. Between `begin` and `finish` the
    module is unchanged.
    """

    module: nn.Module
    layouts: tuple[FlatLayout, ...]
    shards: tuple[torch.Tensor, ...]
    """This rank's shard of each layout, 1-D, `layout.shard_numels[rank]` elements."""
    rank: int
    device: torch.device
    _use_orig_params: bool
    _precision: Precision
    _places: dict[str, tuple[int, int]]
    """By parameter name, the index of its layout and of its slot there."""
    _given: Sequence[BoundParameter]
    """The parameters as `begin` was given them."""

    @classmethod
    def begin(
        cls,
        module: nn.Module,
        bound: Sequence[BoundParameter],
        *,
        rank: int,
        world_size: int,
        use_orig_params: bool = False,
        precision: Precision | None = None,
        device: torch.device | None = None,
        storage_device: torch.device | None = None,
        rule_of: RuleOf | None = None,
        shares: Sequence[float] = (),
    ) -> Self:
        """Plan the flat parameters of `bound`, which may be on the meta device, and allocate the shards, all zero.

        With `use_orig_params` those of two or more dimensions come first, then the others, each in the order given,
        unless rules ask for a different order.

        Args:
            device: the device of full parameters; by default that of the parameters.
            storage_device: the device of the shards, by default `device`; CPU memory beside an accelerator is pinned.
            rule_of: the rule of each parameter; by default `ELEMENT` for all.
            shares: for each rank the weight of its part; empty gives all the same.

        Raises:
            FlatParamError: if a parameter already belongs to a flat parameter, or if they are on several devices.
            LayoutError: if the shares do not fit.
        """
        _check_unclaimed(bound)
        home, precision = device or _common_device(bound), precision or Precision()
        specs = [_spec(b, rule_of) for b in bound]
        # Chunks lie as torch's `fully_shard` has them, so that sums over ranks have its bits.
        is_chunked = any(spec.rule == CHUNK for spec in specs)
        sorts = use_orig_params and not is_chunked
        if is_chunked:
            specs = _after_children(specs)
        if sorts:
            # Parameters that mostly share hyper-parameters become neighbours: see docs/rationale.md.
            specs.sort(key=lambda spec: len(spec.shape) < 2)
        of_shards = CPU_ALIGNMENT_NBYTES if home.type in ("cpu", "meta") else ALIGNMENT_NBYTES
        layouts = plan_layouts(
            specs,
            world_size=world_size,
            alignment_nbytes=(ALIGNMENT_NBYTES if sorts else of_shards).value,
            shard_alignment_nbytes=of_shards.value,
            held_in=precision.held_in,
            shares=shares,
        )
        storage = storage_device or home
        pinned = storage.type == "cpu" and home.type != "cpu"
        shards = tuple(
            torch.zeros(layout.shard_span(rank).numel, dtype=layout.dtype, device=storage, pin_memory=pinned)
            for layout in layouts
        )
        places = {
            fqn: (number, index) for number, layout in enumerate(layouts) for index, fqn in enumerate(layout.fqns)
        }
        return cls(module, layouts, shards, rank, home, use_orig_params, precision, places, bound)

    def pack(self, fqn: str, value: torch.Tensor) -> None:
        """Copy this rank's part of parameter `fqn`, whose full value is `value`, to its shard."""
        number, index = self._places[fqn]
        pack_parameter(self.shards[number], self.layouts[number], index, value, rank=self.rank)

    def finish(self, bound: Sequence[BoundParameter]) -> tuple[FlatParamHandle, ...]:
        """Make the module show its sharded form.

        Args:
            bound: the parameters, under the names given to `begin`; they may be other objects by now.
        """
        by_name = {b.names[0]: b for b in bound}
        handles = tuple(
            FlatParamHandle.create(
                self.module,
                [by_name[fqn] for fqn in layout.fqns],
                layout,
                shard,
                rank=self.rank,
                attribute=None if self._use_orig_params else _free_attribute(self.module),
                precision=self._precision,
                device=self.device,
            )
            for layout, shard in zip(self.layouts, self.shards, strict=True)
        )
        for b in self._given:
            number, index = self._places[b.names[0]]
            if b.parameter is not by_name[b.names[0]].parameter:
                # A module outside may share the object that was there before.
                mark_owner(b.parameter, handles[number], index)
        return handles


def _after_children(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return `specs`, those that a module has itself behind those of its children."""

    def modules(spec: ParamSpec) -> list[str]:
        path = spec.fqn.split(".")[:-1]
        return [".".join(path[: depth + 1]) for depth in range(len(path))]

    turns = {name: turn for turn, name in enumerate(dict.fromkeys(name for spec in specs for name in modules(spec)))}
    return sorted(specs, key=lambda spec: [*map(turns.__getitem__, modules(spec)), len(turns)])


def flatten_module(
    module: nn.Module,
    *,
    rank: int,
    world_size: int,
    use_orig_params: bool = False,
    precision: Precision | None = None,
    device: torch.device | None = None,
    storage_device: torch.device | None = None,
    parameters: Sequence[BoundParameter] | None = None,
    rule_of: RuleOf | None = None,
    shares: Sequence[float] = (),
) -> tuple[FlatParamHandle, ...]:
    """Shard the parameters of `module` in place; every rank calls it with equal modules.

    Args:
        module: shows its sharded form afterwards, until a handle is unsharded.
        rank: this rank's index among the `world_size` ranks that share the parameters.
        use_orig_params: whether `module.parameters()` lists the original objects, or flat parameters.
        precision: compute and reduction dtypes; by default every parameter's own.
        device: the device of full parameters; by default that of the parameters.
        storage_device: the device of the shards; by default `device`.
        parameters: what to flatten, by default all that `discover` finds.
        rule_of: what of each parameter stays on one rank; by default boundaries between ranks lie anywhere.
        shares: for each rank the weight of its part; empty gives all the same.

    Returns:
        One handle for each dtype of the trainable parameters, then one for each of the frozen ones; empty if there are
        no parameters.

    Raises:
        FlatParamError: if a parameter already belongs to a flat parameter, or if they are on several devices.
        LayoutError: if the shares do not fit.
    """
    bound = discover(module) if parameters is None else tuple(parameters)
    if not bound:
        return ()
    flattening = Flattening.begin(
        module,
        bound,
        rank=rank,
        world_size=world_size,
        use_orig_params=use_orig_params,
        precision=precision,
        device=device,
        storage_device=storage_device,
        rule_of=rule_of,
        shares=shares,
    )
    for b in bound:
        flattening.pack(b.names[0], b.parameter)
    return flattening.finish(bound)


def _spec(bound: BoundParameter, rule_of: RuleOf | None) -> ParamSpec:
    spec, rule = bound.spec, ELEMENT if rule_of is None else rule_of(bound)
    if rule == CHUNK and not spec.is_row_major:
        spec = attrs.evolve(spec, stride=contiguous_stride(spec.shape))
    return spec if rule == spec.rule else attrs.evolve(spec, rule=rule)


def _free_attribute(owner: nn.Module) -> str:
    taken = sum(name.startswith(FLAT_PARAM) for name in owner._parameters)
    return f"{FLAT_PARAM}_{taken}" if taken else FLAT_PARAM


def _check_unclaimed(bound: Sequence[BoundParameter]) -> None:
    for b in bound:
        if getattr(b.parameter, "_fsdp_flattened", False):
            raise FlatParamError(
                f"parameter {b.names[0]!r} already belongs to another unit (names are below the module that is "
                "sharded now); make one unit of a module that contains everything that shares the parameter"
            )


def _common_device(bound: Sequence[BoundParameter]) -> torch.device:
    first = bound[0]
    for b in bound:
        if b.parameter.device != first.parameter.device:
            raise FlatParamError(
                f"parameter {b.names[0]!r} is on {b.parameter.device}, {first.names[0]!r} on "
                f"{first.parameter.device}; move the module to one device, or say which with device="
            )
    return first.parameter.device
