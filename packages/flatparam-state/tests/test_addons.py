"""Names that the state layer promises and an add-on has."""

import sys

import pytest

import flatparam_state


@pytest.mark.parametrize("name", flatparam_state._MOVED)
def test_a_name_of_an_add_on_that_is_lacking(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is promised all the same, and the error says which name is lacking and what to install."""
    monkeypatch.setitem(sys.modules, "flatparam_publish", None)
    monkeypatch.delitem(vars(flatparam_state), name, raising=False)
    assert name in flatparam_state.__all__
    with pytest.raises(ModuleNotFoundError) as caught:
        getattr(flatparam_state, name)
    assert str(caught.value) == (
        f"flatparam_state.{name}: expected the package flatparam-publish, which is not installed: "
        "pip install flatparam-publish"
    )
    assert caught.value.name == "flatparam_publish"
