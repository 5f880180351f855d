"""What MkDocs calls while it builds the site: the version in its head, notebooks as pages, what search finds first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    """Name the version of the wrapper beside the name of the site; files that pages quote are in the repository."""
    config.mdx_configs["pymdownx.snippets"]["base_path"] = [str(ROOT)]
    text = (ROOT / "packages" / "flatparam" / "src" / "flatparam" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.*)"', text, re.MULTILINE)
    assert found, "the wrapper has a version"
    config.site_name = f"{config.site_name} {found[1]}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook."""
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        content = page_of(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead to the pages of notebooks, and have search find the page of symptoms first, and the reference last."""
    boost = 4.0 if page.file.src_uri == "faq.md" else 0.5 if page.file.src_uri.startswith("reference/") else 1.0
    page.meta.setdefault("search", {"boost": boost})
    return re.sub(r"(\(notebooks/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def page_of(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its texts, its code, and what the code has printed."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
