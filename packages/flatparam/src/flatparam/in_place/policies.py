"""FSDP2's policies: same names, same fields, same defaults; torch's own objects are taken too."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "PolicyOfTorch", "as_policy"]

P = TypeVar("P")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a module that `fully_shard` shards computes, reduces and returns; `None` keeps each as it is.

    Attributes:
        param_dtype: the dtype of full parameters, and so of computation. Optimizers step the parameters in their own
            dtype.
        reduce_dtype: the dtype in which gradients are reduced, and in which those of passes that do not reduce are
            added up; `None` is the dtype of computation.
        output_dtype: the dtype that floating-point outputs of the module's forward are cast to.
        cast_forward_inputs: whether floating-point inputs of the module's forward are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """The policy to offload nothing."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """The policy to keep shards, their gradients, and so the optimizer's states, in CPU memory.

    Attributes:
        pin_memory: whether that memory is pinned; beside an accelerator it always is, so `False` is refused there.
    """

    pin_memory: bool = True


class PolicyOfTorch(Protocol):
    """A policy for torch's own `fully_shard`: a dataclass with the name of one of these."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def as_policy(kind: type[P], value: Any, argument: str) -> P:
    """`value` as an instance of `kind`, or of a subclass of it; torch's dataclass of the same name is translated.

    Raises:
        TypeError: for anything else.
        ValueError: for an object of torch's that asks for something which the class of ours does not know.
    """
    if isinstance(value, kind):
        return value
    for candidate in (kind, *kind.__subclasses__()):
        if type(value).__name__ == candidate.__name__ and dataclasses.is_dataclass(value):
            return _translated(candidate, value, argument)
    raise TypeError(f"{argument}: expected a {kind.__name__} of flatparam or of torch, found {value!r}")


def _translated(kind: type[P], value: Any, argument: str) -> P:
    # Each candidate is a dataclass.
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for field in dataclasses.fields(value):
        if field.name not in known and getattr(value, field.name) != field.default:
            raise ValueError(
                f"{argument}: {field.name}={getattr(value, field.name)!r} is not supported; leave it at "
                f"{field.default!r}"
            )
    return kind(**{name: getattr(value, name) for name in known if hasattr(value, name)})
