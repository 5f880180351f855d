"""The part of an optimizer's saved state that this rank needs, read and verified, in host memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_checkpoint.load.prepared_model import read_part
from flatparam_files import CheckpointError, CheckpointReader, join_path, split_path
from flatparam_runtime import COUNTERS, ParamSpec, Span
from flatparam_state.forms.deferred import LazyTensor, LazyValue
from flatparam_state.model_tensors import ModelTensor, model_tensors
from flatparam_state.optimizer import AsItIs, Holding, PerRank, load_optimizer_state


@final
@attrs.frozen(eq=False)
class PreparedOptimizer:
    """A new state for an optimizer, as its `load_state_dict` takes it."""

    optimizer: torch.optim.Optimizer
    state_dict: dict[str, Any]
    converted: Mapping[int, frozenset[torch.dtype]] = attrs.field(factory=dict)
    """By the number of a parameter that gets a different dtype, the dtypes that it was saved in."""

    def install(self) -> None:
        """Give it to the optimizer as it was saved, but what has the dtype of a parameter that is converted.

        Torch itself would cast tensors to the parameters' dtype, and make generators of strings.
        """
        self.optimizer.load_state_dict(self.state_dict)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        of_parameters = ((key, values) for key, values in self.state_dict["state"].items() if isinstance(key, int))
        for index, values in of_parameters:
            installed = self.optimizer.state[parameters[index]]
            for name, value in values.items():
                now = installed.get(name)
                if not isinstance(value, Tensor):
                    installed[name] = value
                elif (
                    isinstance(now, Tensor)
                    and now.dtype != value.dtype
                    and value.dtype not in self.converted.get(index, ())
                ):
                    installed[name] = value.to(now.device)


def prepare_optimizer(
    reader: CheckpointReader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    at: tuple[str, ...],
    *,
    other_states: bool,
    new: Collection[str] = (),
    converted: Mapping[str, torch.dtype] | None = None,
) -> PreparedOptimizer:
    """Read what this rank has of the optimizer's state that was saved under the keys `at`.

    Args:
        new: the parameters that the checkpoint lacks: they have no state yet, and the settings of their groups.
        converted: the dtypes in which parameters were saved that have a different one now, by name.

    Raises:
        CheckpointError: if there is none.
        FlatParamError: if it does not fit; if it is that of a different optimizer, unless `other_states`.
    """
    saved = _saved_state(reader, model, at)
    if new:
        _add_new(saved["param_groups"], Holding.of(model, optimizer), frozenset(new))
    made = load_optimizer_state(model, optimizer, saved, other_states=other_states, is_compared=True)
    state_dict = {**made, "param_groups": copy.deepcopy(made["param_groups"])}
    if not converted:
        return PreparedOptimizer(optimizer, state_dict)
    items = Holding.of(model, optimizer).items
    dtypes = {
        number: frozenset(converted[fqn] for fqn in item.fqns if fqn in converted) for number, item in enumerate(items)
    }
    return PreparedOptimizer(optimizer, state_dict, dtypes)


def _saved_state(reader: CheckpointReader, model: nn.Module, at: tuple[str, ...]) -> dict[str, Any]:
    """An optimizer's state by the names that its parameters have in the model now, to be read when it is needed."""
    tensors = {name: tensor for tensor in model_tensors(model) for name in tensor.names}
    name_now = _names_now(reader, {name: tensor.name for name, tensor in tensors.items()})
    prefix, tree = (*at, "state"), _tree(reader, at)
    state: dict[str, dict[str, Any]] = {}

    def note(path: str, value: Any) -> None:
        parts = split_path(path)
        if len(parts) == len(prefix) + 2 and parts[:-2] == prefix:
            state.setdefault(name_now(parts[-2]), {})[parts[-1]] = value

    for path, record in reader.manifest.tensors.items():
        *_, fqn, _ = ("", *split_path(path))
        stored = SavedTensor(reader, path, tensors.get(name_now(fqn)))
        note(path, AsItIs(stored) if record.whole else stored)
    for path, of_ranks in reader.manifest.per_rank.items():
        of = tensors.get(name_now(split_path(path)[-2]))
        note(
            path,
            PerRank(tuple((_in_part(each.span, of), SavedValue(reader, each.value)) for each in of_ranks)).to_entry(),
        )
    groups = reader.decode(tree["param_groups"])
    of_parameters = {fqn for group in groups for fqn in group["params"]}
    others: dict[str, Any] = {}
    for fqn, plain in tree.get("state", {}).items():
        if fqn not in of_parameters:
            others[fqn] = reader.decode(plain)
            continue
        for name, value in plain.items():
            note(join_path((*prefix, fqn, name)), reader.decode(value))
    # In the order in which the optimizers of torch make them: files have what is cut like the parameter first.
    state = {
        fqn: dict(sorted(values.items(), key=lambda entry: entry[0] not in COUNTERS)) for fqn, values in state.items()
    }
    for group in groups:
        for key in {"params", "param_names"} & group.keys():
            group[key] = [name_now(fqn) for fqn in group[key]]
    return {"state": {**state, **others}, "param_groups": groups}


def _in_part(span: Span, of: ModelTensor | None) -> Span:
    """Return a span of the parameter `of` as the optimizer counts it: from the beginning of this rank's part, if it has
    a part. What is before that comes behind its end, where nothing is asked for."""
    if of is None or of.held is None:
        return span
    is_before = span.start < of.held.offset
    return span.shifted(math.prod(of.held.part_shape) if is_before else -of.held.offset)


def _add_new(saved_groups: list[dict[str, Any]], holding: Holding, new: frozenset[str]) -> None:
    """Add the `new` parameters to the saved groups of those that are in one group with them now."""
    homes = {fqn: group for group in saved_groups for fqn in group["params"]}
    for group, items in holding.groups:
        fqns = [fqn for item in items for fqn in item.fqns]
        added = [fqn for fqn in fqns if fqn in new and fqn not in homes]
        home = next((homes[fqn] for fqn in fqns if fqn in homes), None)
        if added and home is None:
            saved_groups.append({**group, "params": added})
        elif added and home is not None:
            home["params"] = [*home["params"], *added]


def _tree(reader: CheckpointReader, at: tuple[str, ...]) -> dict[str, Any]:
    tree: Any = reader.manifest.values
    for key in at:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    if not isinstance(tree, dict) or "param_groups" not in tree:
        there = reader.manifest.values.get("optimizer", {})
        raise CheckpointError(
            f"{reader.path} has no state of an optimizer at {join_path(at)!r}; "
            f"under 'optimizer' it has {sorted(there) or 'nothing'}",
            path=reader.path,
            hint="give the optimizers the names that they had, or load without an optimizer",
        )
    return tree


def _names_now(reader: CheckpointReader, now: Mapping[str, str]) -> Callable[[str], str]:
    """From a name of a parameter when it was saved, to the first name that it has in the model; else as it was."""
    aliases: dict[str, list[str]] = {}
    for alias, path in reader.manifest.aliases.items():
        aliases.setdefault(path, []).append(split_path(alias)[-1])

    def name_now(saved: str) -> str:
        known = (saved, *aliases.get(join_path(("model", saved)), ()))
        return next((now[name] for name in known if name in now), saved)

    return name_now


# What is read when it is needed


@final
@attrs.frozen(eq=False)
class SavedValue(LazyValue):
    """A value in a manifest, perhaps with a tensor in a file."""

    _reader: CheckpointReader
    _tree: Any

    def whole(self) -> Any:
        """Read the value, and the tensors in it."""
        return self._reader.decode(self._tree)


@final
class SavedTensor(LazyTensor):
    """A tensor of a checkpoint."""

    def __init__(self, reader: CheckpointReader, path: str, of: ModelTensor | None = None) -> None:
        """Read nothing yet of the tensor that is at `path` in the checkpoint, shaped like the parameter `of`."""
        info = reader.record(path).info
        self.shape, self.dtype = info.shape, info.dtype
        self._reader, self._path, self._of = reader, path, of
        if of is not None and of.held is not None and info.shape == of.shape:
            # The optimizer holds a state of that part.
            self.shape = of.held.part_shape

    def whole(self) -> Tensor:
        """Read all of the tensor, in its shape."""
        return self._reader.load(self._path)

    def part(self, spec: ParamSpec, span: Span) -> Tensor:
        """Read the elements `span` in the memory order of `spec`, and only the blocks that they are in."""
        if self._of is None or self._of.held is None:
            return read_part(self._reader, self._path, spec.stride, [span], self.dtype)
        spans = self._of.intervals(span.shifted(self._of.held.offset))
        return read_part(self._reader, self._path, self._of.stride, spans, self.dtype)
