"""Which backwards of autograd run, and which one raised.

A backward's end is known by a final callback. The engine owns it, and lets go of it where the backward raises: a weak
reference tells the two apart. Backwards may stand inside one another (reentrant checkpointing).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from zc import torch_private


class Backwards:
    """By autograd's number of the graph task."""

    def __init__(self) -> None:
        self._open: dict[int, weakref.ref[Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        """Whether one runs, or has raised and was not `drop_failed` yet."""
        return bool(self._open)

    def is_entered(self) -> bool:
        """Whether the end of the backward that runs in this thread is known to be ours already."""
        callback = self._open.get(torch_private.current_graph_task())
        return callback is not None and callback() is not None

    def enter(self, end: Callable[[], None]) -> None:
        """``end`` is called when the outermost backward that is open has ended."""
        task = torch_private.current_graph_task()
        callback = partial(self._leave, task, end)
        self._open[task] = weakref.ref(callback)
        torch_private.queue_callback(callback)

    def _leave(self, task: int, end: Callable[[], None]) -> None:
        self._open.pop(task, None)
        if not self._open:
            end()

    def drop_failed(self) -> bool:
        """Forgets those that have raised. Returns whether there were any."""
        failed = [task for task, callback in self._open.items() if callback() is None]
        for task in failed:
            del self._open[task]
        return bool(failed)

    def clear(self) -> None:
        self._open.clear()
