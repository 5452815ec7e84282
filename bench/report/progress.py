"""A progress bar for a training loop: rich where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

NUM_LINES = 10  # of a whole run, into a log


class Progress:
    """``update`` once a step. Drawn by the caller's own thread: a drawing thread would take time from the step."""

    def __init__(self, steps: int, title: str, *, shown: bool) -> None:
        self.steps, self.title, self.shown, self.done = steps, title, shown, 0
        self.console = Console()
        self.bar: RichProgress | None = None
        self.task = TaskID(0)

    def __enter__(self) -> Progress:
        if self.shown and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            status = TextColumn("{task.fields[status]}")
            self.bar = RichProgress(*columns, status, console=self.console, auto_refresh=False)
            self.task = self.bar.add_task(self.title, total=self.steps, status="compiling")
            self.bar.start()
        elif self.shown:
            print(f"{self.title}: {self.steps} steps", flush=True)
        return self

    def update(self, loss: float, norm: float, tokens_per_s: float) -> None:
        """``loss`` in nats a token, of this rank."""
        self.tick(f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  gradient norm {norm:.2f}")

    def tick(self, status: str) -> None:
        """One step more."""
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, advance=1, status=status, refresh=True)
        elif self.shown and (self.done * NUM_LINES % self.steps < NUM_LINES or self.done == 1):
            print(f"{self.title}: step {self.done}/{self.steps}  {status}", flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
