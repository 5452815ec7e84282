"""The backwards of autograd that run through one model.

A backward ends with autograd's final callback. Autograd owns the callback, and drops it if the backward raises. So a
weak reference to it tells whether the backward has raised; nothing else does. On a device a thread of autograd's drops
it, perhaps after the caller has caught the error: `drop_failed` waits for that. Backwards may be nested (reentrant
checkpointing): the outermost one ends last. No state is stored, each follows from the references::

                 begin                    the outermost one ends
    none runs ----------> some run ---------------------------------> none runs
                             |  one raises               forget_raised, clear
                             +---------------> has_raised -----------------> none runs
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from functools import partial

from zc import torch_private

_OF_ALL_MODELS: weakref.WeakValueDictionary[int, Backwards] = weakref.WeakValueDictionary()
DROPPED_S = 5.0  # autograd's thread needs the GIL and some microseconds
_NUMBERS = itertools.count()  # in the order of zc.compile, which is that of all ranks


class Backwards:
    """Only the thread that issues schedules changes it: autograd's during a backward, the caller's otherwise.
    ``drop_failed`` drops the gradients of a backward that raised, and reduces what other ranks wait for.
    ``drops_late``: autograd has threads of its own, as for a device."""

    def __init__(self, drop_failed: Callable[[], object], *, drops_late: bool = True) -> None:
        self._drop_failed, self._drops_late = drop_failed, drops_late
        _OF_ALL_MODELS[next(_NUMBERS)] = self
        # by autograd's number of the backward; the thread of the watch reads a copy (`has_stopped`)
        self._callbacks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._survived: frozenset[int] = frozenset()  # by number: after these raised, the program has gone on
        self._last_deferred: int | None = None  # the last backward that left its announcement to the one around it

    @property
    def is_any_open(self) -> bool:
        """Whether one has begun here and not ended, or raised and not been forgotten."""
        return bool(self._callbacks)

    def has_begun(self) -> bool:
        """Whether the backward that runs in this thread has begun here."""
        callback = self._callbacks.get(torch_private.current_graph_task())
        return callback is not None and callback() is not None

    def begin(self, end: Callable[[], None]) -> None:
        """The backward that runs in this thread begins. Calls ``end`` when the outermost one has ended."""
        number = torch_private.current_graph_task()
        callback = partial(self._end_one, number, end)
        self._callbacks[number] = weakref.ref(callback)
        torch_private.queue_callback(callback)

    def _end_one(self, number: int, end: Callable[[], None]) -> None:
        raised = self._callbacks.pop(number, None)
        if self._callbacks:
            return
        try:
            end()
        except BaseException:  # out of memory in the last flush, say: autograd drops the callback, as after any raise
            if raised is not None:
                self._callbacks[number] = raised
            raise

    def await_drops(self) -> None:
        """Outside of a backward, none can run: waits until autograd has dropped the callbacks of those that raised.
        Returns at once where there are none. The limit is for a program that runs a backward in another thread."""
        if not self._drops_late or not self._callbacks or torch_private.current_graph_task() != -1:
            return
        end = time.monotonic() + DROPPED_S
        while any(callback() is not None for callback in self._callbacks.values()) and time.monotonic() < end:
            time.sleep(0.0001)  # without the GIL

    def has_raised(self) -> bool:
        """Whether one has raised."""
        return any(callback() is None for callback in list(self._callbacks.values()))

    def has_stopped(self) -> bool:
        """Whether one has raised, and the program has called nothing of zc since. The thread of the watch asks."""
        callbacks, survived = list(self._callbacks.items()), self._survived
        return any(callback() is None for number, callback in callbacks if number not in survived)

    def go_on(self) -> None:
        """The program compiles a forward, which may take longer than the others' patience. No backward runs."""
        self._survived = frozenset(self._callbacks)

    def forget_raised(self) -> None:
        self._callbacks = {number: callback for number, callback in self._callbacks.items() if callback() is not None}

    def clear(self) -> None:
        self._callbacks.clear()

    def defer_to_outer(self, callback: Callable[[], None]) -> bool:
        """If the backward in this thread runs inside another one, calls ``callback`` in that one as soon as this one
        has ended, and returns True. Calls it once per backward."""
        number = torch_private.current_graph_task()
        if number == self._last_deferred:
            return True
        outer = torch_private.outer_node()
        if outer is None:
            return False
        self._last_deferred = number
        torch_private.call_before_followers(outer, callback)
        return True


def drop_failed() -> None:
    """Called before a backward and an update: drops the gradients of backwards that raised, in any model of this
    process. A rank that had begun to reduce in such a model waits there for this one, and comes nowhere else."""
    for backwards in list(_OF_ALL_MODELS.values()):
        backwards.await_drops()
        if backwards.has_raised():
            backwards._drop_failed()
