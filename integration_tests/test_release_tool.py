"""tools/release: what a release changes and what it refuses, in a clone of a repository with the packages' own files."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from each_row import each_row
from house import read_toml
from packaging.version import Version
from release.changelog import Changelog
from release.main import main
from release.packages import ReleaseError, widened

ROOT = Path(__file__).resolve().parents[1]
TODAY = time.strftime("%Y-%m-%d")
CHANGELOG = """# Changelog

## [Unreleased]

### Added

- A thing.

## [0.1.0.dev1] - 2026-11-21

### Added

- Everything else.
"""


def git(where: Path, *arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=where, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of a repository that holds the pyproject.toml, the changelog and the `__init__.py` of each package."""
    # Neither the user's settings nor those of the machine: no signatures, no hooks, a name to commit under.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "gitconfig").write_text("[user]\n  name = Somebody\n  email = somebody@example.org\n")
    origin = tmp_path / "origin"
    for package in (ROOT / "packages").iterdir():
        home = f"src/{package.name.replace('-', '_')}"
        module = f"{home}/version.py" if (package / home / "version.py").exists() else f"{home}/__init__.py"
        for name in ("pyproject.toml", "CHANGELOG.md", module):
            copy = origin / "packages" / package.name / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(package / name, copy)
        (origin / "packages" / package.name / "CHANGELOG.md").write_text(CHANGELOG)
    for name in ("tools/mkdocs.yml", "docs/install.md"):
        (origin / name).parent.mkdir()
        shutil.copy(ROOT / name, origin / name)
    git(tmp_path, "init", "--quiet", str(origin))
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "All")
    git(tmp_path, "clone", "--quiet", str(origin), "clone")
    return tmp_path / "clone"


def text_of(clone: Path, package: str, name: str) -> str:
    """The text of a file of a package."""
    return (clone / "packages" / package / name).read_text(encoding="utf-8")


def test_a_release(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One commit and one tag hold the changelog, the version and the wider ranges, and nothing else is changed."""
    assert main(["core", "0.2.0"], clone) == 0
    assert '\n__version__ = "0.2.0"\n' in text_of(clone, "flatparam-core", "src/flatparam_core/__init__.py")
    released = Changelog(text_of(clone, "flatparam-core", "CHANGELOG.md"))
    assert released.unreleased == ""
    assert released.versions == {"0.2.0": TODAY, "0.1.0.dev1": "2026-11-21"}
    for package in (
        "flatparam-clients",
        "flatparam-comm",
        "flatparam",
        "flatparam-files",
        "flatparam-meshes",
        "flatparam-optim",
        "flatparam-plan",
    ):
        assert '"flatparam-core>=0.1,<0.3"' in text_of(clone, package, "pyproject.toml")
        noted = Changelog(text_of(clone, package, "CHANGELOG.md"))
        assert noted.unreleased.endswith("### Changed\n\n- Takes `flatparam-core` 0.2, too.")
    assert git(clone, "tag", "--points-at", "HEAD") == "flatparam-core-v0.2.0"
    assert git(clone, "log", "--format=%s") == "Release flatparam-core 0.2.0\nAll"
    assert git(clone, "show", "--name-only", "--format=").splitlines() == [
        "packages/flatparam-clients/CHANGELOG.md",
        "packages/flatparam-clients/pyproject.toml",
        "packages/flatparam-comm/CHANGELOG.md",
        "packages/flatparam-comm/pyproject.toml",
        "packages/flatparam-core/CHANGELOG.md",
        "packages/flatparam-core/src/flatparam_core/__init__.py",
        "packages/flatparam-files/CHANGELOG.md",
        "packages/flatparam-files/pyproject.toml",
        "packages/flatparam-meshes/CHANGELOG.md",
        "packages/flatparam-meshes/pyproject.toml",
        "packages/flatparam-optim/CHANGELOG.md",
        "packages/flatparam-optim/pyproject.toml",
        "packages/flatparam-plan/CHANGELOG.md",
        "packages/flatparam-plan/pyproject.toml",
        "packages/flatparam/CHANGELOG.md",
        "packages/flatparam/pyproject.toml",
    ]
    assert git(clone, "status", "--porcelain") == ""
    assert "git push origin HEAD flatparam-core-v0.2.0" in capsys.readouterr().out


def test_an_add_on_is_released_without_the_layers(clone: Path) -> None:
    """Its own files change, and the ranges of the wrapper, those of extras too; no other package does."""
    assert main(["plan", "0.2.0"], clone) == 0
    assert git(clone, "tag") == "flatparam-plan-v0.2.0"
    assert git(clone, "show", "--name-only", "--format=").splitlines() == [
        "packages/flatparam-plan/CHANGELOG.md",
        "packages/flatparam-plan/src/flatparam_plan/__init__.py",
        "packages/flatparam/CHANGELOG.md",
        "packages/flatparam/pyproject.toml",
    ]
    project = text_of(clone, "flatparam", "pyproject.toml")
    assert project.count('"flatparam-plan>=0.1,<0.3"') == 3
    assert project.count('"flatparam-plan[transformers]>=0.1,<0.3"') == 1


def test_a_dry_run(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The changes are printed, and none is made."""
    assert main(["core", "0.2.0", "--dry-run"], clone) == 0
    printed = capsys.readouterr().out
    for line in (
        f"+## [0.2.0] - {TODAY}",
        '-__version__ = "0.1.0"',
        '+__version__ = "0.2.0"',
        '+    "flatparam-core>=0.1,<0.3",',
        "Would commit this as `Release flatparam-core 0.2.0` and tag the commit flatparam-core-v0.2.0. Nothing was changed.",
    ):
        assert line in printed.splitlines(), line
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "tag") == ""
    assert git(clone, "log", "--format=%s") == "All"


def test_the_first_release(clone: Path) -> None:
    """The version that the package has already is released if it has no tag; ranges that hold it stay as they are."""
    assert main(["flatparam-comm", "0.1.0"], clone) == 0
    assert git(clone, "show", "--name-only", "--format=") == "packages/flatparam-comm/CHANGELOG.md"
    assert git(clone, "tag") == "flatparam-comm-v0.1.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cores", "0.2.0"], "there is no package 'cores': there are flatparam, flatparam-certify,"),
        (["core", "next"], "'next' is no version: write it as in 0.2.0 or 0.2.0rc1"),
        (["core", "0.2"], "'0.2' is not how a version is written here: as in 0.2.0"),
        (["core", "0.2.0-rc1"], "'0.2.0-rc1' is not how a version is written here"),
        (["core", "0.2.0+mine"], "'0.2.0+mine' is not how a version is written here"),
        (["core", "0.0.9"], "0.0.9 is lower than the package's version, which is 0.1.0"),
    ],
    ids=["package", "no version", "two numbers", "spelling", "local", "lower"],
)
def test_what_is_refused(arguments: list[str], message: str, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong names and wrong versions are refused, in a sentence."""
    assert main(arguments, clone) == 1
    assert message in capsys.readouterr().err


def test_a_checkout_with_changes(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not committed would be in no release, so a dirty checkout is refused, in a dry run, too."""
    (clone / "new.txt").write_text("new")
    assert main(["core", "0.2.0", "--dry-run"], clone) == 1
    assert "the checkout has changes: commit them, or undo them\n?? new.txt" in capsys.readouterr().err


def test_a_tag_that_exists(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version that was tagged is refused."""
    git(clone, "tag", "flatparam-core-v0.2.0")
    assert main(["core", "0.2.0"], clone) == 1
    assert "the tag flatparam-core-v0.2.0 exists" in capsys.readouterr().err
    assert git(clone, "status", "--porcelain") == ""


def test_nothing_to_release(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A package without unreleased changes is refused."""
    assert main(["core", "0.2.0"], clone) == 0
    assert main(["core", "0.3.0"], clone) == 1
    assert "flatparam-core/CHANGELOG.md names no change under [Unreleased]" in capsys.readouterr().err


def test_a_version_with_a_section(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A version that the changelog has already is refused, even if its tag is gone."""
    assert main(["core", "0.2.0"], clone) == 0
    git(clone, "tag", "--delete", "flatparam-core-v0.2.0")
    assert main(["core", "0.2.0"], clone) == 1
    assert "flatparam-core/CHANGELOG.md has a section for 0.2.0 already" in capsys.readouterr().err


@each_row(
    ("text", "message"),
    [
        ("# Changelog\n", r"the first section must be `## \[Unreleased\]`, and it is \[\]"),
        ("## [Unreleased]\n\n## 0.1.0\n", "a section must be headed"),
        ("## [Unreleased]\n\n### New\n", "found `### New`"),
    ],
    ids=["none", "heading", "kind"],
)
def test_a_changelog_of_another_form(text: str, message: str) -> None:
    """A changelog that is not in the format is refused before anything is written."""
    with pytest.raises(ReleaseError, match=message):
        Changelog(text)


@each_row("package", sorted(path.name for path in (ROOT / "packages").iterdir()))
def test_our_changelogs(package: str) -> None:
    """The changelogs of the packages are in the format, and their dated versions stand in order."""
    changelog = Changelog.read(ROOT / "packages" / package / "CHANGELOG.md")
    dates = list(changelog.versions.values())
    assert dates == sorted(dates, reverse=True)
    assert [Version(each) for each in changelog.versions] == sorted(map(Version, changelog.versions), reverse=True)


def test_an_item_joins_its_kind() -> None:
    """A new item comes last among those of its kind, and the rest of the changelog stays as it is."""
    changed = Changelog(CHANGELOG).with_item("Added", "Another.").text
    assert changed == CHANGELOG.replace("- A thing.\n", "- A thing.\n- Another.\n")


@each_row(
    ("found", "version", "expected"),
    [
        (">=0.1,<0.2", "0.1.7", ">=0.1,<0.2"),
        (">=0.1,<0.2", "0.2.0rc1", ">=0.1,<0.3"),
        (">=0.1,<0.2", "1.0.0", ">=0.1,<2"),
        (">=1.2,<2", "2.1.0", ">=1.2,<3"),
        (">=0.1", "0.9.0", ">=0.1"),
    ],
)
def test_ranges_are_widened(found: str, version: str, expected: str) -> None:
    """The upper end becomes the first version that may break; the lower end, and ranges that fit, stay."""
    project = f'dependencies = ["flatparam-core{found}", "flatparam-core-extras<0.1"]'
    assert widened(project, "flatparam-core", Version(version)) == project.replace(found, expected)


def test_the_address_of_the_repository(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each package links to its source, its changelog, the documentation and the tracker; the site and one page name it.

    Given again, it replaces the older one and changes nothing else.
    """
    before = {path: read_toml(path) for path in clone.rglob("pyproject.toml")}
    assert main(["address", "https://example.org/us/old"], clone) == 0
    assert f"Wrote the address to {len(before) + 2} files" in capsys.readouterr().out
    assert main(["address", "https://example.org/us/flatparam.git"], clone) == 0
    for path, was in before.items():
        found = read_toml(path)
        folder = f"packages/{path.parent.name}"
        assert found["project"].pop("urls") == {
            "Source": f"https://example.org/us/flatparam/tree/main/{folder}",
            "Documentation": "https://example.org/us/flatparam/tree/main/docs",
            "Changelog": f"https://example.org/us/flatparam/blob/main/{folder}/CHANGELOG.md",
            "Issues": "https://example.org/us/flatparam/issues",
        }
        was["project"].pop("urls", None)
        assert found == was
    assert (clone / "tools/mkdocs.yml").read_text().count("repo_url: https://example.org/us/flatparam\n") == 1
    page = (clone / "docs/install.md").read_text()
    assert "$ git clone https://example.org/us/flatparam.git flatparam\n" in page
    now = git(clone, "diff")
    assert main(["address", "https://example.org/us/flatparam"], clone) == 0
    assert git(clone, "diff") == now


@each_row(
    "address", ["flatparam", "http://example.org/us/flatparam", "https://example.org", "git@example.org:us/flatparam"]
)
def test_what_is_no_address(address: str, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Anything but the https address of a page is refused, and nothing is written."""
    assert main(["address", address], clone) == 1
    assert "expected an address such as https://example.org/us/flatparam" in capsys.readouterr().err
    assert git(clone, "status", "--porcelain") == ""
