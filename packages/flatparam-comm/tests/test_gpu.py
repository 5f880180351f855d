"""The order of streams, which only CUDA can show. The values are tested by the contract, which runs on CUDA, too."""

from __future__ import annotations

import pytest
import torch

from flatparam_comm import Collectives, CompressedCollectives
from flatparam_comm.testing import run_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]

#: Clock cycles of the GPU that a stream sleeps: some milliseconds, an age for a kernel.
A_WHILE = 20_000_000


def _on_streams_of_their_own(comm: Collectives) -> float:
    """Fill the input late on one stream, communicate there, and read the output on another."""
    fill, read = torch.cuda.Stream(), torch.cuda.Stream()
    numel = 1 << 20
    output = torch.full((comm.size * numel,), -1.0, device="cuda")
    shard = torch.zeros(numel, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(fill):
        torch.cuda._sleep(A_WHILE)
        shard.fill_(comm.rank + 1.0)
        pending = comm.all_gather(output, shard)
    with torch.cuda.stream(read):
        pending.wait()
        total = output.sum()
    read.synchronize()
    return float(total) / numel


def _reads_are_ordered(deliver_late: bool) -> None:
    expected = sum(rank + 1.0 for rank in range(3))
    assert run_threads(3, _on_streams_of_their_own, deliver_late=deliver_late) == [expected] * 3


@pytest.mark.parametrize("deliver_late", [True, False])
def test_a_wait_orders_the_current_stream(deliver_late: bool) -> None:
    """Inputs that a slow stream still fills arrive whole in outputs that another stream reads after wait()."""
    _reads_are_ordered(deliver_late)


def test_a_wait_does_not_block_the_host() -> None:
    """wait() returns while the GPU is still busy with what comes before."""

    def program(comm: Collectives) -> bool:
        tensor = torch.ones(1024, device="cuda")
        torch.cuda._sleep(10 * A_WHILE)
        comm.all_reduce(tensor).wait()
        busy = not torch.cuda.current_stream().query()
        # Ranks take turns, and share the device: nobody is to wait for it until everybody has looked.
        comm.exchange(None)
        torch.cuda.synchronize()
        assert tensor[0].item() == comm.size
        return busy

    torch.cuda.synchronize()
    assert run_threads(2, program) == [True, True]


def test_inputs_may_be_overwritten_after_the_wait() -> None:
    """After wait() the current stream may overwrite the input, though the ranks' streams differ in speed."""

    def program(comm: Collectives) -> float:
        stream = torch.cuda.Stream()
        numel = 1 << 20
        with torch.cuda.stream(stream):
            full = torch.full((comm.size * numel,), comm.rank + 1.0, device="cuda")
            output = torch.zeros(numel, device="cuda")
            if comm.rank == 1:
                torch.cuda._sleep(A_WHILE)
            comm.reduce_scatter(output, full).wait()
            full.fill_(1000.0)
            total = output.sum()
        stream.synchronize()
        return float(total) / numel

    assert run_threads(3, program) == [6.0] * 3


def test_staged_memory_is_not_reused_too_early() -> None:
    """Memory that one rank's stream staged results in is not given out again while other streams read it."""

    def program(comm: Collectives) -> float:
        compressed = CompressedCollectives(comm, torch.bfloat16)
        stream = torch.cuda.Stream()
        worst = 0.0
        with torch.cuda.stream(stream):
            for step in range(20):
                output = torch.zeros(comm.size << 18, device="cuda")
                shard = torch.full((1 << 18,), float(step + comm.rank), device="cuda")
                pending = (compressed if step % 2 else comm).all_gather(output, shard)
                if comm.rank == step % comm.size:
                    torch.cuda._sleep(A_WHILE // 10)
                pending.wait()
                expected = torch.arange(comm.size, device="cuda").repeat_interleave(1 << 18) + step
                worst = max(worst, float((output - expected).abs().max()))
        return worst

    assert run_threads(3, program) == [0.0] * 3


def test_backward_of_all_ranks_runs_on_one_gpu() -> None:
    """Ranks may wait for each other inside backward, though autograd has only one thread per GPU."""

    def program(comm: Collectives) -> float:
        weight = torch.ones(4, device="cuda", requires_grad=True)
        hidden = weight * 2

        def reduce(grad: torch.Tensor) -> torch.Tensor:
            total = grad.clone()
            comm.all_reduce(total, label="gradient").wait()
            return total

        hidden.register_hook(reduce)
        (hidden * (comm.rank + 1.0)).sum().backward()
        assert weight.grad is not None
        return float(weight.grad[0])

    assert run_threads(3, program) == [12.0] * 3


def test_random_numbers_on_the_gpu_are_each_ranks_own() -> None:
    """Each rank has a CUDA generator of its own: ranks that seed alike draw alike, whatever others draw in between."""

    def program(comm: Collectives) -> list[float]:
        torch.manual_seed(5)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand((), device="cuda")))
            comm.barrier()
        return drawn

    torch.cuda.init()
    first, *others = run_threads(3, program)
    assert others == [first, first]
