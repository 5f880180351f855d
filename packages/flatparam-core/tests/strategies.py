"""Strategies of hypothesis: parameters, layouts, and tensors that fit them, without ranks and modules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from hypothesis import strategies as st

from flatparam_core import (
    ELEMENT,
    ROW,
    WHOLE,
    FlatLayout,
    LayoutRule,
    ParamSpec,
    Slot,
    Span,
    block_of,
)

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int64,
)
ALIGNMENTS = (0, 16, 64)
WORLD_SIZES = st.integers(1, 64)


def spans(limit: int = 40) -> st.SearchStrategy[Span]:
    """Any span in ``[0, limit)``, empty ones too."""
    return st.tuples(st.integers(0, limit), st.integers(0, limit)).map(lambda ends: Span(min(ends), max(ends)))


@st.composite
def memory_orders(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dense strides of ``shape`` with its dimensions in any order, as those of channels_last are."""
    strides = [0] * len(shape)
    step = 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@st.composite
def param_specs(draw: st.DrawFn, fqn: str = "p", dtype: torch.dtype = torch.float32, smallest: int = 0) -> ParamSpec:
    """A parameter of 0 to 4 dimensions (a 0-d one too) whose sizes are ``smallest`` to 5."""
    shape = tuple(draw(st.lists(st.integers(smallest, 5), max_size=4)))
    trainable = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
    return ParamSpec(fqn, shape, dtype, trainable, draw(memory_orders(shape)))


@st.composite
def unit_specs(draw: st.DrawFn, dtype: torch.dtype | None = None) -> tuple[ParamSpec, ...]:
    """One to seven parameters of one dtype, with distinct names."""
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    return tuple(draw(param_specs(f"p{number}", dtype)) for number in range(draw(st.integers(1, 7))))


@st.composite
def planned_layouts(draw: st.DrawFn, dtype: torch.dtype | None = None) -> FlatLayout:
    """A layout as :meth:`FlatLayout.plan` makes it."""
    return FlatLayout.plan(
        draw(unit_specs(dtype)),
        world_size=draw(WORLD_SIZES),
        alignment_nbytes=draw(st.sampled_from(ALIGNMENTS)),
    )


@st.composite
def any_layouts(draw: st.DrawFn, dtype: torch.dtype | None = None) -> FlatLayout:
    """Any valid layout, also one that no plan makes: gaps of any length, in front and at the end too."""
    slots = []
    end = 0
    for spec in draw(unit_specs(dtype)):
        start = end + draw(st.integers(0, 9))
        end = start + spec.numel
        slots.append(Slot(spec, Span(start, end)))
    world_size = draw(WORLD_SIZES)
    shard_numel = -(-end // world_size) + draw(st.integers(0, 3))
    return FlatLayout(tuple(slots), world_size, world_size * shard_numel)


def rules() -> st.SearchStrategy[LayoutRule]:
    """Every kind of rule, with blocks of up to nine elements."""
    return st.sampled_from([ELEMENT, ROW, WHOLE]) | st.integers(1, 9).map(block_of)


@st.composite
def ruled_specs(draw: st.DrawFn, dtype: torch.dtype | None = None) -> tuple[ParamSpec, ...]:
    """One to seven parameters of one dtype, each with a rule of its own."""
    return tuple(attrs.evolve(spec, rule=draw(rules())) for spec in draw(unit_specs(dtype)))


@st.composite
def ruled_layouts(
    draw: st.DrawFn,
    dtype: torch.dtype | None = None,
    *,
    world_sizes: st.SearchStrategy[int] = WORLD_SIZES,
    uneven: bool = False,
) -> FlatLayout:
    """A layout with rules as :meth:`FlatLayout.plan` makes it; with ``uneven``, each rank has a share of its own."""
    world_size = draw(world_sizes)
    shares = st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size)
    return FlatLayout.plan(
        draw(ruled_specs(dtype)),
        world_size=world_size,
        alignment_nbytes=draw(st.sampled_from(ALIGNMENTS)),
        shares=draw(shares) if uneven else (),
    )


def layouts(dtype: torch.dtype | None = None) -> st.SearchStrategy[FlatLayout]:
    """Planned and hand-made layouts, with rules and without."""
    return planned_layouts(dtype) | any_layouts(dtype) | ruled_layouts(dtype)


def tensor_for(spec: ParamSpec, start: int = 1) -> torch.Tensor:
    """A tensor of the shape, strides and dtype of ``spec``: ``start``, ``start + 1``, ... in memory order.

    The values are non-zero, and all different if the dtype can tell them apart.
    """
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
    if spec.numel:
        tensor.as_strided((spec.numel,), (1,)).copy_(torch.arange(start, start + spec.numel))
    return tensor


def tensors_for(specs: Sequence[ParamSpec]) -> list[torch.Tensor]:
    """A tensor for each spec; every element of all of them has a value of its own."""
    starts = [1]
    for spec in specs:
        starts.append(starts[-1] + math.prod(spec.shape))
    return [tensor_for(spec, start) for spec, start in zip(specs, starts, strict=False)]
