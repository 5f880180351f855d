"""Frozen parameters of a wrapper class, such as quantised weights: sharded as bytes, shown as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, ShardedEMA
from flatparam_comm import Collectives, FlatParamError, run_threads
from flatparam_state.places import places_in


class Scaled(Tensor):
    """Whole numbers of 8 bits, and a scale for each row; made of two inner tensors."""

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype)  # type: ignore[assignment]
        made.numbers, made.scales = numbers, scales
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        """`weight`, rounded."""
        scales = weight.detach().abs().amax(1) / 127
        return cls((weight.detach() / scales[:, None]).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, *_: Any) -> Scaled:
        return cls(inner["numbers"], inner["scales"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, *bias = args
            return function(x, weight.numbers * weight.scales[:, None], *bias)
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].numbers), function(args[0].scales))
        raise NotImplementedError(f"{function} of {cls.__name__}")


class Adapted(nn.Module):
    """A rounded layer, and a trained one beside it."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 5)
        self.base.weight = nn.Parameter(Scaled.of(self.base.weight), requires_grad=not frozen)
        self.adapter = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]


def trained(model: nn.Module, inputs: list[Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(3):
        losses = torch.stack([model(x).square().mean() for x in inputs])
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses.tolist())
    return found


INPUTS = list(torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)))


@each_row("use_orig_params", [False, True], ids=["flat", "originals"])
def test_training_on_top_of_it(use_orig_params: bool) -> None:
    """Losses and the weights at the end are those of one process, bit for bit; a rank keeps half of the bytes."""

    def program(world: Collectives) -> Any:
        model = FullyShardedDataParallel(Adapted(), use_orig_params=use_orig_params)
        losses = trained(model, [INPUTS[world.rank]])
        with ShardedEMA(model, 0.5).applied(model), torch.no_grad():
            model(INPUTS[0])
        flat = [place.handle.flat_param for place in places_in(model)]
        kept = {each.dtype: each.nbytes for each in flat}
        state = model.state_dict()
        model.load_state_dict({name: value.clone() for name, value in state.items()})
        return losses, kept[torch.uint8], state, model.state_dict()

    whole = Adapted()
    expected = trained(whole, INPUTS)
    # 40 numbers of a byte, filled up to 48, and 5 scales, filled up to 32 bytes.
    for rank, (losses, nbytes, *states) in enumerate(run_threads(2, program)):
        assert [of_ranks[rank] for of_ranks in expected] == [loss for (loss,) in losses]
        assert nbytes == (48 + 32) // 2
        for state in states:
            found = state["base.weight"]
            assert type(found) is Scaled
            assert torch.equal(found.numbers, whole.base.weight.numbers)  # type: ignore[arg-type]
            assert torch.equal(found.scales, whole.base.weight.scales)  # type: ignore[arg-type]
            assert torch.equal(state["adapter.weight"], whole.adapter.weight)


def test_one_that_is_trained_is_refused() -> None:
    """A parameter of such a class that requires a gradient is refused, with its name, its class and what to do."""

    def program(world: Collectives) -> None:
        with pytest.raises(FlatParamError, match=r"'base\.weight' is a .*Scaled.*freeze it.*\(LoRA\)"):
            FullyShardedDataParallel(Adapted(frozen=False))

    run_threads(2, program)


def test_a_different_tensor_is_not_loaded() -> None:
    """A plain tensor in the place of one, or one of a different shape, is refused by name; nothing is changed."""

    def program(world: Collectives) -> None:
        model = FullyShardedDataParallel(Adapted())
        state = model.state_dict()
        for other in (torch.zeros(5, 8), Scaled.of(torch.ones(4, 8))):
            with pytest.raises(RuntimeError, match=r"parameter 'base\.weight'"):
                model.load_state_dict({**state, "base.weight": other})
        assert torch.equal(model.state_dict()["base.weight"].numbers, state["base.weight"].numbers)

    run_threads(2, program)
