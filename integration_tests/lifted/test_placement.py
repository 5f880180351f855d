"""Devices, first values and buffers: rows L-31, L-32, L-51 and L-52 of the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from each_row import each_row
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload as TorchOffload
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp import _init_utils as torch_init

from flatparam import CPUOffload, MixedPrecision
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from integration_tests.lifted.our_half import (
    FSDP,
    assert_trains_as_one,
    blocks,
    seeded,
    sgd,
    square_loss,
    train,
    train_alone,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.models import Block
from integration_tests.parity.runs import assert_same_tensors

X = torch.ones(3, 4)
NO_ACCELERATOR = pytest.mark.skipif(torch.accelerator.is_available(), reason="torch finds an accelerator")


def torch_l31_no_device(group: Collectives) -> None:
    FullyShardedDataParallel(blocks())(X)


def torch_l31_sync(group: Collectives) -> None:
    fsdp1(blocks(), sync_module_states=True)


def torch_l31_offload(group: Collectives) -> None:
    fsdp1(blocks(), cpu_offload=TorchOffload(True))(X)


@NO_ACCELERATOR
def test_l31_torch_wants_an_accelerator(processes: Outcomes) -> None:
    """On a machine with a CPU only, torch refuses to run without device_id, to sync module states and to offload."""
    processes.assert_raised(torch_l31_no_device, "RuntimeError", "needs a non-CPU accelerator device")
    processes.assert_raised(torch_l31_sync, "ValueError", "requires them to be on GPU")
    # The second one is what a torch that was built for CUDA says where there is no driver.
    no_device = ("Cannot access accelerator device", "Found no NVIDIA driver")
    processes.assert_raised(torch_l31_offload, "RuntimeError", *no_device)


@NO_ACCELERATOR
@each_row("offload", [False, True])
def test_l31_the_cpu_needs_no_word(offload: bool) -> None:
    """Without device_id, and with CPU offload, a model on the CPU trains to the bits of the unsharded one."""

    def plainly(model: nn.Module, group: Collectives) -> nn.Module:
        return FSDP(model, cpu_offload=CPUOffload(offload), auto_wrap_policy=ModuleWrapPolicy({Block}))

    assert_trains_as_one(blocks, plainly)


def test_l31_all_ranks_start_from_the_first() -> None:
    """On the CPU too, sync_module_states has all ranks train the first one's model, whatever they had built."""

    def build(seed: int) -> nn.Module:
        return seeded(lambda: nn.Sequential(Block(4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2)), seed)

    def rank(group: Collectives) -> dict[str, Any]:
        model = build(group.rank)
        model[1].running_mean.fill_(1 + group.rank)
        made = FSDP(model, sync_module_states=True, auto_wrap_policy=ModuleWrapPolicy({Block}))
        train(made, sgd(made.parameters()), group.rank)
        return made.state_dict()

    alone = build(0)
    alone[1].running_mean.fill_(1)
    expected = train_alone(alone, 2).state_dict()
    for state in run_threads(2, rank):
        assert_same_tensors(state, expected, "after training:")


def on_two_devices() -> nn.Module:
    """The first block on the CPU, the second on the meta device: what two devices there are without an accelerator."""
    return nn.Sequential(seeded(lambda: Block(4)), *_meta_layers(), nn.Linear(4, 2, device="meta"))


def _meta_layers() -> list[nn.Module]:
    return [nn.Linear(4, 4, device="meta"), nn.Tanh()]


def torch_l32(group: Collectives) -> None:
    torch_init._check_single_device_module(on_two_devices(), set(), None)


def test_l32_torch_refuses_two_devices(processes: Outcomes) -> None:
    """Torch raises RuntimeError for parameters on two devices without device_id; on a CPU its check is asked itself."""
    processes.assert_raised(torch_l32, "RuntimeError", "please pass in device_id argument")


@NO_ACCELERATOR
@each_row("policy", [None, ModuleWrapPolicy({Block, nn.Linear})], ids=["whole", "policy"])
def test_l32_two_devices_become_one(policy: Any) -> None:
    """Parameters on two devices come together without a word of the user's, and the model trains to the same bits."""

    def rank(group: Collectives) -> dict[str, Any]:
        model = on_two_devices()
        torch.manual_seed(5)
        made = FSDP(model, auto_wrap_policy=policy)
        assert made.compute_device == torch.device("cpu")
        train(made, sgd(made.parameters()), group.rank)
        return made.state_dict()

    alone = on_two_devices()
    torch.manual_seed(5)
    for place in (1, 3):
        alone[place].to_empty(device="cpu").reset_parameters()
    expected = train_alone(alone, 2).state_dict()
    for state in run_threads(2, rank):
        assert_same_tensors(state, expected, "after training:")


class Weighed(nn.Linear):
    """When it is initialised, notes how many bytes of parameters there are in all of its kind, itself included."""

    def __init__(self, home: list[Any], held: list[int]) -> None:
        self.home, self.held = home, held
        super().__init__(4, 4, device="meta")
        home.append(self)
        held.clear()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        live = (p for each in self.home for p in each.parameters() if not p.is_meta)
        self.held.append(sum(p.untyped_storage().nbytes() for p in live))


LAYER_NBYTES = 4 * (4 * 4 + 4)


def weighed() -> tuple[nn.Module, list[int]]:
    """Four layers of one unit, and the bytes that there are as each is initialised."""
    held: list[int] = []
    home: list[Any] = []
    return nn.Sequential(*(Weighed(home, held) for _ in range(4))), held


def torch_l51(group: Collectives) -> list[int]:
    model, held = weighed()
    fsdp1(model)
    return held


def test_l51_torch_makes_whole_units(processes: Outcomes) -> None:
    """Torch holds all of a unit's parameters before it shards them."""
    assert [held[-1] for held in processes.values(torch_l51)] == [4 * LAYER_NBYTES] * 2


@each_row("own", [False, True], ids=["reset_parameters", "param_init_fn"])
def test_l51_a_unit_is_made_layer_by_layer(own: bool) -> None:
    """A unit on the meta device is initialised with one layer in memory at a time, to the unsharded model's values."""

    def make(module: nn.Module) -> None:
        if isinstance(module, Weighed):
            module.to_empty(device="cpu")
            module.reset_parameters()

    def rank(group: Collectives) -> Any:
        model, held = weighed()
        torch.manual_seed(3)
        made = FSDP(model, param_init_fn=make if own else None)
        return list(held), made.state_dict()

    alone, _ = weighed()
    torch.manual_seed(3)
    alone.apply(make)
    for held, state in run_threads(2, rank):
        assert held == [LAYER_NBYTES] * 4
        assert_same_tensors(state, alone.state_dict(), "initial")


class Rotary(nn.Module):
    """A layer between frequencies, which need their precision, and a scale, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("inv_freq", 10000 ** (-torch.arange(4) / 4))
        self.register_buffer("scale", torch.ones(4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x * self.inv_freq + self.inv_freq.cos()) * self.scale.float())


def torch_l52_cast(group: Collectives) -> list[torch.dtype]:
    model = fsdp1(Rotary(), mixed_precision=TorchMixedPrecision(buffer_dtype=torch.bfloat16))
    model(X)
    return [buffer.dtype for buffer in model.buffers()]


def torch_l52_complex(group: Collectives) -> bool:
    module = nn.Linear(4, 4)
    module.register_buffer("turns", turns(group.rank))
    dist._broadcast_coalesced(dist.group.WORLD, [module.turns, module.weight.detach()], 2**20, 0)
    return torch.equal(module.turns, turns(0))


def turns(rank: int) -> Tensor:
    return torch.polar(torch.ones(4), torch.arange(4.0) + rank)


def test_l52_torch_casts_every_buffer(processes: Outcomes) -> None:
    """Torch casts all floating-point buffers to buffer_dtype, those that need their precision too."""
    assert processes.values(torch_l52_cast) == [[torch.bfloat16] * 2] * 2


def test_l52_torch_can_send_complex_buffers_over_gloo(processes: Outcomes) -> None:
    """The row says that torch cannot broadcast complex buffers; over gloo the broadcast that it makes can, in 2.13."""
    assert processes.values(torch_l52_complex) == [True, True]


def test_l52_a_policy_for_each_buffer() -> None:
    """A function of name and buffer as buffer_dtype: the scale is cast, frequencies are not; the same bits as alone."""

    def dtype_of(name: str, buffer: Tensor) -> torch.dtype | None:
        return torch.bfloat16 if name == "scale" else None

    def rank(group: Collectives) -> Any:
        model = FSDP(seeded(Rotary), mixed_precision=MixedPrecision(buffer_dtype=dtype_of))
        train(model, sgd(model.parameters()), group.rank)
        dtypes = [model.module.inv_freq.dtype, model.module.scale.dtype]
        return dtypes, {n: t for n, t in model.state_dict().items() if n.startswith("layer")}

    alone: Any = seeded(Rotary)
    alone.scale = alone.scale.bfloat16()
    expected = train_alone(alone, 2).layer.state_dict(prefix="layer.")
    for dtypes, state in run_threads(2, rank):
        assert dtypes == [torch.float32, torch.bfloat16]
        assert_same_tensors(state, expected, "after training:")


def test_l52_complex_buffers() -> None:
    """Complex buffers are sent from the first rank by sync_module_states, and keep their dtype under buffer_dtype."""

    def rank(group: Collectives) -> Tensor:
        module = nn.Linear(4, 4)
        module.register_buffer("turns", turns(group.rank))
        model = FSDP(module, sync_module_states=True, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
        square_loss(model, 0, group.rank).backward()
        return model.module.turns

    for found in run_threads(2, rank):
        assert found.dtype == torch.complex64
        assert torch.equal(found, turns(0))
