"""Marks each `optimizer.state_dict()` as one rank's part, and checks the mark in `optimizer.load_state_dict`.

With several ranks, the caller's optimizer has only this rank's slices. Its state_dict is therefore a part, and another
rank's part may have the same shapes. The mark consists of plain values that ``torch.load(weights_only=True)`` reads::

    state["zc"] = {"rank": 1, "world_size": 2, "plan": "5f0c..."}       no mark on one rank: that state is whole

| argument of load_state_dict | result |
|---|---|
| this rank's own part, of this plan | loaded, as in PyTorch |
| no mark: a whole state, of DDP, of one process, of `zc.full_optimizer_state` | this rank's part of it is loaded |
| another rank's part, or a part of another plan | CheckpointError; nothing is changed |

A script's ranks may load one after another, with barriers between, or only some may load. So loading waits for no other
rank. Its outcome goes into the rank's journal (zc/ranks/watch.py), which ranks compare before the next update. If one
rank loaded a state and another refused or never loaded, every rank raises RankMismatchError before the update.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from zc.checkpoint.other_state import frozen_of
from zc.checkpoint.plain_state import PART_KEY, WAYS, add_plain_optimizer, text_of_mark
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import owned
from zc.checkpoint.target import Target
from zc.checkpoint.together import check_together, members_of
from zc.engine.memory_order import in_shape
from zc.errors import CheckpointError
from zc.planning.plan import Plan
from zc.ranks.journal import LOADED

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer


def install(sharded_model: ShardedModel) -> None:
    """Registers hooks on the caller's optimizers, for as long as these live."""
    for one in sharded_model.optimizers:
        _install(sharded_model, one)


def _install(sharded_model: ShardedModel, one: ShardedOptimizer) -> None:

    def mark(optimizer: Optimizer, state: dict[str, Any]) -> None:
        runtime = sharded_model.runtime
        runtime.wait_for_host_memory()  # offload: an update may be running, and the caller saves this next
        ranks = runtime.group.shard
        if ranks.world_size > 1:
            state[PART_KEY] = _mark(sharded_model)
            runtime.say_once(
                f"optimizer.state_dict() is this rank's part of {ranks.world_size}, and only this rank "
                f"{'and its replicas ' if runtime.group.replicas is not None else ''}can load it again. For a whole "
                f"one, {WAYS}"
            )

    def take(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        journal = sharded_model.runtime.group.journal
        sharded_model.runtime.streams.synchronize()  # so that launched work precedes this entry in every rank's journal
        is_accepted = False
        try:
            fitting = _fitting(sharded_model, one, state)
            is_accepted = True
        finally:
            if journal is not None:
                journal.enter(LOADED, int(is_accepted))
        return fitting

    one.optimizer.register_state_dict_post_hook(mark)
    one.optimizer.register_load_state_dict_pre_hook(take)


def _fitting(sharded_model: ShardedModel, one: ShardedOptimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """The state that torch should load instead of ``state``; None: ``state`` itself."""
    mark, own = state.get(PART_KEY), _mark(sharded_model)
    if mark == own:
        return None
    if mark is None:
        both = (state["param_groups"], one.local.param_groups)
        sizes, ours = ([len(group["params"]) for group in groups] for groups in both)
        return None if own["world_size"] == 1 and sizes == ours else _cut(sharded_model, one, state)
    if isinstance(mark, dict) and {**mark, "rank": own["rank"]} == own:
        why = f"and this is rank {own['rank']}"
    else:
        why = f"made under another plan: this is rank {own['rank']} of {own['world_size']}"
    raise CheckpointError(f"the given optimizer state is {text_of_mark(mark)}, {why}. Nothing is changed: {WAYS}")


def _cut(sharded_model: ShardedModel, one: ShardedOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Cuts a whole state to the part that this rank's optimizer would have saved."""
    target = Target("the given optimizer state")
    add_plain_optimizer(target, sharded_model, one, state)
    by_string = target.by_string(one)
    check_together(one, members_of(one) if by_string else target.with_state, {}, target.where)
    numbers: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    for saved, group in zip(state["param_groups"], one.local.param_groups, strict=True):
        first = len(numbers)
        numbers.update({id(param): first + k for k, param in enumerate(group["params"])})
        groups.append({**saved, "params": list(range(first, len(numbers)))})
    local: dict[Any, Any] = dict(by_string)
    mine, frozen = owned(sharded_model), frozen_of(one)
    for name, values in target.by_name("optimizer", "state").items():
        local[numbers[id(frozen[name] if name in frozen else one.slices[name])]] = {
            key: in_shape(value.local, mine[name].slot) if isinstance(value, ShardOf) else value
            for key, value in values.items()
        }
    return {**state, "state": local, "param_groups": groups}


def _mark(sharded_model: ShardedModel) -> dict[str, Any]:
    group = sharded_model.runtime.group.shard
    return {"rank": group.rank, "world_size": group.world_size, "plan": _digest(sharded_model.runtime.plan)}


def _digest(plan: Plan) -> str:
    """Identifies which elements each rank owns."""
    digest = hashlib.sha256(str(plan.world_size).encode())
    for bucket in plan.buckets:
        layout = bucket.layout
        for slot in bucket.slots:
            where = f"{slot.offset} {layout.numel_shard} {layout.owners}{slot.strides or ''} {layout.num_hosts}"
            digest.update(f"{slot.name} {slot.shape} {where}\n".encode())
    return digest.hexdigest()[:16]
