"""How far a check is: one line on stderr that is drawn over where there is a terminal, else a line for each part."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30
REDRAW_S = 0.1


class Progress:
    """``total``: forwards and backwards in all."""

    def __init__(self, total: int, *, shown: bool, stream: TextIO | None = None) -> None:
        self.total, self.done, self._part = max(total, 1), 0, ""
        self._stream = sys.stderr if stream is None else stream
        self._shown, self._drawn, self._started = shown, 0.0, time.monotonic()
        self._is_terminal = shown and self._stream.isatty()

    def begin(self, part: str) -> None:
        self._part = part
        if self._is_terminal:
            self._draw()
        elif self._shown:
            print(f"zc.check: {part} ({100 * self.done // self.total} %)", file=self._stream, flush=True)

    def advance(self) -> None:
        self.done = min(self.done + 1, self.total)
        if self._is_terminal and time.monotonic() - self._drawn > REDRAW_S:
            self._draw()

    def add(self, more: int) -> None:
        self.total += more

    def end(self) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        filled = WIDTH * self.done // self.total
        seconds = self._drawn - self._started
        left = f", {seconds / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        bar = "#" * filled + "." * (WIDTH - filled)
        self._stream.write(f"\r\x1b[Kzc.check [{bar}] {self.done}/{self.total}, {seconds:.0f} s{left}: {self._part}")
        self._stream.flush()
