"""A compiled model that is pickled whole (``torch.save(model)``) comes back as a plain module, and says so.

A DDP module that is loaded reduces again; this one can't, without its optimizer. What is pickled in its place warns
when it is loaded, and needs no zc for that. A deepcopy is a plain module as well, as an averaged copy should be, and
says nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

_NAME = "_zc_compiled"
_TEXT = (
    "zc: this module was saved whole (torch.save(model)) while it was compiled by zc, and is a plain module now: over "
    "several ranks nothing reduces its gradients until zc.compile(model, optimizer) is called. zc.save keeps what "
    "training needs, model.state_dict() the weights alone"
)


class _Mark:
    """What stands in a compiled model's ``__dict__``; no one else knows it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return warnings.warn, (_TEXT,)  # returns None


def mark(model: nn.Module) -> None:
    setattr(model, _NAME, _Mark())


def unmark(model: nn.Module) -> None:
    vars(model).pop(_NAME, None)
