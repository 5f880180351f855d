"""What the documentation of `MixedPrecision`, of the strategies and of the forms of state says, sentence by sentence."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from integration_tests.fsdp1.asking import Library, alike, unlike
from integration_tests.fsdp1.subjects import Normed, batch, blocks, rank, seeded

BOTH = [False, True]
BF16 = torch.bfloat16


def dtypes(pairs: Any) -> list[tuple[str, str]]:
    """The dtype of each tensor, by its name."""
    return [(name, str(value.dtype)) for name, value in pairs]


@alike(ranks=2, keep=BOTH, reduce=["None", "float32", "bfloat16"], originals=BOTH)
def test_dtypes_of_gradients(library: Library, keep: bool, reduce: str, originals: bool) -> Any:
    """Gradients are in full precision, or kept in the dtype of their reduction, which is by default that of parameters."""
    precision = library.MixedPrecision(
        param_dtype=BF16, reduce_dtype=getattr(torch, reduce, None), keep_low_precision_grads=keep
    )
    model = library.shard(seeded(), mixed_precision=precision, use_orig_params=originals)
    model(batch(rank())).float().square().mean().backward()
    found = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    return [found, {parameter.dtype for parameter in model.parameters()}]


@alike(ranks=2, form=["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_dtypes_of_states(library: Library, form: str) -> Any:
    """States have parameters in full precision; buffers too, but for the local form."""
    precision = library.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), mixed_precision=precision)
    model(batch())
    library.FSDP.set_state_dict_type(model, library.StateDictType[form])
    return sorted(dtypes(model.state_dict().items()))


@alike(ranks=2, originals=BOTH)
def test_dtypes_while_summoned(library: Library, originals: bool) -> Any:
    """Parameters are in full precision then, buffers are not; in the forward pass both are in low precision."""
    precision = library.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)
    seen: list[Any] = []
    model = library.shard(
        seeded(), auto_wrap_policy=blocks(library), mixed_precision=precision, use_orig_params=originals
    )
    up, block = model.blocks[0].module.up, model.blocks[0].module
    up.register_forward_hook(
        lambda module, args, y: seen.extend([module.weight.dtype, args[0].dtype, y.dtype, block.scale.dtype])
    )
    before = dtypes(model.named_buffers())
    y = model(batch())
    with library.FSDP.summon_full_params(model, writeback=False):
        summoned = dtypes(model.named_parameters()), dtypes(model.named_buffers())
    return [before, seen, y.dtype, summoned, dtypes(model.named_buffers())]


@alike(ranks=2, root=BOTH, below=BOTH, own=BOTH)
def test_where_inputs_are_cast(library: Library, root: bool, below: bool, own: bool) -> Any:
    """`cast_root_forward_inputs` decides for the root, `cast_forward_inputs` for units with parameters of their own."""
    seen: list[Any] = []

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 2)
            self.offset = nn.Parameter(torch.zeros(3)) if own else 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.dtype)
            y = self.first(x.to(BF16) + self.offset)
            seen.append(y.dtype)
            return self.second(y.float() if below else y)

    precision = library.MixedPrecision(BF16, cast_forward_inputs=below, cast_root_forward_inputs=root)
    module = seeded(Between)
    module.second.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    policy = library.ModuleWrapPolicy({nn.Linear})
    model = library.shard(module, auto_wrap_policy=policy, mixed_precision=precision)
    return [model(batch()).dtype, seen]


@alike(ranks=2, mode=["train", "eval"])
def test_what_a_norm_computes_in(library: Library, mode: str) -> Any:
    """A BatchNorm that is left out takes and keeps fp32, and its output has the dtype of its input."""
    seen: list[Any] = []
    model = library.shard(
        seeded(Normed),
        auto_wrap_policy=library.ModuleWrapPolicy({nn.Linear}),
        mixed_precision=library.MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
    )
    model.train(mode == "train")
    model.norm.module.register_forward_hook(
        lambda module, args, y: seen.extend([args[0].dtype, y.dtype, module.weight.dtype])
    )
    model.last.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    return [model(batch()).dtype, seen, dtypes(model.named_buffers())]


@unlike("Full parameters are listed inside the forward pass", ranks=2, ours=[True])
def test_what_is_listed_after_a_forward_pass(library: Library) -> Any:
    """Under SHARD_GRAD_OP FSDP1 lists the original parameters whole between the passes, and not what an optimizer holds."""
    model = library.shard(
        seeded(lambda: nn.Linear(3, 4)),
        sharding_strategy=library.ShardingStrategy.SHARD_GRAD_OP,
        use_orig_params=True,
    )
    before = sum(parameter.numel() for parameter in model.parameters())
    model(batch())
    return [sum(parameter.numel() for parameter in model.parameters()) == before]


@unlike("A sharded original keeps its number of dimensions", ranks=2, ours=[2, 2])
def test_dimensions_of_sharded_originals(library: Library) -> Any:
    """In FSDP1 they have one."""
    model = library.shard(
        seeded(lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))),
        use_orig_params=True,
    )
    return [parameter.dim() for parameter in model.parameters()]


@alike(ranks=2, originals=BOTH)
def test_rank0_only(library: Library, originals: bool) -> Any:
    """A full state with `rank0_only` is on rank 0; the others have what is sharded by nobody."""
    model = library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals)
    config = library.FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with library.FSDP.state_dict_type(model, library.StateDictType.FULL_STATE_DICT, config):
        return list(model.state_dict())


@alike(ranks=2, originals=BOTH, form=["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_state_of_each_form_is_loaded(library: Library, originals: bool, form: str) -> Any:
    """What one saved another loads, in each form that FSDP1 can load."""
    one, other = (
        library.shard(seeded(), auto_wrap_policy=blocks(library), use_orig_params=originals) for _ in range(2)
    )
    with library.FSDP.summon_full_params(one), torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(3)
    for model in (one, other):
        library.FSDP.set_state_dict_type(model, library.StateDictType[form])
    loaded = other.load_state_dict(one.state_dict())
    return [repr(loaded), one(batch()), other(batch())]


class Casts(TorchDispatchMode):
    """Knows the matrices in bfloat16 that were made of others, and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_to_copy" and out.dtype == BF16 and out.shape in ((6, 4), (4, 6)):
            self.made.append(weakref.ref(out))
        return out

    def counts(self) -> tuple[int, int]:
        return len(self.made), sum(made() is not None for made in self.made)


@alike(ranks=2, strategy=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], originals=BOTH)
def test_one_region_of_autocast(library: Library, strategy: str, originals: bool) -> Any:
    """Inside one region evaluation casts the weights in each pass and keeps none, and steps see the weights of each."""
    model = library.shard(
        seeded(),
        auto_wrap_policy=blocks(library),
        sharding_strategy=library.ShardingStrategy[strategy],
        use_orig_params=originals,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=BF16), Casts() as casts:
        with torch.no_grad():
            answers: list[Any] = [model(batch()).tolist(), casts.counts()]
            answers += [model(batch()).tolist(), casts.counts()]
        for _ in range(3):
            loss = model(batch(rank())).float().square().mean()
            loss.backward()
            answers += [loss.item(), casts.counts()]
            optimizer.step()
            optimizer.zero_grad()
    return answers
