"""`flatparam_comm.testing` where `flatparam-simdev`, which has the worlds of processes, is not installed."""

import sys

import pytest

from flatparam_comm import testing


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flatparam-simdev."""
    for name in ("flatparam_simdev", "flatparam_simdev.worlds"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(vars(testing), "run_processes", raising=False)


@pytest.mark.usefixtures("alone")
def test_worlds_of_processes_are_lacking() -> None:
    """The name is promised all the same, and the error says what to install."""
    assert "run_processes" in testing.__all__
    with pytest.raises(ModuleNotFoundError) as caught:
        testing.run_processes  # noqa: B018
    assert str(caught.value) == (
        "flatparam_comm.testing.run_processes: expected the package flatparam-simdev, which is not installed: "
        "pip install flatparam-simdev, or from a checkout python3 tools/run.py install flatparam-simdev"
    )


@pytest.mark.usefixtures("alone")
def test_worlds_of_threads_are_patient_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """`be_patient` sets the limit of the worlds that there are."""
    defaults = testing.run_threads.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout", 1.0)
    testing.be_patient()
    assert defaults["timeout"] == testing.PATIENCE


def test_it_is_the_tools_own() -> None:
    """Where it is installed, the name is the tool's function, whose limits `be_patient` has set."""
    from flatparam_simdev.worlds import run_processes

    assert testing.run_processes is run_processes
    assert run_processes.__kwdefaults__["pg_timeout"] == testing.PATIENCE / 2
