"""The forms in which programs save the state of an optimizer, brought into one: by parameter name.

`{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}`, as FSDP's `optim_state_dict` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flatparam_files.disk import CheckpointError
from flatparam_files.formats.stored.tensors import Stored

__all__ = ["by_name"]

_STATE: Final = "state."
_GROUPS: Final = "param_groups."


def by_name(optimizer: Mapping[str, Any], model: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Key the state of an optimizer by parameter name.

    States that are keyed by number are given names by the group's `param_names`, or, if all the parameters of
    the model are in one group, by their order in the model.

    Args:
        model: the model's tensors by name; empty if they are not known.
        file: the file of the state, for errors.

    Raises:
        CheckpointError: if flatparam cannot tell to which parameter a state belongs.
    """
    if not ("state" in optimizer or "param_groups" in optimizer):
        return _unflattened(optimizer, model, file)
    state, groups = optimizer.get("state", {}), optimizer.get("param_groups", [])
    _check_form(state, groups, file)
    rest = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}
    if any(
        isinstance(key, int)
        for key in [*state, *(key for group in groups for key in group.get("params", []))]
    ):
        names = _names(state, groups, model, file)
        unknown = [key for key in state if key not in names]
        if unknown:
            raise CheckpointError(
                f"{file} has optimizer states of {unknown[:5]}, which no parameter group holds"
            )
        state = {names[key]: value for key, value in state.items()}
        groups = [{**group, "params": [names[key] for key in group.get("params", [])]} for group in groups]
    return {"state": state, "param_groups": groups, **rest}


def _check_form(state: Any, groups: Any, file: Path) -> None:
    states = isinstance(state, Mapping) and all(isinstance(value, Mapping) for value in state.values())
    if not states or not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(
            f"{file}: the optimizer's state is not of the form {{'state': {{parameter: {{name: value}}}}, "
            "'param_groups': [{...}]}; save what the optimizer's state_dict() returns"
        )


def _names(
    state: Mapping[Any, Any], groups: list[Mapping[str, Any]], model: Mapping[str, Any], file: Path
) -> dict[Any, str]:
    if groups and all(len(group.get("param_names", ())) == len(group.get("params", ())) for group in groups):
        pairs = [pair for group in groups for pair in zip(group["params"], group["param_names"], strict=True)]
        return dict(pairs)
    numbers = [number for group in groups for number in group.get("params", [])]
    names = _distinct(model)
    why = ""
    if len(groups) != 1:
        why = f"it has {len(groups)} parameter groups, whose order need not be that of the model"
    elif len(names) != len(numbers):
        why = f"it has {len(numbers)} parameters, and the model {len(names)} tensors"
    else:
        found = dict(zip(numbers, names, strict=True))
        odd = [
            number for number in state if number in found and not _fits(state[number], model[found[number]])
        ]
        if not odd:
            return found
        why = f"the state of number {odd[0]} is not shaped like {found[odd[0]]!r}"
    raise CheckpointError(
        f"{file} keys the optimizer's state by number, and flatparam cannot tell which parameter a number means: "
        f"{why}. Save the state by name: FSDP.optim_state_dict, torch.distributed.checkpoint.state_dict."
        "get_optimizer_state_dict, or an optimizer that was made from model.named_parameters()"
    )


def _distinct(model: Mapping[str, Any]) -> list[str]:
    """The names of the model's tensors, without those that share the memory of one before (tied weights)."""
    seen: dict[Stored, str] = {}
    for name, value in model.items():
        if isinstance(value, Stored):
            seen.setdefault(value, name)
    return list(seen.values())


def _fits(state: Mapping[str, Any], parameter: Any) -> bool:
    """Whether every tensor of a state is shaped like its parameter, or is a single number."""
    shapes = [value.info.shape for value in state.values() if isinstance(value, Stored)]
    return all(shape in ((), (1,), parameter.info.shape) for shape in shapes)


def _unflattened(optimizer: Mapping[str, Any], model: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The form of `flatten_optimizer_state_dict`: `state.<fqn>.<name>` and `param_groups.<fqn>.<option>`.

    It does not say which parameters shared a group: those with equal options come to be in one.
    """
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in optimizer.items():
        target, prefix = (state, _STATE) if key.startswith(_STATE) else (options, _GROUPS)
        fqn, name = _split(key.removeprefix(prefix), model)
        if not fqn:
            raise CheckpointError(f"{file}: the optimizer's {key!r} names no parameter")
        target.setdefault(fqn, {})[name] = value
    groups: list[dict[str, Any]] = []
    for fqn in options or state:
        of_fqn = options.get(fqn, {})
        group = next((each for each in groups if each["options"] == of_fqn), None)
        if group is None:
            groups.append({"options": of_fqn, "params": [fqn]})
        else:
            group["params"].append(fqn)
    return {
        "state": state,
        "param_groups": [{**group["options"], "params": group["params"]} for group in groups],
    }


def _split(key: str, model: Mapping[str, Any]) -> tuple[str, str]:
    """`<fqn>.<name>` in two, at the longest name of the model that fits, or else at the last dot."""
    at = len(key)
    while (at := key.rfind(".", 0, at)) >= 0:
        if key[:at] in model:
            return key[:at], key[at + 1 :]
    fqn, _, name = key.rpartition(".")
    return fqn, name
