"""The optimizer classes that `zc.optim.kinds.elementwise` was called for, each with its block."""

from __future__ import annotations

import weakref

from torch.optim import Optimizer

DECLARED: weakref.WeakKeyDictionary[type[Optimizer], int] = weakref.WeakKeyDictionary()
