"""From a module to its parameters, and to every attribute through which each one is reached."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import final

import attrs
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from flatparam_core.errors import FlatParamError, warn_caller
from flatparam_core.geometry import ParamSpec
from flatparam_core.names import clean_fqn


@final
@attrs.frozen(eq=False)
class ParamInfo:
    """One attribute that holds a parameter: `getattr(module, param_name)`.

    `module_name` is the module's clean path below the module that was searched (empty for that module itself).
    """

    param_name: str
    module_name: str
    _module: weakref.ReferenceType[nn.Module]
    _stand_in: nn.Module | None = attrs.field(default=None, init=False)
    """A module in the place of one that is gone: it has the attribute, and nothing calls it."""

    def __getstate__(self) -> tuple[object, ...]:
        """Return the state for a copy, the module included."""
        return self.param_name, self.module_name, self.module

    def __setstate__(self, state: tuple[str, str, nn.Module]) -> None:
        """Restore a copy, which holds its module weakly again."""
        param_name, module_name, module = state
        type(self).__init__(self, param_name, module_name, weakref.ref(module))

    @property
    def reference(self) -> weakref.ReferenceType[nn.Module]:
        """A weak reference to the module that has the attribute."""
        return self._module if self._stand_in is None else weakref.ref(self._stand_in)

    @property
    def is_gone(self) -> bool:
        """Return whether the module that had the attribute does not exist any more."""
        return self._module() is None

    @property
    def module(self) -> nn.Module:
        """The module that has the attribute; once that is gone, a stand-in, and a warning says so."""
        module = self._module()
        if module is None:
            module = self._stand_in
        if module is None:
            module = nn.Module()
            # The class is frozen.
            object.__setattr__(self, "_stand_in", module)
            warn_caller(
                f"the module {self.module_name!r} was taken out of the model after it was sharded: its parameters stay "
                "in their unit, where nothing uses them. Shard what has taken its place, which each rank trains for "
                "itself until then, and make a new optimizer"
            )
        return module

    @property
    def fqn(self) -> str:
        """The dotted name below the searched module."""
        return f"{self.module_name}.{self.param_name}" if self.module_name else self.param_name


@final
@attrs.frozen(eq=False)
class BoundParameter:
    """A parameter and its bindings: one, or several if modules share it.

    `names` are all the dotted names by which the searched module reaches the parameter, its own first: more than there
    are bindings if a module itself is reached by several paths.
    """

    parameter: nn.Parameter
    infos: tuple[ParamInfo, ...]
    names: tuple[str, ...]

    @property
    def spec(self) -> ParamSpec:
        """The parameter's geometry, under its first name."""
        return ParamSpec.of(self.names[0], self.parameter, self.names[1:])


def discover(
    root: nn.Module,
    *,
    ignored_parameters: Collection[nn.Parameter] = (),
    skip_module: Callable[[nn.Module], bool] = lambda module: False,
) -> tuple[BoundParameter, ...]:
    """Find the parameters of `root` and its submodules in the order of `root.named_parameters()`.

    Args:
        root: searched with all its submodules.
        ignored_parameters: left out, compared by identity.
        skip_module: a submodule for which this is true is left out with everything below it (`root` never is).

    Raises:
        FlatParamError: if a parameter cannot be taken from its module: that of TorchScript, or one without a shape.
    """
    ignored = {id(parameter) for parameter in ignored_parameters}
    found: dict[int, tuple[nn.Parameter, list[ParamInfo], list[str]]] = {}
    seen: set[nn.Module] = set()
    for module_name, module in _walk("", root, skip_module):
        path, reference = clean_fqn(module_name), weakref.ref(module)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            info = ParamInfo(name, path, reference)
            _check_takeable(module, info, parameter)
            _, infos, names = found.setdefault(id(parameter), (parameter, [], []))
            names.append(info.fqn)
            if module not in seen:
                infos.append(info)
        seen.add(module)
    return tuple(BoundParameter(p, tuple(infos), tuple(names)) for p, infos, names in found.values())


def _check_takeable(module: nn.Module, info: ParamInfo, parameter: nn.Parameter) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise FlatParamError(
            f"parameter {info.fqn!r} belongs to TorchScript, whose compiled code does not see a parameter that takes "
            "its place; shard the module before it was scripted or traced, use torch.compile instead, or leave the "
            "module whole (ignored_modules, or ignored_params of fully_shard)"
        )
    if isinstance(parameter, UninitializedParameter):
        raise FlatParamError(
            f"parameter {info.fqn!r} has no shape yet, since its {type(module).__name__} was not called; call the "
            "model once, with inputs as it will get, before it is sharded"
        )


def _walk(
    name: str, module: nn.Module, skip_module: Callable[[nn.Module], bool], above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield every path without a circle, depth first; a module that is reached twice comes twice."""
    yield name, module
    path = (*above, module)
    for child_name, child in module._modules.items():
        if child is not None and child not in path and not skip_module(child):
            yield from _walk(f"{name}.{child_name}" if name else child_name, child, skip_module, path)


def each_module(
    root: nn.Module, skip_module: Callable[[nn.Module], bool] = lambda module: False
) -> Iterator[nn.Module]:
    """Yield `root` and all modules below it, each once, in the order of `root.modules()`, with one generator for all.

    A submodule for which `skip_module` is true is left out with everything below it (`root` never is).
    """
    seen: set[nn.Module] = set()
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is None or module in seen or (module is not root and skip_module(module)):
            continue
        seen.add(module)
        yield module
        stack.extend(reversed(module._modules.values()))
