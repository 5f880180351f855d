"""The files of a checkpoint of DeepSpeed's ZeRO, and what their pickles may mention."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, final

import attrs

from flatparam_files.disk.checkpoint_error import CheckpointError, damage_named
from flatparam_files.disk.system import ByteFile
from flatparam_files.formats.pickle_reader import AdmittedNames, InertObject
from flatparam_files.formats.stored_tensors import StridedTensor
from flatparam_files.formats.torch_archive import TORCH_NAMES, open_archive

# The files

_TAG_NBYTES: Final = 4096
"""More than `latest` has."""
_NAME_NBYTES: Final = 255
"""More than the name of a directory has."""


def step_directory(path: Path) -> Path:
    """Return the directory of the step to read."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a directory, and a checkpoint of DeepSpeed is one",
            path=path,
            hint="give the directory that engine.save_checkpoint was given",
        )
    latest = path / "latest"
    if not latest.is_file():
        if any(path.glob("*_states.pt")):
            return path
        steps = sorted(found.parent.name for found in path.glob("*/*mp_rank_00_model_states.pt"))
        raise CheckpointError(
            f"{path} has no file `latest`, which names the step to read",
            path=path,
            hint=f"give the directory of a step instead, of which there are {sorted(set(steps))}",
        )
    with ByteFile(latest) as file:
        tag = file.read(0, min(file.nbytes, _TAG_NBYTES)).decode("utf-8", errors="replace").strip()
    step = path / tag
    if not tag or tag == ".." or Path(tag).name != tag or len(tag.encode()) > _NAME_NBYTES or "\0" in tag:
        raise CheckpointError(
            f"{latest} should name a directory beside it, and says {tag[:80]!r}",
            path=latest,
            hint="give the directory of a step instead",
        )
    if not step.is_dir():
        raise CheckpointError(
            f"{latest} says {tag!r}, and this directory is not beside it",
            path=step,
            hint="copy the directory to its place, or give the directory of a different step",
        )
    return step


_OPTIM: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHERS: Final = {
    "layer_*": "pipeline parallelism",
    "*expert_*": "experts (MoE)",
    "expp_rank_*": "experts (MoE)",
    "*mp_rank_01*": "tensor parallelism",
    "zero": "a universal checkpoint",
}


@final
@attrs.frozen
class Files:
    """The files of a step by rank; `model` has one in stages 1 and 2."""

    step: Path
    optim: tuple[Path, ...]
    model: tuple[Path, ...]

    @classmethod
    def found_in(cls, step: Path) -> Files:
        """Return those in the directory, when it is of a kind that is read."""
        for pattern, what in _OTHERS.items():
            if found := next(step.glob(pattern), None):
                raise _unread(found, what)
        if not (optim := _by_rank(step, _OPTIM)):
            raise CheckpointError(
                f"{step} has no file zero_pp_rank_0_mp_rank_00_optim_states.pt: it was saved without ZeRO (stage 0), "
                "or its optimizer files were not copied",
                path=step,
                hint="copy these files there; for stage 0, import mp_rank_00_model_states.pt as a file of torch.save",
            )
        if not (model := _by_rank(step, _MODEL)):
            raise CheckpointError(
                f"{step} has no file that ends in mp_rank_00_model_states.pt, which holds the names",
                path=step,
                hint="copy the file there; rank 0 wrote it",
            )
        return cls(step, optim, model)


def _unread(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file} says that this checkpoint is of {what}, which is not read",
        path=file,
        hint="only checkpoints of ZeRO over data-parallel ranks are; convert it with DeepSpeed's own tools",
    )


def _by_rank(step: Path, pattern: re.Pattern[str]) -> tuple[Path, ...]:
    """Return the files whose names match, in the order of the ranks; none may be missing in between."""
    found: dict[int, Path] = {}
    for file in sorted(step.iterdir()):
        if match := pattern.fullmatch(file.name):
            rank = int(match[1] or 0)
            if rank in found:
                raise _of_another_save(file, rank)
            found[rank] = file
    for rank in range(max(found, default=-1)):
        if rank not in found:
            raise _missing(found[max(found)], rank)
    return tuple(file for _, file in sorted(found.items()))


def _missing(other: Path, rank: int) -> CheckpointError:
    name = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", other.name)
    return CheckpointError(
        f"{other.with_name(name)} is missing: the part of rank {rank}",
        rank=rank,
        path=other.with_name(name),
        hint="copy it from the machine of that rank: without it no parameter is whole",
    )


def plausible(file: Path) -> AbstractContextManager[None]:
    """Turn what goes wrong with the contents of a file into an error that names it."""
    return damage_named(
        f"{file} does not hold what DeepSpeed writes there",
        path=file,
        hint="the file is not of a whole save by a version that is known (0.19.8 is tested), or its states were "
        "offloaded to NVMe, which leaves them out of it",
    )


@final
@attrs.frozen
class RankPart:
    """The part of the optimizer that one rank saved.

    Attributes:
        state: what else is needed of ZeRO's state.
        weights: its part of the master weights, by flat group.
        optimizer: the state dict of the optimizer in it, `{"state": {flat group: {...}}, "param_groups": [...]}`;
            without groups if only the states were kept.
    """

    file: Path
    state: Mapping[str, Any]
    stage: int
    world_size: int
    weights: tuple[StridedTensor, ...]
    optimizer: Mapping[str, Any]

    @classmethod
    def read_from(cls, file: Path) -> RankPart:
        """Read the structure of a rank's file."""
        root = open_archive(file, names=_NAMES).root
        with plausible(file):
            state = root["optimizer_state_dict"]
            stage = _stage(file, state)
            count = state["partition_count"]
            weights = tuple(state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"])
            optimizer = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            # `elastic_checkpoint` keeps a list of the states.
            if stage < 3 and isinstance(optimizer, list):
                optimizer = {"state": dict(enumerate(optimizer))}
            if not all(isinstance(part, StridedTensor) for part in weights):
                raise TypeError("expected tensors as flat groups, found something else")
            world_size = int(max(count) if isinstance(count, list) else count)
            needed = {key: value for key, value in state.items() if key in _NEEDED}
            return cls(file, needed, stage, world_size, weights, optimizer)


_NEEDED: Final = ("param_alignment_paddings", "loss_scaler", "ds_zero_partition_groups")


def _stage(file: Path, state: Mapping[str, Any]) -> int:
    # The optimizer for bf16 with gradients accumulated in fp32, which is stage 1, does not say so.
    found = state.get("zero_stage", 1 if "single_partition_of_fp32_groups" in state else None)
    stage = found.arguments[0] if isinstance(found, InertObject) else found
    if stage not in (1, 2, 3):
        raise CheckpointError(
            f"{file} is of ZeRO stage {stage!r}, and stages 1, 2 and 3 are read",
            path=file,
            hint="convert it with DeepSpeed's own tools",
        )
    return int(stage)


def read_model_parts(files: Sequence[Path]) -> list[Mapping[str, Any]]:
    """The contents of the model's files: all of rank 0's, and the entries of the others that are cut or compared."""
    found: list[Mapping[str, Any]] = []
    for file in files:
        root = open_archive(file, names=_NAMES).root
        with plausible(file):
            if not isinstance(root["module"], dict) or not isinstance(root["param_shapes"], list):
                raise TypeError("`module` or `param_shapes` is of a different type")
            compared = {key: root.get(key) for key in ("frozen_param_fragments", "global_steps")}
            found.append(compared if found else root)
    return found


def check_complete(files: Files, ranks: Sequence[RankPart], models: Sequence[Mapping[str, Any]]) -> None:
    """Check that the files are those of one save; a CheckpointError names one that is missing, or does not belong."""
    world_size, stage = ranks[0].world_size, ranks[0].stage
    if "ds_zero_partition_groups" in ranks[0].state:
        raise _unread(ranks[0].file, "experts (AutoEP)")
    for rank, part in enumerate(ranks):
        if (part.world_size, part.stage, len(part.weights)) != (world_size, stage, len(ranks[0].weights)):
            raise _of_another_save(part.file, rank)
    _check_count(files.optim, world_size)
    _check_count(files.model, world_size if stage == 3 else 1)
    for rank, model in enumerate(models):
        if model.get("global_steps") != models[0].get("global_steps"):
            raise _of_another_save(files.model[rank], rank)
    if len(models[0]["param_shapes"]) != len(ranks[0].weights):
        raise _of_another_save(ranks[0].file, 0)


def _check_count(found: Sequence[Path], expected: int) -> None:
    if len(found) < expected:
        raise _missing(found[-1], len(found))
    if len(found) > expected:
        raise _of_another_save(found[expected], expected)


def _of_another_save(file: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{file} does not belong to the same save as the others: they differ in dtype, stage, groups, step or number "
        "of ranks",
        rank=rank,
        path=file,
        hint="the directory was written twice, or copied together: take it from where it was written, whole",
    )


# What the pickles may mention


_NUMPY: Final = ("numpy.core.multiarray", "numpy._core.multiarray")
_NAMES: Final[AdmittedNames] = attrs.evolve(
    TORCH_NAMES,
    # Their objects become inert records: nothing of these classes is imported.
    inert=frozenset(
        {
            "deepspeed.runtime.zero.config.ZeroStageEnum",
            "deepspeed.runtime.zero.constants.ZeroStageEnum",
            "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
            "deepspeed.runtime.config.DeepSpeedConfig",
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            # what training programs put into the client state beside tensors and plain values
            "argparse.Namespace",
            "pathlib.PosixPath",
            "numpy.ndarray",
            "numpy.dtype",
            *(f"{module}.{name}" for module in _NUMPY for name in ("_reconstruct", "scalar")),
        }
    ),
    hint=(
        "If you trust whoever wrote it: load it in DeepSpeed, and save again with a client_state of tensors and "
        "plain values"
    ),
)
