"""Plain state dicts: whole tensors by name, or by number as an unsharded optimizer has them; and the mark of a part.

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
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import (
    OTHER,
    OWN,
    PART_KEY,
    TOGETHER,
    check_together,
    frozen_keys,
    frozen_of,
    groups_of,
    in_model,
    members_of,
    numbered,
    others,
    own_part,
    owned,
)
from zc.checkpoint.target import Path, Target, add_model, add_optimizers, check_groups, check_names, num_updates
from zc.engine.memory_order import change_each, in_shape
from zc.errors import CheckpointError
from zc.optim.assignment import parts_of
from zc.planning.plan import Plan
from zc.ranks.journal import LOADED

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer


WAYS = (
    "call zc.full_optimizer_state(model, optimizer) on every rank and save what it gives on rank 0, which "
    "optimizer.load_state_dict and zc.load_state_dict take on every rank, or use zc.save and zc.load"
)
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile


def from_plain(model: nn.Module, sharded_model: ShardedModel, state: Mapping[str, Any]) -> Target:
    """Makes a target from a `zc.state_dict`, or from whole tensors or DTensors. Only reads the live state, and is
    collective for DTensors alone."""
    if not isinstance(state, Mapping) or "model" not in state:
        raise TypeError(
            'a state has the key "model", and "optimizer" where it has one: {"model": ..., "optimizer": ...}'
        )
    optimizer = state.get("optimizer")
    target = Target("the given state", has_optimizer=optimizer is not None)
    wanted = {*in_model(sharded_model), *others(model, sharded_model), *model.state_dict(keep_vars=True)}
    names = _without_wrappers(list(state["model"]), wanted)
    given = zip(names, state["model"].values(), strict=True)
    weights = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in given}
    check_names(model, sharded_model, set(weights), target.where)
    entries = _last_of_tied(model, weights)
    add_model(target, model, sharded_model, {("model", name): value for name, value in entries.items()})
    if optimizer is not None:
        _add_whole_optimizers(target, sharded_model, optimizer)
    check_groups(sharded_model, target)
    return target


def _last_of_tied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """A tied weight has several names, and may be given a value under each: as ``model.load_state_dict`` leaves it, it
    has the last one's."""
    first: dict[int, str] = {}
    last = dict(weights)
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            of_all = first.setdefault(id(value), name)
            if name in weights:
                last[of_all] = weights[name]
    return last


def from_optimizer_state(sharded_model: ShardedModel, state: Any) -> Target:
    """As `from_plain`, from the state of the optimizers alone."""
    target = Target("the given state")
    _add_whole_optimizers(target, sharded_model, state)
    check_groups(sharded_model, target)
    return target


def _add_whole_optimizers(target: Target, sharded_model: ShardedModel, optimizer: Any) -> None:
    num_groups = 0
    for one, state in _parts(sharded_model, optimizer, target.where):
        if PART_KEY in state:
            mark = text_of_mark(state[PART_KEY])
            raise CheckpointError(f"{target.where}: its optimizer state is {mark}, and a whole one is wanted: {WAYS}")
        add_plain_optimizer(target, sharded_model, one, state, num_groups)
        num_groups += len(state["param_groups"])


def _parts(
    sharded_model: ShardedModel, given: Any, where: str
) -> list[tuple[ShardedOptimizer | None, Mapping[str, Any]]]:
    """Pairs each optimizer with its own state, from a container like the one that `zc.compile` got. A single state for
    all optimizers, as torch.distributed.checkpoint.state_dict makes it, is paired with None."""
    if isinstance(given, Mapping) and "state" in given and "param_groups" in given:
        return [(None, given)]
    parts = parts_of(sharded_model.container, given)
    if parts is None or not all(isinstance(p, Mapping) and "state" in p and "param_groups" in p for p in parts):
        kinds = [type(each.optimizer).__name__ for each in sharded_model.optimizers]
        raise CheckpointError(
            f"{where}: its optimizer state is a {type(given).__name__} of {len(given)}, and wanted is one state_dict, "
            f"or a {type(sharded_model.container).__name__} of them as zc.compile was given {', '.join(kinds)}"
        )
    return list(zip(sharded_model.optimizers, parts, strict=True))


def add_plain_optimizer(
    target: Target,
    sharded_model: ShardedModel,
    one: ShardedOptimizer | None,
    state: Mapping[str, Any],
    num_groups: int = 0,
) -> None:
    """Adds the state of ``one``, with parameters by name or by number; None: one state for all optimizers. Its groups
    come after ``num_groups`` others. Raises CheckpointError if the state belongs to other parameters."""
    optimizers = sharded_model.optimizers if one is None else [one]
    groups = _named_groups(groups_of(optimizers), state["param_groups"], target.where)
    both = zip(state["param_groups"], groups, strict=True)
    names = {k: name for theirs, ours in both for k, name in zip(theirs["params"], ours["params"], strict=True)}
    known = {m for each in optimizers for m in (*members_of(each), *frozen_of(each))}
    has_numbers = len(optimizers) == 1 and all(isinstance(key, int) for key in names)
    keys = frozen_keys(one) if one is not None else {}
    entries: dict[Path, Any] = {}
    by_string: dict[str, Any] = {}
    for key, items in state["state"].items():
        if has_numbers and isinstance(key, str):
            by_string[key] = items
            continue
        name = names.get(key, _bare(key, known) if isinstance(key, str) else key)
        name = keys.get(name, name)
        target.with_state.add(name)
        entries.update({("optimizer", "state", name, option): value for option, value in items.items()})
    by_number = dict(state.get(OTHER, {}))  # of `zc.state_dict`
    if by_string:
        by_number[str(optimizers[0].number)] = {f"rank_{sharded_model.runtime.group.rank}": by_string}
    for number, by_rank in by_number.items():
        for rank, items in by_rank.items():
            entries.update({("optimizer", OTHER, number, rank, key): item for key, item in items.items()})
    entries.update({("optimizer", TOGETHER, number): names for number, names in state.get(TOGETHER, {}).items()})
    own = dict(state.get(OWN, {}))  # of `zc.state_dict`
    if len(optimizers) == 1:
        own.setdefault(str(optimizers[0].number), own_part(state))
    entries.update({("optimizer", OWN, number, k): v for number, items in own.items() for k, v in items.items()})
    for number, group in enumerate(groups, num_groups):
        entries.update({("optimizer", "param_groups", number, option): value for option, value in group.items()})
    add_optimizers(target, sharded_model, optimizers, entries)


def text_of_mark(mark: Any) -> str:
    if not isinstance(mark, Mapping):
        return f"marked as {mark!r}, which this zc does not know"
    return f"rank {mark.get('rank')}'s part of {mark.get('world_size')} (what optimizer.state_dict() gave there)"


def _named_groups(ours: list[dict[str, Any]], groups: Any, where: str) -> list[dict[str, Any]]:
    """Replaces the members' numbers by names. A plain optimizer numbers its parameters across all groups, in the order
    in which it got them."""
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in ours]:
        raise CheckpointError(
            f"{where} has parameter groups of {[len(g['params']) for g in groups]} members, the optimizer was given "
            f"{[len(g['params']) for g in ours]}"
        )
    named = []
    for their, our in zip(groups, ours, strict=True):
        members = [
            _bare(m, our["params"]) if isinstance(m, str) else name
            for m, name in zip(their["params"], our["params"], strict=True)
        ]
        named.append({**their, "params": members})
    return named


def _without_wrappers(names: list[str], wanted: Collection[str]) -> list[str]:
    """These names without the prefixes of wrappers around the model that was saved. A model may itself have an
    attribute ``module``: what all names have in common goes first, and no name of ``wanted`` is changed after that."""
    while names and any(name not in wanted for name in names):
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in names)), None)
        if prefix is None:
            return [_bare(name, wanted) for name in names]
        names = [name[len(prefix) :] for name in names]
    return names


def _bare(name: str, wanted: Collection[str]) -> str:
    """A name of ``wanted``, if it is one with prefixes of wrappers."""
    while name not in wanted and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def install_marks(sharded_model: ShardedModel, one: ShardedOptimizer) -> None:
    """Registers hooks on one of the caller's optimizers."""

    def mark(optimizer: Optimizer, state: dict[str, Any]) -> None:
        runtime = sharded_model.runtime
        runtime.wait_for_host_memory()  # offload: an update may be running, and the caller saves this next
        ranks = runtime.group.shard
        if ranks.world_size > 1:
            state[PART_KEY] = _mark(sharded_model)
        if ranks.world_size > 1 and not one.asked_by_zc:
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

    one.hooks.append(one.optimizer.register_state_dict_post_hook(mark))
    one.hooks.append(one.optimizer.register_load_state_dict_pre_hook(take))


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
    both = zip(state["param_groups"], one.local.param_groups, strict=True)
    numbers, groups = numbered({**saved, "params": [id(p) for p in ours["params"]]} for saved, ours in both)
    local: dict[Any, Any] = dict(by_string)
    mine, keys = owned(sharded_model), frozen_keys(one)
    frozen = {keys[name]: param for name, param in frozen_of(one).items()}
    for name, values in target.by_name("optimizer", "state").items():
        if name not in frozen:
            one.loaded_updates[mine[name].planned] = num_updates(values)
            if mine[name].slice is None:
                continue

        def own_elements(_: Any, value: Any, name: str = name) -> Any:
            return in_shape(value.local, mine[name].slot) if isinstance(value, ShardOf) else value

        local[numbers[id(frozen[name] if name in frozen else mine[name].slice)]] = {
            key: change_each(own_elements, key, item) for key, item in values.items()
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
