"""States in eight bits of other libraries, with scales for blocks, as tensors that can be cut anywhere, and back."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from flatparam_comm import FlatParamError
from flatparam_optim.eight_bits import in_blocks, spread_out

MODULE = "torchao.optim.subclass_8bit"
BLOCK = 256


class OptimState8bit(torch.Tensor):
    """What torchao's tensor of states shows of itself."""

    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, signed: bool, dtype: torch.dtype
    ) -> OptimState8bit:
        made: Any = torch.Tensor._make_subclass(cls, torch.empty(codes.shape, dtype=dtype))
        made.codes, made.scale, made.qmap, made.signed = codes, scale, qmap, signed
        return made  # type: ignore[no-any-return]


OptimState8bit.__module__ = MODULE


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchao that has the class."""
    for name in ("torchao", "torchao.optim", MODULE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[MODULE].OptimState8bit = OptimState8bit  # type: ignore[attr-defined]


def of_bitsandbytes(numel: int, *, nested: bool = False) -> dict[str, Any]:
    """The states of AdamW8bit for a parameter of so many elements."""
    blocks = -(-numel // BLOCK)
    inner = {
        "state1": torch.randint(0, 256, (numel,), dtype=torch.uint8),
        "state2": torch.randint(0, 256, (numel,), dtype=torch.uint8),
        "absmax1": torch.rand(blocks),
        "absmax2": torch.rand(blocks),
        "qmap1": torch.linspace(-1, 1, 256),
        "qmap2": torch.linspace(0, 1, 256),
    }
    return {"step": 3, "__bnb_optimizer_quant_state__": inner} if nested else {"step": 3, **inner}


@pytest.mark.parametrize("numel", [1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("nested", [False, True])
def test_states_of_bitsandbytes_come_back(numel: int, nested: bool) -> None:
    """Each element has the scale of its block while it is saved, and the optimizer gets back what it had, to the bit."""
    given = of_bitsandbytes(numel, nested=nested)
    saved = dict(spread_out(given))
    inner = given.get("__bnb_optimizer_quant_state__", given)
    for scales, codes in (("absmax1", "state1"), ("absmax2", "state2")):
        assert saved[scales].shape == inner[codes].shape
        expected = [inner[scales][index // BLOCK] for index in range(numel)]
        assert saved[scales].tolist() == [float(each) for each in expected]
    back = in_blocks(saved, torch.zeros(numel))
    assert back.keys() == inner.keys() | {"step"}
    assert all(torch.equal(back[name], value) for name, value in inner.items() if name != "step")


@pytest.mark.parametrize("least", [-1.0, 0.0])
def test_states_of_torchao_come_back(torchao: None, least: float) -> None:
    """The tensor of torchao's own class is taken apart to be saved, and made anew, signed as its table says."""
    codes = torch.randint(0, 256, (3, BLOCK), dtype=torch.uint8)
    scale, table = torch.rand(3), torch.linspace(least, 1, 256)
    saved = dict(spread_out({"exp_avg": OptimState8bit(codes, scale, table, least < 0, torch.bfloat16)}))
    assert torch.equal(saved["exp_avg.scale"], scale.repeat_interleave(BLOCK).view(3, BLOCK))
    (back,) = in_blocks(saved, torch.zeros(3, BLOCK, dtype=torch.bfloat16)).values()
    assert isinstance(back, OptimState8bit)
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scale, scale)
    assert torch.equal(back.qmap, table)
    assert (back.signed, back.dtype) == (least < 0, torch.bfloat16)  # type: ignore[attr-defined]


def test_without_torchao_its_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, and names the state."""
    codes = torch.zeros(BLOCK, dtype=torch.uint8)
    saved = spread_out({"exp_avg": OptimState8bit(codes, torch.ones(1), torch.arange(256.0), False, torch.float32)})
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(FlatParamError, match="'exp_avg' was saved in the eight bits of torchao.*install torchao"):
        in_blocks(dict(saved), torch.zeros(BLOCK))


def test_other_states_are_as_they_were() -> None:
    """States that are in no blocks are the same object before and after, so that nothing is copied."""
    values = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "absmax1": torch.ones(7)}
    assert spread_out(values) is values
    assert in_blocks(dict(values), torch.ones(4)) == values
