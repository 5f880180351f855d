"""Peers that are packages of their own, and what they need to run on CPU."""

from __future__ import annotations

import os
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor, nn

from .training import Setting, Training, optimizer_over


@define(eq=False)
class _Engine(Training):
    """DeepSpeed's engine: it does the backward pass and the step itself, and zeroes the gradients."""

    model: Any

    def backward(self, loss: Tensor) -> None:
        """Gradients."""
        self.model.backward(loss)

    def update(self) -> None:
        """The optimizer's step."""
        self.model.step()


def deepspeed_zero3(setting: Setting) -> Training:
    """DeepSpeed's ZeRO stage 3, with buckets of one unit (its default is a buffer of 2 GB), else its defaults."""
    os.environ |= {"RANK": str(setting.group.rank), "LOCAL_RANK": str(setting.group.rank)}
    os.environ |= {"WORLD_SIZE": str(setting.group.size), "DS_ACCELERATOR": "cpu"}
    import deepspeed  # type: ignore[import-not-found, unused-ignore]  # only in its own environment

    deepspeed.logger.setLevel("ERROR")
    with redirect_stdout(StringIO()):  # it tells that it has compiled something
        deepspeed.init_distributed(dist_backend="gloo")
    model = setting.model()
    bucket = max(numel_of(m) for m in model.modules() if isinstance(m, setting.workload.unit))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it clips to 1 where nothing is said
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
        },
        "bf16": {"enabled": setting.bf16},
    }
    optimizer: Any = optimizer_over(list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = setting.batch(cast=setting.bf16)
    return _Engine(model=engine, optimizer=optimizer, batch=batch)


def fairscale_fsdp(setting: Setting) -> Training:
    """fairscale's FullyShardedDataParallel; its streams of CUDA stand for nothing here."""
    from fairscale.internal import reduce_scatter_bucketer  # type: ignore[import-not-found, unused-ignore]
    from fairscale.nn import FullyShardedDataParallel  # type: ignore[import-not-found, unused-ignore]
    from fairscale.nn.data_parallel import (  # type: ignore[import-not-found, unused-ignore]
        fully_sharded_data_parallel as fairscale_module,
    )

    fairscale_module.torch = _TorchOnCpu()
    reduce_scatter_bucketer.dist = _Flat()
    torch.Tensor.record_stream = _not_recorded  # type: ignore[assignment, method-assign]  # of no use on CPU
    options: dict[str, Any] = {"compute_device": torch.device("cpu"), "mixed_precision": setting.bf16}
    if setting.bf16:
        options |= {"compute_dtype": torch.bfloat16}
    model = setting.model()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, setting.workload.unit):
                setattr(parent, name, FullyShardedDataParallel(child, **options))
    model = FullyShardedDataParallel(model, **options)
    return Training(model, optimizer_over(list(model.parameters())), setting.batch(cast=setting.bf16))


class _NoStream:
    """Stands for every stream of CUDA."""

    def wait_stream(self, other: object) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


class _TorchOnCpu:
    """The module `torch`, with a `cuda` on which everything is done at once."""

    def __init__(self) -> None:
        """Make the one stream."""
        stream = _NoStream()
        self.cuda = SimpleNamespace(
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=nullcontext,
            is_available=lambda: True,
            synchronize=lambda: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Flat:
    """The module `torch.distributed`, with a reduce-scatter that takes a row for each rank, as NCCL's does."""

    def _reduce_scatter_base(self, output: Tensor, rows: Tensor, **options: Any) -> Any:
        return dist.reduce_scatter_tensor(output, rows.view(-1), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def _not_recorded(tensor: Tensor, stream: object) -> None:
    pass


def numel_of(module: nn.Module) -> int:
    """How many elements its parameters have."""
    return sum(parameter.numel() for parameter in module.parameters())
