"""An operation that would run, its work, and the memory that the CPU's kernels take for it beside the results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


@final
@attrs.frozen(eq=False)
class Kernel:
    """An operation that would run, with its arguments and the tensors that it fills."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    @property
    def name(self) -> str:
        """The operation's name, without `aten::` and without the underscore of those that write in place."""
        name: str = self.operation._schema.name.partition("::")[2]
        return name if name.startswith("_") else name.rstrip("_")

    @property
    def nbytes(self) -> int:
        """The bytes that it reads and writes."""
        return sum(each.nbytes for each in (*operands_of((self.args, *self.kwargs.values())), *self.results))


def operands_of(values: Any) -> list[Tensor]:
    """Return the tensors in a value that an operation takes or returns, in lists too."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in operands_of(value)]
    return []


@final
@attrs.frozen
class Work:
    """The work of a kernel, for an estimate of its time."""

    name: str
    flops: int
    nbytes: int
    """The bytes that it reads and writes."""
    dtype: str
    """The dtype of what it computes with."""

    @classmethod
    def of(cls, kernel: Kernel) -> Work:
        """Return the work of a kernel; torch's own formulas count the operations of matrix products and attention."""
        count: Callable[..., int] | None = flop_registry.get(kernel.operation.overloadpacket)
        flops = 0
        if count is not None:
            out = kernel.results[0] if len(kernel.results) == 1 else tuple(kernel.results)
            # A formula may be for other arguments than these: the gradient of a bias alone, say.
            with contextlib.suppress(IndexError, TypeError, ValueError, AssertionError):
                flops = int(count(*kernel.args, **kernel.kwargs, out_val=out))
        given = operands_of((kernel.args, *kernel.kwargs.values()))
        dtype = next((each.dtype for each in (*kernel.results, *given)), torch.float32)
        return cls(kernel.name, flops, kernel.nbytes, str(dtype).removeprefix("torch."))


# The memory that the CPU's kernels take beside their results and free at once, as far as rules know


_NUMBER_NBYTES: Final = 8
"""A Python number beside a tensor becomes a tensor of one int64 or float64."""
_TAKES_NUMBERS: Final = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "true_divide",
        "floor_divide",
        "remainder",
        "fmod",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ]
)
_PROMOTES: Final = _TAKES_NUMBERS | frozenset(
    ["maximum", "minimum", "atan2", "pow", "addcmul", "addcdiv", "lerp", "xlogy"]
)
_MAKES_FLOATS: Final = frozenset(("div", "true_divide", "atan2", "xlogy"))
_CLEAN: Final = frozenset(
    [
        "copy",
        "_to_copy",
        "clone",
        "cat",
        "stack",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "fill",
        "zero",
        "normal",
        "uniform",
        "arange",
        "neg",
        "abs",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "sigmoid",
        "tanh",
        "silu",
        "gelu",
        "relu",
        "silu_backward",
        "gelu_backward",
        "threshold_backward",
        "tanh_backward",
        "sigmoid_backward",
        "amax",
        "amin",
        "argmax",
        "where",
        "masked_fill",
        "native_dropout",
        "bernoulli",
        "random",
        "_foreach_copy",
        "_foreach_zero",
        "_foreach_sqrt",
    ]
)
"""Operations whose kernels take nothing."""
_CLEAN_BY_ROWS: Final = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "tril",
        "triu",
    ]
)
"""Operations whose kernels take nothing if all of their tensors are laid out by rows, and copy others."""


def by_rule(kernel: Kernel) -> int | None:
    """Return the bytes that a kernel takes beside its results; `None` if no rule knows."""
    if _is_complex(kernel):
        return None
    found = _by_name(kernel)
    return 0 if found is None and kernel.name in _CLEAN else found


def returns_as_shaped(kernel: Kernel) -> bool:
    """Return whether what a kernel returns is as its shape says: by the rules, or as those of `_CLEAN_BY_ROWS` do."""
    return not _is_complex(kernel) and (kernel.name in _CLEAN_BY_ROWS or by_rule(kernel) is not None)


def _is_complex(kernel: Kernel) -> bool:
    """Return whether it computes with complex numbers, of which the rules know nothing."""
    return any(each.is_complex() for each in (*kernel.results, *operands_of(kernel.args)))


def _by_name(kernel: Kernel) -> int | None:
    name = kernel.name
    if name.startswith("_foreach_"):
        return _of_foreach(kernel)
    if name in _PROMOTES or name == "pow":
        return _of_pointwise(kernel)
    if name in ("sum", "mean") and kernel.args:
        return _of_reduction(kernel)
    if name in ("embedding", "embedding_dense_backward"):
        indices = kernel.args[1]
        return 0 if indices.is_contiguous() else int(indices.nbytes)
    if name in _CLEAN_BY_ROWS and not _copies(*operands_of(kernel.args)):
        return 0
    if name == "native_layer_norm":
        return _copies(kernel.args[0])
    if name == "native_layer_norm_backward":
        return _of_layer_norm_backward(kernel)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _of_attention(kernel.args[0], kernel.args[1])
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward" and kernel.args[1].dtype == torch.float32:
        return _of_attention_backward(kernel)
    if name in ("mm", "addmm", "bmm", "baddbmm") and kernel.results[0].dtype in (torch.float32, torch.float64):
        # The vendor's library for matrices has memory of its own.
        return _of_matrices(kernel)
    return None


def _copies(*tensors: Tensor) -> int:
    """Return the bytes of contiguous copies of those tensors that are not contiguous."""
    return sum(each.nbytes for each in tensors if not each.is_contiguous())


def _of_pointwise(kernel: Kernel) -> int:
    """Python numbers become tensors, and what has a different dtype than the computation is cast first."""
    operands = [each for each in kernel.args if isinstance(each, (Tensor, int, float)) and each is not None]
    tensors = [each for each in operands if isinstance(each, Tensor)]
    if kernel.name in ("addcmul", "addcdiv", "lerp"):
        operands = list(tensors)
    if kernel.name == "pow" and not isinstance(operands[-1], Tensor):
        operands = operands[:1]
    common = _common_dtype(kernel.name, operands)
    taken = 0
    for each in operands:
        if isinstance(each, Tensor):
            taken += each.numel() * common.itemsize if each.dtype != common else 0
            continue
        own = torch.float64 if isinstance(each, float) else torch.int64
        taken += _NUMBER_NBYTES + (common.itemsize if own != common else 0)
    result = kernel.results[0]
    is_written = kernel.operation._schema.returns[0].alias_info is not None
    if is_written and result.dtype != common:
        taken += result.numel() * common.itemsize
    return taken


def _common_dtype(name: str, operands: list[Any]) -> torch.dtype:
    common = functools.reduce(_promoted, operands[1:], operands[0])
    dtype = common.dtype if isinstance(common, Tensor) else torch.result_type(common, common)
    if name in _MAKES_FLOATS and not dtype.is_floating_point and not dtype.is_complex:
        return torch.get_default_dtype()
    return dtype


def _promoted(one: Any, other: Any) -> Any:
    """Return a tensor on the meta device with the dtype in which torch computes with both."""
    dtype = torch.result_type(one, other)
    rank = max(each.dim() if isinstance(each, Tensor) else 0 for each in (one, other))
    return torch.empty((1,) * rank, dtype=dtype, device="meta")


def _of_reduction(kernel: Kernel) -> int:
    """Return a reduction to a different dtype casts all of its input; a mean is a sum that is divided by a number."""
    given, result = kernel.args[0], kernel.results[0]
    taken = given.numel() * result.itemsize if result.dtype != given.dtype else 0
    if kernel.name == "mean":
        taken = max(taken, _NUMBER_NBYTES + result.itemsize)
    return taken


def _of_foreach(kernel: Kernel) -> int | None:
    """On the CPU a loop over the tensors, one of which takes most."""
    operation = {"_foreach_add_": "add", "_foreach_mul_": "mul", "_foreach_div_": "div"}
    scalar = next((each for each in kernel.args[1:2] if isinstance(each, (int, float))), None)
    if scalar is not None and kernel.operation._schema.name.partition("::")[2] in operation and kernel.args[0]:
        return max(
            _NUMBER_NBYTES + (each.itemsize if each.dtype not in (torch.float64, torch.int64) else 0)
            for each in kernel.args[0]
        )
    return None


def _of_matrices(kernel: Kernel) -> int | None:
    """A matrix that is neither rows nor columns is copied first."""
    for each in operands_of(kernel.args):
        if each.dim() < 2:
            continue
        rows, columns = each.stride()[-2:]
        if 1 not in (rows, columns) or 0 in (rows, columns):
            return None
    return 0


def _of_layer_norm_backward(kernel: Kernel) -> int:
    gradient, given, shape = kernel.args[0], kernel.args[1], kernel.args[2]
    mask = kernel.args[-1]
    taken = _copies(gradient, given)
    if mask[1] or mask[2]:
        taken += 2 * torch.get_num_threads() * functools.reduce(int.__mul__, shape, 1) * given.itemsize
    return taken


def _splits(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Return the rows of queries and of keys that the CPU's flash attention computes on at once."""
    rows = query.shape[2]
    split = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(split, rows), min(512, int(key.shape[2]))


def _of_attention(query: Tensor, key: Tensor) -> int:
    """For each thread scores, two numbers for each row and a sum, and narrow scores for narrow dtypes."""
    rows, columns = _splits(query, key)
    scores = rows * columns
    taken = (scores + 2 * rows + rows * query.shape[3]) * 4
    if query.itemsize < 4:
        taken += scores * query.itemsize
    return int(taken) * torch.get_num_threads()


def _of_attention_backward(kernel: Kernel) -> int:
    """For each thread two blocks of scores and a sum, and a copy of a gradient that is not laid out by rows."""
    gradient, query, key = kernel.args[:3]
    rows, columns = _splits(query, key)
    return (2 * rows * columns + rows) * 4 * torch.get_num_threads() + _copies(gradient.transpose(1, 2))
