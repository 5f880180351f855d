"""The table of thresholds is that of the code, and results do not depend on them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import flatparam.fully_sharded_data_parallel  # noqa: F401  # all layers, and so all thresholds
import flatparam_checkpoint  # noqa: F401
import flatparam_files.formats.detect  # noqa: F401
import flatparam_onehost  # noqa: F401
import flatparam_optim  # noqa: F401
import flatparam_publish  # noqa: F401
from flatparam import Checkpointer, FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from flatparam_core import Threshold, all_thresholds
from flatparam_guard.relay_settings import RelaySettings

PAGE = Path(__file__).parent / "reference" / "thresholds.md"
ROW = re.compile(r"^\| `([a-z_.]+)` \| ([0-9,]+) \| (.+) \|$", re.MULTILINE)


def test_the_page_lists_them_all() -> None:
    """Each threshold is in the table with its default and what it decides, in order, and nothing else is."""
    found = [(name, int(value.replace(",", "")), ways) for name, value, ways in ROW.findall(PAGE.read_text())]
    assert found == [(each.name, each.default, each.ways) for each in all_thresholds()]


def test_the_relays_numbers_are_listed() -> None:
    """Each of them is in the table with its default and what it decides, in order, and nothing else is."""
    page = (PAGE.parents[1] / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([0-9.]+) \| (.+) \|$", page, re.MULTILINE)
    fields = [field for field in attrs.fields(RelaySettings) if "ways" in field.metadata]
    assert rows == [(each.name.upper(), f"{each.default:g}", each.metadata["ways"]) for each in fields]


def test_setting_one() -> None:
    """A threshold is set inside a context and is as before after it, also after an exception; too small is refused."""
    threshold = all_thresholds()[0]
    seen = []

    def fail() -> None:
        with threshold.set_to(threshold.least):
            seen.append(threshold.value)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [threshold.least]
    assert threshold.value == threshold.default
    for value in (threshold.least - 1, threshold.most + 1):
        with pytest.raises(ValueError, match="expected a number from"), threshold.set_to(value):
            pass
    with pytest.raises(ValueError, match="already"):
        Threshold(threshold.name, 1, "")


@contextlib.contextmanager
def all_set(extreme: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in all_thresholds():
            # Else hundreds of thousands of pieces.
            small = 2**12 if each.name == "runtime.step_numel" else each.least
            stack.enter_context(each.set_to(small if extreme == "least" else each.most))
        yield


class Net(nn.Module):
    """Parameters of one element, of some, and of more than any threshold of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(4, 8)
        self.long = nn.Linear(8, 2**18 // 4, bias=False)
        self.last = nn.Linear(2**18 // 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.long(self.first(x)) * self.scale))
        return out


def trained(ranks: Collectives, use_orig_params: bool, directory: str) -> Any:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        sync_module_states=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + ranks.rank))
        model(x).square().mean().backward()
        optimizer.step()
    with Checkpointer(directory, model, optimizer, ranks=ranks) as checkpointer:
        checkpointer.save(1)
        checkpointer.load()
    return model.state_dict(), FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_no_number_depends_on_them(use_orig_params: bool, tmp_path: Path) -> None:
    """With every threshold at its least and at more than anything there is, parameters and state have the same bits."""
    results = []
    for extreme in ("default", "least", "large"):
        with all_set(extreme) if extreme != "default" else contextlib.nullcontext():
            results.append(run_threads(2, trained, use_orig_params, str(tmp_path / extreme))[0])
    (state, optimizer), *others = results
    for other_state, other_optimizer in others:
        assert all(torch.equal(other_state[name], value) for name, value in state.items())
        for fqn, values in optimizer["state"].items():
            assert all(torch.equal(other_optimizer["state"][fqn][name], value) for name, value in values.items())
