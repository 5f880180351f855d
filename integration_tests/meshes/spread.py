"""Two models as cases for a certificate, and engines that spread them over all dimensions of a mesh by flatparam."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import flatparam
from flatparam_certify import Case
from flatparam_certify.trainer import Loss, SummoningTrainer, Trainer, Whole, whole
from flatparam_meshes import hold_experts
from integration_tests.meshes.llama import LAYERS, LENGTH, VOCABULARY, Attention, Llama, parallelize
from integration_tests.meshes.mixtral import EXPERTS, MoE
from integration_tests.meshes.ring import RingAttention

ROWS = 2


def batch(step: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and those that follow, both of shape (ROWS, LENGTH)."""
    del step, micro_batch, data_rank
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of all tokens."""
    tokens, targets = given
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def build_mixtral() -> nn.Module:
    """Return a Llama with four experts in the place of each MLP."""
    model = Llama(MoE)
    for each in model.modules():
        if isinstance(each, MoE):
            each.experts.reset_parameters(0)
    return model


LLAMA = Case(Llama, batch, loss)
MIXTRAL = Case(build_mixtral, batch, loss)


class Spread(SummoningTrainer):
    """One rank of a model over pipeline stages, copies, shards, experts, parts of a sequence, and tensor parallelism."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Train `module`, which is sharded, and one stage if `mesh` has more than one along `pp`."""
        super().__init__(module, flatparam.FullyShardedDataParallel.summon_full_params)
        self.mesh = mesh
        self.model: Any = module

    def no_sync(self) -> AbstractContextManager[Any] | None:
        """Collect gradients; of a module of `fully_shard`, too."""
        return self.model.no_sync() if hasattr(self.model, "no_sync") else super().no_sync()

    def accumulate(self, loss: Loss, batches: Sequence[Any], no_sync: bool) -> list[Tensor | None]:
        """Compute the gradients of this rank's part of each sequence, by torch's schedules if there are stages."""
        cp = self.mesh["cp"]
        parts = [tuple(each.chunk(cp.size(), 1)[cp.get_local_rank()] for each in given) for given in batches]
        if self.mesh["pp"].size() > 1:
            losses = self._pipelined(loss, parts)
        else:
            losses = super().accumulate(loss, parts, no_sync)
        if cp.size() > 1:
            for each in losses:
                if each is not None:
                    dist.all_reduce(each, group=cp.get_group())
                    each /= cp.size()
        return losses

    def _pipelined(self, loss: Loss, parts: Sequence[Any]) -> list[Tensor | None]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        pp, count = self.mesh["pp"], len(parts)
        stage, stages = pp.get_local_rank(), pp.size()
        pipe = PipelineStage(self.model, stage, stages, torch.device("cpu"), group=pp.get_group())
        schedule: Any = ScheduleGPipe if count < stages else Schedule1F1B

        def of_output(output: Tensor, targets: Tensor) -> Tensor:
            return loss(lambda _: output, (None, targets)) / count

        run = schedule(pipe, n_microbatches=count, loss_fn=of_output, scale_grads=False)
        tokens, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        found: list[Any] = []
        has_ours = hasattr(self.model, "accumulate")
        with self.model.accumulate() if has_ours else nullcontext():
            if stage == stages - 1:
                run.step(*([tokens] if stage == 0 else []), target=targets, losses=found)
            else:
                run.step(*([tokens] if stage == 0 else []))
        if has_ours:
            self.model.reduce_gradients()
        return [each.detach() * count for each in found] or [None] * count

    def clip(self, max_norm: float) -> Tensor | float:
        """Clip to the norm of all stages."""
        parameters, pp = list(self.model.parameters()), self.mesh["pp"]
        if pp.size() == 1:
            return flatparam.clip_grad_norm_(parameters, max_norm)
        total = flatparam.clip_grad_norm_(parameters, math.inf) ** 2
        dist.all_reduce(total, group=pp.get_group())
        total = total.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total


class SpreadByTorch(Spread):
    """The same by torch's `fully_shard`, as torchtitan's trainer does what it leaves to programs.

    That is: the divisor of experts (see `spread`), the norm of parameters on several meshes, and which micro-batch
    reduces.
    """

    def no_sync(self) -> AbstractContextManager[Any] | None:
        """Collect gradients."""
        return Trainer.no_sync(self)

    def weights(self) -> Whole:
        """Return the parameters of this rank, whole."""
        return Trainer.weights(self)

    def gradients(self) -> Whole:
        """Return the gradients of this rank's parameters, whole."""
        return Trainer.gradients(self)

    def clip(self, max_norm: float) -> Tensor | float:
        """Clip to the norm of the parameters of each mesh, and of all stages."""
        of_meshes: dict[Any, list[Any]] = {}
        for each in self.model.parameters():
            if each.grad is not None:
                of_meshes.setdefault(each.device_mesh, []).append(each)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in each]) for each in of_meshes.values()]
        total = torch.stack([whole(norm) for norm in norms]).square().sum()
        if self.mesh["pp"].size() > 1:
            dist.all_reduce(total, group=self.mesh["pp"].get_group())
        total = total.sqrt()
        for each in of_meshes.values():
            torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
        return total


def over(mesh: DeviceMesh, *names: str) -> Any:
    """Return the mesh of one dimension that has the ranks of several."""
    long = [name for name in names if mesh[name].size() > 1] or [names[0]]
    return mesh[long[0]] if len(long) == 1 else mesh[tuple(long)]._flatten("_".join(long))


def spread(
    door: str,
    model: Any,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    *,
    ring: bool = False,
    **arguments: Any,
) -> Spread:
    """Spread `model`, of `LLAMA` or `MIXTRAL`, over `mesh`, and shard each set of experts, each block and the rest.

    Keys and values of a shared sequence are gathered, or travel in torch's ring.
    """
    logging.disable(logging.WARNING)  # torch warns that it could do with fewer collectives
    stages = mesh["pp"].size()
    mine = range(LAYERS)[mesh["pp"].get_local_rank() :: stages] if stages > 1 else range(LAYERS)
    if mine[0] > 0:
        model.embedding = None
    if mine[-1] < LAYERS - 1:
        model.norm = model.output = None
    for number in range(LAYERS):
        if number not in mine:
            model.layers[number] = nn.Identity()
    if mesh["cp"].size() > 1:
        parts = [LENGTH // mesh["cp"].size()] * mesh["cp"].size()
        for each in model.modules():
            if isinstance(each, Attention):
                each.shared = mesh["cp"].get_group(), parts
                each.ring = RingAttention.apply if ring else None
    if mesh["tp"].size() > 1:
        parallelize(model, mesh["tp"], loss_parallel=False)
    mixtures = [each for each in model.modules() if isinstance(each, MoE)]
    for each in mixtures:
        spread_experts(each, mesh)
    is_hybrid = mesh["dp_replicate"].size() > 1

    def shards_of(*names: str) -> Any:
        sharded = over(mesh, *names)
        return mesh["dp_replicate", sharded.mesh_dim_names[0]] if is_hybrid else sharded

    everyone, of_experts = shards_of("dp_shard", "ep", "cp"), shards_of("dp_shard", "cp")
    shard: Any
    if door in ("fully_shard", "FSDP2"):
        library: Any = flatparam if door == "fully_shard" else importlib.import_module("torch.distributed.fsdp")
        policy = library.MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32)
        shard = functools.partial(library.fully_shard, mp_policy=policy, **arguments)
        for each in mixtures:
            shard(each.experts, mesh=of_experts)
        for number in mine:
            shard(model.layers[number], mesh=everyone)
        shard(model, mesh=everyone)
    else:
        shard = functools.partial(
            flatparam.FullyShardedDataParallel,
            sharding_strategy=flatparam.ShardingStrategy.HYBRID_SHARD if is_hybrid else None,
            mixed_precision=None if dtype is None else flatparam.MixedPrecision(dtype, torch.float32),
            use_orig_params=door == "originals",
            device_id=torch.device("cpu"),
            **arguments,
        )
        for each in mixtures:
            each.experts = shard(each.experts, device_mesh=of_experts)
        for number in mine:
            model.layers[number] = shard(model.layers[number], device_mesh=everyone)
        model = shard(model, device_mesh=everyone)
    if door == "FSDP2":
        inner: Any
        for name, inner in model.named_modules():
            if not hasattr(inner, "set_gradient_divide_factor"):
                continue
            is_expert = name.endswith("experts")
            if is_expert and mesh["ep"].size() > 1:
                inner.set_gradient_divide_factor(float(everyone.size()))
            if (of_experts if is_expert else everyone).size() > 1:
                # Gloo has no sum that multiplies, which torch asks for otherwise.
                inner.set_force_sum_reduction_for_comms(True)
        return SpreadByTorch(model, mesh)
    if mixtures and mesh["ep"].size() > 1:
        assert hold_experts(model) == len(mixtures)
    return Spread(model, mesh)


def spread_experts(mixture: MoE, mesh: DeviceMesh) -> None:
    """Have each rank of `ep` hold some experts, and each of `tp` a part of each: columns first, then rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    names = [name for name in ("ep", "tp") if mesh[name].size() > 1]
    if not names:
        return
    experts = mixture.experts
    if mesh["ep"].size() > 1:
        mixture.group, mixture.ranks = mesh["ep"].get_group(), mesh["ep"].size()
    if mesh["tp"].size() > 1:
        experts.shared = mesh["tp"].get_group()
    for name, cut in (("up", 2), ("down", 1)):
        places = [Shard(0) if each == "ep" else Shard(cut) for each in names]
        spread_out = distribute_tensor(getattr(experts, name).detach(), mesh[tuple(names)], places)
        setattr(experts, name, nn.Parameter(spread_out))
    assert EXPERTS % mixture.ranks == 0


originals = functools.partial(spread, "originals")
flat = functools.partial(spread, "flat")
in_place = functools.partial(spread, "fully_shard")
torchs = functools.partial(spread, "FSDP2")
exact = functools.partial(spread, "originals", reduction="exact")
ringed = functools.partial(spread, "originals", ring=True)
