"""overlap_gather while the program keeps an alias of the weights: step() waits as long as it is kept, and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from late_gathers import LATE, VERY_LATE, Late, last_weight, train_late
from tiers import full_only
from torch import nn

import zc
from zc.ranks.group import Group
from zc.weights.overlapped import OverlappedWeights

ALIASES: dict[str, Callable[[nn.Parameter], Any]] = {
    "p.data": lambda p: p.data,
    "a detached part": lambda p: p.detach()[3:, :2],
    "a view in a graph": lambda p: p.view(-1),
    "numpy": lambda p: p.detach().numpy(),
    "rows": lambda p: list(p.data),
}


def has_waited(model: nn.Module) -> bool:
    """Whether no gather may be in flight; without overlap_gather none ever is."""
    return not getattr(zc.registry.sharded(model).runtime.weights, "in_flight", False)


class Keeper:
    """After each odd update keeps an alias of the last weights, one kind after the other; after the even ones, looks at
    what it has kept, and lets go of it. ``waited``: whether step() had, each time."""

    def __init__(self) -> None:
        self.kinds, self.kept = iter(ALIASES.values()), []
        self.seen: list[torch.Tensor] = []
        self.waited: list[bool] = []

    def __call__(self, model: nn.Module) -> None:
        self.waited.append(has_waited(model))
        if not self.kept:
            self.kept.append(next(self.kinds)(last_weight(model)))
            return
        (alias,) = self.kept
        rows = alias if isinstance(alias, list) else [torch.as_tensor(alias).detach()]
        self.seen.append(torch.cat([row.reshape(-1) for row in rows]))  # a copy
        self.kept.clear()


def _aliases(rank: int, world_size: int, is_counted: bool) -> tuple[dict[str, bool], list[bool], str]:
    """By kind: whether what was kept from before an update shows it right after step(), as without overlap_gather; and
    when step() waited."""
    count, plain, keeper = zc.torch_private.num_sharing, Keeper(), Keeper()
    options: dict[str, Any] = {"backend": "aot_eager", "num_steps": 2 * len(ALIASES)}
    train_late(rank, Late, plain, **options)
    if not is_counted:
        zc.torch_private.num_sharing = lambda tensor: 0
    try:
        late = LATE if is_counted else VERY_LATE
        _, explanation = train_late(rank, Late, keeper, overlap_gather=True, late=late, **options)
    finally:
        zc.torch_private.num_sharing = count
    same = {kind: torch.equal(*pair) for kind, *pair in zip(ALIASES, plain.seen, keeper.seen, strict=True)}
    return same, keeper.waited, explanation


@pytest.mark.filterwarnings("ignore:zc")
def test_step_waits_while_an_alias_of_weights_is_kept() -> None:
    for same, waited, explanation in run_ranks(_aliases, 2, True):
        assert all(same.values()), same
        assert waited == [False, True] * len(ALIASES), "while it is kept, and no longer"
        assert "holds the memory of 6.weight (a view" in explanation


@full_only
def test_an_alias_would_show_old_weights() -> None:
    """The control."""
    for same, waited, explanation in run_ranks(_aliases, 2, False):
        assert not any(same.values()) and not any(waited), (same, waited)
        assert "holds the memory" not in explanation


def _in_flight(rank: int, world_size: int) -> tuple[list[bool], str]:
    """Gathers that hold their views when the step ends, and when it looks for others."""
    gather, watch, waited = Group.all_gather, OverlappedWeights.watch, []

    def slow_gather(self: Group, out: torch.Tensor, *args: Any) -> Any:
        rows = list(out.view(world_size, -1))
        time.sleep(LATE)
        del rows
        return gather(self, out, *args)

    def late_watch(self: OverlappedWeights) -> None:
        time.sleep(LATE / 2)
        watch(self)

    def look(model: nn.Module) -> None:
        waited.append(has_waited(model))

    try:
        Group.all_gather, OverlappedWeights.watch = slow_gather, late_watch  # type: ignore[method-assign]
        _, explanation = train_late(rank, Late, look, late=0.0, backend="aot_eager", overlap_gather=True)
    finally:
        Group.all_gather, OverlappedWeights.watch = gather, watch  # type: ignore[method-assign]
    return waited, explanation


def test_views_of_the_gathers_themselves_are_no_aliases() -> None:
    for waited, explanation in run_ranks(_in_flight, 2):
        assert not any(waited) and "holds the memory" not in explanation


