"""What every test of this package shares: what those of the wrapper do, and what torch wrapped before does not count."""

from collections.abc import Iterator

import pytest

import flatparam
from flatparam_clients import installing
from flatparam_clients.names import fsdp1_names
from flatparam_comm.testing import be_patient
from packages.flatparam.tests.conftest import _repeatable as _repeatable
from packages.flatparam.tests.conftest import torch_world as torch_world
from packages.flatparam.tests.conftest import use_orig_params as use_orig_params

be_patient()


@pytest.fixture(scope="module")
def names_are_in_place() -> None:
    """The names that are imported on first use are there, so that none appears in the middle of a test."""
    assert callable(flatparam.install)
    assert all(name.ours is not None for name in fsdp1_names())


@pytest.fixture(scope="module")
def leftovers_do_not_count() -> Iterator[None]:
    """What torch's FSDP1 wrapped before, in tests that compare with it, is not too early for `flatparam.install()`.

    Torch itself keeps some of these modules alive.
    """
    find = installing._wrapped_by_torch
    before = find()
    known = {id(each) for each in before}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installing, "_wrapped_by_torch", lambda: [each for each in find() if id(each) not in known])
        yield
