"""What ranks find out about the simulated device, for the tests of it. Each function is run in a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_simdev.log import Kind
from flatparam_simdev.races import find_races
from flatparam_simdev.worlds import World

Facts = dict[str, Any]


def of_one(world: World) -> Facts:
    """What one rank sees, by the names of the functions below."""
    functions: Iterable[Callable[[torch.device], Any]] = (
        copies_to_the_host,
        copies_to_the_device,
        copies_of_lists,
        reads_by_the_host,
        streams,
        autograd,
        memory,
        amp,
        versions,
        views_of_complex_numbers,
        copies_of_storages,
    )
    return {function.__name__: function(world.device) for function in functions}


def versions(device: torch.device) -> tuple[int, int]:
    """How many changes in place autograd counts of a tensor, of one operator and of one on a list."""
    alone, listed = _numbers(device), _numbers(device)
    before = (alone._version, listed._version)
    alone.add_(1)
    torch._foreach_add_([listed], 1)
    return alone._version - before[0], listed._version - before[1]


def views_of_complex_numbers(device: torch.device) -> list[Any]:
    """Copies of a conjugate and of a negative view, on the device and to the host."""
    number = torch.tensor([1.0 + 2.0j]).to(device)
    conjugate, negative = number.conj(), number.conj().imag
    return [each.cpu().tolist() for each in (conjugate.clone(), conjugate, negative.clone(), negative)]


def copies_of_storages(device: torch.device) -> list[list[float]]:
    """A tensor whose storage was copied on the device, and one whose storage was copied to the host."""
    numbers = _numbers(device)
    storage: Any = numbers.untyped_storage()
    copies = (storage.clone(), storage.cpu())
    return [torch.empty(0, device=each.device).set_(each).tolist() for each in copies]


def _numbers(device: torch.device) -> Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


def copies_to_the_host(device: torch.device) -> Facts:
    """What pinned memory holds before and after the host has waited, in several ways; and in a strided view."""
    numbers = _numbers(device)
    stream = torch.accelerator.current_stream()
    waits: dict[str, Callable[[torch.Event], Any]] = {
        "stream": lambda event: stream.synchronize(),
        "event": lambda event: event.synchronize(),
        "device": lambda event: torch.accelerator.synchronize(),
        "query": lambda event: [event.query() for _ in range(3)],
        "item": lambda event: numbers.sum().item(),
        "event before the copy": lambda event: early.synchronize(),
        "another stream": lambda event: torch.Stream(device=device).synchronize(),
    }
    found: Facts = {}
    for name, wait in waits.items():
        target = torch.zeros(2, 3).pin_memory()
        early = stream.record_event()
        target.copy_(numbers, non_blocking=True)
        before = target.tolist()
        wait(stream.record_event())
        found[name] = (before, target.tolist())
    wide = torch.zeros(2, 6).pin_memory()
    wide[:, ::2].copy_(numbers, non_blocking=True)
    before = wide.tolist()
    stream.synchronize()
    found["strided"] = (before, wide.tolist())
    ordinary = torch.zeros(2, 3)
    ordinary.copy_(numbers, non_blocking=True)
    found["ordinary memory"] = ordinary.tolist()
    return found


def copies_to_the_device(device: torch.device) -> Facts:
    """What the device gets when the host overwrites what is being copied, before and after it has waited."""
    found: Facts = {}
    stream = torch.accelerator.current_stream()
    for name in ("at once", "after waiting"):
        source = torch.ones(3).pin_memory()
        target = source.to(device, non_blocking=True)
        if name == "after waiting":
            stream.synchronize()
        source.fill_(2.0)
        found[name] = target.cpu().tolist()
    source = torch.ones(3).pin_memory()
    target = source.to(device, non_blocking=True)
    with torch.Stream(device=device):
        found["read by a stream that does not wait"] = (target + 0).cpu().tolist()
    found["there and back"] = target.cpu().tolist()
    return found


def copies_of_lists(device: torch.device) -> Facts:
    """Lists of tensors that are copied between the host and the device."""
    targets = [torch.zeros(2).pin_memory(), torch.zeros(3).pin_memory()]
    torch._foreach_copy_(targets, [torch.ones(2, device=device), torch.ones(3, device=device)], non_blocking=True)
    before = [target.tolist() for target in targets]
    torch.accelerator.synchronize()
    return {"before": before, "after": [target.tolist() for target in targets]}


def reads_by_the_host(device: torch.device) -> list[str]:
    """What the checker says when Python reads pinned memory by each of its ways."""
    from flatparam_simdev import device as simulated

    ways: list[Callable[[Tensor], Any]] = [
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor[0].item(),
        lambda tensor: bool(tensor[0] > 0),
        lambda tensor: tensor + 1,
        lambda tensor: tensor.clone(),
    ]
    simulated.start_log()
    for number, read in enumerate(ways):
        simulated.mark(f"way {number}")
        target = torch.zeros(3).pin_memory()
        target.copy_(torch.ones(3, device=device), non_blocking=True)
        read(target)
    return [str(finding) for finding in find_races(simulated.stop_log())]


def streams(device: torch.device) -> Facts:
    """Current streams, events and times."""
    module: Any = torch.get_device_module(device)
    side = module.Stream()
    found: Facts = {"default": module.current_stream() == module.default_stream()}
    with module.stream(side):
        found["inside"] = module.current_stream() == side
        others: list[Any] = []
        thread = threading.Thread(target=lambda: others.append(module.current_stream()))
        thread.start()
        thread.join()
        found["in another thread"] = others[0] == module.default_stream()
    found["after"] = module.current_stream() == module.default_stream()
    first, second = module.Event(enable_timing=True), module.Event(enable_timing=True)
    first.record(side)
    second.record(side)
    second.synchronize()
    found["elapsed"] = first.elapsed_time(second)
    return found


def autograd(device: torch.device) -> Facts:
    """On which stream and in which thread a backward pass runs whose forward pass ran on a stream of its own."""
    from flatparam_simdev import device as simulated

    weight: Any = torch.ones(3, device=device, requires_grad=True)
    side = torch.Stream(device=device)
    threads: list[int] = []
    simulated.start_log()
    with side:
        product = weight * 2
        product.register_hook(lambda gradient: threads.append(threading.get_ident()))
        loss = product.sum()
    simulated.mark("backward")
    loss.backward()
    records = simulated.stop_log()
    start = next(i for i, record in enumerate(records) if record.kind is Kind.MARK)
    streams = {r.stream for r in records[start:] if r.kind is Kind.KERNEL and r.name.startswith("aten::mul")}
    return {"streams": streams, "side": side.stream_id, "own thread": threads != [threading.get_ident()]}


def memory(device: torch.device) -> Facts:
    """What is allocated, as storages are made, resized and freed; and what a freed tensor answers."""
    module: Any = torch.get_device_module(device)
    start = module.memory_allocated()
    module.reset_peak_memory_stats()
    tensor = torch.ones(1000, device=device)
    sizes = [module.memory_allocated() - start]
    tensor.untyped_storage().resize_(0)
    sizes.append(module.memory_allocated() - start)
    try:
        tensor + 1
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    tensor.untyped_storage().resize_(4000)
    sizes.append(module.memory_allocated() - start)
    fresh = tensor[:2].tolist()
    del tensor
    sizes.append(module.memory_allocated() - start)
    return {"sizes": sizes, "peak": module.max_memory_allocated() - start, "error": error, "fresh": fresh}


def amp(device: torch.device) -> Facts:
    """Autocast and torch's scaler of gradients."""
    linear = torch.nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        output = linear(torch.ones(2, 3, device=device))
    scaler.scale(output.float().sum()).backward()
    scaled = linear.bias.grad
    found = {"dtype": output.dtype, "scaled": None if scaled is None else scaled.tolist()}
    scaler.step(optimizer)
    scaler.update()
    return {**found, "after": linear.bias.grad.tolist() if linear.bias.grad is not None else None}


# Of two ranks


def of_two(world: World) -> Facts:
    """What the ranks of a group see."""
    c10d: Any = dist
    rank, group = world.rank, world.group

    def own(*numbers: float) -> Tensor:
        return torch.tensor([number + 10 * rank for number in numbers], device=world.device)

    found: Facts = {"cpu tensor": error_of(lambda: dist.all_reduce(torch.ones(1), group=group))}
    for operation in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        reduced = own(1.0, 2.0)
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, operation), group=group)
        found[operation] = reduced.tolist()
    scaled = own(1.0, 2.0)
    dist.all_reduce(scaled, op=c10d._make_nccl_premul_sum(0.5), group=group)
    found["PREMUL_SUM"] = scaled.tolist()
    narrow = own(1.0, 2.0).bfloat16()
    dist.all_reduce(narrow, op=c10d._make_nccl_premul_sum(0.5), group=group)
    found["PREMUL_SUM in bfloat16"] = narrow.tolist()
    part = torch.zeros(1, device=world.device)
    c10d.reduce_scatter_tensor(part, own(1.0, 2.0), op=dist.ReduceOp.AVG, group=group)
    found["reduce_scatter"] = part.tolist()
    whole = torch.zeros(4, device=world.device)
    c10d.all_gather_into_tensor(whole, own(1.0, 2.0), group=group)
    found["all_gather_into_tensor"] = whole.tolist()
    parts = [torch.zeros(2, device=world.device) for _ in range(2)]
    dist.all_gather(parts, own(1.0, 2.0), group=group)
    found["all_gather"] = [each.tolist() for each in parts]
    one, two = (torch.zeros(2, device=world.device) for _ in range(2))
    with c10d._coalescing_manager(group=group, device=world.device):
        c10d.all_gather_into_tensor(one, own(1.0), group=group)
        c10d.all_gather_into_tensor(two, own(2.0), group=group)
    found["coalesced"] = [one.tolist(), two.tolist()]
    sent = own(1.0)
    dist.broadcast(sent, 1, group=group)
    found["broadcast"] = sent.tolist()
    dist.barrier(group=group)
    return {**found, "waiting": [_findings(world, wait=wait) for wait in (True, False)]}


def error_of(call: Callable[[], Any]) -> str:
    """What a call raises, as text; empty where it does not raise."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _findings(world: World, *, wait: bool) -> list[str]:
    """What the checker says when a gathered tensor is read with and without waiting for the gather."""
    from flatparam_simdev import device

    c10d: Any = dist
    whole, part = torch.zeros(2, device=world.device), torch.ones(1, device=world.device)
    device.start_log()
    work = c10d.all_gather_into_tensor(whole, part, group=world.group, async_op=True)
    if wait:
        work.wait()
    whole + 1
    found = [str(finding) for finding in find_races(device.stop_log())]
    work.wait()
    return found
