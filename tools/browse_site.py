"""Look at the built site in a real browser: `nox -s run -- browser`.

It needs Chromium (`apt install chromium`), which is found on the PATH. Words that a reader in need types have to lead
to a page that helps, the copy button must copy a command without its prompt, and no page may be wider than a telephone.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright  # type: ignore[import-not-found, unused-ignore]

ROOT: Final = Path(__file__).resolve().parents[1]
SITE: Final = ROOT / "build" / "site"
#: What a reader types, and the pages of which one has to be among the first three that search finds.
WORDS: Final = {
    "QLoRA": ("guides/client-peft", "guides/fine-tuning", "examples"),
    "install": ("install",),
    "OOM": ("faq",),
    "out of memory": ("faq",),
    "NCCL": ("faq", "guides/several-hosts", "reliability", "accelerators"),
    "hang": ("faq", "reliability", "guides/debugging"),
    "fully_shard": ("guides/from-fsdp2", "reference/flatparam"),
    "LoRA": ("guides/client-peft", "guides/fine-tuning", "examples"),
    "checkpoint": ("guides/checkpoints", "guides/checkpointing"),
}
PAGES: Final = ("index", "install", "examples", "faq", "guides/will-it-fit", "performance", "complaints")
NARROW: Final = 420
_SETTLED_MS: Final = 2000


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


def found_by(page: Any, words: str) -> list[str]:
    """Return the pages that search finds first."""
    page.goto(f"{page.home}/index.html")
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially(words, delay=20)
    page.wait_for_timeout(_SETTLED_MS)
    links = page.locator("a.md-search-result__link").all()[:3]
    return [str(link.get_attribute("href")) for link in links]


def copied(page: Any, path: str) -> str:
    """Return what the first copy button of a page puts into the clipboard."""
    page.goto(f"{page.home}/{path}.html")
    page.locator("button[data-md-type=copy], button.md-clipboard").first.click()
    page.wait_for_timeout(300)
    return str(page.evaluate("navigator.clipboard.readText()"))


def problems_of(page: Any) -> list[str]:
    """Return what is wrong, in sentences."""
    problems = []
    for words, wanted in WORDS.items():
        links = found_by(page, words)
        if not any(f"/{each}.html" in link for link in links for each in wanted):
            problems.append(f"search for {words!r}: expected one of {wanted} among the first, found {links}")
    command = copied(page, "install")
    if not command.startswith("git clone"):
        problems.append(f"the copy button: expected the command alone, found {command!r}")
    return problems


def problems_on_a_telephone(page: Any, scheme: str) -> list[str]:
    """Return the pages that are too wide, or not in the scheme of the reader's system; draw each."""
    problems = []
    page.set_viewport_size({"width": NARROW, "height": 800})
    for path in PAGES:
        page.goto(f"{page.home}/{path}.html")
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > NARROW:
            problems.append(f"{path}.html is {width} pixels wide on a screen of {NARROW}")
        shown = page.locator("body").get_attribute("data-md-color-scheme")
        if shown != {"light": "default", "dark": "slate"}[scheme]:
            problems.append(f"{path}.html: expected the {scheme} scheme, found {shown!r}")
        page.screenshot(path=ROOT / "build" / f"{path.replace('/', '-')}-{scheme}.png")
    return problems


def main() -> int:
    """Print what is wrong; returns 1 if anything is."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("expected Chromium on the PATH, found none: apt install chromium")
    handler = functools.partial(_Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = started.chromium.launch(executable_path=chromium, args=arguments)
        problems: list[str] = []
        for scheme in ("light", "dark"):
            # One that has seen nothing yet: the site remembers the scheme.
            context = browser.new_context(color_scheme=scheme, permissions=["clipboard-read", "clipboard-write"])
            page: Any = context.new_page()
            page.home = f"http://127.0.0.1:{server.server_port}"
            problems += problems_of(page) if scheme == "light" else []
            problems += problems_on_a_telephone(page, scheme)
        browser.close()
    sys.stdout.write("\n".join([*problems, f"{len(problems)} problems\n"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
