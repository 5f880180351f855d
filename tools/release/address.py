"""The address of the repository, in every file that names it: what packages link to, the site's head, how to install.

    nox -s release -- address https://example.org/us/flatparam

It can be given again: the older address is replaced. Nothing is committed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from .packages import ReleaseError

__all__ = ["URLS", "write_address"]

#: What a package index shows beside a package, below the address.
URLS: Mapping[str, str] = {
    "Source": "/tree/main/packages/{name}",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/packages/{name}/CHANGELOG.md",
    "Issues": "/issues",
}
_TABLE = re.compile(r"(?m)^\[project\.urls\]\n(?:[^\[\n].*\n)*\n?")
_SITE = re.compile(r"(?m)^repo_url: .*\n")
_CLONE = re.compile(r"(?m)^\$ git clone \S+ flatparam\b.*$")


def write_address(root: Path, address: str) -> list[Path]:
    """Write the address of the repository to every file that names it; return those that changed.

    Raises:
        ReleaseError: if it is no address of a page.
    """
    address = address.rstrip("/").removesuffix(".git")
    parts = urlsplit(address)
    if parts.scheme != "https" or not parts.netloc or not parts.path.strip("/") or parts.query or parts.fragment:
        raise ReleaseError(f"expected an address such as https://example.org/us/flatparam, found {address!r}")
    texts = {}
    for project in sorted((root / "packages").glob("*/pyproject.toml")):
        text = _TABLE.sub("", project.read_text(encoding="utf-8"))
        lines = [f'{what} = "{address}{path.format(name=project.parent.name)}"' for what, path in URLS.items()]
        # Before the first table behind [project].
        head, table, tail = text.partition("\n[project.")
        if not table:
            head, table, tail = text.partition("\n[tool.")
        texts[project] = "\n".join([head, "[project.urls]", *lines, ""]) + table + tail
    site, page = root / "tools" / "mkdocs.yml", root / "docs" / "install.md"
    text = _SITE.sub("", site.read_text(encoding="utf-8"))
    texts[site] = text.replace("\ndocs_dir:", f"\nrepo_url: {address}\ndocs_dir:", 1)
    texts[page] = _CLONE.sub(f"$ git clone {address}.git flatparam", page.read_text(encoding="utf-8"))
    changed = [path for path, text in texts.items() if text != path.read_text(encoding="utf-8")]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    return changed
