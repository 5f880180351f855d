"""Hooks that a program registers on modules, after they are wrapped: what each finds there, beside FSDP1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from integration_tests.fsdp1.asking import Library, alike
from integration_tests.fsdp1.subjects import Normed, batch, rank, seeded

BOTH = [False, True]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


@alike(ranks=2, originals=BOTH)
def test_what_hooks_find(library: Library, originals: bool) -> Any:
    """Each kind of hook on a wrapped module finds full parameters, in memory, exactly if it does with FSDP1."""
    seen: list[Any] = []
    module = seeded(layers)
    model = library.shard(module, auto_wrap_policy=library.ModuleWrapPolicy({nn.Linear}), use_orig_params=originals)
    for index in (0, 2, 4):
        inner = model.module[index].module
        full = inner.out_features * inner.in_features

        def look(*_: Any, kind: str, inner: Any = inner, full: int = full, index: int = index) -> None:
            held = inner.weight.untyped_storage().nbytes() >= 4 * full
            seen.append((index, kind, held and inner.weight.numel() == full))

        def hook(kind: str, look: Any = look) -> Any:
            return lambda *_: look(kind=kind)

        inner.register_forward_pre_hook(hook("before"))
        inner.register_forward_pre_hook(hook("first"), prepend=True)
        inner.register_forward_hook(hook("after"))
        inner.register_full_backward_pre_hook(hook("backward"))
        inner.register_full_backward_hook(hook("end"))
    for _ in range(2):
        model(batch(rank()).requires_grad_()).sum().backward()
    return seen


@alike(ranks=2)
def test_a_hook_sees_what_a_norm_puts_out(library: Library) -> Any:
    """A BatchNorm that is left out of mixed precision shows a late hook the cast output."""
    seen: list[Any] = []
    model = library.shard(
        seeded(Normed),
        auto_wrap_policy=library.ModuleWrapPolicy({nn.Linear}),
        mixed_precision=library.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    )
    inner = model.norm.module
    inner.register_forward_hook(lambda module, args, y: seen.extend([args[0].dtype, y.dtype, module.weight.numel()]))
    model(batch())
    return seen
