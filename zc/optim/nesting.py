"""Treats a step that calls ``super().step()`` as one update.

torch wraps the ``step`` of every class that has an instance, and the wrapper runs the object's hooks. If the process
also has an optimizer of the parent class, ``super().step()`` runs the hooks again in the middle of the update.
"""

from __future__ import annotations

from types import FrameType

from zc import torch_private


class Nesting:
    """Distinguishes the hooks of an outermost step from those of a step inside it. Call it from the hooks, which
    torch's wrapper calls. A step that raised is forgotten, because its frame is no longer on the stack."""

    def __init__(self) -> None:
        self._outermost: FrameType | None = None

    def begins(self) -> bool:
        """In a pre-hook: whether this step is an outermost one."""
        wrapper = torch_private.step_frame()
        frame: FrameType | None = wrapper
        while frame is not None and self._outermost is not None:
            if frame is self._outermost:
                return False
            frame = frame.f_back
        self._outermost = wrapper
        return True

    def ends(self) -> bool:
        """In a post-hook: whether the outermost step is over."""
        if torch_private.step_frame() is not self._outermost:
            return False
        self._outermost = None
        return True
