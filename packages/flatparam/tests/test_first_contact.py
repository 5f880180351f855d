"""What programs that were not written here do with the wrapper, and how it once failed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint import state_dict as torchs

from flatparam import FlatParameter, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import CollectiveError, Collectives, SingleCollectives
from flatparam_core import FlatParamError

from .models import seeded
from .worlds import assert_same_state, on_ranks

VOCABULARY, WIDTH = 700, 96
HERE = SingleCollectives()


class Block(nn.Module):
    """Projections without biases, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Language(nn.Module):
    """A model whose units are long: embedding, blocks, and an output layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.embed(tokens)))
        return out


def loss(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


# Units of long parameters only


@each_row("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@each_row("classes", [{Block}, {nn.Linear, nn.Embedding, nn.RMSNorm}], ids=["blocks", "layers"])
def test_units_of_long_parameters_alone(
    classes: set[type[nn.Module]], dtype: torch.dtype | None, use_orig_params: bool
) -> None:
    """They train; in fp32 to the bits of one process on the mean of the losses."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(
            seeded(Language),
            auto_wrap_policy=ModuleWrapPolicy(classes),
            mixed_precision=None if dtype is None else MixedPrecision(param_dtype=dtype),
            use_orig_params=use_orig_params,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(loss(model, ranks.rank, 0))
            losses[-1].backward()
            optimizer.step()
        return model.state_dict(), [each.item() for each in losses]

    results = on_ranks(2, rank)
    assert all(losses[-1] < losses[0] for _, losses in results)
    if dtype is None:
        plain = seeded(Language)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            for each in range(2):
                (loss(plain, each) / 2).backward()
            optimizer.step()
        for state, _ in results:
            assert_same_state(state, plain.state_dict())


def test_one_long_linear_layer_in_bfloat16() -> None:
    """The one line of the report: a layer without a bias, wrapped by itself, in bf16."""

    def rank(ranks: Collectives) -> None:
        layer = FSDP(nn.Linear(300, 300, bias=False), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
        layer(torch.ones(2, 300)).float().square().mean().backward()
        assert all(p.grad is not None for p in layer.parameters())

    on_ranks(2, rank)


# Activation checkpointing that comes late


def late(model: nn.Module) -> None:
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda child: isinstance(child, Block)
    )


@pytest.mark.parametrize("form", ["full", "on rank 0"])
@pytest.mark.parametrize("source_late", [False, True], ids=["early", "late"])
def test_loading_after_late_activation_checkpointing(source_late: bool, form: str, use_orig_params: bool) -> None:
    """A unit's module may be put into a checkpoint wrapper after wrapping: states of any form load, and it trains."""

    def build(seed: int) -> FSDP:
        return FSDP(
            seeded(Language, seed),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
        )

    def rank(ranks: Collectives) -> Any:
        source, target = build(1), build(2)
        late(target)
        if source_late:
            late(source)
        rank0_only = form == "on rank 0"
        for model in (source, target):
            FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=rank0_only))
        target.load_state_dict(source.state_dict())
        FSDP.set_state_dict_type(target, StateDictType.FULL_STATE_DICT)
        loss(target, ranks.rank).backward()
        names = {name for name, p in target.named_parameters() if p.grad is not None}
        assert names
        return target.state_dict()

    for state in on_ranks(2, rank):
        assert_same_state(state, seeded(Language, 1).state_dict())


# What stands for a tensor


class Lazy:
    """Becomes a tensor when one of torch's functions is called with it, as Lightning's lazily loaded ones."""

    def __init__(self, tensor: torch.Tensor, with_shape: bool) -> None:
        self.tensor = tensor
        if with_shape:
            self.shape, self.dtype = tensor.shape, tensor.dtype

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loaded = [each.tensor if isinstance(each, Lazy) else each for each in args]
        named = {name: each.tensor if isinstance(each, Lazy) else each for name, each in (kwargs or {}).items()}
        return function(*loaded, **named)


@pytest.mark.parametrize("with_shape", [False, True])
@pytest.mark.parametrize("rank0_only", [False, True])
def test_tensor_likes_are_loaded(rank0_only: bool, with_shape: bool, use_orig_params: bool) -> None:
    """Anything that becomes a tensor through `__torch_function__` loads as that tensor; a wrong shape is refused."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(Language, 2), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
        state: dict[str, Any] = {
            name: Lazy(value, with_shape) for name, value in seeded(Language, 1).state_dict().items()
        }
        if rank0_only:
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
                model.load_state_dict(state if ranks.rank == 0 else {})
        else:
            wrong = {**state, "head.weight": Lazy(torch.ones(2, 2), with_shape)}
            with pytest.raises(RuntimeError, match=r"'head.weight': expected .*found shape \(2, 2\)"):
                model.load_state_dict(wrong)
            model.load_state_dict(state)
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert_same_state(state, seeded(Language, 1).state_dict())


# Torch's own functions for distributed state


def calls(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    plain = seeded(Language).state_dict()
    return {
        "get_model_state_dict": lambda: torchs.get_model_state_dict(model),
        "get_optimizer_state_dict": lambda: torchs.get_optimizer_state_dict(model, optimizer),
        "get_state_dict": lambda: torchs.get_state_dict(model, optimizer),
        "set_model_state_dict": lambda: torchs.set_model_state_dict(model, plain),
        "set_optimizer_state_dict": lambda: torchs.set_optimizer_state_dict(
            model, optimizer, {"state": {}, "param_groups": []}
        ),
        "set_state_dict": lambda: torchs.set_state_dict(
            model, optimizer, model_state_dict=plain, optim_state_dict={"state": {}, "param_groups": []}
        ),
    }


@each_row("below", [False, True], ids=["root", "in a plain module"])
@each_row("name", [name for name in dir(torchs) if name in calls(nn.Linear(1, 1), None)])  # type: ignore[arg-type]
def test_torchs_functions_name_ours(name: str, below: bool, use_orig_params: bool) -> None:
    """Each function of torch.distributed.checkpoint.state_dict is an error on every rank that names flatparam's."""

    def rank(ranks: Collectives) -> None:
        model: nn.Module = FSDP(
            seeded(Language), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params
        )
        model = nn.Sequential(model) if below else model
        optimizer = torch.optim.AdamW(model.parameters())
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(FlatParamError, match=rf"rank {ranks.rank}: .*flatparam.checkpoint.state_dict .*{name}"):
            calls(model, optimizer)[name]()
        assert optimizer.state_dict() == before

    on_ranks(2, rank)


# Wrapped again


@each_row("what", ["the module", "its wrapper", "the wrapper's module"])
def test_wrapping_again(what: str, use_orig_params: bool) -> None:
    """What is a unit already can be wrapped again: the parameters are listed once, and it trains as before."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(Language)
        first = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
        again = {"the module": module, "its wrapper": first, "the wrapper's module": first.module}[what]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = FSDP(again, use_orig_params=use_orig_params)
        assert [id(p) for p in model.parameters()] == [id(p) for p in first.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss(model, ranks.rank).backward()
        optimizer.step()
        return model.state_dict()

    plain = seeded(Language)
    for each in range(2):
        (loss(plain, each) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for state in on_ranks(2, rank):
        assert_same_state(state, plain.state_dict())


def test_other_arguments_of_a_second_wrapping() -> None:
    """Arguments that differ from those of the first wrapping are named in a warning, since they change nothing."""

    def rank(ranks: Collectives) -> list[str]:
        module = seeded(Language)
        FSDP(module)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FSDP(module, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
        return [str(each.message) for each in caught if "was wrapped before" in str(each.message)]

    (message,) = {text for texts in on_ranks(2, rank) for text in texts}
    assert "sharding_strategy, use_orig_params of this wrapping have no effect" in message


def test_an_outer_unit_for_units() -> None:
    """A module whose children are all units can be wrapped, after they have run too."""

    def rank(ranks: Collectives) -> Any:
        model = seeded(Language)
        model.embed = FSDP(model.embed)  # type: ignore[assignment]
        model.blocks = FSDP(model.blocks)  # type: ignore[assignment]
        model.head = FSDP(model.head)  # type: ignore[assignment]
        loss(model, ranks.rank).backward()
        outer = FSDP(model)
        outer.zero_grad()
        loss(outer, ranks.rank).backward()
        assert not [p for p in outer._modules["_fsdp_wrapped_module"].parameters(recurse=False)]  # type: ignore[union-attr]
        return outer.state_dict()

    for state in on_ranks(2, rank):
        assert_same_state(state, seeded(Language).state_dict())


# A group that only has ranks


class Ranks:
    """What tests of wrapping pass as a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_that_only_has_ranks(size: int, use_orig_params: bool) -> None:
    """Wrapping works with it and shards as that rank; a call is an error that says what was expected."""
    group = Ranks(1, size)
    model = FSDP(seeded(Language), group, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params)
    assert len(FSDP.fsdp_modules(model)) == 3
    assert (model.rank, model.world_size, model.process_group) == (1, size, group)
    total = sum(p.numel() for p in Language().parameters())
    held = sum(p.numel() for p in model.parameters())
    assert total // size <= held + 64 <= total // size + 192
    with pytest.raises(CollectiveError, match=r"found a Ranks, which only has rank\(\) and size\(\)"):
        model(torch.zeros(1, 1, dtype=torch.long))


def test_a_group_of_one_that_only_has_ranks() -> None:
    """In a world of one nothing is communicated, so the model trains."""
    model = FSDP(seeded(Language), Ranks(0, 1))
    loss(model, 0).backward()
    assert all(isinstance(p, FlatParameter) and p.grad is not None for p in model.parameters())


# Gradients


def test_gradients_of_what_is_elsewhere_are_none() -> None:
    """With originals, no gradient is an empty tensor: an infinity norm over all that are not None is a number."""

    def rank(ranks: Collectives) -> float:
        model = FSDP(seeded(Language), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
        loss(model, ranks.rank).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert any(p.numel() == 0 for p in model.parameters())
        assert all(gradient.numel() for gradient in gradients)
        return max(gradient.abs().max().item() for gradient in gradients)

    plain = seeded(Language)
    for each in range(2):
        (loss(plain, each) / 2).backward()
    expected = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    assert max(on_ranks(2, rank)) == expected


def test_clipping_nothing_is_told_of() -> None:
    """`clip_grad_norm_` without any gradient warns, and returns zero."""
    model = FSDP(seeded(Language), HERE)
    with pytest.warns(UserWarning, match="found no gradient on this rank"):
        assert model.clip_grad_norm_(1.0).item() == 0.0


# The meta device


class Norm(nn.Module):
    """A module of somebody else's, which does not know how to reset its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Hub(nn.Module):
    """A model that initialises its modules itself, as Hugging Face's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, WIDTH), Norm(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.first(x)))
        return out

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)


def test_the_way_from_the_meta_device_that_the_error_shows() -> None:
    """A module without `reset_parameters` is an error with a `param_init_fn` in it; that one, run as it stands, works."""
    with torch.device("meta"):
        model = Hub()
    with (
        pytest.warns(UserWarning, match="Norm could not"),
        pytest.raises(AttributeError, match="param_init_fn") as caught,
    ):
        FSDP(copy.deepcopy(model), HERE, auto_wrap_policy=ModuleWrapPolicy({Norm}))
    message = str(caught.value)
    assert message.startswith("Norm has parameters or buffers on the meta device and no reset_parameters()")
    lines = message.split("\n\n")[1]
    scope: dict[str, Any] = {"model": model}
    exec("\n".join(line[4:] for line in lines.splitlines()), scope)
    wrapped = FSDP(model, HERE, auto_wrap_policy=ModuleWrapPolicy({Norm}), param_init_fn=scope["param_init_fn"])
    state = wrapped.state_dict()
    assert {name: value.unique().tolist() for name, value in state.items()} == {
        "first.weight": [0.5],
        "first.bias": [0.0],
        "norm.weight": [1.0],
        "last.weight": [0.5],
        "last.bias": [0.0],
    }
