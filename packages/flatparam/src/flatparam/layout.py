"""Layouts keep blocks, rows or whole parameters on one rank: by class, name or function, or as an optimizer needs.

`FullyShardedDataParallel(model, layout=...)` and `fully_shard(model, layout=...)` take what `by` and `for_optimizer`
return, or a function of name and parameter. See `docs/layouts.md`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import nn

from flatparam.addons import load
from flatparam_core import CHUNK, ELEMENT, ROW, WHOLE, LayoutRule, block_of

__all__ = [
    "LayoutPolicy",
    "RuleFunction",
    "as_policy",
    "blocks",
    "by",
    "chunk",
    "element",
    "for_optimizer",
    "row",
    "whole",
]

RuleFunction: TypeAlias = Callable[[str, nn.Parameter], LayoutRule]
"""A function of a parameter's name and the parameter, which may be on the meta device."""

element: Final = ELEMENT
"""A boundary between ranks may lie anywhere: no padding. The rule if none is given."""
row: Final = ROW
"""Each index of the first dimension stays on one rank."""
chunk: Final = CHUNK
"""Each rank has a chunk of the rows, as torch's `fully_shard` cuts them; for all parameters of a unit."""
whole: Final = WHOLE
"""The parameter stays on one rank, in its own shape; the others have an empty part of it."""


def blocks(numel: int) -> LayoutRule:
    """Return the rule that each block of `numel` elements, counted from the parameter's first one, stays on one rank.

    Raises:
        LayoutError: if `numel` is less than 1.
    """
    return block_of(numel)


@final
@attrs.frozen(repr=False)
class LayoutPolicy:
    """Chooses a rule for every parameter of a model; `by` and `for_optimizer` make it."""

    _choose: Callable[[str, nn.Parameter, nn.Module], LayoutRule]
    _told: str
    """How it was made, for messages."""
    shares: tuple[float, ...] = ()
    """For each rank of the shard group the weight of its part; empty gives all the same."""
    patterns: tuple[str, ...] = ()
    """The patterns of names among its cases."""

    def __attrs_post_init__(self) -> None:
        for rank, share in enumerate(self.shares):
            if not (math.isfinite(share) and share > 0):
                raise ValueError(f"layout: expected a positive number as the share of rank {rank}, found {share!r}")

    def rule(self, name: str, parameter: nn.Parameter, module: nn.Module) -> LayoutRule:
        """Return the rule of `parameter`.

        Args:
            name: its dotted name below the module that is wrapped, without the parts that wrappers add.
            parameter: with its full shape; it may be on the meta device.
            module: the module that has it.

        Raises:
            TypeError: if the policy's function returns something else than a rule; the message names the parameter.
        """
        found: Any = self._choose(name, parameter, module)
        if not isinstance(found, LayoutRule):
            raise TypeError(
                f"layout: expected a rule for {name!r}, such as flatparam.layout.row, found {found!r} from {self}"
            )
        return found

    def __repr__(self) -> str:
        return self._told


def by(
    rules: Mapping[type[nn.Module] | str, LayoutRule] | RuleFunction,
    *,
    otherwise: LayoutRule = ELEMENT,
    shares: Sequence[float] = (),
) -> LayoutPolicy:
    """Make a layout that chooses rules by the class of a parameter's module, by a pattern of its name, or a function.

    Args:
        rules: a rule for each class of modules, or pattern of dotted names as in a shell (`"*.experts.*"`): the first
            that fits counts. Or a function of name and parameter. A pattern that fits no parameter of a model that is
            wrapped with an `auto_wrap_policy` gets a warning.
        otherwise: the rule of parameters that nothing fits.
        shares: for each rank of the shard group the weight of its part, for devices of different sizes; empty gives
            all the same. Parts of different lengths travel in parts as long as the longest.

    Raises:
        TypeError: for anything else.
        ValueError: for a share that is no positive number.
    """
    if not isinstance(rules, Mapping):
        if isinstance(rules, type) or not callable(rules):
            raise TypeError(f"layout.by: expected a mapping, or a function of name and parameter; found {rules!r}")
        return LayoutPolicy(
            lambda name, parameter, module: rules(name, parameter), f"layout.by({rules!r})", tuple(shares)
        )
    cases = dict(rules)
    for key, rule in (*cases.items(), (None, otherwise)):
        _check_case(key, rule)

    def choose(name: str, parameter: nn.Parameter, module: nn.Module) -> LayoutRule:
        return next((rule for key, rule in cases.items() if _fits(key, name, module)), otherwise)

    patterns = tuple(key for key in cases if isinstance(key, str))
    return LayoutPolicy(choose, f"layout.by({cases!r}, otherwise={otherwise!r})", tuple(shares), patterns)


def _check_case(key: object, rule: object) -> None:
    is_class = isinstance(key, type) and issubclass(key, nn.Module)
    if not (is_class or isinstance(key, str) or key is None):
        raise TypeError(f"layout.by: expected classes of modules or patterns of names as keys, found {key!r}")
    if not isinstance(rule, LayoutRule):
        raise TypeError(f"layout.by: expected a rule such as flatparam.layout.row for {key!r}, found {rule!r}")


def _fits(key: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    return fnmatch.fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)


_QUANTISED: Final = ("8bit", "4bit", "fp8")
"""Optimizers with quantised states, by how the name of their class ends (bitsandbytes, torchao)."""
_BLOCK, _LEAST = 256, 4096
"""They have a scale for each 256 elements (4 bits: 128), and quantise only parameters of 4,096 elements or more."""


def for_optimizer(kind: type[torch.optim.Optimizer], *, shares: Sequence[float] = ()) -> LayoutPolicy:
    """Make a layout with which the optimizer `kind` computes every step as in a single process.

    An optimizer of matrices (Muon, Shampoo, SOAP) has each parameter of two or more dimensions whole; one that looks at
    the rows or the norm of each parameter (Adafactor, LAMB) has all whole; one with states in blocks (8-bit Adam) has
    blocks so long that each part of a parameter is quantised if the whole is. One that treats each element alone
    (AdamW, SGD) needs no rule.

    Whole parameters have their own shape with `use_orig_params=True`.

    Args:
        kind: the class of the optimizer.
        shares: see `by`.

    Raises:
        TypeError: for anything but a class of optimizers.
        ModuleNotFoundError: if the add-on flatparam-optim, which knows the kinds of optimizers, is not installed.
        ValueError: for a class whose rule flatparam does not know, or a share that is not a positive number.
    """
    asked: Any = kind
    if not (isinstance(asked, type) and issubclass(asked, torch.optim.Optimizer)):
        raise TypeError(f"layout.for_optimizer: expected a class of optimizers, found {asked!r}")
    optim = load("flatparam_optim")
    kinds, found = optim.OptimizerKind, optim.kind_of_optimizer(kind)
    if found is kinds.ALL:
        raise ValueError(
            f"layout.for_optimizer: {kind.__qualname__} computes with all parameters at once, so no layout makes it "
            "exact on shards; use sharding_strategy=NO_SHARD and use_orig_params=True"
        )
    is_quantised = any(base.__name__.lower().endswith(_QUANTISED) for base in asked.__mro__)
    # None stands for the rule of states in blocks, which depends on the parameter.
    of_others = None if is_quantised else ELEMENT
    if found is kinds.PARAMETERS:
        of_others = WHOLE
    elif found is None and not is_quantised:
        raise ValueError(
            f"layout.for_optimizer: flatparam does not know the rule of {kind.__qualname__}; give the rules yourself, "
            "for example layout=flatparam.layout.by({}, otherwise=flatparam.layout.whole)"
        )
    of_matrices = WHOLE if found is kinds.MATRICES else of_others
    return LayoutPolicy(
        lambda name, parameter, module: (
            (of_matrices if parameter.dim() > 1 else of_others) or _quantised_alike(parameter)
        ),
        f"layout.for_optimizer({kind.__module__}.{kind.__qualname__})",
        tuple(shares),
    )


def _quantised_alike(parameter: nn.Parameter) -> LayoutRule:
    """Return the rule under which each part of `parameter` is quantised if the whole is, in the same blocks."""
    numel = parameter.numel()
    if numel < _LEAST:
        return ELEMENT
    if numel % _BLOCK:
        # torchao leaves it as it is, and would quantise a part that has whole blocks.
        return WHOLE
    lengths = range(_LEAST, numel, _BLOCK)
    # The last part may be the rest alone.
    return block_of(next((each for each in lengths if not 0 < numel % each < _LEAST), numel))


def as_policy(layout: LayoutPolicy | RuleFunction) -> LayoutPolicy:
    """Return `layout` as a policy: it may be one, or a function of name and parameter.

    Raises:
        TypeError: for anything else; a rule by itself is refused, since it does not say of which parameters.
    """
    if isinstance(layout, LayoutPolicy):
        return layout
    if isinstance(layout, type) or not callable(layout):
        raise TypeError(
            "layout: expected flatparam.layout.by(...), flatparam.layout.for_optimizer(...), or a function of name and "
            f"parameter; found {layout!r}"
        )
    return by(layout)
