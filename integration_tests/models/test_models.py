"""The table of docs/models.md: `nox -s run -- models` runs it in an environment that has transformers and diffusers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration_tests.models import checks, deferred
from integration_tests.models.described import BLOCKS, LAYERS, Model
from integration_tests.models.every import EVERY
from integration_tests.models.pretrained import check_pretrained
from integration_tests.models.training import Setting

os.environ.setdefault("HF_HUB_OFFLINE", "1")

if any(importlib.util.find_spec(name) is None for name in ("transformers", "diffusers")):
    pytest.skip(
        "transformers and diffusers are not installed here; `nox -s run -- models` has them in an environment of its own",
        allow_module_level=True,
    )

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # on a busy machine
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated"),
]

Record = Callable[[str, object], None]


def of_models(*more: str, only: Callable[[Model], object] = lambda model: True, mixed: bool = False) -> Any:
    """Parametrize by model, in a group for each, so that what torch has trained is at hand; `more` says by what else."""
    found = []
    for model in EVERY.values():
        if not only(model):
            continue
        group = pytest.mark.xdist_group(model.name)
        if not more:
            found.append(pytest.param(model.name, id=model.name, marks=group))
            continue
        values: list[Any] = [False, True]
        if more == ("setting",):
            values = checks.settings(BLOCKS, *([LAYERS] if model.layers else []), mixed=mixed)
        names = {False: "flat", True: "original"}
        found += [
            pytest.param(model.name, value, id=f"{model.name}-{names.get(value, value)}", marks=group)
            for value in values
        ]
    return pytest.mark.parametrize(("name", *more), found)


@pytest.fixture
def record(record_property: Record, request: pytest.FixtureRequest) -> Record:
    """Notes what a test is about, for the table (tools/models_page.py)."""
    record_property("model", request.getfixturevalue("name"))
    return record_property


@of_models()
def test_width(name: str, record: Record) -> None:
    """Each model has parameters, gradients and parts of parameters on both sides of every threshold."""
    checks.check_width(name)
    for fact, value in checks.facts(name).items():
        record(fact, value)


@of_models("setting")
def test_fp32(name: str, setting: Setting, record: Record) -> None:
    """Three steps of AdamW on two ranks have the bits of one process."""
    record("column", "fp32")
    checks.check_fp32(name, setting)


@pytest.mark.processes
@of_models("setting", mixed=True)
def test_bf16(name: str, setting: Setting, record: Record) -> None:
    """Three steps of AdamW in bf16 mixed precision on two ranks have the bits of torch FSDP1's."""
    record("column", "bf16")
    checks.check_bf16(name, setting)


@pytest.mark.parametrize("way", list(checks.THREADS))
@of_models()
def test_saved_and_loaded(name: str, way: str, tmp_path: Path, record: Record) -> None:
    """A fresh model, at either exposure, trains on from what was saved, to the same bits."""
    record("column", "saved")
    checks.check_saved(name, way, checks.ways(EVERY[name]), tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("way", list(checks.PROCESSES))
@of_models()
def test_saved_and_loaded_by_processes(name: str, way: str, tmp_path: Path, record: Record) -> None:
    """The same for sharded state, which torch's process groups are needed for."""
    record("column", "saved")
    checks.check_saved(name, way, checks.ways(EVERY[name]), tmp_path)


@of_models("original")
def test_plain_state(name: str, original: bool, record: Record) -> None:
    """The full state is the plain model's, in both directions."""
    record("column", "saved")
    checks.check_plain_state(name, Setting(original=original))


@of_models(only=lambda model: model.pretrained)
def test_pretrained(name: str, tmp_path: Path, record: Record) -> None:
    """What rank 0 saves by transformers' own function, transformers' own function reads."""
    record("column", "saved")
    check_pretrained(name, tmp_path)


@of_models("original", only=lambda model: model.generate)
def test_generates(name: str, original: bool, record: Record) -> None:
    """The tokens are the plain model's with the same weights."""
    record("column", "generate")
    checks.check_generates(name, Setting(original=original))


@of_models("original")
def test_first_rank_has_values(name: str, original: bool, record: Record) -> None:
    """Rank 0 has the model, and the other builds it on the meta device."""
    record("column", "meta")
    deferred.check_first_rank_has_values(name, original)


@of_models("original", only=lambda model: model.pretrained)
def test_own_start_from_meta(name: str, original: bool, record: Record) -> None:
    """Both ranks build it on the meta device, and it begins as its own `_init_weights` says."""
    record("column", "meta")
    deferred.check_own_start(name, original)
