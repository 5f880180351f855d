"""The guide to each client shows a program that a test runs: a file of integration_tests/clients/programs, as it is."""

import re
from pathlib import Path

from each_row import each_row

from docs.test_code_blocks import blocks_of

DOCS = Path(__file__).resolve().parent
CLIENTS = DOCS.parent / "integration_tests" / "clients"
PAGES = sorted((DOCS / "guides").glob("client-*.md"))
PROGRAM = re.compile(r"\bguide_(\w+)\.py\b")


@each_row("page", PAGES, ids=lambda page: page.stem)
def test_the_program_is_a_tested_one(page: Path) -> None:
    """Each page has one program, which is the file that its mark names; `test_guides.py` runs it."""
    blocks = [block for block in blocks_of(page.read_text(encoding="utf-8")) if block.language == "python"]
    shown = [(PROGRAM.search(block.not_run or ""), block) for block in blocks]
    ((named, block),) = [(named, block) for named, block in shown if named]
    assert "\n".join(block.lines) + "\n" == (CLIENTS / "programs" / named[0]).read_text(encoding="utf-8")
    assert f'"{named[1]}": (' in (CLIENTS / "test_guides.py").read_text(encoding="utf-8")


def test_every_program_has_a_page() -> None:
    """There is a page for each program for the guides, and the general page leads to it."""
    programs = {path.stem.removeprefix("guide_") for path in CLIENTS.glob("programs/guide_*.py")}
    assert {page.stem.removeprefix("client-") for page in PAGES} == programs
    general = (DOCS / "guides" / "clients.md").read_text(encoding="utf-8")
    assert all(f"({page.name})" in general for page in PAGES)


def test_tests_that_pages_name_are_there() -> None:
    """Each test that a page names, or a table of the general page, is a function of a test file."""
    files = [*CLIENTS.glob("test_*.py"), *DOCS.parent.glob("packages/flatparam*/tests/test_*.py")]
    defined = {
        name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    defined |= {path.name for path in files}
    for page in [*PAGES, DOCS / "guides" / "clients.md", DOCS / "guides" / "fine-tuning.md"]:
        named = set(re.findall(r"`(test_\w+(?:\.py)?)`", page.read_text(encoding="utf-8")))
        assert named - defined == set(), page.name


def test_the_guide_to_fine_tuning_shows_a_tested_program() -> None:
    """Its program is a file of the programs, as it is, and a test in the session `clients` runs it."""
    page = (DOCS / "guides" / "fine-tuning.md").read_text(encoding="utf-8")
    (block,) = [block for block in blocks_of(page) if block.language == "python"]
    assert "programs/fine_tuning.py" in (block.not_run or "")
    program = (CLIENTS / "programs" / "fine_tuning.py").read_text(encoding="utf-8")
    assert "\n".join(block.lines) + "\n" == program
    assert 'PROGRAMS / "fine_tuning.py"' in (CLIENTS / "test_fine_tuning.py").read_text(encoding="utf-8")
