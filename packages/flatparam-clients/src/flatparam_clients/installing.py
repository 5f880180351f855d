"""Make the names of FSDP1 and FSDP2 ours for the whole process, so that programs which know them run unchanged.

Attributes are patched, and modules stay what they are, because the compiler has its part in the same ones. What is
patched, in this order:

1. the names in torch's modules (`flatparam_clients.names` is the table);
2. the attributes of other modules that are one of the objects that these names stood for: early imports;
3. torch's class itself, for whoever holds it elsewhere: a call makes a wrapper of ours, its static methods are ours;
4. the start of processes by `multiprocessing`, which install it, too;
5. the form of sharded states, which is FSDP1's then;
6. the planner of `torch.distributed.checkpoint`, for optimizers that have no state yet;
7. when a model is wrapped and it is there: PEFT's functions for the state of an adapter.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch.distributed as dist
from typing_extensions import Self

from flatparam.addons import fulfil
from flatparam.compat import INSTALLED, LOCK, Patch, apply, restore
from flatparam_clients.adapters import patches_of_adapters
from flatparam_clients.children import note_wrapped, patch_of_children
from flatparam_clients.names import FSDP, fsdp1_names, patches_of_holders
from flatparam_clients.occasions import WHEN_WRAPPED
from flatparam_clients.reading import patch_of_planner, patches_of_reader
from flatparam_clients.second_door.door import fsdp2_names, sharded_by_torch

_LOGGER = logging.getLogger("flatparam")


@final
class Installation:
    """The result of `install`: a context whose end undoes what that call did."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        """Take the patches that the call put; none if all were in place before."""
        self._patches = patches

    def __repr__(self) -> str:
        return f"Installation({len(self._patches)} attributes)" if self._patches else "Installation(before)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._patches:
            uninstall()


def install(*, fsdp1: bool = True, fsdp2: bool = True) -> Installation:
    """Make the names in `torch.distributed.fsdp` refer to flatparam, wherever programs import them from.

    That is: torch's modules, the modules that have imported a name already, and the functions of
    `torch.distributed.checkpoint.state_dict`. The compiler is left alone. Call it before a model is sharded, and before
    `Accelerator()`; a second call changes nothing. One line in the log `flatparam` lists what was patched.

    Args:
        fsdp1: whether the names of FSDP1 become ours: `FullyShardedDataParallel` and what belongs to it.
        fsdp2: whether the names of FSDP2 do: `fully_shard`, whose parameters are `DTensor`s then, as torch's are.

    Returns:
        A context manager that may be ignored; `with flatparam.install():` undoes it at the end.

    Raises:
        RuntimeError: if it is too late, because torch has sharded a model or accelerate has chosen its classes; nothing
            is changed. Or if this torch has no distributed package.
    """
    with LOCK:
        if INSTALLED:
            return Installation(())
        if not dist.is_available():
            raise RuntimeError("flatparam.install(): this torch was built without torch.distributed")
        _refuse_if_late(fsdp1=fsdp1, fsdp2=fsdp2)
        patches = apply(_patches(fsdp1=fsdp1, fsdp2=fsdp2))
        INSTALLED[:] = patches
        WHEN_WRAPPED.append(_notice_programs)
        _LOGGER.info("install() made these names flatparam's: %s", _listed(patches))
        return Installation(tuple(patches))


def uninstall() -> None:
    """Undo `install`: each patched attribute gets its old object back. Without an installation, this does nothing.

    A module that took a name while it was ours keeps it.
    """
    with LOCK:
        restore(INSTALLED)
        INSTALLED.clear()
        WHEN_WRAPPED[:] = [notice for notice in WHEN_WRAPPED if notice is not _notice_programs]


def _notice_programs() -> None:
    """Patch PEFT if it was imported since `install`; it may be its model that is being wrapped."""
    note_wrapped()
    with LOCK:
        if INSTALLED:
            INSTALLED.extend(apply(patches_of_adapters()))


def _listed(patches: Sequence[Patch]) -> str:
    """Return the attributes in one line, those of a module or class together."""
    names: dict[str, list[str]] = {}
    for patch in patches:
        names.setdefault(patch.of, []).append(patch.name)
    return "; ".join(f"{of}: {', '.join(sorted(names[of]))}" for of in sorted(names))


def _refuse_if_late(*, fsdp1: bool, fsdp2: bool) -> None:
    """Raise if objects exist that a patch would come too late for."""
    asked = [("FSDP1", _wrapped_by_torch)] if fsdp1 else []
    for who, look in [*asked, ("FSDP2", sharded_by_torch)] if fsdp2 else asked:
        if look():
            # What is garbage does not count.
            gc.collect()
        found = look()
        if found:
            inside = type(getattr(found[0], "module", found[0])).__name__
            raise RuntimeError(
                f"flatparam.install(): expected no module that torch's {who} has sharded, found {len(found)}, such as "
                f"{inside}; call install() before the first module is sharded. Nothing was changed"
            )
    accelerate = sys.modules.get("accelerate.state")
    if getattr(getattr(accelerate, "AcceleratorState", None), "_shared_state", None):
        raise RuntimeError(
            "flatparam.install(): expected no accelerate.Accelerator, found one; it chooses its classes when it is "
            "made, so call install() before Accelerator(). Nothing was changed"
        )


def _wrapped_by_torch() -> list[Any]:
    if f"{FSDP}.fully_sharded_data_parallel" not in sys.modules:
        return []
    kinds = [_torchs_class()]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    # Every object refers to its class. The type, since some objects have a `__class__` that does things.
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


def _torchs_class() -> Any:
    return importlib.import_module(f"{FSDP}.fully_sharded_data_parallel").FullyShardedDataParallel


def _patches(*, fsdp1: bool, fsdp2: bool) -> Iterator[Patch]:
    """Yield every patch, in the order in which they are put."""
    kind = _torchs_class()
    # Torch's own users of the names are to be there, so that they are patched.
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    names = {(each.module, each.name): each.ours for each in fsdp1_names()} if fsdp1 else {}
    if fsdp2:
        names = {**names, **fsdp2_names()}
    ours_for: dict[int, tuple[Any, Any]] = {}
    by_name = []
    for (module, name), ours in names.items():
        patch = Patch(importlib.import_module(module), name, ours)
        if patch.before is not patch.value:
            by_name.append(patch)
            # Equal numbers and strings are one object, which means other things elsewhere.
            if not isinstance(patch.before, (str, int, float, type(None))):
                ours_for[id(patch.before)] = (patch.before, patch.value)
    yield from by_name
    # These do not hold torch's objects any more.
    yield from patches_of_holders(ours_for)
    yield patch_of_children(functools.partial(install, fsdp1=fsdp1, fsdp2=fsdp2))
    if fsdp1:
        yield from _patches_of_class(kind)
        yield Patch(importlib.import_module("flatparam.state.form_settings"), "chunks_by_default", True)
        yield patch_of_planner()
        yield from patches_of_reader()


def _patches_of_class(theirs: Any) -> Iterator[Patch]:
    """Yield the patches of torch's class for programs that hold it in a place other than a module."""
    from flatparam.fully_sharded_data_parallel import FullyShardedDataParallel

    fulfil(FullyShardedDataParallel)

    @functools.wraps(theirs.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not theirs:
            raise RuntimeError(
                f"{type(self).__module__}.{type(self).__qualname__} is a subclass of torch's FSDP1: its class was made "
                "before flatparam.install(). Call install() before the module that defines it is imported"
            )
        self.__class__ = FullyShardedDataParallel
        FullyShardedDataParallel.__init__(self, *args, **kwargs)

    yield Patch(theirs, "__init__", init)
    for name, member in vars(FullyShardedDataParallel).items():
        if isinstance(member, staticmethod) and isinstance(vars(theirs).get(name), staticmethod):
            yield Patch(theirs, name, member)
