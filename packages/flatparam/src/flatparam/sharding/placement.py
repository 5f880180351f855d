"""The devices and the values of a module's tensors, before they are sharded: those of the meta device are made here."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, final

import attrs
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatparam.resolving.parameters import Ignored
from flatparam.resolving.settings import Resolved
from flatparam_comm import Topology, broadcast_tensors
from flatparam_core import BoundParameter, discover, each_module, give_data
from flatparam_runtime import Initialise, unit_of
from flatparam_state.forms.deferred import ValuesLater


def own_modules(module: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """`module` and those below it that are neither ignored nor part of a unit below it, each once."""
    below = each_module(module, lambda child: unit_of(child) is not None or child in ignored.modules)
    return [child for child in below if child not in ignored.modules]


def bound_parameters(module: nn.Module, ignored: Ignored) -> tuple[BoundParameter, ...]:
    """Return the parameters in `module` that are neither ignored nor in a unit below it, with what holds each."""
    return discover(
        module,
        ignored_parameters=ignored.parameters,
        skip_module=lambda child: child in ignored.modules or unit_of(child) is not None,
    )


def own_tensors(modules: Iterable[nn.Module], ignored: Ignored) -> Iterator[torch.Tensor]:
    """The parameters and buffers that `modules` register, each once, but for those that are ignored or sharded."""
    seen: set[int] = set()
    for child in modules:
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is None or id(tensor) in seen or tensor in ignored:
                continue
            seen.add(id(tensor))
            if not getattr(tensor, "_fsdp_flattened", False):
                yield tensor


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Put `tensors` on `device`, in place; those on the meta device stay there."""
    for tensor in tensors:
        if not tensor.is_meta:
            give_data(tensor, tensor.data.to(device))


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor of a wrapper class (a quantised one, say) is made of; else itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    # A DTensor's mesh is among them.
    inner = [getattr(tensor, name) for name in names]
    return [part for part in inner if isinstance(part, torch.Tensor)]


def broadcast_from_first(topology: Topology, tensors: Sequence[torch.Tensor]) -> None:
    """Give every data-parallel rank the first rank's values: first across the copies of a shard, then inside."""
    detached = [part.detach() for tensor in tensors for part in _plain_parts(tensor)]
    for group in reversed(topology.groups if detached else ()):
        broadcast_tensors(group, detached)


def is_deferred(tensors: Iterable[Tensor], resolved: Resolved) -> bool:
    """Return whether a unit's `tensors` still have to be made: here or, if rank 0's values count, on any rank.

    In the second case all ranks go module by module, the ones with values too, and meet in the same broadcasts.
    """
    deferred = any(tensor.is_meta for tensor in tensors)
    topology = resolved.plan.topology
    if resolved.asked.sync_module_states:
        for group in reversed(topology.groups):
            deferred = any(group.exchange(deferred, label="which ranks are on the meta device"))
    return deferred


def initialiser(module: nn.Module, resolved: Resolved) -> Initialise:
    """The function that gives the unit's parameters their values, if some are on the meta device; see `is_deferred`.

    Module by module, breadth first: `param_init_fn(module)` of those that have tensors on the meta device in them, or
    `to_empty()` and `reset_parameters()` of those that hold some themselves. Each module's parameters are packed and
    let go before the next is made.
    """
    ignored = resolved.ignored
    bound = bound_parameters(module, ignored)
    topology = resolved.plan.topology if resolved.asked.sync_module_states else None
    asked, device = resolved.asked.param_init_fn, resolved.device or torch.device("cpu")
    later = asked if isinstance(asked, ValuesLater) else ValuesLater.of((), asked)
    return _Initialiser(module, ignored, later.function, device, topology, bound, later)


_NO_WAY: Final = """\
{kind} has parameters or buffers on the meta device and no reset_parameters(), so nothing says what their values are:
pass param_init_fn, a function that is called with each module and gives its own tensors memory and values, such as

    def param_init_fn(module):
        module.to_empty(device="{device}", recurse=False)
        model._init_weights(module)  # of a Hugging Face model; or whatever your model initialises its modules with

and FullyShardedDataParallel(model, param_init_fn=param_init_fn, ...). If modules of the model initialise those inside
them, as in GPT-2, T5, Mamba and Whisper, build (or load) the model on rank 0 and leave it on the meta device elsewhere:
then pass sync_module_states=True and a param_init_fn that only calls to_empty, on every rank."""


@final
@attrs.define(eq=False)
class _Initialiser:
    module: nn.Module
    ignored: Ignored
    function: Callable[[nn.Module], None] | None
    device: torch.device
    topology: Topology | None
    """Whose first rank's values count; `None`: each rank's own do."""
    bound: tuple[BoundParameter, ...]
    later: ValuesLater

    def __call__(self, pack: Callable[[str, Tensor], None]) -> None:
        """Make, pack and let go of one module after the other."""
        holders = {(info.module, info.param_name): b for b in self.bound for info in b.infos}
        to_come = {b: len(b.infos) for b in self.bound}
        held: set[BoundParameter] = set()
        for child in _own_modules(self.module, self.ignored):
            if self._has_to_be_made(child):
                self._make(child)
            if self.topology is not None:
                broadcast_from_first(self.topology, list(_tensors(child, self.ignored)))
            for name, parameter in child._parameters.items():
                b = holders.get((child, name))
                if b is None or parameter is None:
                    continue
                if parameter in self.later:
                    self._hold_place(parameter, b)
                    held.add(b)
                if b in held:
                    continue
                # A tie is not broken by a new object under one of its names.
                for info in b.infos:
                    info.module._parameters[info.param_name] = parameter
                pack(b.names[0], parameter.detach())
                to_come[b] -= 1
                if not to_come[b]:
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    def _hold_place(self, parameter: nn.Parameter, bound: BoundParameter) -> None:
        """Put a parameter without elements in the places of one whose values come later; until then they are zero."""
        empty = nn.Parameter(
            torch.empty(0, dtype=parameter.dtype, device=self.device), requires_grad=parameter.requires_grad
        )
        vars(empty).update(vars(parameter))
        for info in bound.infos:
            info.module._parameters[info.param_name] = empty

    def _has_to_be_made(self, child: nn.Module) -> bool:
        """Whether tensors of `child` are on the meta device; for a user's function also those of modules inside it."""
        inside = [child] if self.function is None else _own_modules(child, self.ignored)
        tensors = (tensor for each in inside for tensor in _tensors(each, self.ignored))
        return any(tensor.is_meta and tensor not in self.later for tensor in tensors)

    def _make(self, child: nn.Module) -> None:
        try:
            if self.function is None and not callable(getattr(child, "reset_parameters", None)):
                raise AttributeError(_NO_WAY.format(kind=type(child).__name__, device=self.device))
            with torch.no_grad():
                if self.function is not None:
                    self.function(child)
                else:
                    child.to_empty(device=self.device, recurse=False)
                    # Modules have the method by convention; an error is told below.
                    child.reset_parameters()  # type: ignore[operator]
        except BaseException as error:
            how = "param_init_fn" if self.function is not None else "to_empty() and reset_parameters()"
            warnings.warn(
                f"{type(child).__name__} could not be initialised from the meta device by {how}: {error}", stacklevel=2
            )
            raise
        left = [name for name, p in child._parameters.items() if p is not None and p.is_meta and p not in self.ignored]
        if left:
            raise ValueError(
                f"param_init_fn left {left} of {type(child).__name__} on the meta device: it must give every parameter "
                "of the module that it is called with a device and values"
            )


def _own_modules(module: nn.Module, ignored: Ignored) -> Iterator[nn.Module]:
    """`module` and those below it, breadth first, without units, what is ignored, and all below these."""
    seen = {module}
    queue = deque([module])
    while queue:
        current = queue.popleft()
        yield current
        for child in current.children():
            if child not in seen and child not in ignored.modules and unit_of(child) is None:
                seen.add(child)
                queue.append(child)


def _tensors(module: nn.Module, ignored: Ignored) -> Iterator[Tensor]:
    """Yield the parameters and buffers that `module` itself registers and that are not ignored."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor not in ignored:
            yield tensor
