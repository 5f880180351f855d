"""The effect of operations on memory, and the tensors that they make."""

from __future__ import annotations

import math
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_plan.hollow.kernels import operands_of
from flatparam_plan.hollow.temporaries import AFFORDABLE_NBYTES, zeros_as
from flatparam_plan.plan_error import PlanError

ATEN: Final = torch.ops.aten
_KEEPS_NUMBER: Final = (ATEN.mul.Tensor, ATEN.div.Tensor, ATEN.mul_.Tensor, ATEN.div_.Tensor)
_READS: Final = (ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.is_nonzero.default)
_ALIASES: Final = (
    ATEN._unsafe_view.default,
    ATEN.detach.default,
    ATEN.lift_fresh.default,
    ATEN.unsafe_split.Tensor,
    ATEN.unsafe_split_with_sizes.default,
)
"""Operations that return their argument's memory, of which the schema does not always tell."""
_TURNS_IN_PLACE: Final = tuple(
    getattr(getattr(ATEN, name), overload)
    for name in ("as_strided_", "detach_", "squeeze_", "t_", "transpose_", "unsqueeze_")
    for overload in getattr(ATEN, name).overloads()
)
"""Operations that change the shape of their argument, and write nothing to its memory."""
_MEAN: Final = 1
"""How torch numbers a reduction to the mean; 0 is none."""
_REDUCED_IN_PLACE: Final = (
    ATEN.mse_loss.default,
    ATEN.smooth_l1_loss.default,
    ATEN.binary_cross_entropy.default,
    ATEN.soft_margin_loss.default,
)
"""Operations that compute a number for each element, and reduce them to one, which keeps the memory of all."""


@final
@attrs.frozen(eq=False)
class Trait:
    """The effect of an operation on memory, as its schema says."""

    operation: Any
    kind: str
    """"view" for those that take no memory, "written" for those that write to their arguments, "read", or "new"."""
    returns: int
    returns_list: bool
    keeps_number: bool
    """Whether autograd keeps a Python number that it is given."""
    _written: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, func: Any) -> Trait:
        """Read the schema."""
        schema = func._schema
        written = tuple(
            (number, argument.name)
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        returns = schema.returns
        if func in _READS:
            kind = "read"
        elif (
            func in _ALIASES
            or func.is_view
            or func in _TURNS_IN_PLACE
            or (returns and not any("Tensor" in str(r.type) for r in returns))
        ):
            kind = "view"
        elif written and all(each.alias_info is not None for each in returns):
            kind = "written"
        else:
            kind = "new"
        returns_list = len(returns) == 1 and "List" in str(returns[0].type)
        return cls(func, kind, len(returns), returns_list, func in _KEEPS_NUMBER, written)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that the operation writes to."""
        found: list[Tensor] = []
        for number, name in self._written:
            value = args[number] if number < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                found.append(value)
            else:
                found.extend(operands_of(value))
        return found


def value_of(func: Any, args: tuple[Any, ...]) -> Any:
    """Return a value that somebody wants to know, and that is not known."""
    if func is ATEN.equal.default:
        return True
    if args[0].is_floating_point():
        return 1.0
    raise PlanError(
        f"expected a program whose shapes and decisions do not depend on what it computes, found one that reads a "
        f"{str(args[0].dtype).removeprefix('torch.')} of a computed tensor (.item(), bool(tensor), int(tensor)); "
        "plan it with sizes that are known in advance"
    )


def appearance(value: Any, tensors: list[Tensor]) -> Any:
    """Collect the tensors in `value`; returns what is equal for arguments that make equal shapes."""
    if isinstance(value, Tensor):
        tensors.append(value)
        dtype = value.dtype
        return (value.shape, value.stride(), dtype, dtype.is_complex and value.is_conj())
    if isinstance(value, (tuple, list)):
        return tuple([appearance(each, tensors) for each in value])
    if isinstance(value, bool):
        # True is equal to 1.
        return (bool, value)
    if isinstance(value, float):
        return float
    # Generators are the only arguments that cannot be keys.
    return value if not isinstance(value, torch.Generator) else None


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the results of the operation, as the CPU's kernel makes them, but on the meta device.

    Raises:
        PlanError: if the shapes depend on values.
    """

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(map(there, value))
        return value

    named = {name: there(value) for name, value in kwargs.items() if name != "generator"}
    if any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = torch.device("meta")
    named.pop("pin_memory", None)
    try:
        result = _grouped(*args) if func is ATEN._grouped_mm.default else func(*there(args), **named)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, PlanError):
            raise
        if not isinstance(error, NotImplementedError) and "meta" not in str(error).lower():
            raise PlanError(
                f"expected a program that runs, found that {func} raises {type(error).__name__}: "
                f"{str(error).splitlines()[0]}; plan it with inputs that fit the model"
            ) from error
        raise PlanError(
            f"expected operations whose results have shapes that follow from their arguments, found {func}: "
            f"{str(error).splitlines()[0]}; plan the program without it"
        ) from error
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if any(each.layout is not torch.strided for each in operands_of(results)):
        raise PlanError(
            f"expected tensors with a value for each element, found a sparse one that {func} makes: how many elements "
            "it has depends on what is computed; plan with sparse=False"
        )
    if func is ATEN.native_layer_norm.default and all(
        each is None or each.dtype == args[0].dtype for each in args[2:4]
    ):
        # The CPU's kernel keeps mean and deviation in the dtype of its input, unless the weights have another.
        results[1:] = [each.to(args[0].dtype) for each in results[1:]]
    if func is ATEN.native_batch_norm.default and not args[5]:
        # Without training the CPU's kernel keeps no means.
        results[1:] = [each.new_empty(0) for each in results[1:]]
    if (
        func is ATEN.mkldnn_rnn_layer.default
        and sum(each.nbytes for each in (*operands_of(args), *results)) <= AFFORDABLE_NBYTES
    ):
        # What it leaves for the backward kernel has no size on the meta device.
        results[3] = func(*zeros_as(args), **kwargs)[3].to("meta")
    return results


def _grouped(one: Tensor, other: Tensor, ends: Tensor | None = None, *_: Any) -> Tensor:
    """Return the result of a product of groups of rows, on the meta device, where torch knows bfloat16 only.

    Rows begin at multiples of 16 bytes.
    """
    groups = (len(one),) if one.dim() == other.dim() == 3 else ()
    if one.dim() == other.dim() == 2:
        groups = (0 if ends is None else len(ends),)
    shape = (*groups, one.shape[-2], other.shape[-1])
    aligned = 16 // one.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=one.dtype, device="meta")


def room_of(func: Any, args: tuple[Any, ...]) -> int:
    """The elements of memory that the CPU's kernel takes for its result, if they are more than the result has."""
    if func not in _REDUCED_IN_PLACE:
        return 0
    # Weights may stand before it.
    reduction = next((each for each in args[2:] if isinstance(each, int)), _MEAN)
    shape: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    return math.prod(shape) if reduction else 0
