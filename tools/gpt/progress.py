"""The progress bar."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from .report import Console, in_units

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # the job runs without a bar
    tqdm = None


class _Lines:
    """Standard error when it is a file: each state of the bar on a line of its own, instead of over the last one."""

    def write(self, text: str) -> int:
        shown = text.strip("\r\n ")
        return sys.stderr.write(shown + "\n") if shown else 0

    def flush(self) -> None:
        sys.stderr.flush()


class Progress:
    """A bar on the rank whose console is loud; nothing elsewhere, or where tqdm is missing."""

    def __init__(self, console: Console, *, start: int, steps: int) -> None:
        """Show ``start`` of ``steps`` as done."""
        self._console = console
        self._bar: Any = None
        if console.is_loud and tqdm is not None:
            style: dict[str, Any] = {"mininterval": 0.2, "dynamic_ncols": True}
            if not sys.stderr.isatty():
                style = {"mininterval": 10.0, "ascii": True, "ncols": 130, "file": _Lines()}
            self._bar = tqdm(total=steps, initial=start, unit="step", **style)
        elif tqdm is None:
            console.say("  (no progress bar: tqdm is not installed)")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, *, loss: float, bits_per_byte: float, tokens_per_second: float, moved: int) -> None:
        """Advance by one step and show its figures."""
        if self._bar is None:
            return
        self._bar.set_postfix_str(
            f"loss {loss:.3f}, {bits_per_byte:.2f} bits/byte, {tokens_per_second:,.0f} tokens/s, "
            f"{in_units(moved)} moved/step",
            refresh=False,
        )
        self._bar.update()

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        if self._bar is None:
            self._console.say(text)
        else:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()
