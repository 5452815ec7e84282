"""Item 6: optimizer.state_dict() and load_state_dict in a loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from rows import STEPS, Script, row

import zc


def _goes_back(s: Script, saved: Callable[[Script], Any]) -> None:
    """The optimizer's state goes back by two steps; the weights stay."""
    state: Any = None
    for step in range(STEPS):
        if step == 2:
            state = copy.deepcopy(saved(s))
        if step == 4:
            s.optimizer.load_state_dict(state)
        s.loss(step).backward()
        s.update()


@row(6, "each rank loads its own optimizer.state_dict()")
def own_state(s: Script) -> None:
    _goes_back(s, lambda s: s.optimizer.state_dict())


@row(6, "each rank loads the whole optimizer state (zc.full_optimizer_state; DDP's)")
def whole_state(s: Script) -> None:
    def saved(s: Script) -> Any:
        state = [zc.full_optimizer_state(s.model, s.optimizer) if s.is_zc else s.optimizer.state_dict()]
        dist.broadcast_object_list(state, 0)
        return state[0]

    _goes_back(s, saved)


@row(
    6,
    "each rank loads rank 0's optimizer.state_dict(), errors passed over",
    refused={"always": "RankMismatchError: rank 1 has optimizer.load_state_dict, refused"},
    note="rank 1's own error is a CheckpointError that names zc.full_optimizer_state",
)
def rank_0s_state(s: Script) -> None:
    s.loss(0).backward()
    s.update()
    state = [s.optimizer.state_dict()]
    dist.broadcast_object_list(state, 0)
    with contextlib.suppress(zc.CheckpointError):
        s.optimizer.load_state_dict(state[0])
    s.loss(1).backward()
    s.update()
