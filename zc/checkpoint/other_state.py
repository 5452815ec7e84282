"""Optimizer state that is not of one slice: of frozen parameters, under names of the optimizer's own, and of several
parameters together.

A frozen parameter stays in its group, and may have state: from before it was frozen, or made by the optimizer's
``__init__``, as Adagrad does. Its state is whole on every rank, and `zc.recompile` cuts it once the parameter trains.
An optimizer may also keep state under a string, such as a count of its own: ``optimizer.state["count"]``. And a state
may belong to several parameters, such as a momentum stacked under a group's first one; it is saved under the parameter
that stores it, and the checkpoint also lists the parameters that each rank updates::

    optimizer.state.<name>.<key>                     of a frozen parameter, as rank 0 has it
    optimizer.state.<name> (<number>).<key>          the same of another optimizer that has it, too, by its number
    optimizer.other.<number>.rank_<r>.<key>          under strings, of each rank, by the optimizer's number
    optimizer.own.<number>.<key>                     what the class adds to ``state_dict()``, as rank 0 has it
    optimizer.together.<number>                      [["a", "c"], ["b", "d"]]: rank 0 updates a and c

`zc.optim.trials.habits_of` finds the optimizers that may have the last kind. It is loaded only where one
rank updates the same parameters in the same order, and so is state under strings of such an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zc.errors import CheckpointError

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer

OTHER, OWN, TOGETHER = "other", "own", "together"  # keys of a checkpoint, below "optimizer"
PART_KEY = "zc"  # in an optimizer's state_dict: it is one rank's part


def names_of(one: ShardedOptimizer) -> dict[int, str]:
    """The names that this optimizer's parameters have now, by their ids; of one that has left the model, the last."""
    runtime = one.runtime
    planned = {id(param): name for names in (runtime.frozen, runtime.params) for name, param in names.items()}
    return planned | runtime.names_now()


def frozen_of(one: ShardedOptimizer) -> dict[str, Tensor]:
    """The frozen parameters in this optimizer's groups, by name."""
    names = names_of(one)
    return {names[id(m)]: m for members in one.members for m in members if isinstance(m, Tensor) and id(m) in names}


def frozen_keys(one: ShardedOptimizer) -> dict[str, str]:
    """The names of `frozen_of`, each with that under which a checkpoint has this optimizer's state of it."""
    before = one.grad_shards.optimizers[: one.number]
    in_others = {id(param) for other in before for group in other.param_groups for param in group["params"]}
    return {n: f"{n} ({one.number})" if id(param) in in_others else n for n, param in frozen_of(one).items()}


def states_of_frozen(one: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """By name; without those that have none."""
    state = one.state_of_class
    return {name: dict(state[param]) for name, param in frozen_of(one).items() if state.get(param)}


def state_by_string(one: ShardedOptimizer) -> dict[str, Any]:
    """Raises CheckpointError if the optimizer has state that can't be saved by a name."""
    names = {id(param) for param in (*one.slices.values(), *frozen_of(one).values())}
    by_string: dict[str, Any] = {}
    for key, value in one.state_of_class.items():
        if isinstance(key, str):
            by_string[key] = value
        elif id(key) not in names:
            what = f"a tensor {tuple(key.shape)} that is in no group" if isinstance(key, Tensor) else repr(key)
            raise CheckpointError(
                f"{type(one.optimizer).__name__} keeps state under {what}: zc saves what is kept under a parameter or "
                "a string. Remove it before the save, or keep it under a string"
            )
    return by_string


def own_entries(one: ShardedOptimizer) -> dict[str, Any]:
    """What the optimizer's class, or a hook, adds to ``state_dict()``, such as a count of steps that is an attribute:
    its own ``load_state_dict``, or a hook, takes it back."""
    try:
        return own_part(_part_of_rank(one))
    except NotImplementedError:  # it has no such format
        return {}


def take_own_entries(one: ShardedOptimizer, own: Mapping[str, Any]) -> None:
    """Gives them to the class, whose states and groups are loaded already."""
    one.optimizer.load_state_dict({**_part_of_rank(one), **own})


def _part_of_rank(one: ShardedOptimizer) -> dict[str, Any]:
    one.asked_by_zc = True
    try:
        return one.optimizer.state_dict()
    finally:
        one.asked_by_zc = False


def own_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain state has beside the entries of PyTorch and of zc."""
    standard = ("state", "param_groups", PART_KEY, OTHER, OWN, TOGETHER)
    return {key: value for key, value in state.items() if key not in standard}


def together(sharded_model: ShardedModel) -> dict[str, list[list[str]]]:
    """The checkpoint's entry for each such optimizer; equal on every rank."""
    several = [one for one in sharded_model.optimizers if one.habits.stacks_state]
    return {str(one.number): _updated_by_rank(one) for one in several}


def note_of(sharded_model: ShardedModel) -> str | None:
    """The note for a save, or None."""
    names = [type(one.optimizer).__name__ for one in sharded_model.optimizers if one.habits.stacks_state]
    if not names:
        return None
    return (
        f"the state of {' and '.join(names)} was not shown to belong to single parameters: it can be loaded only where "
        "the same parameters are updated together, that is on as many ranks and with the same options of zc.compile"
    )


def check_together(
    one: ShardedOptimizer, states: Iterable[str], saved: Mapping[str, Sequence[Sequence[str]]], where: str
) -> None:
    """Raises CheckpointError, on every rank, if this optimizer can't use the checkpoint's states. ``states`` are their
    parameter names. ``saved`` is from `together`; without an entry for this optimizer, one process updated all."""
    members = members_of(one)
    if not one.habits.stacks_state or not set(states) & set(members):
        return
    theirs = [list(names) for names in saved.get(str(one.number), [members])]
    ours = _updated_by_rank(one)
    for rank, names in enumerate(ours):
        if names and names not in theirs:
            raise CheckpointError(
                f"{where}: its {type(one.optimizer).__name__} state belongs to parameters together, and is of "
                f"{len(theirs)} rank(s) that updated {_shown(theirs)}; here rank {rank} of {len(ours)} updates "
                f"{_shown([names])}. Such a state can't be divided: load it on {len(theirs)} rank(s) with the same "
                "options, or load the weights alone, by zc.load_state_dict without the key 'optimizer'"
            )


def refuse_together(sharded_model: ShardedModel, optimizers: Iterable[ShardedOptimizer], what: str) -> None:
    """Raises CheckpointError if ``what`` needs a state per parameter and an optimizer may not have that."""
    for one in optimizers:
        if one.habits.stacks_state and sharded_model.runtime.group.shard.world_size > 1:
            raise CheckpointError(
                f"{what}: the state of {type(one.optimizer).__name__} was not shown to belong to single parameters, so "
                "the parts of several ranks are not the state of one process: use zc.save and zc.load, on as many ranks"
            )


def members_of(one: ShardedOptimizer) -> list[str]:
    """The names of now."""
    return [called for called, _ in _both_names(one)]


def _both_names(one: ShardedOptimizer) -> list[tuple[str, str]]:
    """Of those that train, in the order of the groups: the names of now and the plan's."""
    now, params = names_of(one), one.runtime.params
    members = [member for members in one.members for member in members if isinstance(member, str)]
    return [(now[id(params[name])], name) for name in members]


def _updated_by_rank(one: ShardedOptimizer) -> list[list[str]]:
    """For each rank, the parameters of which it updates any element, in the order of the groups."""
    slots = {slot.name: (bucket.layout, slot) for bucket in one.buckets for slot in bucket.slots}
    ranges = {
        name: [layout.owned(slot, rank) for rank in range(one.runtime.group.shard.world_size)]
        for name, (layout, slot) in slots.items()
    }
    return [
        [called for called, name in _both_names(one) if ranges[name][rank][0] < ranges[name][rank][1]]
        for rank in range(one.runtime.group.shard.world_size)
    ]


def _shown(lists: Sequence[Sequence[str]], at_most: int = 4) -> str:
    texts = [", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "") for names in lists[:at_most]]
    return "; ".join(f"({text})" for text in texts) + ("; ..." if len(lists) > at_most else "")
