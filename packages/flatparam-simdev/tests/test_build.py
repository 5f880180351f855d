"""How the simulated device is compiled, without compiling it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatparam_simdev import build


def test_no_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no compiler, the reason says what is needed."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs g++" in build.why_not()


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compiler fails, the reason is what it says, and nothing is left that looks as if it were built."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "no such header" in build.why_not()
    assert not list(tmp_path.rglob("*.so"))


def test_what_is_built_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of this torch, this Python and this source is used as it is."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho once >> "$0.calls"\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.built() == build.built()
    assert (tmp_path / "compiler.calls").read_text() == "once\n"
