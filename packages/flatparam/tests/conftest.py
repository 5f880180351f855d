"""What every test of this package shares: one thread per process, a seed, and the two exposures."""

from collections.abc import Iterator

import pytest
import torch

from flatparam_comm.testing import be_patient

torch.set_num_threads(1)  # the ranks share the cores
be_patient()


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(params=["default", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])])
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """Torch's default device, if that is an accelerator (the simulated one), and its twin, a GPU."""
    device = torch.get_default_device() if request.param == "default" else torch.device("cuda", 0)
    if device.type == "cpu":
        pytest.skip("the default device is the CPU")
    return device


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)  # whatever ran before: the bits of some sums depend on it
    torch.manual_seed(0)


@pytest.fixture
def torch_world() -> Iterator[None]:
    """torch's own process group with this process alone in it, for torch's FSDP as the oracle."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
