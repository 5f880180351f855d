"""Where the parameters live and whose values they start with."""

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import CPUOffload
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives

from .models import Batch, Transformer, mlp, seeded
from .worlds import assert_same_state, on_ranks

HERE = SingleCollectives()

NO_ACCELERATOR = not torch.accelerator.is_available()


@each_row("device", [None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=str)
def test_ways_to_name_the_cpu(device: Any) -> None:
    """S-019: every way to say the CPU is accepted, and the module stays where it is."""
    model = FSDP(seeded(mlp), HERE, device_id=device)
    assert model.compute_device == torch.device("cpu")
    assert_same_state(model.state_dict(), seeded(mlp).state_dict())


@pytest.mark.skipif(not NO_ACCELERATOR, reason="a number names an accelerator here")
def test_a_number_without_an_accelerator() -> None:
    """A local rank as `device_id` is accepted on a machine that has the CPU only, as clients pass it there."""
    assert FSDP(mlp(), HERE, device_id=0).compute_device == torch.device("cpu")


@pytest.mark.skipif(not NO_ACCELERATOR, reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    """A named device that the machine has not is an error that names it, and nothing is wrapped."""
    module = mlp()
    with pytest.raises(ValueError, match=r"device_id: .* found cuda:0, which torch cannot use here"):
        FSDP(module, HERE, device_id="cuda:0", auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert list(dict(module.named_parameters())) == list(dict(mlp().named_parameters()))


@pytest.mark.parametrize("policy", [None, {nn.Linear, nn.LayerNorm}], ids=["whole", "policy"])
def test_sync_module_states(policy: Any, use_orig_params: bool) -> None:
    """S-020: every rank starts from rank 0's parameters and buffers, whatever its own were."""
    make = nn.Sequential

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = make(nn.Linear(2, 2).bfloat16(), Batch(), nn.LayerNorm(3))
        module[1].running = torch.zeros(())
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.uniform_()
        return module

    def rank(ranks: Collectives) -> Any:
        model = FSDP(
            build(ranks.rank),
            auto_wrap_policy=ModuleWrapPolicy(policy) if policy else None,
            use_orig_params=use_orig_params,
            sync_module_states=True,
        )
        return model.state_dict(), model.module[1].cache.clone()

    expected = build(0)
    for state, cache in on_ranks(3, rank):
        assert_same_state(state, expected.state_dict())
        assert torch.equal(cache, expected[1].cache)


def test_without_sync_module_states_each_rank_keeps_its_own_values() -> None:
    """S-020: by default nothing is broadcast: a shard holds its own rank's numbers."""

    def rank(ranks: Collectives) -> Any:
        torch.manual_seed(ranks.rank)
        return FSDP(nn.Linear(3, 1, bias=False).requires_grad_()).state_dict()["weight"]

    first, second = on_ranks(2, rank)
    rows = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        rows.append(nn.Linear(3, 1, bias=False).weight.detach()[0])
    assert torch.equal(first, second)
    assert torch.equal(first[0], torch.cat([rows[0][:2], rows[1][2:]]))


def test_sync_module_states_of_tied_parameters() -> None:
    """A tie is broadcast once and stays a tie."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(Transformer, seed=ranks.rank), sync_module_states=True)
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert_same_state(state, seeded(Transformer, seed=0).state_dict())


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0)], ids=str)
def test_the_units_tensors_move(device: Any) -> None:
    """S-019: parameters and buffers of the unit move to the device; what is ignored, and units inside, stay."""
    module = nn.Sequential(Batch(), nn.Linear(3, 3), nn.Linear(3, 3))
    module[1] = FSDP(module[1], HERE)
    ignored = module[2]
    model = FSDP(module, HERE, device_id=device, ignored_modules=[ignored])
    assert model.compute_device == torch.device("cuda", 0)
    assert {tensor.device.type for tensor in (*model.params, *module[0].buffers())} == {"cuda"}
    assert {tensor.device.type for tensor in (*module[1].params, *ignored.parameters())} == {"cpu"}


@pytest.mark.gpu
@on_gpu
def test_a_device_without_an_index() -> None:
    """S-019: "cuda" is the current device, with a warning that says which."""
    with pytest.warns(UserWarning, match="no index.*cuda:0"):
        assert FSDP(mlp(), HERE, device_id="cuda").compute_device == torch.device("cuda", 0)


@pytest.mark.gpu
@on_gpu
def test_parameters_on_another_device() -> None:
    """S-019: parameters on an accelerator that is not the one asked for are refused, with both named."""
    with pytest.raises(ValueError, match="device_id=cpu.*cuda:0"):
        FSDP(mlp().cuda(), HERE, device_id="cpu")


@pytest.mark.gpu
@on_gpu
def test_parameters_on_two_devices() -> None:
    """L-32: without `device_id`, parameters on the CPU and on one accelerator all go to the accelerator."""
    module = mlp()
    module[2].cuda()
    model = FSDP(module, HERE)
    assert model.compute_device == torch.device("cuda", 0)
    assert model(torch.ones(1, 3)).device.type == "cuda"


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("offload", [False, True])
def test_moving_a_wrapped_module(use_orig_params: bool, offload: bool) -> None:
    """S-068: `model.cuda()` and `.cpu()` move shards, gradients and buffers, and the model trains on."""
    model = FSDP(Batch(), HERE, cpu_offload=CPUOffload(offload), use_orig_params=use_orig_params, device_id="cpu")
    model(torch.ones(2, 3)).sum().backward()
    model.cuda()
    assert {buffer.device.type for buffer in model.buffers()} == {"cuda"}
    if not offload:
        assert {t.device.type for p in model.parameters() for t in (p, p.grad) if t is not None} == {"cuda"}
        model(torch.ones(2, 3)).sum().backward()
    model.cpu()
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    model(torch.ones(2, 3)).sum().backward()
