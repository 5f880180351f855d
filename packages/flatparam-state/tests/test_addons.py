"""Names that the state layer promises and an add-on has."""

import sys

import pytest

import flatparam_state


@pytest.mark.parametrize(
    ("addon", "name"), [(addon, name) for addon, names in flatparam_state._MOVED.items() for name in names.split()]
)
def test_a_name_of_an_add_on_that_is_lacking(addon: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is promised all the same, and the error says which name is lacking and what to install."""
    monkeypatch.setitem(sys.modules, addon, None)
    monkeypatch.delitem(vars(flatparam_state), name, raising=False)
    assert name in flatparam_state.__all__
    with pytest.raises(ModuleNotFoundError) as caught:
        getattr(flatparam_state, name)
    distribution = addon.replace("_", "-")
    assert str(caught.value) == (
        f"flatparam_state.{name}: expected the package {distribution}, which is not installed: "
        f"pip install {distribution}, or from a checkout python3 tools/run.py install {distribution}"
    )
    assert caught.value.name == addon
