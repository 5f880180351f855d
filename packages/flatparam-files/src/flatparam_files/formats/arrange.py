"""Between the trees that programs save and ours: `{"model": ..., "optimizer": ..., "extra": ...}`.

A foreign tree is made of dictionaries, lists, tuples and leaves, where the tensors are `Stored`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

from flatparam_core import Span
from flatparam_files.disk.checkpoint_error import CheckpointError, damage_named
from flatparam_files.disk.source import join_path, split_path
from flatparam_files.formats.stored_tensors import Stored

MODEL_KEYS: Final = ("model", "model_state_dict", "state_dict")
OPTIMIZER_KEYS: Final = (
    "optimizer",
    "optim",
    "optimizer_state_dict",
    "optim_state_dict",
    "optimizer_state",
    "optimizer_states",
    # Lightning's sharded form has this one.
    "optimizer_0",
)
_OURS: Final = {"model", "optimizer", "extra", "averages", "rank_extra"}
"""The parts of a checkpoint of ours."""
_MOST_NESTED: Final = 3
"""The levels below the top at which a model and an optimizer are looked for."""
_SHOWN: Final = 10
_MAX_DEPTH: Final = 100
_MOST_COMPARED: Final = 64
"""The elements of the longest tensor among an optimizer's options that is compared with another."""
_MAX_LEAVES: Final = 10_000_000


def arranged(root: Any, file: Path, prefix: str | None = None) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Bring what a program saved into our tree.

    Args:
        root: the tree as it was saved; leaves that are `Stored` are its tensors.
        file: where it comes from, for errors.
        prefix: the path of the dictionary in it that has the model and the optimizer, such as `app` if the program
            saved `{"app": AppState(model, optimizer)}`; by default that is the top, or the only one that has them.

    Returns:
        Its tensors by path, and its values.

    Raises:
        CheckpointError: if it is unclear which part is the model, or which parameter a state belongs to.
    """
    walk = _Walk(file)
    hint = "save state dicts as the model and the optimizer return them"
    with damage_named(f"{file} does not have the form of a checkpoint", path=file, hint=hint):
        ours = _parts(_at_prefix(root, file, prefix) if prefix is not None else _found_below(root, file), file)
        if "optimizer" in ours:
            saved, model = ours["optimizer"], ours.get("model", {})
            if _are_optimizers(saved):
                ours["optimizer"] = {name: by_name(each, model, file) for name, each in saved.items()}
            else:
                ours["optimizer"] = by_name(saved, model, file)
        return walk.tensors, walk.values(ours, ())


def together(files: Sequence[Path], trees: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return one tree of those of several files or directories, which have different keys at their tops."""
    root: dict[Any, Any] = {}
    for file, tree in zip(files, trees, strict=True):
        twice = sorted(map(str, root.keys() & tree.keys()))
        if twice:
            raise CheckpointError(f"{file} has {twice[0]!r}, and so has another of {', '.join(map(str, files))}")
        root.update(tree)
    return root


def _at_prefix(root: Any, file: Path, prefix: str) -> Any:
    """Return what is in the tree under the keys of `prefix`."""
    for part in split_path(prefix):
        by_text = {str(key): value for key, value in root.items()} if isinstance(root, Mapping) else {}
        if part not in by_text:
            shown = ", ".join(map(repr, list(by_text)[:_SHOWN])) or "nothing"
            raise CheckpointError(f"{file} has no {part!r} on the way to {prefix!r}; found {shown}", path=file)
        root = by_text[part]
    return root


def _found_below(root: Any, file: Path) -> Any:
    """The tree, or if it has neither a model nor an optimizer, the one below it that has, with what is beside that."""
    if not isinstance(root, Mapping) or _has_parts(root) or set(root) == {"extra"}:
        return root
    if any(isinstance(value, Stored) for value in root.values()):
        return root
    level: dict[str, Mapping[Any, Any]] = {"": root}
    for _ in range(_MOST_NESTED):
        level = {
            f"{above}/{join_path((str(key),))}".lstrip("/"): value
            for above, tree in level.items()
            for key, value in tree.items()
            if isinstance(value, Mapping)
        }
        found = [path for path, tree in level.items() if _has_parts(tree)]
        if len(found) > 1:
            raise CheckpointError(
                f"{file} has a model or an optimizer at {', '.join(map(repr, found[:_SHOWN]))}",
                path=file,
                hint=f"say which one is meant, as in --prefix {found[0]}",
            )
        if found:
            beside = {key: value for key, value in root.items() if str(key) != split_path(found[0])[0]}
            return {**level[found[0]], **({"extra": beside} if beside else {})}
    return root


def _has_parts(tree: Mapping[Any, Any]) -> bool:
    """Return whether a model or an optimizer is directly below."""
    if _is_optimizer(tree) or _are_optimizers(tree):
        return True
    optimizers = (_only_one(tree.get(key)) for key in OPTIMIZER_KEYS)
    return any(isinstance(tree.get(key), Mapping) for key in MODEL_KEYS) or any(map(_is_optimizer, optimizers))


def _parts(root: Any, file: Path) -> dict[str, Any]:
    if not isinstance(root, Mapping):
        kind = "single tensor" if isinstance(root, Stored) else type(root).__name__
        raise CheckpointError(f"{file} holds a {kind}, and not a state dict or a dictionary of state dicts")
    if _is_optimizer(root) or (_are_optimizers(root) and not any(key in OPTIMIZER_KEYS for key in root)):
        return {"optimizer": root}
    model = [key for key in MODEL_KEYS if isinstance(root.get(key), Mapping)]
    optimizer = [
        key for key in OPTIMIZER_KEYS if _is_optimizer(_only_one(root.get(key))) or _are_optimizers(root.get(key))
    ]
    if len(model) > 1 or len(optimizer) > 1:
        raise CheckpointError(
            f"{file} has several models or optimizers ({', '.join(map(repr, [*model, *optimizer]))}), and a "
            "checkpoint has one of each; save them in files of their own"
        )
    if model or optimizer:
        ours: dict[str, Any] = {"model": root[model[0]]} if model else {}
        if optimizer:
            ours["optimizer"] = _only_one(root[optimizer[0]])
        # A checkpoint of ours that was written for another program has these two.
        own = [key for key in ("averages", "rank_extra") if root.keys() <= _OURS and isinstance(root.get(key), Mapping)]
        ours.update((key, root[key]) for key in own)
        extra = {key: value for key, value in root.items() if key not in (*model, *optimizer, *own)}
        if extra.keys() == {"extra"}:
            return {**ours, **extra}
        extra.update(extra.pop("extra", {}) if isinstance(extra.get("extra"), Mapping) else {})
        return {**ours, "extra": extra} if extra else ours
    if any(isinstance(value, Stored) for value in root.values()):
        return {"model": root}
    if set(root) == {"extra"}:
        return dict(root)
    found = ", ".join(repr(key) for key in list(root)[:10]) or "nothing"
    raise CheckpointError(
        f"{file} has no model: neither tensors nor any of {', '.join(map(repr, MODEL_KEYS))} at its top; found {found}"
    )


def _only_one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _is_optimizer(value: Any) -> bool:
    """Return whether it looks like the state dict of an optimizer, also of the form that has one level only."""
    if not isinstance(value, Mapping):
        return False
    if isinstance(value.get("state"), Mapping) or isinstance(value.get("param_groups"), list):
        return True
    return bool(value) and all(str(key).startswith(("state.", "param_groups.")) for key in value)


def _are_optimizers(value: Any) -> bool:
    """Return whether it looks like the state dicts of several optimizers by their names."""
    return isinstance(value, Mapping) and bool(value) and all(map(_is_optimizer, value.values()))


@final
class _Walk:
    """Sorts the leaves of a tree into tensors by path and the tree of the other values."""

    def __init__(self, file: Path) -> None:
        self.tensors: dict[str, Stored] = {}
        self._file = file
        self._seen = 0

    def values(self, tree: Any, parts: tuple[str, ...]) -> Any:
        """`tree` without its tensors, which go to `tensors`.

        In a list a tensor leaves None behind; a tuple with tensors becomes a list, and keys beside tensors become text.
        """
        if isinstance(tree, Stored):
            path = join_path(parts)
            if path in self.tensors:
                raise CheckpointError(f"{self._file}: two tensors would be at {path!r}", fqn=path)
            self.tensors[path] = tree
            return None
        self._seen += 1
        if len(parts) > _MAX_DEPTH or self._seen > _MAX_LEAVES:
            raise CheckpointError(
                f"{self._file} nests deeper than {_MAX_DEPTH} levels or has more than {_MAX_LEAVES} entries; "
                "no checkpoint does"
            )
        known = len(self.tensors)
        if isinstance(tree, Counter):
            return tree
        if isinstance(tree, Mapping):
            found = {}
            for key, value in tree.items():
                without_tensors = self.values(value, (*parts, str(key)))
                if not isinstance(value, Stored):
                    found[key] = without_tensors
            if len(self.tensors) == known:
                return found
            # The paths of the tensors beside these values are text.
            texts = {str(key): value for key, value in found.items()}
            if len(texts) < len(found):
                raise CheckpointError(f"{self._file}: two keys of {join_path(parts)!r} are the same text")
            return texts
        if isinstance(tree, (list, tuple)):
            each = [self.values(value, (*parts, str(index))) for index, value in enumerate(tree)]
            return tuple(each) if type(tree) is tuple and len(self.tensors) == known else each
        return tree


# The forms in which programs save the state of an optimizer, brought into one: by parameter name.
#
# `{"state": {fqn: {name: value}}, "param_groups": [{..., "params": [fqn, ...]}]}`, as FSDP's `optim_state_dict` has it.


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
    if any(isinstance(key, int) for key in [*state, *(key for group in groups for key in group.get("params", []))]):
        names = _names(state, groups, model, file)
        unknown = [key for key in state if key not in names]
        if unknown:
            raise CheckpointError(f"{file} has optimizer states of {unknown[:5]}, which no parameter group holds")
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
        return dict(pair for group in groups for pair in zip(group["params"], group["param_names"], strict=True))
    numbers = [number for group in groups for number in group.get("params", [])]
    names = _distinct(model)
    why = ""
    if len(groups) != 1:
        why = f"it has {len(groups)} parameter groups, whose order need not be that of the model"
    elif len(names) != len(numbers):
        why = f"it has {len(numbers)} parameters, and the model {len(names)} tensors"
    else:
        found = dict(zip(numbers, names, strict=True))
        odd = [number for number in state if number in found and not _fits(state[number], model[found[number]])]
        if not odd:
            return found
        why = f"the state of number {odd[0]} is not shaped like {found[odd[0]]!r}"
    raise CheckpointError(
        f"{file} keys the optimizer's state by number, and flatparam cannot tell which parameter a number means: "
        f"{why}. Save the state by name: FSDP.optim_state_dict, torch.distributed.checkpoint.state_dict."
        "get_optimizer_state_dict, or an optimizer that was made from model.named_parameters()"
    )


def _distinct(model: Mapping[str, Any]) -> list[str]:
    """Return the names of the model's tensors, without those that share the memory of one before (tied weights)."""
    seen: dict[Stored, str] = {}
    for name, value in model.items():
        if isinstance(value, Stored):
            seen.setdefault(value, name)
    return list(seen.values())


def _fits(state: Mapping[str, Any], parameter: Any) -> bool:
    """Return whether every tensor of a state is shaped like its parameter, or is a single number."""
    shapes = [value.info.shape for value in state.values() if isinstance(value, Stored)]
    return all(shape in ((), (1,), parameter.info.shape) for shape in shapes)


def _unflattened(optimizer: Mapping[str, Any], model: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the form of `flatten_optimizer_state_dict`: `state.<fqn>.<name>` and `param_groups.<fqn>.<option>`.

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
    groups: dict[str, list[str]] = {}
    for fqn in options or state:
        groups.setdefault(_told(options.get(fqn, {})), []).append(fqn)
    return {"state": state, "param_groups": [{**options.get(each[0], {}), "params": each} for each in groups.values()]}


def _told(options: Mapping[str, Any]) -> str:
    """Return options in words, with the values of small tensors: each parameter has a learning rate of its own."""
    found = dict(options)
    for name, each in options.items():
        if isinstance(each, Stored) and each.info.numel <= _MOST_COMPARED:
            found[name] = (each.info, [piece.tolist() for piece in each.read(Span(0, each.info.numel))])
    return repr(sorted(found.items()))


def _split(key: str, model: Mapping[str, Any]) -> tuple[str, str]:
    """`<fqn>.<name>` in two, at the longest name of the model that fits, or else at the last dot."""
    at = len(key)
    while (at := key.rfind(".", 0, at)) >= 0:
        if key[:at] in model:
            return key[:at], key[at + 1 :]
    fqn, _, name = key.rpartition(".")
    return fqn, name
