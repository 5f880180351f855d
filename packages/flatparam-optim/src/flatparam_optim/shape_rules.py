"""The kinds of optimizers, and their refusal on shards: one that looks at shapes would train other numbers there."""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any, Final, final

import attrs
import torch
from torch import nn

from flatparam_comm import FlatParamError, FlatParameter, owner_of, warn_caller
from flatparam_runtime.optimizers.torch_optimizers import INIT_GROUP

MAY_SEE_SHARDS: Final = "_flatparam_may_see_shards"
"""Our mark on an optimizer that may step shards, whatever its kind."""
_PARTS_OF_WORDS: Final = ("came", "dion", "kron", "lamb", "larc", "lars", "sm3", "spam")
"""Names that count at the end of a class's name only: elsewhere they may be part of a different word."""
_TREATS_EACH_ALONE: Final = frozenset(
    (
        *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "adan", "ademamix", "asgd"),
        *("lion", "lionw", "nadam", "nadamw", "radam", "rmsprop", "rprop", "sgd", "sgdw", "sophia", "sophiag"),
        *("adamwschedulefree", "radamschedulefree", "sgdschedulefree", "sparseadam"),
    )
)
"""The names of classes that treat each element alone. A longer name may say what else a class looks at."""
_LOOKS_AT_MORE: Final = (
    *("adanorm", "adaptive_clip", "caution", "cautious", "clip_grad", "gradient_centralization", "max_grad_norm"),
    *("max_unorm", "norm_grad", "normalize", "stable", "trust_ratio", "use_adanorm", "use_gc", "use_layer_norm"),
)
"""The settings with which such a class looks at whole parameters, if they are on."""
_PREFIXES: Final = ("anyprecision", "cpu", "decoupled", "deepspeed", "distributed", "fused", "hybrid", "npu", "paged")
"""Beginnings of names that say how a class computes, and not what."""
_SUFFIX: Final = re.compile(r"(\d+bit|fp8)$")
"""The end of a name that says how a class keeps its state: `LAMB8bit` looks at what `LAMB` does."""


@final
class OptimizerKind(enum.Enum):
    """The things that an optimizer computes with, which decide what of a parameter has to stay on one rank."""

    ELEMENTS = "each element alone"
    MATRICES = "matrices as wholes, and each element of other parameters alone"
    PARAMETERS = "rows, columns or the norm of each parameter"
    ALL = "all parameters at once"


_NAMES: Final = {
    OptimizerKind.PARAMETERS: (
        *("adafactor", "adammini", "adam_mini", "came", "kfac", "lamb", "larc", "lars", "novograd"),
        *("sm3", "spam"),
    ),
    OptimizerKind.MATRICES: ("apollo", "dion", "galore", "kron", "muon", "psgd", "scion", "shampoo", "soap"),
    OptimizerKind.ALL: ("dadapt", "lbfgs", "prodigy"),
}
"""Names of classes that compute with more than single elements, also as bases of other classes."""


def kind_of_optimizer(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer) -> OptimizerKind | None:
    """The kind of a class of optimizers, by its name and those of its bases; `None` if flatparam does not know it.

    A class treats each element alone if it has such a name, or a base, and the `step` of each such base, and what
    collects its tensors. An optimizer counts as its class, unless one of its settings has it look at more.
    """
    made_by: Any = optimizer if isinstance(optimizer, type) else type(optimizer)
    kind, groups = _kind_of_class(made_by), () if isinstance(optimizer, type) else optimizer.param_groups
    looks_at_more = any(group.get(name) for group in groups for name in _LOOKS_AT_MORE)
    return None if kind is OptimizerKind.ELEMENTS and looks_at_more else kind


@functools.lru_cache(maxsize=64)
def _kind_of_class(optimizer: Any) -> OptimizerKind | None:
    bases: list[Any] = [base for base in optimizer.__mro__ if issubclass(base, torch.optim.Optimizer)]
    for kind, known in _NAMES.items():
        if any(_names_one_of(_plain_name(base), known) for base in bases):
            return kind
    alone = [base for base in bases if _plain_name(base) in _TREATS_EACH_ALONE]
    # Torch wraps the step in each class anew.
    has_theirs = all(
        inspect.unwrap(getattr(base, name, _nothing)) is inspect.unwrap(getattr(optimizer, name, _nothing))
        for base in alone
        for name in ("step", INIT_GROUP)
    )
    return OptimizerKind.ELEMENTS if alone and has_theirs else None


def _nothing() -> None:
    """Stand for a method that a class does not have."""


def allow_shards(optimizer: torch.optim.Optimizer) -> None:
    """Say that `optimizer` treats each element alone, or knows what to do with the shards that it is given."""
    setattr(optimizer, MAY_SEE_SHARDS, True)


def may_step_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer` treats each element alone, or was said to know of shards (`allow_shards`)."""
    return bool(vars(optimizer).get(MAY_SEE_SHARDS)) or kind_of_optimizer(optimizer) is OptimizerKind.ELEMENTS


def check_sees_no_shards(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step of an optimizer that looks at shapes, and holds parameters that have lost theirs.

    An optimizer of an unknown kind gets a warning, once.

    Raises:
        FlatParamError: naming the optimizer, a parameter, and what to do; nothing has been stepped.
    """
    if may_step_shards(optimizer):
        return
    made_by, kind = type(optimizer), kind_of_optimizer(optimizer)
    if kind is OptimizerKind.ALL:
        part = next((part for part in _parts(optimizer) if part.is_sharded), None)
        looks_at, whole = "all parameters at once", ""
    elif kind is not None:
        part = next((part for part in _parts(optimizer) if part.has_lost_its_shape), None)
        looks_at = "the shapes of the parameters that it steps"
        whole = f", or keep each on one rank, with layout=flatparam.layout.for_optimizer({made_by.__name__})"
    else:
        part = next((part for part in _parts(optimizer) if part.has_lost_its_shape), None)
        if part is not None:
            _warn(made_by.__name__, part)
            allow_shards(optimizer)
        return
    if part is not None:
        raise FlatParamError(
            f"rank {part.rank}: {made_by.__name__} looks at {looks_at}, and would train other numbers without a word: "
            f"of {part.fqn!r}, of shape {part.whole}, it holds {part.found}. Use one of flatparam.optim (Muon, "
            "Adafactor, Shampoo, or your own step of matrices), which are exact on shards, or one that treats each "
            "element alone (AdamW, SGD and so on; docs/guides/optimizers.md), or have parameters kept whole on each "
            f"rank, with NO_SHARD and use_orig_params=True{whole}; if this one knows of shards, call "
            "flatparam.allow_shards(optimizer)"
        )


def _warn(kind: str, part: _Part) -> None:
    warn_caller(
        f"{kind} is not an optimizer that flatparam knows, and sees shards: of {part.fqn!r}, of shape {part.whole}, it "
        f"holds {part.found}. If it treats each element alone, nothing is lost; flatparam.allow_shards(optimizer) says "
        "so. If it looks at shapes or norms, it trains other numbers: have parameters kept whole, with NO_SHARD and "
        "use_orig_params=True"
    )


def _plain_name(kind: type) -> str:
    name = kind.__name__.lower().lstrip("_")
    while (prefix := next(filter(name.startswith, _PREFIXES), name)) != name:
        name = name.removeprefix(prefix)
    return _SUFFIX.sub("", name).rstrip("_")


def _names_one_of(name: str, known: tuple[str, ...]) -> bool:
    return name.endswith(known) or any(each in name for each in known if each not in _PARTS_OF_WORDS)


@final
@attrs.frozen
class _Part:
    """A part is what an optimizer holds of a sharded parameter."""

    rank: int
    fqn: str
    whole: tuple[int, ...]
    found: str
    is_sharded: bool
    """Whether other ranks hold elements too."""
    has_lost_its_shape: bool


def _parts(optimizer: torch.optim.Optimizer) -> Iterator[_Part]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = _part_of(parameter)
            if part is not None:
                yield part


def _part_of(parameter: nn.Parameter) -> _Part | None:
    if isinstance(parameter, FlatParameter):
        layout = parameter.flat_layout
        spec = layout.slots[0].spec
        found = f"a part of a flat parameter of {parameter.numel()} elements"
        return _Part(parameter.rank, spec.fqn, spec.shape, found, layout.world_size > 1, True)
    owner = owner_of(parameter)
    if owner is None:
        return None
    handle, index = owner
    if handle.faces is not None and parameter is handle.exposure.listed()[index]:
        # Operations of a face are those of the whole.
        return None
    spec = handle.layout.slots[index].spec
    is_sharded, shape = handle.layout.world_size > 1, tuple(parameter.shape)
    # One rank has all of it then, in its own shape, and the others have an empty part, which is not stepped. A scalar
    # always is: as one element it has the same norm, and neither rows nor columns.
    is_scalar = not spec.shape
    is_kept = is_scalar or bool(spec.rule.kind == "whole" and spec.numel and spec.is_row_major)
    has_lost = not (is_kept if is_sharded else is_scalar or shape == spec.shape)
    return _Part(handle.rank, spec.fqn, spec.shape, f"a part of shape {shape}", is_sharded, has_lost)
