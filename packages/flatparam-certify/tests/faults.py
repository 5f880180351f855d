"""Engines with one fault each, and a right one: data parallel by hand, with gradients that `finish` reduces."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import programs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flatparam_certify import Trainer


class ByHand(Trainer):
    """The right one: after the last backward pass, gradients are averaged over all ranks."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module)
        self.mesh = mesh
        self.size = mesh.size()
        self.count = 0

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by name."""
        return dict(self.module.named_parameters())

    def no_sync(self) -> AbstractContextManager[Any]:
        """Nothing is reduced before `finish`."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Count the micro-batches."""
        self.count += 1
        super().backward(loss)

    def reduce(self, gradient: Tensor, group: Any = None) -> None:
        """Average over a group."""
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)

    def finish(self) -> None:
        """Average every gradient over all ranks."""
        for parameter in self.named.values():
            if parameter.grad is not None:
                self.reduce(parameter.grad)


class ExpertsDividedTwice(ByHand):
    """The divisor of experts has the size of their mesh in it once more."""

    def finish(self) -> None:
        super().finish()
        for name, parameter in self.named.items():
            if "experts" in name:
                parameter.grad /= self.mesh["ep"].size()


class DoubledInGroupsOfOne(ByHand):
    """In a group of one rank, nothing is copied: the sum is added to itself with each micro-batch."""

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.mesh["dp_shard"].size() == 1:
            for parameter in self.named.values():
                parameter.grad *= 2


class OnlyLast(ByHand):
    """Each micro-batch overwrites what was there."""

    def backward(self, loss: Tensor) -> None:
        self.module.zero_grad()
        super().backward(loss)


class WithoutLast(ByHand):
    """The gradients are taken before the last micro-batch has added its own."""

    def accumulate(self, loss: Any, batches: Any, no_sync: bool) -> list[Any]:
        if len(batches) == 1:
            return super().accumulate(loss, batches, no_sync)
        losses: list[Any] = []
        for batch in batches:
            found = self.forward(loss, batch)
            losses.append(found)
            if len(losses) < len(batches):
                (found / len(batches)).backward()
        return losses


class SummedInBf16(ByHand):
    """Gradients travel in bf16, and are summed in it."""

    def reduce(self, gradient: Tensor, group: Any = None) -> None:
        short = gradient.bfloat16()
        super().reduce(short, group)
        gradient.copy_(short)


class DividedByMicroBatches(ByHand):
    """The loss is divided by their number a second time."""

    def finish(self) -> None:
        for parameter in self.named.values():
            parameter.grad /= self.count
        self.count = 0
        super().finish()


class NoSyncWithoutEffect(ByHand):
    """Every backward pass reduces."""

    def backward(self, loss: Tensor) -> None:
        before = {name: each.grad.clone() for name, each in self.named.items() if each.grad is not None}
        super().backward(loss)
        for name, parameter in self.named.items():
            own = parameter.grad - before.get(name, 0)
            self.reduce(own)
            parameter.grad = before.get(name, 0) + own

    def finish(self) -> None:
        """Nothing is left to do."""


class ReplicasNotReduced(ByHand):
    """Gradients are averaged over the shard group alone."""

    def finish(self) -> None:
        for parameter in self.named.values():
            self.reduce(parameter.grad, self.mesh.get_group("dp_shard"))


class NothingReducedInGroupsOfOne(ByHand):
    """A shard group of one rank is taken for a world of one rank."""

    def finish(self) -> None:
        if self.mesh["dp_shard"].size() > 1:
            super().finish()


class Summed(ByHand):
    """Gradients are summed, and not averaged."""

    def reduce(self, gradient: Tensor, group: Any = None) -> None:
        dist.all_reduce(gradient, group=group)


class WithoutRankOne(ByHand):
    """Rank 1 is not in the sum."""

    def reduce(self, gradient: Tensor, group: Any = None) -> None:
        if dist.get_rank() == 1:
            gradient.zero_()
        super().reduce(gradient, group)


class LastShardLost(ByHand):
    """The last rank's shard of one parameter gets no gradient."""

    def finish(self) -> None:
        super().finish()
        self.named["up.weight"].grad[4:] = 0


class ZeroOnRankOne(ByHand):
    """Rank 1 loses a gradient."""

    def finish(self) -> None:
        super().finish()
        if dist.get_rank() == 1:
            self.named["up.bias"].grad.zero_()


class Detached(ByHand):
    """One parameter takes no part."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module, mesh)
        self.named["up.bias"].requires_grad_(False)


class OwnWeights(ByHand):
    """Ranks begin with weights of their own."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(module, mesh)
        with torch.no_grad():
            self.named["down.weight"].add_(0.1 * dist.get_rank())


class OwnUpdates(ByHand):
    """Each rank's optimizer sees its own rounding of one gradient, which the certificate does not."""

    def optimizer(self, make: Any) -> torch.optim.Optimizer:
        made = make(self.module.parameters())
        made.register_step_post_hook(lambda *_: self.named["up.bias"].data.mul_(1 + 1e-6 * dist.get_rank()))
        return made


class LossScaled(ByHand):
    """The loss that is returned is half of it; its gradient is not."""

    def forward(self, loss: Any, batch: Any) -> Tensor:
        return super().forward(loss, batch) / 2

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * 2)


class Stale(ByHand):
    """The optimizer's `zero_grad` has no effect."""

    def optimizer(self, make: Any) -> torch.optim.Optimizer:
        made = make(self.module.parameters())
        made.zero_grad = lambda *_, **__: None
        return made

    def finish(self) -> None:
        # What is there from the step before is the same everywhere, and so is its mean.
        super().finish()


class NeverUpdated(ByHand):
    """The optimizer does not know one parameter."""

    def optimizer(self, make: Any) -> torch.optim.Optimizer:
        return make([each for name, each in self.named.items() if name != "norm.weight"])


class NormOfCopies(ByHand):
    """The norm counts every copy of a parameter."""

    def clip(self, max_norm: float) -> Tensor:
        square = sum(each.grad.square().sum() for each in self.named.values())
        dist.all_reduce(square)
        norm = square.sqrt()
        for each in self.named.values():
            each.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


class NormOfPart(ByHand):
    """Each rank clips by the norm of its own part of the parameters."""

    def clip(self, max_norm: float) -> Tensor:
        mine = [each for at, each in enumerate(self.named.values()) if at % self.size == dist.get_rank()]
        norm = torch.sqrt(sum(each.grad.square().sum() for each in mine))
        for each in self.named.values():
            each.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


class NotClipped(ByHand):
    """The norm is right, and nothing is clipped."""

    def clip(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), 1e9)


class ByRows(ByHand):
    """The right one for ranks that share a batch along one dimension: each computes its rows of it."""

    along = "cp"

    def forward(self, loss: Any, batch: Any) -> Tensor:
        mesh = self.mesh[self.along]
        return super().forward(loss, programs.rows_of(batch, mesh.get_local_rank(), mesh.size()))


class NormOfTpNotReduced(ByRows):
    """Under sequence parallelism, the gradients of the norm are partial, and nobody sums them."""

    along = "tp"

    def finish(self) -> None:
        for name, parameter in self.named.items():
            if name.startswith("norm"):
                parameter.grad /= self.size
            else:
                self.reduce(parameter.grad)


class SummedOverCp(ByRows):
    """Means over parts of a sequence are summed."""

    def reduce(self, gradient: Tensor, group: Any = None) -> None:
        dist.all_reduce(gradient, group=group)


class Hung(ByHand):
    """Rank 1 leaves a collective out."""

    def finish(self) -> None:
        if dist.get_rank() != 1:
            super().finish()


class Raised(ByHand):
    """Rank 1 fails."""

    def finish(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("rank 1 has had enough")
        super().finish()


class ByStages(ByHand):
    """The right one for a pipeline of two stages: activations go to rank 1, and their gradients come back."""

    def __init__(self, module: Any, mesh: DeviceMesh) -> None:
        super().__init__(module, mesh)
        self.stage, self.stages = mesh["pp"].get_local_rank(), mesh["pp"].size()

    def forward(self, loss: Any, batch: Any) -> Tensor:
        """Nobody calls this, as `accumulate` runs the stages."""
        raise AssertionError

    def accumulate(self, loss: Any, batches: Any, no_sync: bool) -> list[Any]:
        if self.stages == 1:
            return [self._alone(loss, batch, len(batches)) for batch in batches]
        return [self._staged(loss, batch, len(batches)) for batch in batches]

    def _alone(self, loss: Any, batch: Any, count: int) -> Tensor:
        found = loss(self.module, batch)
        (found / count).backward()
        return found.detach()

    def _staged(self, loss: Any, batch: Any, count: int) -> Tensor | None:
        model: Any = self.module
        inputs, _ = batch
        if self.stage == 0:
            hidden = model.down(torch.relu(model.up(model.norm(inputs))))
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            self.backward_of_first(hidden, gradient)
            return None
        hidden = torch.empty(len(inputs), 6)
        dist.recv(hidden, 0)
        hidden.requires_grad_()

        def second(_: Tensor) -> Tensor:
            return sum((torch.tanh(expert(hidden)) for expert in model.experts), torch.zeros(()))

        found = loss(second, batch)
        (found / count).backward()
        dist.send(hidden.grad, 0)
        return found.detach()

    def backward_of_first(self, hidden: Tensor, gradient: Tensor) -> None:
        """Go on with the gradient that came back."""
        hidden.backward(gradient)

    def _mine(self) -> dict[str, nn.Parameter]:
        def is_mine(name: str) -> bool:
            return self.stages == 1 or ("experts" in name) == (self.stage == 1)

        return {name: each for name, each in self.named.items() if is_mine(name)}

    def finish(self) -> None:
        """Each stage has the gradients of its own parameters."""

    def optimizer(self, make: Any) -> torch.optim.Optimizer:
        return make(self._mine().values())

    def clip(self, max_norm: float) -> Tensor:
        square = sum(each.grad.square().sum() for each in self._mine().values())
        dist.all_reduce(square)
        norm = square.sqrt()
        for each in self._mine().values():
            each.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm

    def weights(self) -> dict[str, Any]:
        return {name: each.detach() for name, each in self._mine().items()}

    def gradients(self) -> dict[str, Any]:
        return {name: each.grad for name, each in self._mine().items()}


class FirstStageSkipsLast(ByStages):
    """The first stage drops the gradient of the last of several micro-batches."""

    left = 0

    def accumulate(self, loss: Any, batches: Any, no_sync: bool) -> list[Any]:
        self.left = len(batches) if len(batches) > 1 else 0
        return super().accumulate(loss, batches, no_sync)

    def backward_of_first(self, hidden: Tensor, gradient: Tensor) -> None:
        self.left -= 1
        if self.left:
            super().backward_of_first(hidden, gradient)


class _SumOverTp(torch.autograd.Function):
    """A sum over ranks of tensor parallelism, in a dtype; its gradient is that of each term."""

    @staticmethod
    def forward(context: Any, value: Tensor, group: Any, dtype: torch.dtype) -> Tensor:
        short = value.to(dtype)
        dist.all_reduce(short, group=group)
        return short.to(value.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _ForTp(torch.autograd.Function):
    """What each rank of tensor parallelism takes; its gradients are summed, in a dtype."""

    @staticmethod
    def forward(context: Any, value: Tensor, group: Any, dtype: torch.dtype) -> Tensor:
        context.group, context.dtype = group, dtype
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        short = gradients[0].to(context.dtype)
        dist.all_reduce(short, group=context.group)
        return short.to(gradients[0].dtype), None, None


class ByColumns(ByHand):
    """The right one for tensor parallelism: each rank has some rows of `up` and the same columns of `down`."""

    backward_dtype = torch.float32

    def __init__(self, module: Any, mesh: DeviceMesh) -> None:
        super().__init__(module, mesh)
        part, size = mesh["tp"].get_local_rank(), mesh["tp"].size()
        self.group = mesh.get_group("tp")
        up, down = module.up, module.down
        up.weight = nn.Parameter(up.weight.detach().chunk(size)[part].clone())
        up.bias = nn.Parameter(up.bias.detach().chunk(size)[part].clone())
        down.weight = nn.Parameter(down.weight.detach().chunk(size, 1)[part].clone())
        bias, down.bias = down.bias, None
        down.register_parameter("bias", None)
        module.shared = bias
        up.register_forward_pre_hook(lambda _, args: _ForTp.apply(args[0], self.group, self.backward_dtype))
        down.register_forward_hook(lambda _, args, output: _SumOverTp.apply(output, self.group, torch.float32) + bias)

    def finish(self) -> None:
        """Each rank has the gradients of its part, and whole ones of the rest."""

    def clip(self, max_norm: float) -> Tensor:
        """Parts count on their rank, and the rest once."""
        norm = torch.stack([each.norm() for each in self.gradients().values()]).norm()
        for each in self.named.values():
            each.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if name not in ("up.weight", "up.bias", "down.weight"):
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, 1 if name == "down.weight" else 0)

    def _all(self, of: Any) -> dict[str, Any]:
        found = {name: self._whole(name, of(each)) for name, each in self.named.items()}
        return {name.replace("shared", "down.bias"): each for name, each in found.items()}

    def weights(self) -> dict[str, Any]:
        """Gather the parts."""
        return self._all(lambda each: each.detach())

    def gradients(self) -> dict[str, Any]:
        """Gather the parts."""
        return self._all(lambda each: each.grad)


class TpSumsInBf16(ByColumns):
    """The sums of tensor parallelism in the backward pass are in bf16."""

    backward_dtype = torch.bfloat16


def by_torch(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Return the model, tensor-parallel by torch's own parts: parameters are DTensors."""
    return parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
