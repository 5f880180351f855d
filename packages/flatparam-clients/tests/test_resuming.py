"""A run that is resumed by the calls of accelerate, and of programs like it, goes on as the one that was not interrupted.

They load a sharded checkpoint into the state of an optimizer that has just been made, and has not stepped. Their calls
are written out here; integration_tests/clients has the programs.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("leftovers_do_not_count")]

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=False),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}
STEPS = 4


class Model(nn.Module):
    """With a frozen layer, and with one that is trained only if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.frozen = nn.Linear(5, 5)
        self.last = nn.Linear(5, 2)
        self.unused = nn.Linear(5, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x).tanh()))  # type: ignore[no-any-return]


class Run:
    """A model and its optimizer in a program of FSDP1's; what is trained is compared by its losses and weights."""

    def __init__(self, kind: str, originals: bool) -> None:
        fsdp, wrap = (importlib.import_module(f"torch.distributed.fsdp{name}") for name in ("", ".wrap"))
        self.fsdp = fsdp
        self.model = fsdp.FullyShardedDataParallel(
            Model(),
            auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear}),
            use_orig_params=originals,
            device_id=torch.device("cpu"),
        )
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:1], "weight_decay": 0.5}, {"params": parameters[1:]}]
        self.optimizer = OPTIMIZERS[kind](groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            # The same on all ranks, so that the number of ranks does not matter.
            loss = self.model(torch.full((2, 3), step + 1.0)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def sharded(self) -> Any:
        fsdp = self.fsdp
        return fsdp.FullyShardedDataParallel.state_dict_type(
            self.model,
            fsdp.StateDictType.SHARDED_STATE_DICT,
            fsdp.ShardedStateDictConfig(offload_to_cpu=True),
            fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True),
        )

    def save(self, folder: Path) -> None:
        """As `save_fsdp_model` and `save_fsdp_optimizer` do."""
        import torch.distributed.checkpoint as dist_cp
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        with self.sharded():
            for name, state in (
                ("model", self.model.state_dict()),
                (
                    "optimizer",
                    self.fsdp.FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer),
                ),
            ):
                dist_cp.save(
                    state_dict={name: state},
                    storage_writer=dist_cp.FileSystemWriter(folder / f"{name}_0"),
                    planner=DefaultSavePlanner(),
                )

    def load(self, folder: Path) -> None:
        """As `load_fsdp_model` and `load_fsdp_optimizer` do."""
        import torch.distributed.checkpoint as dist_cp
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        FSDP = self.fsdp.FullyShardedDataParallel
        with self.sharded():
            state = {"model": self.model.state_dict()}
            dist_cp.load(
                state_dict=state,
                storage_reader=dist_cp.FileSystemReader(folder / "model_0"),
                planner=DefaultLoadPlanner(),
            )
            self.model.load_state_dict(state["model"])
            optim_state = {"optimizer": FSDP.optim_state_dict(self.model, self.optimizer)}
            dist_cp.load(
                state_dict=optim_state,
                storage_reader=dist_cp.FileSystemReader(folder / "optimizer_0"),
                planner=DefaultLoadPlanner(),
            )
            flattened_osd = FSDP.optim_state_dict_to_load(
                model=self.model, optim=self.optimizer, optim_state_dict=optim_state["optimizer"]
            )
            self.optimizer.load_state_dict(flattened_osd)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def uninterrupted(ranks: Collectives, folder: Path, kind: str, originals: bool, saved: int) -> tuple[Any, Any]:
    """Its losses after it was saved, and its last weights."""
    run = Run(kind, originals)
    run.train(0, saved)
    run.save(folder / f"{kind}-{originals}-{saved}")
    return run.train(saved, STEPS), run.weights


def passed_on(ranks: Collectives, folder: Path, kind: str, originals: bool, saved: int) -> tuple[Any, Any]:
    """Resume, take a step and save again."""
    run = Run(kind, originals)
    run.load(folder / f"{kind}-{originals}-{saved}")
    losses = run.train(saved, saved + 1)
    run.save(folder / f"{kind}-{originals}-{saved + 1}")
    return losses, run.weights


def resumed(ranks: Collectives, folder: Path, kind: str, originals: bool, saved: int) -> tuple[Any, Any]:
    run = Run(kind, originals)
    run.load(folder / f"{kind}-{originals}-{saved}")
    return run.train(saved, STEPS), run.weights


def each(ranks: Collectives, folder: Path, work: list[tuple[Any, ...]]) -> list[tuple[Any, Any]]:
    warnings.simplefilter("ignore")
    with flatparam.install():
        return [run(ranks, folder, *case) for run, *case in work]


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


CASES = [(kind, originals, 2) for kind in OPTIMIZERS for originals in (False, True)]
UNSTEPPED = [("AdamW", True, 0), ("momentum", False, 0)]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Losses and weights are equal bit for bit, for each kind of optimizer and also if it was saved before its first step.

    With the original parameters the checkpoint has no state of the layer that is not used.
    """
    cases = [*CASES, *UNSTEPPED]
    work = [(run, *case) for case in cases for run in (uninterrupted, resumed)]
    for found in run_processes(2, each, tmp_path, work):
        for case, expected, again in zip(cases, found[::2], found[1::2], strict=True):
            assert again[0] == expected[0], case
            assert_same(again, expected)


def test_on_other_ranks(tmp_path: Path) -> None:
    """What two ranks saved one rank and three load, and go on to the same losses, up to rounding."""
    cases = [("AdamW", True, 2), ("momentum", False, 2)]
    before = run_processes(2, each, tmp_path, [(uninterrupted, *case) for case in cases])[0]
    for ranks in (1, 3):
        after = run_processes(ranks, each, tmp_path, [(resumed, *case) for case in cases])[0]
        for found, expected in zip(after, before, strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_from_two_ranks_to_one_and_to_three(tmp_path: Path) -> None:
    """What two ranks saved, one rank resumes and saves a step later, and three ranks end: with the same losses, up to rounding."""
    kinds = [("AdamW", True), ("momentum", False)]
    before = run_processes(2, each, tmp_path, [(uninterrupted, *kind, 2) for kind in kinds])[0]
    then = run_processes(1, each, tmp_path, [(passed_on, *kind, 2) for kind in kinds])[0]
    last = run_processes(3, each, tmp_path, [(resumed, *kind, 3) for kind in kinds])[0]
    for expected, one, three in zip(before, then, last, strict=True):
        assert [*one[0], *three[0]] == pytest.approx(expected[0], rel=1e-5)
        for name, value in expected[1].items():
            torch.testing.assert_close(three[1][name], value)


def test_what_is_missing_of_a_stepped_parameter_is_told(tmp_path: Path) -> None:
    """Only a parameter of which a checkpoint has nothing was never stepped; if it has a part, torch's error says so."""
    run_processes(2, told, tmp_path)


def told(ranks: Collectives, folder: Path) -> None:
    import torch.distributed.checkpoint as dist_cp

    with flatparam.install():
        run = Run("AdamW", True)
        run.train(0, 1)
        with run.sharded():
            state = run.fsdp.FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
        del state["state"]["last.weight"]["exp_avg"]
        # As a checkpoint of torch, or of an earlier version, has none of a parameter that no step has given a gradient.
        assert state["state"].pop("unused.weight")["step"] == 0
        dist_cp.save({"optimizer": state}, checkpoint_id=folder / "partial")
        again = Run("AdamW", True)
        with again.sharded():
            into = run.fsdp.FullyShardedDataParallel.optim_state_dict(again.model, again.optimizer)
        assert set(into["state"]) > set(state["state"])
        with pytest.raises(dist_cp.api.CheckpointException, match=r"Missing key.*last.weight.exp_avg"):
            dist_cp.load({"optimizer": into}, checkpoint_id=folder / "partial")
        assert not into["state"]["unused.weight"]
