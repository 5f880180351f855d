"""A plan is exact for operations one by one: what they return, take inside and leave for the backward pass.

Each is applied to a tensor that is large beside all others, so that nothing hides behind a larger peak.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatparam import PlanError
from flatparam_plan.costs import measure
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.training import Setup, TrainingProgram

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = (8, 24, 36)


class Applied(nn.Module):
    """A function of an input that is scaled by the only parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def errors_of(make: Callable[[], nn.Module], inputs: Any = None, **settings: Any) -> dict[str, int]:
    """The differences between plan and run."""
    program = TrainingProgram.of(make, inputs, batch=2, sequence=12)
    setup = Setup(**{"world_size": 1, **settings})
    return rehearse(program, setup).costs.errors(measure(program, setup, setup.topology()))


def numbers(*shape: int) -> Tensor:
    """Indices or classes."""
    return torch.zeros(*shape, dtype=torch.int64)


def classes(logits: Tensor, **how: Any) -> Tensor:
    """A cross-entropy over the second dimension."""
    return functional.cross_entropy(logits, numbers(SHAPE[0], SHAPE[2]), **how)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda y: y.gather(1, numbers(8, 10, 36)),
    "log_probability": lambda y: y.log_softmax(-1).gather(-1, numbers(8, 24, 1)),
    "max": lambda y: y.max(1).values,
    "sort": lambda y: y.sort(1).values,
    "topk": lambda y: y.topk(3).values,
    "list_of_rows": lambda y: y[[0, 2]],
    "tensor_of_rows": lambda y: y[:, torch.tensor([1, 1, 3])],
    "index_select": lambda y: y.index_select(1, numbers(9)),
    "take": lambda y: y.take(numbers(50)),
    "written_number": lambda y: y.clone().index_fill_(1, numbers(2), 1.0),
    "softmax_summed_at_once": lambda y: y.softmax(1),
    "log_softmax_summed_at_once": lambda y: y.log_softmax(1),
    "mean": lambda y: y.mean(1) * 2,
    "mean_kept": lambda y: y - y.mean(1, keepdim=True),
    "entropy": classes,
    "entropy_without_some": functools.partial(classes, ignore_index=0),
    "entropy_smoothed": functools.partial(classes, label_smoothing=0.1),
    "entropy_of_each": functools.partial(classes, reduction="none"),
    "entropy_of_logits": lambda y: functional.binary_cross_entropy_with_logits(y, torch.zeros(SHAPE)),
    "entropy_of_weighted_logits": lambda y: functional.binary_cross_entropy_with_logits(
        y, torch.zeros(SHAPE), weight=torch.ones(36), pos_weight=torch.ones(36)
    ),
    "quantile": lambda y: y.quantile(0.3, dim=1),
    "complex_product": lambda y: (torch.complex(y, y) @ torch.complex(y, y).mH).real,
    "product_of_groups": lambda y: torch._grouped_mm(
        y.reshape(-1, 36), torch.ones(4, 36, 20), offs=torch.tensor([9, 20, 20, 192], dtype=torch.int32)
    ).square(),
    "linear_of_columns": lambda y: functional.linear(y.transpose(1, 2), torch.ones(7, 24), torch.ones(7)),
    "linear_of_four": lambda y: functional.linear(y.view(2, 4, 24, 36), torch.ones(7, 36), torch.ones(7)),
    "product_and_sum": lambda y: y.transpose(1, 2) @ torch.ones(24, 7) + torch.ones(7),
    "norm_in_use": lambda y: functional.batch_norm(y, torch.zeros(24), torch.ones(24)),
    "norm_in_training": lambda y: functional.batch_norm(y, None, None, training=True),
    "group_norm": lambda y: functional.group_norm(y, 4),
    "dropout": functional.dropout,
    "random": lambda y: y[:, torch.randperm(24)] + torch.randn_like(y),
    "spectrum": lambda y: torch.fft.rfft(y).abs(),
    "attention_with_a_mask": lambda y: functional.scaled_dot_product_attention(
        *(y.view(2, 4, 24, 36),) * 3, attn_mask=torch.zeros(24, 24)
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_and_its_backward_pass(name: str) -> None:
    """Forward and backward, in the first step and in the second."""
    assert errors_of(lambda: Applied(OPERATIONS[name]), lambda *_: torch.zeros(SHAPE)) == {}


def bags(mode: str, **how: Any) -> Callable[[], nn.Module]:
    """Bags of embeddings, and a layer."""
    return lambda: nn.Sequential(nn.EmbeddingBag(50, 8, mode=mode, **how), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "param_dtype"),
    [
        (bags("sum"), None),
        (bags("mean"), None),
        (bags("max"), None),
        (bags("mean", padding_idx=3), None),
        (bags("sum"), torch.bfloat16),
    ],
    ids=["sum", "mean", "max", "padded", "narrow"],
)
def test_bags_of_embeddings(make: Callable[[], nn.Module], param_dtype: torch.dtype | None) -> None:
    """Whatever they keep for each bag and each token."""
    assert errors_of(make, world_size=4, param_dtype=param_dtype) == {}


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_layer_over_what_a_recurrent_layer_returns(kind: type[nn.RNNBase]) -> None:
    """Its output is laid out by times, so the bias is added to a product."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner = nn.Embedding(30, 8), kind(8, 10, batch_first=True)
            self.head = nn.Linear(10, 300)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.inner(self.embedding(tokens))[0])

    assert errors_of(Recurrent, world_size=4) == {}


def test_equal_arguments_but_for_a_flag() -> None:
    """Of two equal convolutions the first has no gradient of its input to compute; of two means one keeps a dimension.

    What one of them returns is not taken for what the other returns.
    """

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](x))
            return x.mean(1).sum() + (x - x.mean(1, keepdim=True)).square().sum()

    assert errors_of(Convolutions, lambda *_: torch.zeros(16, 8, 64)) == {}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Module]) -> None:
    """Their sizes depend on which tokens there are, and the error says so."""
    with pytest.raises(PlanError, match="sparse=False"):
        errors_of(lambda: nn.Sequential(kind(50, 8, sparse=True), nn.Linear(8, 4)), optimizer="sgd")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda y: y.prod(1), "ProdBackward1"),
        (lambda y: y.cumprod(1), "CumprodBackward0"),
        (lambda y: y.max(), "MaxBackward1"),
    ],
)
def test_a_backward_pass_that_looks_at_values_is_named(function: Callable[[Tensor], Tensor], name: str) -> None:
    """What it takes depends on them, and the plan says that it is not counted."""
    program = TrainingProgram.of(lambda: Applied(function), lambda *_: torch.zeros(SHAPE))
    assert name in rehearse(program, Setup(world_size=1)).unmeasured
