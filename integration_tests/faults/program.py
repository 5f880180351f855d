"""A sharded model, and everything that one rank may do which the others do not."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatparam_comm import ProcessGroupCollectives

__all__ = ["DIVERGENCES", "FAILURES", "Bug", "Program", "fail_now"]

WIDTHS: Final = (8, 64, 16, 32)

#: What one rank does otherwise, and all ranks have to be told of.
DIVERGENCES: Final = (
    "a unit is left out",
    "another order",
    "two models in another order",
    "cast",
    "backward is left out",
    "no_sync",
    "a state dict",
    "a step more",
    "an evaluation",
    "frozen",
    "interrupted",
    "a barrier of the process group",
)
#: How one rank fails, which keeps its own exception, if it has one; the others have to be told of it.
FAILURES: Final = (
    "raises in forward",
    "raises in forward, and lives",
    "raises in backward",
    "raises in backward, and lives",
    "raises between passes",
    "is killed",
    "is terminated",
    "ends its program",
    "raises before the first collective",
    "is killed before the first collective",
    "calls torch's barrier",
    "calls torch's barrier, and lives",
    "raises in forward, in a group without rank 0",
)


class Bug(Exception):
    """An exception of the user's program."""


class Parts(nn.Sequential):
    """Blocks of different sizes, which a rank may call in another order, or leave out."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, value: Tensor) -> Tensor:
        """The mean square of each block's output, on a part of the first input, in this order."""
        total = value.new_zeros(())
        for number in self.order:
            output = self[number](value[:, : WIDTHS[number]].to(next(self[number].parameters()).dtype))
            total = total + output.float().square().mean()
        return total


def _fail(*args: Any) -> Any:
    raise Bug("a bug of the user's")


class Program:
    """A model of several units, and a step that can be done in other ways."""

    def __init__(self, fsdp: Any, state_dict_type: Any, collectives: Any, use_orig_params: bool, how: str = "") -> None:
        """`fsdp` is the class of the wrapper, flatparam's or torch's; `state_dict_type` selects full state dicts.

        Of `two models` there are two, which take turns.
        """
        torch.manual_seed(0)
        self.twin = (
            Program(fsdp, state_dict_type, collectives, use_orig_params) if how.startswith("two models") else None
        )
        self.fsdp = fsdp
        self.state_dict_type = state_dict_type
        options: dict[str, Any] = {"process_group": collectives, "use_orig_params": use_orig_params}
        options["device_id"] = torch.device("cpu")
        blocks = [fsdp(nn.Linear(width, width), **options) for width in WIDTHS]
        self.inner = Parts(*blocks)
        self.model = fsdp(self.inner, **options)

    def step(self, *, backward: bool = True, synchronised: bool = True) -> None:
        """One step of training."""
        with nullcontext() if synchronised else self.model.no_sync():
            loss = self.model(torch.ones(2, max(WIDTHS)))
            if backward:
                loss.backward()
        self.model.zero_grad()
        if self.twin is not None:
            self.twin.step()

    def diverge(self, how: str) -> None:
        """Do one of `DIVERGENCES`, or what leads to it in the next step."""
        if how == "a unit is left out":
            self.inner.order = (0, 2, 3)
        elif how == "another order":
            self.inner.order = (0, 2, 1, 3)
        elif how == "two models in another order":
            assert self.twin is not None, "it is made for this"
            self.model, self.twin.model = self.twin.model, self.model
        elif how == "cast":
            self.inner[1].to(torch.bfloat16)
        elif how == "backward is left out":
            self.step(backward=False)
        elif how == "no_sync":
            self.step(synchronised=False)
        elif how == "a state dict":
            with self.fsdp.state_dict_type(self.model, self.state_dict_type):
                self.model.state_dict()
        elif how == "a step more":
            self.step()
        elif how == "an evaluation":
            with torch.no_grad():
                self.model(torch.ones(2, max(WIDTHS)))
        elif how == "frozen":
            for parameter in self.inner[1].parameters():
                parameter.requires_grad_(False)
        elif how == "interrupted":
            try:
                loss = self.model(torch.ones(2, max(WIDTHS)))
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                del loss
        elif how == "a barrier of the process group":
            # Over shared memory it goes another way than the passes.
            ProcessGroupCollectives(dist.group.WORLD).barrier()
        else:
            raise AssertionError(how)

    def fail(self, how: str) -> None:
        """Do one of `FAILURES` of a program that has begun, or have the next step do it."""
        if how.startswith("raises in forward"):
            self.inner[1].register_forward_pre_hook(_fail)
        elif how.startswith("raises in backward"):
            self.inner[1].register_forward_hook(_fail_later)
        elif how.startswith("calls torch's barrier"):
            dist.barrier()
        else:
            fail_now(how)


def fail_now(how: str) -> None:
    """Do one of `FAILURES` at once, wherever the program is."""
    if how in ("raises between passes", "raises before the first collective"):
        _fail()
    elif how in ("is killed", "is killed before the first collective"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "is terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "ends its program":
        sys.exit(0)
    else:
        raise AssertionError(how)


def _fail_later(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(_fail)  # type: ignore[no-untyped-call]  # torch does not annotate it
