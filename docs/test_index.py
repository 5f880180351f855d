"""Whoever begins at the first page, or at the menu of the site, finds every page."""

import re
from pathlib import Path

from each_row import each_row

DOCS = Path(__file__).resolve().parent
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.name != "index.md")
#: Pages of single devices, which `nox -s gpu` writes; gpu/README.md lists them.
LISTED_ELSEWHERE = {page for page in PAGES if page.startswith("gpu/") and page != "gpu/README.md"}


@each_row("place", ["docs/index.md", "tools/mkdocs.yml"])
def test_every_page_is_listed(place: str) -> None:
    """The index links to every page, and the site's menu has every page, once."""
    text = (DOCS.parent / place).read_text(encoding="utf-8")
    found = re.findall(r"(?<=[( ])([\w/-]+\.md)(?=[)#\n])", text)
    listed = [page for page in found if page != "index.md"]
    assert sorted(listed) == sorted(set(PAGES) - LISTED_ELSEWHERE)
