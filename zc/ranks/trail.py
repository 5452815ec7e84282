"""A process's trail: the last calls that its program has made into zc, each with the line of the program that made it.

Exchanges run on other threads, in an order that ranks may choose. The trail has what the calling thread did: one entry
for an announcement, a norm, a question to other ranks, an update. `zc.diverged` writes it when ranks differ.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import deque
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

LENGTH = 200  # calls that are kept
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(_LIBRARY + name + os.sep for name in ("site-packages", "dist-packages"))
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, os.path.dirname(torch.__file__) + os.sep
_TYPED = ("<stdin>", "<string>", "<ipython")  # a program that lies in no file
_is_programs: dict[str, bool] = {}  # by the name of a code object's file


@dataclass
class Entry:
    """``number``: that of the next call in which all ranks take part, or this call's own. ``shared``: it is one."""

    number: int
    shared: bool
    model: str  # the name of its journal
    what: str | tuple[str, int]  # as in the journal, which has words for it
    code: CodeType | None  # of the program; None: no line of it was on the stack
    line: int
    times: int = 1


class Trail:
    """The trail of one process. Only the thread that calls zc adds to it; the watch's copies it."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=LENGTH)
        self.num_shared = 0  # calls so far in which all ranks take part
        self.agreed = 0  # how many of them had been when all ranks last agreed on an update

    def add(self, model: str, what: str | tuple[str, int], *, shared: bool) -> None:
        """``shared``: all ranks make this call, so its number is the same on all of them. Others, of which ranks may
        make different ones, count as one while the same line repeats them."""
        frame = frame_of_program(sys._getframe(2))
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        if shared:
            self.num_shared += 1
        elif self.entries:
            last = self.entries[-1]
            if (last.what, last.line, last.code, last.model) == (what, line, code, model):
                last.times += 1
                return
        self.entries.append(Entry(self.num_shared + (not shared), shared, model, what, code, line))

    def agree(self) -> None:
        """All ranks have made the same calls so far."""
        self.agreed = self.num_shared


def frame_of_program(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, that is neither zc's nor torch's nor the standard library's.
    Autograd's own thread has none, so there it is the main thread's."""
    found = _innermost(frame)
    if found is None and threading.current_thread() is not threading.main_thread():
        found = _innermost(sys._current_frames().get(threading.main_thread().ident or 0))
    return found


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = frame.f_code.co_filename
        is_programs = _is_programs.get(name)
        if is_programs is None:
            is_programs = _is_programs[name] = is_of_program(name)
        if is_programs:
            return frame
        frame = frame.f_back
    return None


def is_of_program(file: str) -> bool:
    """Whether this file belongs to the program, or to a library that it uses beside torch."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    return not file.startswith(_OURS) and (not file.startswith(_LIBRARY) or file.startswith(_PACKAGES))
