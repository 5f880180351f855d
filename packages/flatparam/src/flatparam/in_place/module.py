"""The class that `fully_shard` gives a module: FSDP2's methods, on the module itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from typing_extensions import Self, deprecated

import flatparam_runtime as runtime
from flatparam.addons import load
from flatparam.in_place import module_state
from flatparam.state import saving
from flatparam.wrapper import interior, refusing, training
from flatparam.wrapper.refusing import unit_behind
from flatparam.wrapper.training import UnshardHandle
from flatparam_core import FlatParamError

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class _GivesWay:
    """A property to which an attribute of the same name that the user's module has is preferred."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, module: Any, kind: type[Any]) -> Any:
        return self if module is None else self.function(module)


class FSDPModule(_Base):
    """A module that `fully_shard` has sharded; the class of each is derived from this one and from its own class.

    The methods are those of torch's `FSDPModule`. The parameters are ordinary tensors: this rank's part of each, with
    its elements along the first dimension, and length 1 in the others; a part may be empty. `parameters()` lists the
    parts, and an optimizer steps them. The full parameters are in place while the module computes, and between
    `unshard()` and `reshard()`.
    """

    _sharded_class: ClassVar[type[nn.Module]]
    """The class that the module had before."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the class that was sharded, which is not sharded itself: a slice of a `Sequential`, say."""
        if "_sharded_class" not in vars(cls):
            raise TypeError(f"{cls.__name__} cannot be made: call fully_shard(module), which returns the module")
        return cls._sharded_class(*args, **kwargs)

    # Full parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's full parameters, not those of sharded modules inside; every rank calls it.

        The next forward pass uses them as they are, unless an optimizer or a load has changed the shards by then.

        Args:
            async_op: return at once, with a handle whose `wait()` has the module show the full parameters; a forward
                pass waits by itself.

        Returns:
            The handle with `async_op`, and otherwise `None`.
        """
        unit = unit_behind(self)
        unit.hold()
        if async_op:
            return UnshardHandle(unit)
        unit.finish_unshard()
        return None

    def reshard(self) -> None:
        """Free this module's full parameters, and show this rank's part of them; a backward pass gathers again.

        Raises:
            FlatParamError: while a forward pass or `summon_full_params` uses them.
        """
        unit = unit_behind(self)
        if unit.is_needed:
            raise FlatParamError(
                f"{unit}: its full parameters cannot be freed while a forward pass or summon_full_params() uses them"
            )
        unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether full parameters are freed between forward and backward; see `fully_shard`.

        Args:
            reshard_after_forward: `True` also for the outermost module, which keeps them by default.
            recurse: whether to choose for the sharded modules inside too.

        Raises:
            ValueError: for anything but a bool.
        """
        check_flag("reshard_after_forward", reshard_after_forward)
        for unit in _units_of(self, recurse):
            unit.change_plan(**freeing(reshard_after_forward, unit.topology, unit.plan.gathers))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether full parameters are freed after a backward pass that does not reduce gradients.

        If they are kept, the next forward pass does not gather them. After a pass that reduces they are freed in any
        case, because an optimizer's step makes them stale.

        Raises:
            ValueError: for anything but a bool.
        """
        check_flag("reshard_after_backward", reshard_after_backward)
        for unit in _units_of(self, recurse):
            unit.change_plan(free_after_unsynced_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether this module's full parameters are gathered for the backward pass.

        `False` is for modules whose backward pass reads none of their parameters, such as an embedding. Of any other
        module, the backward pass would read memory that is freed.

        Raises:
            ValueError: for anything but a bool.
        """
        check_flag("unshard_in_backward", unshard_in_backward)
        unit_behind(self).change_plan(unshards_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the parameters of `modules` when this module's forward begins; without modules, as a pass suggests.

        Raises:
            ValueError: if a module is not sharded.
        """
        training.set_units_to_forward_prefetch(unit_behind(self), list(modules) or None)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the parameters of `modules` when this module's backward begins; without modules, as a pass suggests.

        Raises:
            ValueError: if a module is not sharded.
        """
        training.set_units_to_backward_prefetch(unit_behind(self), list(modules) or None)

    def set_post_optim_event(self, event: Any) -> None:
        """Have all later work of the current stream, and so every later gather, wait for `event`.

        Args:
            event: a `torch.Event` (or `torch.cuda.Event`), recorded after an optimizer's step on a different stream;
                or `None`, as a stream of the CPU records it.
        """
        if event is not None:
            event.wait()

    # Gradients

    @_GivesWay
    def skipped_steps(self) -> int:
        """The number of backward passes after which `nonfinite="skip"` skipped the step on all ranks."""
        return runtime.skipped_steps(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, and drop those that wait for a reduction; every rank calls it."""
        super().zero_grad(set_to_none)
        runtime.drop_waiting(_units_of(self, recurse=True))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept FSDP2's call: it has no effect, because each backward pass completes its reductions.

        In torch, a pass that is not the last leaves reductions under way. Here each pass completes its reductions.

        Raises:
            ValueError: for anything but a bool.
        """
        check_flag("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward passes reduce gradients, or add them up on each rank for a later pass that does.

        Args:
            recurse: whether to choose for the sharded modules inside too.

        Raises:
            ValueError: for anything but a bool.
        """
        check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit in _units_of(self, recurse):
            unit.reducer.synchronises = requires_gradient_sync
            unit.reducer.sums_copies = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backward passes sum gradients over the copies of a shard, or only inside the shard groups.

        Gradients that were not summed over the copies wait, sharded, for a pass that does.

        Raises:
            ValueError: for anything but a bool.
        """
        check_flag("requires_all_reduce", requires_all_reduce)
        training.set_requires_all_reduce(_units_of(self, recurse), requires_all_reduce)

    def accumulate(self, weight: float | Tensor | None = None) -> AbstractContextManager[None]:
        """Compute one micro-batch inside: the passes of one mean loss. Gradients are collected, and not reduced.

        Args:
            weight: what it counts, such as its tokens; any rank may have any number of micro-batches. Without, every
                rank has equally many, which count alike.
        """
        return training.accumulate(self, weight)

    def reduce_gradients(self) -> None:
        """Give each parameter the weighted mean of the gradients of all ranks' micro-batches; every rank calls it."""
        training.reduce_gradients(self)

    def uneven_inputs(self, step: Callable[[], object]) -> AbstractContextManager[None]:
        """Train inside with data that end earlier on some ranks, which then serve the others until all have ended.

        Args:
            step: what every rank does after each `reduce_gradients`: clip, step the optimizer, zero the gradients.
        """
        return training.uneven_inputs(self, step)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of the gradients of this module's own unit by `factor`; `None`: by the number of ranks.

        Raises:
            ValueError: for a factor that is not above zero.
            FlatParamError: if gradients of passes without synchronisation wait for their reduction.
        """
        training.set_divide_factor((unit_behind(self),), factor)

    @deprecated("Use `set_gradient_divide_factor` instead", category=FutureWarning)
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`, as torch's method of this name does."""
        self.set_gradient_divide_factor(factor)

    # Parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """List names and this rank's parts of parameters, even while the module shows full parameters.

        Full parameters are listed while the module computes.
        """
        yield from interior.listed(super().named_parameters(prefix, recurse, remove_duplicate))

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` on every module inside with its full parameters in place, and keep the changes.

        Every rank calls this method and keeps its own part of its own changes, so seed all ranks alike.
        """
        if unit_behind(self).showing.wishes is not None:
            return super().apply(fn)
        with runtime.summon_full_params(self):
            return super().apply(fn)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Give buffers on the meta device memory; tensors that `fully_shard` has initialised do not change.

        For programs that shard a module on the meta device, call this, and then `reset_parameters()` or
        `init_weights()`, which have full parameters in place: for one sharded module after the other.

        Raises:
            FlatParamError: for a different device than the one on which the module was sharded.
        """
        module_state.make_on_device(self, device)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move or cast the shards as wholes; the parameters follow as views of them.

        Inside `summon_full_params` the full parameters move instead, and only until it ends.
        """
        with interior.moving_shards(interior.not_summoned(runtime.units_in(self)), fn):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    # State

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the state with sharded tensors: `DTensor`s, cut along dimension 0, as torch's; every rank calls it.

        They are copies. In a world without process groups, such as one of threads, the tensors are full ones.
        """
        named = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
        saving.warn_of_writes(self)
        found = module_state.save_state(self, args, named, super().state_dict)
        if destination is None and not args:
            saving.watch(self, found)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of any form, sharded or full; every rank calls it.

        Args:
            state_dict: every rank passes the whole of a full state, and copies its own part.
            strict: whether missing and unexpected names are errors.
            assign: see `torch.nn.Module.load_state_dict`; values of sharded parameters are copied in any case.

        Raises:
            RuntimeError: naming what does not fit on some rank, on every rank; nothing is changed.
        """
        saving.forget(self)
        load = partial(super().load_state_dict, assign=assign)
        return module_state.load_state(self, state_dict, strict=strict, load=load)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        module_state.refuse_torchs_loading(self)
        super()._load_from_state_dict(*arguments)

    # Copies

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make a copy: the class is made anew from the one that was sharded."""
        # A string is what a module without content of its own may return, and none does.
        _, _, *content = cast("tuple[Any, ...]", super().__reduce_ex__(2))
        return (_empty, (type(self)._sharded_class, type(self).__bases__[0]), *content)

    def __setstate__(self, content: dict[str, Any]) -> None:
        """Become a copy of a different module, or one from a file."""
        super().__setstate__(content)  # type: ignore[no-untyped-call]
        runtime.revive_units(self)

    # What torch's own ways to spread a model over ranks ask for

    _fqn_modifiers = refusing.refuse_torchs_functions
    _ddp_params_and_buffers_to_ignore = refusing.DDP_ASKS
    _is_fsdp_managed_module = refusing.FSDP_MARKS


def _units_of(module: nn.Module, recurse: bool) -> tuple[runtime.Unit, ...]:
    return runtime.units_in(module) if recurse else (unit_behind(module),)


_CLASSES: dict[tuple[type[nn.Module], type[FSDPModule]], type[nn.Module]] = {}
"""For each class, the one of its modules that are sharded in place."""


_OWN = ("accumulate", "reduce_gradients", "skipped_steps", "uneven_inputs")


def class_for(original: type[nn.Module], base: type[FSDPModule] = FSDPModule) -> type[nn.Module]:
    """Return the class of a sharded module whose class is `original`: `FSDPLinear` for `Linear`."""
    found = _CLASSES.get((original, base))
    if found is None:
        content = {
            # For `replicate` of torch, which leaves such modules alone.
            REGISTRY_KEY: {"fully_shard": None},
            "_sharded_class": original,
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            **module_state.initialisers_of(original),
            # These names are not FSDP2's: a class of the user's that has one keeps it.
            **{name: getattr_static(original, name) for name in _OWN if hasattr(original, name)},
        }
        found = cast("type[nn.Module]", type(f"FSDP{original.__name__}", (base, original), content))
        _CLASSES[original, base] = found
    return found


def _empty(original: type[nn.Module], base: type[FSDPModule] = FSDPModule) -> nn.Module:
    """Return a sharded module without content, for a copy to fill."""
    return object.__new__(class_for(original, base))


def freeing(reshard_after_forward: Any, topology: runtime.Topology, gathers: Any) -> dict[str, Any]:
    """Return the fields of a plan that say what is freed between forward and backward, and how that is gathered.

    Args:
        gathers: how the unit gathers now; what it owes to a number of ranks given before is left out.

    Raises:
        TypeError: for anything but a bool, an int or `None`.
        ValueError: for an int that is no number of ranks to gather from in the backward pass.
    """
    gathers = getattr(gathers, "inner", gathers)
    if reshard_after_forward is None:
        return {"free_after_forward": True, "keeps_outermost": True, "keeps_last": True, "gathers": gathers}
    frees, size = reshard_after_forward, topology.shard.size
    if not isinstance(frees, int):
        raise TypeError(f"reshard_after_forward: expected a bool, an int or None, found {frees!r}")
    if not isinstance(frees, bool):
        if frees < 1 or size % frees:
            raise ValueError(
                f"reshard_after_forward: expected a divisor of the {size} ranks of the shard group, found {frees}"
            )
        if 1 < frees < size:
            gathers = load("flatparam_meshes").KeptParts.over(topology, frees, gathers)
        frees = frees > 1
    return {"free_after_forward": frees, "keeps_outermost": False, "keeps_last": False, "gathers": gathers}


def check_flag(name: str, value: object) -> None:
    """Make sure that `value` is a bool.

    Raises:
        ValueError: for anything else; torch raises the same.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected a bool, found {value!r}")


def refuse_in_place(module: nn.Module) -> None:
    """Check that `module` and those inside are not sharded in place, for a wrapper that is to be put around it.

    Raises:
        FlatParamError: naming the module that is.
    """
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            raise FlatParamError(
                f"FullyShardedDataParallel: {name or 'the module'!r} is sharded by fully_shard; use one of the two for "
                "the whole model"
            )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather full parameters for calls of the method `method_name` of `module`, as for calls of `forward`.

    Args:
        module: a module that `fully_shard` was called for; for any other module this does nothing, as in torch.

    Raises:
        ValueError: if the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    runtime.register_forward_method(module, method_name)
