"""What `optimizer.state_dict()` says of itself, and what `optimizer.load_state_dict` takes.

With several ranks the caller's optimizer holds this rank's slices, so its state_dict is a part, and another rank's part
may have the same shapes. It carries a mark, of plain values that ``torch.load(weights_only=True)`` reads::

    state["zc"] = {"rank": 1, "world_size": 2, "plan": "5f0c..."}       no mark on one rank: that state is whole

| given to load_state_dict | |
|---|---|
| this rank's own part, of this plan | taken, as in PyTorch |
| no mark: a whole state, of DDP, of one process, of `zc.full_optimizer_state` | this rank's part of it is taken |
| another rank's part, or one of another plan | CheckpointError; nothing is changed |

The ranks of a script may load one after the other, with barriers between, or only some of them. So nobody waits for the
others here: the outcome enters the rank's journal (zc/ranks/watch.py), which is compared before the next update. Where
one rank took what another refused, or never loaded, that is a RankMismatchError on every rank, and no update is done.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zc.checkpoint.plain_state import PART_KEY, WAYS, optimizer_part, shown_mark
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import owned
from zc.checkpoint.together import check_together
from zc.engine.memory_order import in_shape
from zc.errors import CheckpointError
from zc.planning.plan import LOADED, Plan

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer


def install(held: ShardedModel) -> None:
    """The hooks of the caller's optimizers. They go with them."""
    for one in held.optimizers:
        _install(held, one)


def _install(held: ShardedModel, one: ShardedOptimizer) -> None:

    def mark(optimizer: Optimizer, state: dict[str, Any]) -> None:
        runtime = held.runtime
        runtime.wait_for_host_memory()  # offload: an update may be on its way, and this is saved next
        ranks = runtime.group.shard
        if ranks.world_size > 1:
            state[PART_KEY] = _mark(held)
            runtime.say_once(
                f"optimizer.state_dict() is this rank's part of {ranks.world_size}, and only this rank "
                f"{'and its replicas ' if runtime.group.replicas is not None else ''}can load it again. For a whole "
                f"one, {WAYS}"
            )

    def take(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        journal = held.runtime.group.journal
        held.runtime.streams.synchronize()  # what it launched stands before this in every rank's journal
        taken = False
        try:
            found = _fitting(held, one, state)
            taken = True
        finally:
            if journal is not None:
                journal.enter(LOADED, int(taken))
        return found

    one.optimizer.register_state_dict_post_hook(mark)
    one.optimizer.register_load_state_dict_pre_hook(take)


def _fitting(held: ShardedModel, one: ShardedOptimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """What torch is to load in the place of ``state``; None: ``state`` itself."""
    mark, own = state.get(PART_KEY), _mark(held)
    if mark == own:
        return None
    if mark is None:
        both = (state["param_groups"], one.optimizer.param_groups)
        sizes, ours = ([len(group["params"]) for group in groups] for groups in both)
        return None if own["world_size"] == 1 and sizes == ours else _cut(held, one, state)
    if isinstance(mark, dict) and {**mark, "rank": own["rank"]} == own:
        why = f"and this is rank {own['rank']}"
    else:
        why = f"made under another plan: this is rank {own['rank']} of {own['world_size']}"
    raise CheckpointError(f"the given optimizer state is {shown_mark(mark)}, {why}. Nothing is changed: {WAYS}")


def _cut(held: ShardedModel, one: ShardedOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole state as this rank's optimizer would have saved it."""
    where = "the given optimizer state"
    states, _, names = optimizer_part(held, state, where, one)
    check_together(one, names, {}, where)
    numbers: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    for given, group in zip(state["param_groups"], one.optimizer.param_groups, strict=True):
        first = len(numbers)
        numbers.update({id(param): first + k for k, param in enumerate(group["params"])})
        groups.append({**given, "params": list(range(first, len(numbers)))})
    local: dict[int, dict[str, Any]] = {}
    mine = owned(held)
    for name, values in states.items():
        local[numbers[id(one.slices[name])]] = {
            key: in_shape(value.local, mine[name].slot) if isinstance(value, ShardOf) else value
            for key, value in values.items()
        }
    return {**state, "state": local, "param_groups": groups}


def _mark(held: ShardedModel) -> dict[str, Any]:
    group = held.runtime.group.shard
    return {"rank": group.rank, "world_size": group.world_size, "plan": _digest(held.runtime.plan)}


def _digest(plan: Plan) -> str:
    """Of what decides which elements a rank owns."""
    found = hashlib.sha256(str(plan.world_size).encode())
    for bucket in plan.buckets:
        layout = bucket.layout
        for slot in bucket.slots:
            where = f"{slot.offset} {layout.numel_shard} {layout.owners}{slot.strides or ''} {layout.num_hosts}"
            found.update(f"{slot.name} {slot.shape} {where}\n".encode())
    return found.hexdigest()[:16]
