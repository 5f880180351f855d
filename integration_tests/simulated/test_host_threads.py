"""What several threads of the host do, and what a user's default device does to memory that has to be the host's."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from integration_tests.simulated.worlds import World, on_simulated

pytestmark = pytest.mark.processes


def is_back_on_its_stream(world: World) -> bool:
    """Whether a thread is on its own stream again after work aside, while another thread does the same."""
    from flatparam_comm.transfer.streams import streams_of

    one_is_inside, other_is_inside, one_has_left = (threading.Event() for _ in range(3))
    found = []

    def one() -> None:
        with torch.Stream(world.device) as mine:
            with streams_of(world.device).aside():
                one_is_inside.set()
                other_is_inside.wait()
            found.append(torch.accelerator.current_stream(world.device) == mine)
            one_has_left.set()

    def other() -> None:
        with torch.Stream(world.device):
            one_is_inside.wait()
            with streams_of(world.device).aside():
                other_is_inside.set()
                one_has_left.wait()

    threads = [threading.Thread(target=function) for function in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found == [True]


def test_threads_keep_their_streams() -> None:
    """Each thread goes back to the stream that it came from, whatever other threads do meanwhile."""
    assert on_simulated(1, is_back_on_its_stream) == [True]


class OutOfLuck(Exception):
    """What a backward pass fails with."""


def summon_after_failures(world: World, times: int) -> int:
    """How often the full parameters can be summoned right after a backward pass that has failed."""
    from flatparam import FullyShardedDataParallel as FSDP
    from flatparam_runtime.inspection.resting import InAPassError

    def fail(*_: object) -> None:
        raise OutOfLuck

    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    middle = layers[1]
    model = FSDP(layers, process_group=world.group, device_id=world.device)
    done = 0
    for _ in range(times):
        x = torch.ones(2, 4, device=world.device, requires_grad=True)
        hook = middle.register_full_backward_hook(fail)
        with pytest.raises(OutOfLuck):
            model(x).square().mean().backward()
        hook.remove()
        with contextlib.suppress(InAPassError), FSDP.summon_full_params(model):
            done += 1
    return done


def test_a_pass_that_failed_is_over() -> None:
    """The thread that autograd has for a device may let go of a failed pass later than `backward()` returns."""
    assert on_simulated(1, summon_after_failures, 100) == [100]


def saved_under_a_default_device(world: World, folder: str) -> tuple[bool, list[str]]:
    """Whether a state of the host comes back to the host, and what races, if all that is made is on the device."""
    from flatparam import Checkpointer
    from flatparam import FullyShardedDataParallel as FSDP
    from flatparam_simdev import device
    from flatparam_simdev.races import find_races

    with world.device:
        model = FSDP(nn.Linear(3, 5), process_group=world.group, device_id=world.device)
        optimizer = torch.optim.AdamW(model.parameters())
        device.start_log()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        with Checkpointer(folder, model, optimizer, asynchronous=True) as checkpointer:
            state = torch.get_rng_state()
            checkpointer.save(1, rank_extra={"generator": state})
            checkpointer.wait()
            back = checkpointer.load().rank_extra["generator"]
        races = [str(each) for each in find_races(device.stop_log())]
    return back.is_cpu and torch.equal(back, state), races


def test_checkpoints_under_a_default_device(tmp_path: Path) -> None:
    """What a checkpoint stages is in the host's memory, also under `torch.set_default_device`."""
    assert on_simulated(2, saved_under_a_default_device, str(tmp_path)) == [(True, [])] * 2
