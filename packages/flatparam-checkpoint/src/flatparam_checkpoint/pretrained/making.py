"""A model without values: parameters on the meta device, buffers as the model computes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary


def hollow(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `factory()` returns; each parameter goes to the meta device when a module registers it.

    So initialisation computes nothing, and buffers (rotary caches, masks) have the values that the model gives them.
    """
    made = WeakIdKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        if parameter not in made:
            made[parameter] = _like(parameter, torch.device("meta"))
        replaced: nn.Parameter = made[parameter]
        return replaced

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return one
    try:
        return factory()
    finally:
        hook.remove()


def _like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter on `device` without values, with the attributes that were set on `parameter`."""
    data = torch.empty_like(parameter.detach(), device=device)
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    return other


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the floating-point parameters of `model`, which have no values yet, a different dtype."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def unknown_buffers(model: nn.Module, known: Collection[str]) -> list[str]:
    """Return the buffers of `model` that have no values, and get none: neither from files nor from their modules."""
    return [
        name
        for name, module, attribute, _ in _buffers_on_meta(model)
        if not _is_known(module, attribute, name, known) and not callable(getattr(module, "reset_parameters", None))
    ]


def unknown_parameters(model: nn.Module, missing: Collection[str]) -> list[str]:
    """Return those of `missing` that are parameters of `model` without values, whose modules give them none."""
    found = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in missing:
        parameter = parameters.get(name)
        holder = model.get_submodule(name.rpartition(".")[0])
        if parameter is not None and parameter.is_meta and not callable(getattr(holder, "reset_parameters", None)):
            found.append(name)
    return found


def materialise(model: nn.Module, device: torch.device, known: Collection[str] | None = None) -> None:
    """Give memory on `device` to what is left of `model` on the meta device, for values that files have.

    Args:
        known: only to persistent buffers of these names; by default to all parameters and buffers.
    """
    for name, module, attribute, buffer in list(_buffers_on_meta(model)):
        if known is None or _is_known(module, attribute, name, known):
            module._buffers[attribute] = torch.empty_like(buffer, device=device)
    if known is not None:
        return
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[attribute] = made.setdefault(id(parameter), _like(parameter, device))


def _is_known(module: nn.Module, attribute: str, name: str, known: Collection[str]) -> bool:
    return name in known and attribute not in module._non_persistent_buffers_set


def _buffers_on_meta(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for path, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield f"{path}.{attribute}" if path else attribute, module, attribute, buffer
