"""Checkpoints of DeepSpeed's ZeRO: whole parameters and optimizer states, read out of the parts of the ranks.

Where things lie (`engine.save_checkpoint` of DeepSpeed 0.19.8 writes it, its zero_to_fp32.py reads the weights):

- The file `latest` names the directory of a step. In it `[bf16_]zero_pp_rank_K_mp_rank_00_optim_states.pt` has rank K's
  part of the master weights and of the states; the names, shapes, buffers and frozen parameters are in
  `zero_pp_rank_K_mp_rank_00_model_states.pt` of each rank (stage 3) or in one `mp_rank_00_model_states.pt`.
- `param_shapes` has, for each flat group of the optimizer, the names and shapes of its parameters, in their order.
- Stage 3 cuts each parameter into equal parts, padded at its end. A rank's flat group is its parts end to end.
- Stages 1 and 2 lay the parameters of a group end to end (each padded by `param_alignment_paddings`), and cut that into
  equal parts. The padding at its end is left out of the weights, and may be left out of the states.
- The optimizer's state has an entry per flat group, of tensors that are cut as the group is and of values.
- Frozen parameters lie by name, in stage 3 cut in the same way. Stage 1 has them only among the module's.
- A parameter with several names lies under the first; `shared_params` maps the others to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_core import Span
from flatparam_files.disk.source import TensorInfo
from flatparam_files.formats.arrange import arranged
from flatparam_files.formats.deepspeed_files import (
    Files,
    RankPart,
    check_complete,
    plausible,
    read_model_parts,
    step_directory,
)
from flatparam_files.formats.pickle_reader import Global, InertObject
from flatparam_files.formats.stored_tensors import Storage, Stored, StridedTensor
from flatparam_files.formats.whole_sources import StoredSource


def is_deepspeed(path: str | Path) -> bool:
    """Return whether the directory is a checkpoint of DeepSpeed, or the directory of one of its steps."""
    path = Path(path)
    return path.is_dir() and ((path / "latest").is_file() or any(path.glob("*mp_rank_*_states.pt")))


def open_deepspeed(path: str | Path) -> StoredSource:
    """Open what `engine.save_checkpoint(path)` of DeepSpeed wrote with ZeRO stage 1, 2 or 3; DeepSpeed is not needed.

    The tensors are `model/<name>`: the master weights, and frozen parameters and buffers in the dtype that they have;
    `optimizer/state/<name>/<state>`; and those of the client state, under `extra/client_state/`. `values` has the
    options of the parameter groups, and in `extra` the rest of what DeepSpeed keeps: the learning rate scheduler's
    state, the loss scale, the number of steps. `facts["left_out"]` lists what is neither a tensor nor a plain value.

    Only the structure of the files is read now. A span of a tensor is read from the parts that it lies in, and no more
    than it; the first time, the checksum of each part (a rank's flat group) is compared, which takes a read of it. What
    the pickles in the files name is neither imported nor called.

    Args:
        path: the directory with the file `latest`, or the directory of one step in it.

    Raises:
        CheckpointError: if files are missing, damaged or of different saves, or of a kind that is not read: tensor,
            pipeline or expert parallelism, states on NVMe, universal checkpoints.
    """
    files = Files.found_in(step_directory(Path(path)))
    ranks = [RankPart.read_from(file) for file in files.optim]
    models = read_model_parts(files.model)
    with plausible(files.model[0]):
        check_complete(files, ranks, models)
        return _Reading(files, ranks, models).source()


def _info(shape: Sequence[int], dtype: torch.dtype) -> TensorInfo:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"expected a shape of numbers, found {shape}")
    return TensorInfo(shape, dtype)


# Entries of the model's side: the state of training, and what only describes the checkpoint. The rest is the client's.
_TRAINING: Final = ("lr_scheduler", "data_sampler", "random_ltd", "global_steps", "global_samples", "skipped_steps")
_DESCRIBING: Final = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "ds_config",
    "ds_version",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "num_experts",
    "ds_autoep_layers",
    "universal_checkpoint_info",
)


@final
class _Reading:
    """Puts the tree of a checkpoint together from what its files hold."""

    def __init__(self, files: Files, ranks: Sequence[RankPart], models: Sequence[Mapping[str, Any]]) -> None:
        self._files = files
        self._ranks = ranks
        self._models = models
        self._stage = ranks[0].stage
        self._left_out: list[str] = []

    def source(self) -> StoredSource:
        """Return the checkpoint as a source."""
        tree = {"model": self._model(), "optimizer": self._optimizer(), "extra": self._extra()}
        tensors, values = arranged(tree, self._files.step)
        return StoredSource("deepspeed", tensors, values, self._facts())

    def _facts(self) -> dict[str, Any]:
        main = self._models[0]
        return {
            "ds_version": str(main.get("ds_version")),
            "stage": self._stage,
            "world_size": len(self._ranks),
            "step_directory": self._files.step.name,
            "step": int(main.get("global_steps") or 0),
            "ds_config": self._plain(main.get("ds_config"), ("ds_config",)),
            "shared_parameters": dict(main["shared_params"]),
            "left_out": self._left_out,
        }

    # The weights

    def _model(self) -> dict[str, CutTensor]:
        main = self._models[0]
        weights: dict[str, CutTensor] = {}
        for index, group in enumerate(main["param_shapes"]):
            weights.update(self._cuts(index, group, tuple(rank.weights[index] for rank in self._ranks)))
        weights.update(self._frozen())
        weights.update({alias: weights[name] for alias, name in main["shared_params"].items() if name in weights})
        stored = {
            name: CutTensor.whole(tensor)
            for name, tensor in main["module"].items()
            if name not in weights and isinstance(tensor, StridedTensor)
        }
        # in the order of the module's own state dict, if it has one
        found = stored | weights
        order = [*(name for name in main["module"] if name in found), *weights]
        return {name: found[name] for name in order}

    def _frozen(self) -> dict[str, CutTensor]:
        shapes = self._models[0].get("frozen_param_shapes") or {}
        found = {}
        for name, shape in shapes.items():
            parts = tuple(model["frozen_param_fragments"][name] for model in self._models)
            each = -(-math.prod(shape) // len(parts))
            found[name] = CutTensor(_info(shape, parts[0].info.dtype), parts, max(1, each)).check()
        return found

    def _cuts(
        self, index: int, shapes: Mapping[str, tuple[int, ...]], parts: tuple[StridedTensor, ...]
    ) -> dict[str, CutTensor]:
        """Return the tensors of a flat group, whose parts on the ranks are given."""
        found = {}
        offset, dtype = 0, parts[0].info.dtype
        paddings = self._ranks[0].state.get("param_alignment_paddings")
        of_group = [0] * len(shapes) if paddings is None or self._stage == 3 else paddings[index]
        for name, shape, padding in zip(shapes, shapes.values(), of_group, strict=True):
            info, numel = _info(shape, dtype), math.prod(shape)
            if self._stage == 3:
                each = -(-numel // len(parts))
                found[name] = CutTensor(info, parts, max(1, each), at=offset).check()
                offset += each
            else:
                found[name] = CutTensor(info, parts, max(1, parts[0].info.numel), origin=offset).check()
                offset += numel + padding
        self._check_used_up(index, offset, [part.info.numel for part in parts])
        return found

    def _check_used_up(self, index: int, used: int, numels: Sequence[int]) -> None:
        """See that the parameters of a flat group are all that the ranks have of it, but for the padding at its end."""
        if self._stage == 3:
            fits = all(numel == used for numel in numels)
        else:
            # Groups are aligned to twice the number of ranks.
            unit = 2 * len(numels)
            fits = -(-used // unit) == -(-sum(numels) // unit)
        if not fits:
            raise ValueError(f"flat group {index} has {numels} elements on the ranks, and its parameters take {used}")

    # The optimizer

    def _optimizer(self) -> dict[str, Any]:
        groups = self._models[0]["param_shapes"]
        saved = [rank.optimizer for rank in self._ranks]
        options = saved[0].get("param_groups")
        # `elastic_checkpoint` keeps the states only.
        if options is None:
            options = [{"params": [index]} for index in range(len(groups))]
        members = [index for group in options for index in group["params"]]
        if members != list(range(len(groups))):
            raise ValueError(f"the optimizer's groups hold the flat groups {members}, of {len(groups)}")
        state: dict[str, dict[str, Any]] = {}
        for group in options:
            for index in group["params"]:
                of_ranks = [each["state"].get(index, {}) for each in saved]
                state.update(self._states(index, groups[index], of_ranks, group))
        named = [
            {**group, "params": [name for index in group["params"] for name in groups[index]]} for group in options
        ]
        return {"state": state, "param_groups": self._plain(named, ("optimizer", "param_groups"))}

    def _states(
        self,
        index: int,
        shapes: Mapping[str, tuple[int, ...]],
        of_ranks: Sequence[Mapping[str, Any]],
        group: Mapping[str, Any],
    ) -> dict[str, dict[str, Any]]:
        """Return the states of the parameters of a flat group."""
        found: dict[str, dict[str, Any]] = {name: {} for name in shapes} if of_ranks[0] else {}
        for kind, value in of_ranks[0].items():
            if self._is_cut(kind, value, index):
                cuts = self._cuts(index, shapes, tuple(states[kind] for states in of_ranks))
                for name, cut in cuts.items():
                    found[name][kind] = cut
            elif isinstance(value, StridedTensor) and value.info.numel != 1:
                self._left_out.append(f"optimizer state {kind!r} of flat group {index}, of shape {value.info.shape}")
            else:
                for name, states in found.items():
                    states[kind] = self._plain(value, ("optimizer", "state", name, str(kind)))
        # DeepSpeed's own optimizers had it there before 0.15.
        if "step" in group:
            for states in found.values():
                states.setdefault("step", group["step"])
        return found

    def _is_cut(self, kind: str, value: Any, index: int) -> bool:
        """Return whether a state of a flat group is like the group, and not one for all of it."""
        if kind == "step" or not isinstance(value, StridedTensor) or len(value.info.shape) != 1:
            return False
        weights = self._ranks[0].weights[index].info.numel
        return value.info.numel >= weights if self._stage < 3 else value.info.numel == weights

    # The rest

    def _extra(self) -> dict[str, Any]:
        main, state = self._models[0], self._ranks[0].state
        extra = {key: main[key] for key in _TRAINING if main.get(key) is not None}
        scaler = state.get("loss_scaler")
        if isinstance(scaler, InertObject) and isinstance(scaler.state, dict):
            extra["loss_scaler"] = scaler.state
        client = {key: main[key] for key in main if key not in (*_DESCRIBING, *_TRAINING)}
        if client:
            extra["client_state"] = client
        plain: dict[str, Any] = self._plain(extra, ("extra",))
        return plain

    def _plain(self, tree: Any, parts: tuple[str, ...]) -> Any:
        """Return a tree with its tensors to be read whole; what is neither a tensor nor a plain value becomes None."""
        if isinstance(tree, StridedTensor):
            return CutTensor.whole(tree)
        if isinstance(tree, (InertObject, Global)):
            self._left_out.append(f"{'/'.join(parts)}, of the class {tree.name}")
            return None
        if isinstance(tree, Mapping):
            return {key: self._plain(value, (*parts, str(key))) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._plain(value, (*parts, str(at))) for at, value in enumerate(tree))
        return tree


# A tensor that lies in parts, cut by DeepSpeed's ZeRO


@final
# Two names are of one tensor if they share the object.
@attrs.frozen(eq=False)
class CutTensor(Stored):
    """A tensor that lies in parts: its element `i` is number `origin + i` of a row, the row is cut every `each`
    elements, and piece `k` of it begins at element `at` of `parts[k]`.
    """

    parts: tuple[StridedTensor, ...]
    each: int
    origin: int = 0
    at: int = 0

    @classmethod
    def whole(cls, stored: StridedTensor) -> CutTensor:
        """Return a tensor that lies in one piece."""
        return cls(stored.info, (stored,), max(1, stored.info.numel))

    def pieces(self, span: Span) -> Iterator[tuple[int, Span]]:
        """Yield the parts that the elements `span` of the tensor lie in, by number, and where in them."""
        row = span.shifted(self.origin)
        for k in range(row.start // self.each, -(-row.stop // self.each)):
            inside = row.overlap(Span(k * self.each, (k + 1) * self.each))
            if inside:
                yield k, inside.relative_to(k * self.each).shifted(self.at)

    def read(self, span: Span) -> Iterator[Tensor]:
        """Yield the elements `span`, part by part, without a copy of the whole."""
        for k, inside in self.pieces(span):
            yield from self.parts[k].read(inside)

    def storages(self) -> Iterator[Storage]:
        """Return the storage of each part."""
        return (part.storage for part in self.parts)

    def check(self) -> CutTensor:
        """Return the same, when all its elements are there, in one dtype."""
        for k, inside in self.pieces(Span(0, self.info.numel)):
            if k >= len(self.parts) or inside.stop > self.parts[k].info.numel:
                raise ValueError("the flat groups are too small for the parameters that they should hold")
            if self.parts[k].info.dtype != self.info.dtype:
                raise ValueError("the ranks hold a parameter in different dtypes")
        return self
