"""Lightning's FSDP strategies on the CPU: `from lightning_on_cpu import FabricStrategy, TrainerStrategy`.

Lightning refuses its own two classes without a GPU, and not their subclasses. It names the device to FSDP by its number,
which a CPU has none of; torch's FSDP1 demands one, and takes the device itself. Nothing else is changed.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import strategies
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDP

NUMBERED = SimpleNamespace(type="cpu", index=torch.device("cpu"))
"""The CPU, with itself for a number."""


class OnCpu:
    """The part of both strategies that names the device to FSDP."""

    wraps = False

    @property
    def root_device(self) -> Any:
        return NUMBERED if self.wraps else super().root_device  # type: ignore[misc]

    def wrapped(self, wrap: Any, module: Any) -> Any:
        self.wraps = True
        try:
            return wrap(module)
        finally:
            self.wraps = False


class FabricStrategy(OnCpu, FabricFSDP):
    """Fabric's."""

    def setup_module(self, module: Any) -> Any:
        return self.wrapped(super().setup_module, module)


class TrainerStrategy(OnCpu, TrainerFSDP):
    """The Trainer's."""

    def _setup_model(self, model: Any) -> Any:
        return self.wrapped(super()._setup_model, model)


if __name__ == "__main__":
    # `lightning_on_cpu.py program.py ...` runs a program that names Lightning's own classes.
    strategies.FSDPStrategy = FabricStrategy  # type: ignore[misc]
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
