"""Names that the runtime promises and an add-on has."""

import sys

import pytest

import flatparam_runtime


@pytest.mark.parametrize("name", flatparam_runtime._MOVED["flatparam_optim"].split())
def test_a_name_of_an_add_on_that_is_lacking(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is promised all the same, and the error says which name is lacking and what to install."""
    monkeypatch.setitem(sys.modules, "flatparam_optim", None)
    monkeypatch.delitem(vars(flatparam_runtime), name, raising=False)
    assert name in flatparam_runtime.__all__
    with pytest.raises(ModuleNotFoundError) as caught:
        getattr(flatparam_runtime, name)
    assert str(caught.value) == (
        f"flatparam_runtime.{name}: expected the package flatparam-optim, which is not installed: "
        "pip install flatparam-optim, or from a checkout python3 tools/run.py install flatparam-optim"
    )
    assert caught.value.name == "flatparam_optim"


def test_a_name_that_nobody_has() -> None:
    """It is an AttributeError, as of any module, and looks for no add-on."""
    with pytest.raises(AttributeError, match="module 'flatparam_runtime' has no attribute 'nothing'"):
        flatparam_runtime.nothing  # noqa: B018
