"""What the machine is: the device, its driver, the versions of what is installed."""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import subprocess
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen

import flatparam
from flatparam_comm import Collectives

from .place import Plan, take_device


@frozen
class Facts:
    """Of one device; there are `count` like it. Bytes are 0 where torch cannot tell."""

    name: str
    kind: str
    count: int
    backend: str
    driver: str
    free_nbytes: int
    total_nbytes: int
    versions: dict[str, str]

    @property
    def slug(self) -> str:
        """The name as that of a file."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or self.kind


def facts_of(ranks: Collectives, plan: Plan) -> Facts | None:
    """What is known of the first device, of the kind that there is if the plan says none; None where there is none.

    It runs in a process of its own, as torch sets up a device to ask it.
    """
    for module in plan.imports:
        importlib.import_module(module)
    if not plan.kind:
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            return None
        plan = evolve(plan, kind=found.type)
    device = take_device(plan, 0)
    if plan.on_cpu:
        name, driver, count, memory = f"CPU {platform.machine()}", "none", 1, (0, 0)
    else:
        properties = _properties(device)
        name = str(getattr(properties, "name", plan.kind))
        driver = str(getattr(properties, "driver_version", "")) or _driver()
        count, memory = torch.accelerator.device_count(), _memory(device)
    return Facts(
        name,
        plan.kind,
        count,
        dist.get_default_backend_for_device(device),
        driver,
        *memory,
        _versions(plan),
    )


def _properties(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    return module.get_device_properties(device) if hasattr(module, "get_device_properties") else None


def _driver() -> str:
    """The driver's version where the vendor's tool tells it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return told[0] if told else "unknown"


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free, and all."""
    module: Any = torch.get_device_module(device)
    for owner, name in ((torch.accelerator, "get_memory_info"), (module, "mem_get_info")):
        if hasattr(owner, name):
            try:
                free, total = getattr(owner, name)(device)
            except RuntimeError:
                continue  # the function is there, and this device's allocator has no answer
            return free, total
    return 0, 0


def _versions(plan: Plan) -> dict[str, str]:
    found = {
        "flatparam": flatparam.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            found[name] = str(version)
    if plan.kind == "cuda" and dist.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found
