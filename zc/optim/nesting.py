"""An optimizer's step that calls its parent class's is one update.

torch wraps the ``step`` of every class of which there is an instance, and the wrapper runs the object's hooks. So
``super().step()`` inside a subclass's own runs them again, in the middle of the update, if the process has an optimizer
of the parent class as well.
"""

from __future__ import annotations

from types import FrameType

from zc import torch_private


class Nesting:
    """Tells the hooks of an outermost step from those of a step inside it. Asked from the hooks themselves, which
    torch's wrapper calls; a step that raised is forgotten, since its frame is on no stack any more."""

    def __init__(self) -> None:
        self._outermost: FrameType | None = None

    def begins(self) -> bool:
        """From a pre-hook: whether this step is an outermost one."""
        wrapper = torch_private.step_frame()
        frame: FrameType | None = wrapper
        while frame is not None and self._outermost is not None:
            if frame is self._outermost:
                return False
            frame = frame.f_back
        self._outermost = wrapper
        return True

    def ends(self) -> bool:
        """From a post-hook: whether the outermost step is over."""
        if torch_private.step_frame() is not self._outermost:
            return False
        self._outermost = None
        return True
