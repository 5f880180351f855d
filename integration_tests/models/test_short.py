"""Two models of the table that need nothing but torch; the table has them too, in every setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.models import checks, deferred
from integration_tests.models.described import BLOCKS, LAYERS
from integration_tests.models.every import SHORT
from integration_tests.models.training import Setting

pytestmark = [
    pytest.mark.parametrize("name", SHORT),
    pytest.mark.timeout(1800),  # on a busy machine
]

FOUR = (
    Setting("FULL_SHARD", False, False, False, LAYERS),
    Setting("FULL_SHARD", True, False, True, BLOCKS),
    Setting("SHARD_GRAD_OP", False, False, True, BLOCKS),
    Setting("SHARD_GRAD_OP", True, False, False, LAYERS),
)
"""Each choice with each other one."""


def test_width(name: str) -> None:
    """Each model has parameters, gradients and parts of parameters on both sides of every threshold."""
    checks.check_width(name)


@pytest.mark.parametrize("setting", FOUR, ids=str)
def test_fp32(name: str, setting: Setting) -> None:
    """Three steps of AdamW on two ranks have the bits of one process."""
    checks.check_fp32(name, setting)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [pytest.param(FOUR[1:3], id="two"), pytest.param(FOUR[::3], id="others", marks=pytest.mark.long)],
)
def test_bf16(name: str, settings: tuple[Setting, ...]) -> None:
    """Three steps of AdamW in bf16 mixed precision on two ranks have the bits of torch FSDP1's."""
    for setting in settings:
        checks.check_bf16(name, setting.evolve(mixed=True))


@pytest.mark.parametrize("way", list(checks.THREADS))
def test_saved_and_loaded(name: str, way: str, tmp_path: Path) -> None:
    """A fresh model at the other exposure trains on from what was saved, to the same bits."""
    checks.check_saved(name, way, checks.ways(SHORT[name])[::2], tmp_path)


def test_plain_state(name: str) -> None:
    """The full state is the plain model's, in both directions."""
    checks.check_plain_state(name, Setting(original=True))


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_generates(name: str, original: bool) -> None:
    """The tokens are the plain model's with the same weights, inside `summon_full_params` and outside."""
    checks.check_generates(name, Setting(original=original))


def test_first_rank_has_values(name: str) -> None:
    """Rank 0 has the model, and the other builds it on the meta device."""
    deferred.check_first_rank_has_values(name, True)
