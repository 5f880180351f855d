"""The same model on a mesh by flatparam's two doors, and by torch's FSDP1 and FSDP2: made, clipped, looked into."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import flatparam
from flatparam_runtime import summon_full_params
from integration_tests.meshes.llama import Llama, parallelize, whole

OURS = ("flat", "originals", "fully_shard")
THEIRS = ("FSDP1", "FSDP2")


@attrs.frozen
class Setting:
    """How a model is spread, sharded and trained."""

    engine: str
    shape: tuple[int, ...]
    """The sizes of (data, tensor), or of (replicate, shard, tensor)."""
    narrow: bool = False
    """Whether to compute in bf16, and reduce in fp32."""
    sequence: bool = True
    loss_parallel: bool = True
    micro_batches: int = 1
    synchronises: bool = True
    """Whether each of the micro-batches reduces gradients."""
    optimizer: str = "AdamW"
    meta: bool = False

    @property
    def data_parallel(self) -> int:
        size = 1
        for each in self.shape[:-1]:
            size *= each
        return size

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.shape[-1]

    @property
    def is_class(self) -> bool:
        """Whether the door is a wrapper class."""
        return self.engine in ("flat", "originals", "FSDP1")

    def mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        names = ("data", "tensor") if len(self.shape) == 2 else ("replicate", "shard", "tensor")
        return init_device_mesh("cpu", self.shape, mesh_dim_names=names)

    def stepping(self) -> Callable[[Any], torch.optim.Optimizer]:
        if self.optimizer == "SGD":
            return functools.partial(torch.optim.SGD, lr=0.1)
        return functools.partial(torch.optim.AdamW, lr=1e-2)


def made(setting: Setting, mesh: Any, model: nn.Module | None = None) -> nn.Module:
    """Return the model, spread over `mesh` and sharded, with the weights of seed 0."""
    torch.manual_seed(0)
    if model is None:
        with torch.device("meta") if setting.meta else contextlib.nullcontext():
            model = Llama()
    model = parallelize(model, mesh["tensor"], sequence=setting.sequence, loss_parallel=setting.loss_parallel)
    is_hybrid = mesh.ndim == 3
    return sharded(setting, model, mesh["replicate", "shard"] if is_hybrid else mesh["data"])


def sharded(setting: Setting, model: Any, mesh: Any) -> nn.Module:
    """Shard each block, and the rest, over `mesh`."""
    library: Any = flatparam
    if setting.engine in THEIRS:
        from torch.distributed import fsdp as library
    if setting.is_class:
        strategies = library.ShardingStrategy
        narrow = library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrap = functools.partial(
            library.FullyShardedDataParallel,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=setting.engine != "flat",
            mixed_precision=narrow if setting.narrow else None,
            sharding_strategy=strategies.FULL_SHARD if mesh.ndim == 1 else strategies.HYBRID_SHARD,
        )
        for number, block in enumerate(model.layers):
            model.layers[number] = wrap(block)
        wrapped: nn.Module = wrap(model)
        return wrapped
    policy = library.MixedPrecisionPolicy
    narrow = policy(torch.bfloat16, torch.float32) if setting.narrow else policy()
    for block in model.layers:
        library.fully_shard(block, mesh=mesh, mp_policy=narrow)
    library.fully_shard(model, mesh=mesh, mp_policy=narrow)
    in_place: nn.Module = model
    return in_place


@contextlib.contextmanager
def unsynchronised(setting: Setting, model: Any, is_last: bool) -> Iterator[None]:
    """Collect gradients inside without reducing them, if `setting` says so and it is not the last micro-batch."""
    if setting.synchronises:
        yield
    elif setting.is_class:
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(is_last)
        yield


def clip(setting: Setting, model: Any, most: float) -> float:
    """Clip the gradients, by the way that programs of each door take, and return the norm."""
    if setting.is_class:
        return float(model.clip_grad_norm_(most))
    return float(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), most)))


def gradients(setting: Setting, model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter's whole gradient by its name; FSDP1 has none to show under tensor parallelism."""
    if setting.engine in OURS:
        with summon_full_params(model, with_grads=True):
            return {n: whole(p.grad).clone() for n, p in _named(model) if p.grad is not None}
    if setting.engine == "FSDP1":
        return {}
    return {name: whole(p.grad).clone() for name, p in _named(model) if p.grad is not None}


def weights(setting: Setting, model: Any) -> dict[str, Tensor]:
    """Return every whole parameter by its name."""
    showing: Any = contextlib.nullcontext()
    if setting.engine in OURS:
        showing = summon_full_params(model, writeback=False)
    elif setting.engine == "FSDP1":
        showing = type(model).summon_full_params(model, writeback=False)
    with showing:
        return {name: whole(p.detach()).clone() for name, p in _named(model)}


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in model.named_parameters():
        yield name.replace("_fsdp_wrapped_module.", ""), parameter
