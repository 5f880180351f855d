"""The patches that `docs/library-authors.md` proposes, applied to the libraries that are installed here."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PATCHES = Path(__file__).parent / "patches"


def patched(patch: str, module: str, folder: Path) -> ModuleType:
    """Return a module of an installed library with a patch applied to a copy of it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    relative = Path(*module.split(".")).with_suffix(".py")
    copy = folder / relative
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.origin, copy)
    command = ["patch", "-p1", "--no-backup-if-mismatch", "-i", str(PATCHES / patch)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    # Its relative imports are those of the library.
    found = importlib.util.spec_from_file_location(f"{module}_patched", copy)
    assert found is not None
    assert found.loader is not None
    made = importlib.util.module_from_spec(found)
    sys.modules[made.__name__] = made
    found.loader.exec_module(made)
    return made


def sharded(form: str, rank: int) -> nn.Module:
    torch.manual_seed(rank)  # so that values which are taken for copies are seen to change
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if form == "fully_shard":
        return flatparam.fully_shard(model)
    return flatparam.FullyShardedDataParallel(model, use_orig_params=form == "original")


def synchronised(ranks: Collectives, trainer: Any, form: str) -> tuple[bool, bool]:
    """Return whether the shards, and an adapter that was added later, are what they were."""
    model = sharded(form, ranks.rank)
    adapter = nn.Linear(2, 2)
    shards = [each.detach().clone() for each in model.parameters()]
    before = adapter.weight.detach().clone()
    stub = SimpleNamespace(accelerator=SimpleNamespace(sync_gradients=True))
    trainer._sync_replicated_trainable_parameters(stub, nn.ModuleList([model, adapter]))
    same = all(map(torch.equal, shards, (each.detach() for each in model.parameters())))
    return same, torch.equal(before, adapter.weight)


def with_transformers(ranks: Collectives, folder: str, form: str) -> list[tuple[bool, bool]]:
    own = Path(folder) / str(ranks.rank)
    module = patched("transformers-5.24.0.patch", "transformers.trainer", own)
    return [synchronised(ranks, module.Trainer, form)]


@pytest.mark.parametrize("form", ["fully_shard", "original", "flat"])
def test_transformers_leaves_shards_alone(form: str, tmp_path: Path) -> None:
    """With the patch `Trainer` broadcasts an adapter that was added later, and no shard, without `install()`."""
    pytest.importorskip("transformers", "5.24")
    first, second = run_processes(2, with_transformers, str(tmp_path), form)
    assert first == [(True, True)]
    assert second == [(True, False)]


def with_accelerate(ranks: Collectives, folder: str) -> list[bool]:
    own = Path(folder) / str(ranks.rank)
    module = patched("accelerate-1.15.0.patch", "accelerate.utils.other", own)
    forms = ("fully_shard", "original", "flat")
    found = [module.model_has_dtensor(sharded(form, ranks.rank)) for form in forms]
    return [*found, module.model_has_dtensor(nn.Linear(2, 2))]


def test_accelerate_knows_shards(tmp_path: Path) -> None:
    """With the patch a model of plain shards is neither moved nor wrapped in DDP, as one of `DTensor`s is not."""
    pytest.importorskip("accelerate", "1.15")
    assert run_processes(2, with_accelerate, str(tmp_path)) == [[True, True, True, False]] * 2


def test_the_page_has_the_patches() -> None:
    """The page shows what is tested."""
    page = (Path(__file__).parents[2] / "docs" / "library-authors.md").read_text(encoding="utf-8")
    for patch in PATCHES.glob("*.patch"):
        changed = [line for line in patch.read_text(encoding="utf-8").splitlines() if line[:1] in "+-"]
        assert all(line in page for line in changed), patch.name
