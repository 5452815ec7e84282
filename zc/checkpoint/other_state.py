"""Optimizer state that is not of the slices: of frozen parameters, and under names of the optimizer's own.

A frozen parameter stays in its group, and may have state: from before it was frozen, or made by the optimizer's
``__init__``, as Adagrad does. Its state is whole on every rank, and `zc.recompile` cuts it once the parameter trains.
An optimizer may also keep state under a string, such as a count of its own: ``optimizer.state["count"]``::

    optimizer.state.<name>.<key>                     of a frozen parameter, as rank 0 has it
    optimizer.other.<number>.rank_<r>.<key>         under strings, of each rank, by the optimizer's number

If the state under strings was not shown to be independent of the parameters that a rank updates, it is loaded only
where the same parameters are updated together (zc/checkpoint/together.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from zc.errors import CheckpointError

if TYPE_CHECKING:
    from zc.optim.optimizer import ShardedOptimizer

KEY = "other"


def frozen_of(one: ShardedOptimizer) -> dict[str, Tensor]:
    """The frozen parameters in this optimizer's groups, by name."""
    names = {id(param): name for name, param in one.runtime.frozen.items()}
    return {names[id(m)]: m for members in one.members for m in members if isinstance(m, Tensor) and id(m) in names}


def states_of_frozen(one: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """By name; without those that have none."""
    state = one.local.state
    return {name: dict(state[param]) for name, param in frozen_of(one).items() if state.get(param)}


def state_by_string(one: ShardedOptimizer) -> dict[str, Any]:
    """Raises CheckpointError if the optimizer has state that can't be saved by a name."""
    names = {id(param) for param in (*one.slices.values(), *frozen_of(one).values())}
    by_string: dict[str, Any] = {}
    for key, value in one.local.state.items():
        if isinstance(key, str):
            _check_keys(one, key, value)
            by_string[key] = value
        elif id(key) not in names:
            what = f"a tensor {tuple(key.shape)} that is in no group" if isinstance(key, Tensor) else repr(key)
            raise CheckpointError(
                f"{type(one.optimizer).__name__} keeps state under {what}: zc saves what is kept under a parameter or "
                "a string. Remove it before the save, or keep it under a string"
            )
    return by_string


def _check_keys(one: ShardedOptimizer, path: str, value: Any) -> None:
    """A checkpoint has strings for keys, and could not tell 0 from "0"."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise CheckpointError(
                f"the state {path!r} of {type(one.optimizer).__name__} has the key {key!r}: zc saves strings"
            )
        _check_keys(one, f"{path}.{key}", item)
