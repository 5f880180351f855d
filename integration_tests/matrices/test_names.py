"""The names of the wrapper that lead to the add-on."""

import pytest

import flatparam.optim
import flatparam_optim


@pytest.mark.parametrize("name", flatparam.optim.__all__)
def test_the_wrappers_names_are_the_add_ons(name: str) -> None:
    """`flatparam.optim` has the very classes of `flatparam_optim`."""
    assert getattr(flatparam.optim, name) is getattr(flatparam_optim, name)
