"""What was saved is loaded bit for bit, and training goes on as if nothing had happened, however it is sharded now."""

from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row

from flatparam_checkpoint import Checkpointer
from flatparam_comm import SingleCollectives

from .beneath import CASES, OPTIMIZERS, Keeper, Setup, Ticker, assert_equal_state
from .runs import resumed, saved

FLAT, ORIGINALS = Setup(), Setup(use_orig_params=True)

PAIRS = {
    "2 to 2": (FLAT, FLAT),
    "2 to 1": (FLAT, Setup(1)),
    "2 to 3": (FLAT, Setup(3)),
    "3 to 2": (Setup(3), FLAT),
    "1 to 4": (Setup(1), Setup(4)),
    "5 to 2 originals": (Setup(5), ORIGINALS),
    "flat to originals": (FLAT, ORIGINALS),
    "originals to flat": (ORIGINALS, FLAT),
    "originals 2 to 3": (ORIGINALS, Setup(3, use_orig_params=True)),
    "to one unit": (FLAT, Setup(3, units=("",))),
    "from one unit": (Setup(3, units=("",)), ORIGINALS),
    "to other units": (FLAT, Setup(2, units=("0", "4"))),
    "to no units at all": (FLAT, Setup(1, units=())),
    "from no units": (Setup(2, units=()), FLAT),
    "to SHARD_GRAD_OP": (FLAT, Setup(early=False)),
    "to NO_SHARD": (FLAT, Setup(shards=1)),
    "from NO_SHARD": (Setup(3, shards=1), FLAT),
    "to HYBRID_SHARD": (FLAT, Setup(4, shards=2)),
    "from HYBRID_SHARD": (Setup(4, shards=2, use_orig_params=True), Setup(3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_resume_anywhere(name: str, tmp_path: Path) -> None:
    """Model and optimizer are equal to the saved ones on every rank, and so is what two more steps make of them."""
    before, after = PAIRS[name]
    expected = saved(before, tmp_path)[0]
    for now, later, loaded in resumed(after, tmp_path):
        assert_equal_state(now, expected[0])
        assert_equal_state(later, expected[1])
        assert (loaded.step, loaded.extra, loaded.world_size) == (3, {"steps": 3}, before.world_size)
        assert loaded.of_rank(0) == {"rank": 0}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("to_originals", [False, True])
def test_every_optimizer(name: str, to_originals: bool, tmp_path: Path) -> None:
    """Each of torch's optimizers goes on at a different world size and in the other exposure, bit for bit."""
    expected = saved(Setup(2, use_orig_params=not to_originals, make=OPTIMIZERS[name]), tmp_path)[0]
    for now, later, _ in resumed(Setup(3, use_orig_params=to_originals, make=OPTIMIZERS[name]), tmp_path):
        assert_equal_state(now, expected[0])
        assert_equal_state(later, expected[1])


@each_row("make", [Keeper, Ticker])
@each_row("use_orig_params", [False, True])
def test_odd_optimizer_states(make: Any, use_orig_params: bool, tmp_path: Path) -> None:
    """Strings, None, numbers, lists and counters beside tensors."""
    setup = Setup(2, use_orig_params=use_orig_params, make=make)
    expected = saved(setup, tmp_path)[0]
    for now, later, _ in resumed(Setup(3, use_orig_params=use_orig_params, make=make), tmp_path):
        assert_equal_state(now, expected[0])
        assert_equal_state(later, expected[1])


@pytest.mark.parametrize("name", CASES)
def test_every_model(name: str, use_orig_params: bool, tmp_path: Path) -> None:
    """Tied, nested, odd shapes, channels_last, dtypes, frozen, buffers and extra state, ignored, shared modules."""
    case = CASES[name]
    expected = saved(Setup(2, case, use_orig_params), tmp_path)[0]
    for now, later, _ in resumed(Setup(3, case, use_orig_params), tmp_path):
        assert_equal_state(now, expected[0])
        assert_equal_state(later, expected[1])


@pytest.mark.parametrize("name", ["tied", "shared module", "odd shapes", "buffers"])
def test_every_model_without_units(name: str, tmp_path: Path) -> None:
    """From shards into the plain model, and from the plain model into shards."""
    case = CASES[name]
    sharded, plain = Setup(2, case), Setup(1, case, units=())
    for before, after in ((sharded, plain), (plain, sharded)):
        root = tmp_path / str(before.world_size)
        expected = saved(before, root)[0]
        for now, later, _ in resumed(after, root):
            assert_equal_state(now, expected[0])
            assert_equal_state(later, expected[1])


def test_without_an_optimizer_and_without_a_model(tmp_path: Path) -> None:
    """A checkpoint can be of the user's own state alone; a model can be loaded without its optimizer."""
    alone = SingleCollectives()
    order = torch.randperm(5)
    with Checkpointer(tmp_path, ranks=alone) as checkpointer:
        assert checkpointer.load() is None
        assert checkpointer.latest() is None
        checkpointer.save(0, extra={"order": order, 3: (1, None)}, rank_extra=torch.get_rng_state())
        loaded = checkpointer.load()
    assert loaded is not None
    assert torch.equal(loaded.extra["order"], order)
    assert loaded.extra[3] == (1, None)
    assert torch.equal(loaded.rank_extra, torch.get_rng_state())
