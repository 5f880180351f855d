"""The memory that the CPU's kernels take beside their results: by the rules, or by running one once."""

from __future__ import annotations

from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import Tensor

from flatparam_plan.allocations import allocations
from flatparam_plan.hollow.kernels import Kernel, by_rule, operands_of, returns_as_shaped

_ATEN: Final = torch.ops.aten
AFFORDABLE_NBYTES: Final = 2**23
"""A kernel is run once, to see what it takes, if its arguments and results have at most so many bytes."""
_RNN_SIZES: Final = (
    "reverse",
    "mode",
    "hidden_size",
    "num_layers",
    "has_biases",
    "train",
    "bidirectional",
    "batch_sizes",
    "batch_first",
)
"""The arguments of a recurrent layer's backward kernel after its tensors, and in which order the forward has them."""
_RNN_ORDER: Final = (
    "reverse",
    "batch_sizes",
    "mode",
    "hidden_size",
    "num_layers",
    "has_biases",
    "bidirectional",
    "batch_first",
    "train",
)


@final
@attrs.frozen(eq=False)
class Trial:
    """The effects of a kernel that ran once, on zeros."""

    taken: int
    """The bytes that it takes beside its results."""
    results: tuple[Any, ...]
    """Its results, on the meta device: tensors that share memory share it here, and memory is as large."""


_Key: TypeAlias = Any
_trials: dict[_Key, Trial | None] = {}
"""The effects of kernels, by operation, kinds of arguments and all else they depend on; `None` if they raise."""
_MANY: Final = 20_000


@final
@attrs.define(eq=False)
class Temporaries:
    """The bytes that kernels take inside, by operation and shapes.

    Some are known by rules. Of other kernels one is run, once for each kind of arguments, on tensors of zeros, if they
    are not large: `unmeasured` has the names of those that were too large.
    """

    are_the_cpus: bool = True
    """Whether the CPU's kernels run; those of an accelerator take memory that nothing here knows."""
    unmeasured: set[str] = attrs.field(factory=set)

    def nbytes(self, kernel: Kernel, key: _Key = None) -> int:
        """Return the bytes that `kernel` takes beside its results; equal keys are of kernels that take as many."""
        if not self.are_the_cpus:
            return 0
        if not kernel.results:
            return 0
        found = by_rule(kernel)
        if found is not None:
            return found
        trial = self._tried(kernel, key)
        if trial is None:
            self.unmeasured.add(kernel.name)
        return 0 if trial is None else trial.taken

    def results(self, kernel: Kernel, key: _Key) -> list[Any] | None:
        """The real results of `kernel`, on the meta device; `None` if its shapes say the same, or nobody knows."""
        if not self.are_the_cpus or not kernel.results:
            return None
        makes = any(each.alias_info is None for each in kernel.operation._schema.returns)
        if not makes or returns_as_shaped(kernel):
            return None
        trial = self._tried(kernel, key)
        return None if trial is None else list(trial.results)

    def _tried(self, kernel: Kernel, key: _Key) -> Trial | None:
        if kernel.nbytes > AFFORDABLE_NBYTES:
            return None
        if key is None:
            return tried(kernel)
        key = (key, torch.get_num_threads(), torch.get_default_dtype())
        if key not in _trials:
            if len(_trials) >= _MANY:
                _trials.clear()
            _trials[key] = tried(kernel)
        return _trials[key]


def tried(kernel: Kernel) -> Trial | None:
    """Run a kernel on zeros; `None` if it raises an error then, as some do that decompose matrices."""
    args = zeros_as(kernel.args)
    kwargs = {name: zeros_as(value) for name, value in kernel.kwargs.items() if name != "generator"}
    if kernel.operation is _ATEN.mkldnn_rnn_layer_backward.default:
        args = (*args[:-1], rnn_workspace(args))
    for argument, value in zip(kernel.operation._schema.arguments, args, strict=False):
        if argument.name == "bag_size":
            # No bag is empty.
            value.fill_(1)
    needs_backward = kernel.operation is _ATEN.mkldnn_rnn_layer.default
    state = torch.default_generator.get_state() if _is_random(kernel) else None
    try:
        with torch.set_grad_enabled(needs_backward), allocations() as found:
            result = kernel.operation(*args, **kwargs)
            results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
            del result
    except (RuntimeError, ValueError):
        return None
    finally:
        if state is not None:
            torch.default_generator.set_state(state)
    makes = any(each.alias_info is None for each in kernel.operation._schema.returns)
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in operands_of(results)}
    kept = sum(sizes.values()) if makes else 0
    return Trial(max(0, found.peak - kept), _on_meta(results))


def _is_random(kernel: Kernel) -> bool:
    return torch.Tag.nondeterministic_seeded in kernel.operation.tags


def _on_meta(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the same tensors on the meta device, in memory of the same size, which they share as these do."""
    storages: dict[int, torch.UntypedStorage] = {}

    def there(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(there, value))
        if not isinstance(value, Tensor):
            return value
        own = value.untyped_storage()
        if own.data_ptr() not in storages or not own.nbytes():
            storages[own.data_ptr()] = torch.empty(own.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        made = torch.empty(0, dtype=value.dtype, device="meta")
        return made.set_(storages[own.data_ptr()], value.storage_offset(), value.shape, value.stride())

    return tuple(map(there, results))


def zeros_as(value: Any) -> Any:
    """Arguments as these, with tensors of zeros that have memory."""
    if isinstance(value, Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
        return made.conj() if value.is_conj() else made
    if isinstance(value, (tuple, list)):
        return type(value)(map(zeros_as, value))
    return value


def rnn_workspace(args: tuple[Any, ...]) -> Tensor:
    """The memory that a recurrent layer's forward kernel leaves for the backward kernel, whose arguments these are.

    Another tensor of as many bytes would crash the backward kernel, which finds offsets in it.
    """
    given, sizes = args[:7], dict(zip(_RNN_SIZES, args[13:22], strict=True))
    with torch.enable_grad():
        # Without, it leaves nothing.
        result = _ATEN.mkldnn_rnn_layer(*zeros_as(given), *(sizes[name] for name in _RNN_ORDER))
    workspace: Tensor = result[3]
    return workspace
