"""``optimizer.state`` of the caller's object: the state of this rank's slices, found under the model's parameters.

A tensor of the slice's shape is shown as a `ShardedValue` of the parameter's shape; whatever else the class keeps, such
as a count of steps, is shown as it is. A write reaches the class's own state. A rank that owns nothing of a parameter
shows the same keys as others, learned from a state that it has, so that loops over states are the same on all ranks::

    optimizer.state[p]["exp_avg"]    the class's state[slice of p]["exp_avg"], or no elements
    optimizer.state["count"]         under a string, or a frozen parameter: the class's own item
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from zc.engine.memory_order import change_each, is_cut
from zc.errors import ZcError
from zc.optim.trials import SHAPE, state_of_trial

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
        self._owner = weakref.ref(owner)
        self._updated: set[str] = set()  # parameters that have state on some rank, as far as this one knows
        self._elsewhere: dict[str, dict[Any, Any]] = {}  # what was written for parameters that have no slice here
        self._held: weakref.WeakValueDictionary[str, ParamState] = weakref.WeakValueDictionary()
        self._noted: list[list[bool]] = []  # of the last update, which parameters had a gradient
        self._trial: dict[Any, Any] | None = None  # a state of small data
        self._num_updates = 0

    @property
    def owner(self) -> ShardedOptimizer:
        owner = self._owner()
        if owner is None:
            raise ZcError("the state of this optimizer is gone with its compiled model")
        return owner

    # --- as a mapping ---

    def __getitem__(self, key: Any) -> Any:
        name = self.owner.name_of(key)
        if name is None:
            return self.owner.local.state[key]
        state = self._held.get(name)
        if state is None:
            state = ParamState()
            state._view, state._name = weakref.ref(self), name
            self._held[name] = state
        state.show(self._items_of(name))
        return state

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (which would call itself)

    def __setitem__(self, key: Any, value: Any) -> None:
        name = self.owner.name_of(key)
        if name is None:
            self.owner.local.state[key] = value
            return
        items = dict(value)  # it may be what this parameter shows
        self._keep(name, {})
        for item_key, item in items.items():
            self.write(name, item_key, item)
        self.refresh()

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        name, state = self.owner.name_of(key), self.owner.local.state
        if name is None:
            del state[key]
            return
        self._updated.discard(name)
        self._elsewhere.pop(name, None)
        state.pop(self.owner.slices.get(name), None)
        self.refresh()

    # A mapping's own would take the state that a parameter lacks for an empty one, which it has.

    def pop(self, key: Any, *default: Any) -> Any:
        """Returns a state that stays as it was."""
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = self[key]
        if isinstance(value, ParamState):
            value = dict(value)
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
        return key in self.owner.local.state if name is None else self._kept(name) is not None

    def __iter__(self) -> Iterator[Any]:
        """Parameters in the order of the groups, the same on all ranks, then what the class keeps by other keys."""
        owner = self.owner
        params = [p for group in owner.optimizer.param_groups for p in group["params"] if owner.name_of(p) is not None]
        yield from [param for param in params if param in self]
        slices = {id(own_slice) for own_slice in owner.slices.values()}
        yield from [key for key in owner.local.state if id(key) not in slices]

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

    def _kept(self, name: str) -> dict[Any, Any] | None:
        """The state of a parameter as the class has it, or would have it if it updated the parameter on this rank."""
        owner = self.owner
        own_slice = owner.slices.get(name)
        if own_slice is not None:
            kept: dict[Any, Any] | None = owner.local.state.get(own_slice)
            return kept
        if name in self._elsewhere or name not in self._updated:
            return self._elsewhere.get(name)
        return self._like_others(name)

    def _keep(self, name: str, items: dict[Any, Any]) -> dict[Any, Any]:
        own_slice = self.owner.slices.get(name)
        if own_slice is not None:
            self.owner.local.state[own_slice] = items
        else:
            self._elsewhere[name] = items
        self._updated.add(name)
        return items

    def _like_others(self, name: str) -> dict[Any, Any] | None:
        """Without elements, what the state of a slice has; of its group if there is one here."""
        owner, state = self.owner, self.owner.local.state
        groups = sorted(owner.members, key=lambda members: name not in members)
        slices = (owner.slices.get(m) for members in groups for m in members if isinstance(m, str))
        like = next((own_slice for own_slice in slices if own_slice is not None and state.get(own_slice)), None)
        if like is not None:
            return _without_elements(state[like], like.shape)
        if self._trial is None:  # this rank owns nothing at all
            self._trial = state_of_trial(owner.local)
        count = {"step": torch.tensor(float(self._num_updates))} if "step" in self._trial else {}
        return {**_without_elements(self._trial, torch.Size(SHAPE)), **count} or None

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
        kept = self._kept(name)
        if kept is None or (name not in self.owner.slices and name not in self._elsewhere):
            kept = self._keep(name, kept or {})
        kept[key] = self.owner.taken(name, value)
        return self._items_of(name)[key]

    def delete(self, name: str, key: Any) -> None:
        kept = self._kept(name) or {}
        if name not in self.owner.slices and name not in self._elsewhere:
            kept = self._keep(name, kept)
        kept.pop(key, None)

    # --- called by zc ---

    def replace(self, given: Mapping[Any, Any]) -> None:
        """The caller has set ``optimizer.state``."""
        items = {key: dict(item) if isinstance(item, Mapping) else item for key, item in given.items()}
        self.clear()
        for key, item in items.items():
            self[key] = item

    def loaded(self, names: Iterable[str]) -> None:
        """A state was loaded, of these parameters."""
        self._elsewhere.clear()
        self._updated = set(names)
        self.refresh()

    def forget(self, names: Iterable[str]) -> None:
        """These parameters are gone; others may come under their names."""
        for name in names:
            self._updated.discard(name)
            self._elsewhere.pop(name, None)
            self._held.pop(name, None)
        self._noted.clear()

    def note(self, names: Iterable[str]) -> None:
        """These parameters have state on some rank."""
        self._updated.update(names)

    def note_update(self, changed: Sequence[int]) -> None:
        """The class has updated the parameters in these buckets that have a gradient."""
        runtime = self.owner.runtime
        plan, touched = runtime.plan, runtime.accumulators.touched
        self._num_updates += 1
        noted = [touched[index] for index in changed]
        if noted != self._noted:
            self._noted = [list(flags) for flags in noted]
            for index in changed:
                slots = zip(plan.buckets[index].slots, touched[index], strict=True)
                self.note(slot.name for slot, is_touched in slots if is_touched)

    def refresh(self) -> None:
        """The class's state may have changed: what the caller still holds shows it."""
        for name, state in list(self._held.items()) if self._held else ():
            state.show(self._items_of(name))


def _without_elements(state: Mapping[Any, Any], shape: torch.Size) -> dict[Any, Any]:
    """A state like this one, of a parameter of this ``shape``, for a rank that has no element of it."""

    def without(key: Any, value: Any) -> Any:
        return value.new_empty(0) if is_cut(key, value, shape) else value

    return {
        key: change_each(without, key, item)
        for key, item in state.items()
        if not isinstance(item, Tensor) or item.dim() == 0 or item.shape == shape
    }
