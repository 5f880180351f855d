"""The seam to autograd: what each private name of torch tells, and what happens if it is gone."""

import pytest
import torch

from flatparam_comm import FlatParamError
from flatparam_runtime.autograd import _private, accumulation_node, current_run, in_backward


def test_a_name_that_is_gone_is_told_when_it_is_needed() -> None:
    """Without a private name of torch the package is imported, and whoever needs it is told which, and what to do."""
    missing = _private("_C._no_such_function")
    with pytest.raises(FlatParamError, match=r"has no torch\._C\._no_such_function.*2\.11 to 2\.15"):
        missing()


def test_a_thread_knows_whether_it_is_in_a_backward_pass() -> None:
    """Inside a hook of autograd there is a run with a number; outside there is none."""
    found: list[tuple[bool, int]] = []
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: found.append((in_backward(), current_run())))
    leaf.square().backward()
    ((inside, number),) = found
    assert inside
    assert number >= 0
    assert not in_backward()
    assert current_run() == -1


def test_a_frozen_leaf_has_a_node_and_stays_frozen() -> None:
    """The node that accumulates is found for a frozen leaf too, which stays frozen; integers have none."""
    leaf = torch.ones(1)
    assert accumulation_node(leaf) is not None
    assert not leaf.requires_grad
    assert accumulation_node(torch.ones(1, dtype=torch.int64)) is None
