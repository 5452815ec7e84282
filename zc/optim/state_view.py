"""``optimizer.state`` of the caller's object: the state of this rank's slices, found under the model's parameters.

A tensor of the slice's shape is shown as a `ShardedValue` of the parameter's shape; whatever else the class keeps, such
as a count of steps, is shown as it is. A write reaches the class's own state. A rank that owns nothing of a parameter
shows the same keys as others, learned from a state that it has, so that loops over states are the same on all ranks::

    optimizer.state[p]["exp_avg"]    the class's state[slice of p]["exp_avg"], or no elements
    optimizer.state["count"]         under a string, or a frozen parameter: the class's own item
    optimizer.state[left]            of a parameter that has left the model: this rank's elements
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from zc import torch_private
from zc.engine.memory_order import change_each, is_cut
from zc.errors import ZcError
from zc.optim.flat_slices import ALONE
from zc.optim.trials import SHAPE, states_of_trial

if TYPE_CHECKING:
    from zc.optim.optimizer import ShardedOptimizer


class ParamState(dict[Any, Any]):
    """The state of one parameter. What is written here is written in the class's state, too."""

    _view: weakref.ref[StateView] | None = None  # None: of a copy
    _name: str = ""

    def _of_class(self) -> StateView | None:
        return self._view() if self._view is not None else None

    def __setitem__(self, key: Any, value: Any) -> None:
        view = self._of_class()
        if view is not None:
            value = view.write(self._name, key, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        view = self._of_class()
        if view is not None:
            view.delete(self._name, key)

    # which are made of the two
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # a plain dict with ``|``
        self.update(other)
        return self

    def show(self, items: Mapping[Any, Any]) -> None:
        """Has these items, which are the class's."""
        dict.clear(self)
        dict.update(self, items)

    def __reduce_ex__(self, proto: Any) -> Any:
        return dict, (dict(self),)


class StateView(MutableMapping[Any, Any]):
    """See the module. Missing states are empty, as in the ``defaultdict`` that it stands for."""

    def __init__(self, owner: ShardedOptimizer) -> None:
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self._updated: set[str] = set()  # parameters that have state on some rank, as far as this one knows
        self._elsewhere: dict[str, dict[Any, Any]] = {}  # what was written for parameters that have no slice here
        self._held: weakref.WeakValueDictionary[str, ParamState] = weakref.WeakValueDictionary()
        self._noted: list[list[bool]] = []  # of the last update, which parameters had a gradient
        self._with_gradient: frozenset[str] = frozenset()  # their names
        self._num_updates = Counter[str]()  # of each parameter
        self._first_count: float | None = None  # the class's `step` before a parameter's first update, once it is known
        self._trials: dict[int, dict[Any, Any]] = {}  # states of small data, by the number of dimensions
        self._added: dict[str, set[Any]] = {}  # keys that the caller has put into a state, and the class does not make
        # Of parameters without a slice here, by name and key: the numbers that were asked for since the last update, or
        # that somebody holds, such as a count of steps, which go on as the class's own would; and their versions, by
        # which a write into one shows
        self._numbers: dict[tuple[str, Any], Tensor] = {}
        self._versions: dict[tuple[str, Any], int] = {}

    @property
    def owner(self) -> ShardedOptimizer:
        owner: ShardedOptimizer | None = self._owner()
        if owner is None:
            raise ZcError("the state of this optimizer is gone with its compiled model")
        return owner

    # --- as a mapping ---

    def __getitem__(self, key: Any) -> Any:
        name = self.owner.name_of(key)
        if name is None:
            away = self._away(key)
            return self.owner.state_of_class[key] if away is None else away
        state = self._held.get(name)
        if state is None:
            state = self._hold(name, ParamState())
        state.show(self._items_of(name))
        return state

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (which would call itself)

    def __setitem__(self, key: Any, value: Any) -> None:
        name = self.owner.name_of(key)
        if name is None:
            self._drop_away(key)
            self.owner.state_of_class[key] = value
            return
        items = dict(value)
        if value is self._held.get(name):
            return
        self._check_shapes(name, items)
        self._let_go(name)
        self._keep(name, {})
        for item_key, item in items.items():
            self.write(name, item_key, item)
        if isinstance(value, ParamState) and value._of_class() is None:  # let go before, and put back now
            self._hold(name, value)
        self.refresh()

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        name, state = self.owner.name_of(key), self.owner.state_of_class
        if name is None:
            self._drop_away(key)
            state.pop(key, None)
            return
        self.forget([name])
        state.pop(self.owner.slices.get(name), None)

    def _away(self, key: Any) -> dict[Any, Any] | None:
        """The state of a parameter that has left the model."""
        away = self.owner.away.get(key) if isinstance(key, Tensor) else None
        return None if away is None else away.state

    def _drop_away(self, key: Any) -> None:
        if self._away(key) is not None:
            self.owner.away[key] = self.owner.away[key]._replace(state=None)

    def clear(self) -> None:
        super().clear()
        for param in list(self.owner.away):
            self._drop_away(param)

    # A mapping's own would take the state that a parameter lacks for an empty one, which it has.

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        """The last, as from a dict."""
        keys = list(self)
        if not keys:
            raise KeyError("no parameter has a state")
        return keys[-1], self.pop(keys[-1])

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __contains__(self, key: Any) -> bool:
        name = self.owner.name_of(key)
        if name is None:
            return key in self.owner.state_of_class or self._away(key) is not None
        return self._kept(name) is not None

    def __iter__(self) -> Iterator[Any]:
        """Parameters in the order of the groups, the same on all ranks, then what the class keeps by other keys."""
        owner = self.owner
        params = [p for group in owner.optimizer.param_groups for p in group["params"] if owner.name_of(p) is not None]
        yield from [param for param in params if param in self]
        slices = {id(own_slice) for own_slice in owner.slices.values()}
        yield from [key for key in owner.state_of_class if id(key) not in slices]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"StateView of {len(self)} parameters"

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        raise ZcError(
            "an optimizer's state is sharded over ranks, so the optimizer can't be copied or pickled: "
            "zc.full_optimizer_state(model, optimizer) has the whole state, optimizer.state_dict() this rank's part"
        )

    # --- between the two forms ---

    def _hold(self, name: str, state: ParamState) -> ParamState:
        state._view, state._name = weakref.ref(self), name
        self._held[name] = state
        return state

    def _let_go(self, name: str) -> None:
        """The state of a parameter is replaced or gone. The one that the caller may hold stays as it is, as a dict does
        that another has replaced."""
        held = self._held.pop(name, None)
        if held is not None:
            held._view = None
        self._added.pop(name, None)
        for key in [key for key in self._numbers if key[0] == name]:
            del self._numbers[key]

    def _kept(self, name: str) -> dict[Any, Any] | None:
        """The state of a parameter as the class has it, or would have it if it updated the parameter on this rank."""
        owner = self.owner
        own_slice = owner.slices.get(name)
        if own_slice is not None:
            kept: dict[Any, Any] | None = owner.state_of_class.get(own_slice)
            return kept
        if name in self._elsewhere or name not in self._updated:
            return self._elsewhere.get(name)
        of_name = [(key, held) for (of, key), held in self._numbers.items() if of == name]
        written = {key: held.clone() for key, held in of_name
                   if torch_private.version(held) != self._versions[name, key]}  # fmt: skip
        items = self._like_others(name)
        if items and written:
            for key, value in written.items():
                items[key].copy_(value)
            self._elsewhere[name] = items
        return items

    def _keep(self, name: str, items: dict[Any, Any]) -> dict[Any, Any]:
        own_slice = self.owner.slices.get(name)
        if own_slice is not None:
            self.owner.state_of_class[own_slice] = items
        else:
            self._elsewhere[name] = items
        self._updated.add(name)
        return items

    def _of_trial(self, num_dims: int) -> dict[Any, Any]:
        """The state that the class makes of a parameter of so many dimensions, as far as that can be tried."""
        if num_dims not in self._trials:
            states = states_of_trial(self.owner.local, num_dims)
            self._trials[num_dims] = states[0] if states else {}
        return self._trials[num_dims]

    @torch.inference_mode(False)
    def _like_others(self, name: str) -> dict[Any, Any] | None:
        """Without elements, what the state of a slice has, of its group if there is one here; where parameters stay
        whole, a class may keep other things of a vector than of a matrix. It counts its own updates."""
        owner, state, params = self.owner, self.owner.state_of_class, self.owner.runtime.params
        groups = sorted(owner.members, key=lambda members: name not in members)
        names = [m for members in groups for m in members if isinstance(m, str)]
        with_state = [m for m in names if m in owner.slices and state.get(owner.slices[m])]
        num_dims = params[name].dim()
        like = min(with_state, key=lambda other: params[other].dim() != num_dims, default=None)
        if like is not None and (params[like].dim() == num_dims or not owner.rule.whole):
            added = self._added.get(like, ())
            own = {key: item for key, item in state[owner.slices[like]].items() if key not in added}
            items = _without_elements(own, owner.slices[like].shape)
        else:
            items = _without_elements(self._of_trial(num_dims), torch.Size(SHAPE[:num_dims]))
        if "step" in items:
            step, count = items["step"], (self._first_count or 0.0) + self.num_updates_of(name)
            items["step"] = torch.full_like(step, count) if isinstance(step, Tensor) else type(step)(count)
        for key, item in items.items() if name not in self._elsewhere else ():
            if isinstance(item, Tensor) and item.dim() == 0:
                items[key] = held = self._numbers.setdefault((name, key), item)
                held.copy_(item)
                self._versions[name, key] = torch_private.version(held)
        return items or None

    def num_updates_of(self, name: str) -> int:
        """How often the class has updated a parameter."""
        return self._num_updates[name]

    def _items_of(self, name: str) -> dict[Any, Any]:
        own_slice = self.owner.slices.get(name)
        shape = own_slice.shape if own_slice is not None else torch.Size([0])
        return {
            key: self.owner.shown(name, item) if is_cut(key, item, shape) else item
            for key, item in (self._kept(name) or {}).items()
        }

    def write(self, name: str, key: Any, value: Any) -> Any:
        """Writes an item of a parameter's state: of a sharded value, or of a whole tensor, this rank's elements.
        Returns how it is shown from now on."""
        self._check_shapes(name, {key: value})
        kept = self._kept(name)
        if kept is None or (name not in self.owner.slices and name not in self._elsewhere):
            kept = self._keep(name, kept or {})
        trial_state = self._of_trial(self.owner.runtime.params[name].dim()) if key not in kept else {}
        if trial_state and key not in trial_state:  # without a trial, what a caller exchanges is the class's, too
            self._added.setdefault(name, set()).add(key)
        for where in [where for where, held in self._numbers.items() if held is value]:
            del self._numbers[where]  # it is one of this parameter's now
        kept[key] = self.owner.taken(name, value)
        return self._items_of(name)[key]

    def _check_shapes(self, name: str, items: Mapping[Any, Any]) -> None:
        """Raises ZcError for a tensor of another shape than the parameter's, where the one of before has it."""
        shape, before = self.owner.runtime.params[name].shape, self._items_of(name)
        for key, item in items.items():
            if isinstance(item, Tensor) and item.dim() and item.shape != shape and is_cut(key, before.get(key), shape):
                raise ZcError(
                    f"the state {key!r} of {self.owner.runtime.name_now(name)} was given a tensor of shape "
                    f"{tuple(item.shape)}, and the parameter "
                    f"and the state of before have {tuple(shape)}: give it one of that shape"
                )

    def delete(self, name: str, key: Any) -> None:
        kept = self._kept(name) or {}
        if name not in self.owner.slices and name not in self._elsewhere:
            kept = self._keep(name, kept)
        kept.pop(key, None)

    # --- called by zc ---

    def replaced_by(self, given: Mapping[Any, Any]) -> StateView:
        """The caller has set ``optimizer.state``. Returns the view of that; this one keeps what it shows, for a caller
        that sets it again. Raises ZcError for a tensor of a wrong shape; nothing has changed."""
        for key, item in given.items():
            if (name := self.owner.name_of(key)) is not None:
                self._check_shapes(name, dict(item))
        view, past = StateView(self.owner), dict(self)
        view._noted, view._with_gradient, view._trials = self._noted, self._with_gradient, self._trials
        view._num_updates, view._first_count = self._num_updates, self._first_count
        self.clear()
        stand_in = SimpleNamespace(name_of=lambda key: None, state_of_class=past, slices={}, away={},
                                   optimizer=SimpleNamespace(param_groups=[]))  # fmt: skip
        self._owner = lambda: stand_in
        for key, item in given.items():
            view[key] = item
        return view

    def loaded(self, num_updates: Mapping[str, int]) -> None:
        """A state was loaded, of these parameters, which have had so many updates."""
        for name in list(self._held):
            self._let_go(name)
        self._elsewhere.clear()
        self._added.clear()
        self._numbers.clear()
        self._updated, self._num_updates = set(num_updates), Counter(num_updates)
        self._noted.clear()  # the next update notes its parameters anew

    def forget(self, names: Iterable[str]) -> None:
        """These parameters, or their states, are gone; others may come under their names."""
        for name in names:
            self._updated.discard(name)
            self._elsewhere.pop(name, None)
            del self._num_updates[name]
            self._let_go(name)
        self._noted.clear()

    def come_back(self, name: str, num_updates: int) -> None:
        """A parameter that was gone has this name now, and had so many updates."""
        self._num_updates[name] = num_updates

    def has(self, name: str) -> bool:
        """Whether a parameter has state on some rank, as far as this one knows."""
        return name in self._updated

    def note(self, names: Iterable[str]) -> None:
        """These parameters have state on some rank."""
        self._updated.update(names)

    def note_update(self, changed: Sequence[int]) -> None:
        """The class has updated the parameters in these buckets that have a gradient."""
        noted = [self.owner.runtime.accumulators.touched[index] for index in changed]
        is_new = noted != self._noted
        if is_new:
            self._noted = [list(flags) for flags in noted]
            self._with_gradient = frozenset(self.owner.grad_shards.touched(changed))
            self.note(self._with_gradient)
        self._num_updates.update(self._with_gradient)
        if is_new and self._first_count is None:
            self._learn_first_count()
        for name in self._with_gradient & self._elsewhere.keys() if self._elsewhere else ():
            self._elsewhere[name] = _updated(self._elsewhere[name], self._like_others(name) or {})
        self.refresh()

    def _learn_first_count(self) -> None:
        """After the first update of a slice, when the loop has not written its state yet."""
        for name in self._with_gradient & self.owner.slices.keys():
            step = self.owner.state_of_class.get(self.owner.slices[name], {}).get("step")
            if isinstance(step, int | float) or (isinstance(step, Tensor) and step.dim() == 0):
                self._first_count = float(step) - self._num_updates[name]
                return

    def refresh(self) -> None:
        """The class's state may have changed: what the caller still holds shows it."""
        for name in {name for name, _ in self._numbers} if self._numbers else ():
            self._kept(name)
        for where in [where for where in self._numbers if sys.getrefcount(self._numbers[where]) == ALONE]:
            del self._numbers[where]
        for name, state in list(self._held.items()) if self._held else ():
            state.show(self._items_of(name))


@torch.no_grad()
def _updated(written: Mapping[Any, Any], kept: Mapping[Any, Any]) -> dict[Any, Any]:
    """What the caller has written for a parameter, after an update in which the class keeps ``kept``: a count of steps
    goes on from the one that was written. Numbers change in place, as the class's own."""
    items = {**written, **kept}
    for key, item in kept.items():
        before = written.get(key, torch.zeros_like(item) if isinstance(item, Tensor) else 0)
        now = before + 1 if key == "step" else item
        is_number = isinstance(before, Tensor) and isinstance(now, Tensor) and before.dim() == now.dim() == 0
        items[key] = before.copy_(now) if is_number else now
    return items


def _without_elements(state: Mapping[Any, Any], shape: torch.Size) -> dict[Any, Any]:
    """A state like this one, of a parameter of this ``shape``, for a rank that has no element of it. What a class keeps
    of other shapes, such as Adafactor's factors, is of whole parameters, and has none either."""

    def without(key: Any, value: Any) -> Any:
        if is_cut(key, value, shape):
            return value.new_empty(0)
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 0:  # the caller may write into it
            return value.clone()
        return value.new_empty((0, *value.shape[1:]) if value.dim() > 1 else (0, 0))  # [0] would be elements of it

    return {key: change_each(without, key, item) for key, item in state.items()}
