"""The ways to save and load: ours, and those of torch's FSDP1 and FSDP2."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint.state_dict as torch_state
import torch.distributed.fsdp as torch_fsdp
from attrs import frozen
from gpt.model import GPT, Block
from gpt.shape import VOCABULARY, Shape
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatparam
import flatparam.checkpoint.state_dict as our_state
from flatparam import Checkpointer
from flatparam_comm import Collectives

_CPU: Final = torch.device("cpu")
_TOKENS: Final = 8
_HEAD_WIDTH: Final = 16


@frozen
class Library:
    """Something that shards: `shard` wraps a model over a group, `state` is its module of `get_state_dict`."""

    shard: Callable[[nn.Module, Collectives], nn.Module]
    state: Any


@frozen
class Training:
    """A sharded model and its optimizer on one rank."""

    library: Library
    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: Collectives

    @classmethod
    def begin(cls, library: Library, parameters: int, group: Collectives, seed: int = 0) -> Training:
        """One that has made no step."""
        torch.manual_seed(seed)
        model = library.shard(GPT(shape_of(parameters)), group)
        return cls(library, model, torch.optim.AdamW(model.parameters(), lr=1e-3), group)

    def step(self) -> None:
        """Train on a row of this rank's own."""
        generator = torch.Generator().manual_seed(self.group.rank)
        row = torch.randint(VOCABULARY, (1, _TOKENS + 1), generator=generator)
        self.model(row[:, :-1], row[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fingerprint(self) -> dict[str, str]:
        """A hash of each full tensor of model and optimizer, and each other value; of rank 0, empty elsewhere."""
        options = self.library.state.StateDictOptions(full_state_dict=True)
        states = self.library.state.get_state_dict(self.model, self.optimizer, options=options)
        return dict(_hashes("", states)) if self.group.rank == 0 else {}


Finish = Callable[[], None]
"""Waits until a save is finished."""


@frozen
class Contender:
    """A way to save in a directory, and to load from it into another training.

    `load` returns how many bytes were read, where the library keeps account.
    """

    library: Library
    save: Callable[[Training, Path], Finish]
    load: Callable[[Training, Path], int | None]
    is_for_any_world_size: bool = True


def shape_of(parameters: int) -> Shape:
    """A shape of about so many parameters, as deep for its width as the presets are."""
    multiple = 64 if parameters > 1_000_000 else _HEAD_WIDTH
    width = max(1, round((51 * parameters / 12) ** (1 / 3) / multiple)) * multiple
    block, root = (Shape(1, width, 1, _TOKENS).block_numel, Shape(1, width, 1, _TOKENS).root_numel)
    layers = max(1, round((parameters - root) / block))
    return Shape(layers, width, heads=width // _HEAD_WIDTH, context=_TOKENS)


def _hashes(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _hashes(f"{path}/{key}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _hashes(f"{path}/{number}", inner)
    elif isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        yield path, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    else:
        yield path, repr(value)


def _nothing() -> None:
    pass


# Libraries


def _shard_with_ours(model: nn.Module, group: Collectives) -> nn.Module:
    policy: Any = ModuleWrapPolicy({Block})
    return flatparam.FullyShardedDataParallel(model, process_group=group, auto_wrap_policy=policy)


def _shard_with_fsdp1(model: nn.Module, group: Collectives) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return torch_fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=_CPU)


def _shard_with_fsdp2(model: nn.Module, group: Collectives) -> nn.Module:
    mesh = init_device_mesh("cpu", (group.size,))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        torch_fsdp.fully_shard(block, mesh=mesh)
    torch_fsdp.fully_shard(model, mesh=mesh)
    return model


_OURS: Final = Library(_shard_with_ours, our_state)
_FSDP1: Final = Library(_shard_with_fsdp1, torch_state)
_FSDP2: Final = Library(_shard_with_fsdp2, torch_state)


# Ways


def _directory(*, asynchronous: bool) -> Contender:
    """flatparam's own checkpoints."""

    def save(training: Training, path: Path) -> Finish:
        checkpointer = Checkpointer(
            path, training.model, training.optimizer, ranks=training.group, asynchronous=asynchronous
        )
        checkpointer.save(1)
        return checkpointer.close

    def load(training: Training, path: Path) -> int:
        loaded = Checkpointer(path, training.model, training.optimizer, ranks=training.group).load()
        if loaded is None:
            raise LookupError(f"there is no checkpoint in {path}")
        return loaded.nbytes_read

    return Contender(_OURS, save, load)


def _distributed(library: Library) -> Contender:
    """Sharded state through torch's DCP."""

    def save(training: Training, path: Path) -> Finish:
        model, optimizer = library.state.get_state_dict(training.model, training.optimizer)
        dcp_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        return _nothing

    def load(training: Training, path: Path) -> None:
        model, optimizer = library.state.get_state_dict(training.model, training.optimizer)
        state = {"model": model, "optimizer": optimizer}
        planner = DefaultLoadPlanner(flatten_sharded_tensors=False)  # else a rank must have a shard of each tensor
        dcp_load(state, checkpoint_id=path, planner=planner)
        library.state.set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return Contender(library, save, load)


def _full(library: Library, names: Any, *, offload: bool) -> Contender:
    """One file with everything, written by rank 0 and read by all; `names` is the module with FSDP1's names."""
    fsdp = names.FullyShardedDataParallel

    def as_full(training: Training, rank0_only: bool) -> Any:
        return fsdp.state_dict_type(
            training.model,
            names.StateDictType.FULL_STATE_DICT,
            names.FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only),
            names.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only),
        )

    def save(training: Training, path: Path) -> Finish:
        with as_full(training, rank0_only=True):
            model = training.model.state_dict()
            optimizer = fsdp.optim_state_dict(training.model, training.optimizer)
        if training.group.rank == 0:
            path.mkdir()
            torch.save({"model": model, "optimizer": optimizer}, path / "full.pt")
        return _nothing

    def load(training: Training, path: Path) -> None:
        state = torch.load(path / "full.pt", weights_only=True)
        with as_full(training, rank0_only=False):
            _install(fsdp, training, state)

    return Contender(library, save, load)


def _file_per_rank() -> Contender:
    """FSDP1's sharded state, pickled by each rank; only as many ranks can read it."""
    fsdp: Any = torch_fsdp.FullyShardedDataParallel

    def as_sharded(training: Training) -> Any:
        return fsdp.state_dict_type(
            training.model,
            torch_fsdp.StateDictType.SHARDED_STATE_DICT,
            torch_fsdp.ShardedStateDictConfig(),
            torch_fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
        )

    def save(training: Training, path: Path) -> Finish:
        path.mkdir(exist_ok=True)
        with as_sharded(training):
            model = training.model.state_dict()
            optimizer = fsdp.optim_state_dict(training.model, training.optimizer)
        torch.save({"model": model, "optimizer": optimizer}, path / f"rank{training.group.rank}.pt")
        return _nothing

    def load(training: Training, path: Path) -> None:
        state = torch.load(path / f"rank{training.group.rank}.pt", weights_only=False)
        with as_sharded(training):
            _install(fsdp, training, state)

    return Contender(_FSDP1, save, load, is_for_any_world_size=False)


def _install(fsdp: Any, training: Training, state: Any) -> None:
    training.model.load_state_dict(state["model"])
    of_this_rank = fsdp.optim_state_dict_to_load(training.model, training.optimizer, state["optimizer"])
    training.optimizer.load_state_dict(of_this_rank)


CONTENDERS: Final[dict[str, Contender]] = {
    "flatparam Checkpointer": _directory(asynchronous=False),
    "flatparam Checkpointer, asynchronous": _directory(asynchronous=True),
    "flatparam sharded, DCP": _distributed(_OURS),
    "flatparam full, torch.save": _full(_OURS, flatparam, offload=True),
    "torch FSDP1 full, torch.save": _full(_FSDP1, torch_fsdp, offload=False),  # offloaded it crashes on CPU
    "torch FSDP1 sharded, torch.save": _file_per_rank(),
    "torch FSDP1 sharded, DCP": _distributed(_FSDP1),
    "torch FSDP2, DCP": _distributed(_FSDP2),
}
