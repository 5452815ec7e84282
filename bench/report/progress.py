"""A progress bar for a training loop: rich where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

NUM_LINES = 10  # of a whole run, into a log
TICK_S = 1.0  # between two looks at the clock while the first step compiles
LINE_S = 10.0  # between two lines about it, into a log


class Progress:
    """``update`` once a step. Drawn by the caller's own thread: a drawing thread would take time from the step.

    Only until the end of the first step, which compiles for half a minute and more, a thread shows the seconds and what
    was last said: by `say`, or by zc's logger, which names what Inductor is at.
    """

    def __init__(self, steps: int, title: str, *, shown: bool) -> None:
        self.steps, self.title, self.shown, self.done = steps, title, shown, 0
        self.console = Console()
        self.bar: RichProgress | None = None
        self.task = TaskID(0)
        self._started, self._printed = time.monotonic(), 0.0
        self._said = "starts"
        self._first_step_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._news = _News(self)

    def __enter__(self) -> Progress:
        if self.shown and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            status = TextColumn("{task.fields[status]}")
            self.bar = RichProgress(*columns, *times, status, console=self.console, auto_refresh=False)
            self.task = self.bar.add_task(self.title, total=self.steps, status=self._said)
            self.bar.start()
        elif self.shown:
            print(f"{self.title}: {self.steps} steps", flush=True)
        if self.shown:
            self._news.attach()
            self._thread = threading.Thread(target=self._tell_time, name="progress", daemon=True)
            self._thread.start()
        return self

    def say(self, what: str) -> None:
        """What is going on: with the seconds while the first step has not ended, at once after it."""
        self._said = what
        if self._first_step_ended.is_set() and self.bar is not None:
            self.bar.update(self.task, status=what, refresh=True)
        elif self._first_step_ended.is_set() and self.shown:
            print(f"{self.title}: {what}", flush=True)

    def _tell_time(self) -> None:
        while not self._first_step_ended.wait(TICK_S):
            seconds = time.monotonic() - self._started
            if self.bar is not None:
                self.bar.update(self.task, status=f"step 1: {self._said}", refresh=True)
            elif seconds - self._printed >= LINE_S:
                self._printed = seconds
                print(f"{self.title}: step 1/{self.steps}  {seconds:.0f} s: {self._said}", flush=True)

    def _end_of_first_step(self) -> None:
        if self._thread is not None:
            self._news.detach()
            self._first_step_ended.set()
            self._thread.join()
            self._thread = None

    def update(self, loss: float, norm: float, tokens_per_s: float) -> None:
        """``loss`` in nats a token, of this rank."""
        self.tick(f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  gradient norm {norm:.2f}")

    def tick(self, status: str) -> None:
        """One step more."""
        self._end_of_first_step()
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, advance=1, status=status, refresh=True)
        elif self.shown and (self.done * NUM_LINES % self.steps < NUM_LINES or self.done == 1):
            print(f"{self.title}: step {self.done}/{self.steps}  {status}", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_of_first_step()
        if self.bar is not None:
            self.bar.stop()


class _News(logging.Handler):
    """What zc's logger says at level INFO goes to `Progress.say`; the level is put back."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress, self._log = progress, logging.getLogger("zc")
        self._level = self._log.level

    def attach(self) -> None:
        self._level = self._log.level
        if not self._log.isEnabledFor(logging.INFO):
            self._log.setLevel(logging.INFO)
        self._log.addHandler(self)

    def detach(self) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.say(record.getMessage())
