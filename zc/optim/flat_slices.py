"""Slices that lie side by side in a master, as one parameter: torch's classes update hundreds of small parameters by
one call, in place of hundreds (as FSDP1's FlatParameter, arXiv:2304.11277). An elementwise update gives each element
the same bits either way. During the class's step a `FlatSlice` stands in its groups in place of its slices, and nowhere
else: between two steps each parameter has its own state, as torch makes it, whose tensors are views of the flat one's.

What somebody does to states or groups between two steps is found as the next one begins, by comparing objects; then
flat slices are made anew, of what still fits together. A tensor of a state that somebody may hold is never moved.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.engine.memory_order import in_shape
from zc.planning.layout import Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.optim.optimizer import ShardedOptimizer

State = Mapping[Any, Any]

_MOST = 1 << 16  # elements: they stay in a core's cache with their states; a larger one costs little by itself
_APART = 64  # elements between two starts: no vector of a kernel has more, so each is rounded as alone
_PLAIN = (type(None), bool, int, float, str)
_version = attrgetter("_version")
_IN_DICT = {0: object()}
ALONE = sys.getrefcount(_IN_DICT[0])  # of an object that a dict alone holds


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether they are lists of the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


class FlatSlice:
    """Slices of one group, side by side in one bucket, all of which have a gradient in this step."""

    def __init__(self, slices: Sequence[nn.Parameter], bucket: Bucket, start: int, state: State) -> None:
        """``start``: of the first slice, in elements of this rank's shard of the bucket. ``state``: the class's, in
        which those of the slices are alike."""
        self.slices, self.bucket = list(slices), bucket
        self._sizes = [own.numel() for own in slices]
        self.elements = slice(start, start + sum(self._sizes))
        self.param = nn.Parameter(slices[0].detach().as_strided((sum(self._sizes),), (1,)))
        self.state: dict[str, Any] = {}  # the class's, of `param`
        self._shared: dict[str, Any] = {}  # what the slices have of it
        self._numbers: dict[str, Tensor] = {}  # [slices] each: what is a number of its own in the state of a slice
        self._items: list[dict[str, Any] | None] = [state.get(own) for own in slices]  # the slices' states
        self._versions: list[int] = []  # until the step has ended
        for key in self._items[0] or ():
            self._adopt(key, [item for item in self._items if item is not None])
        self._remember()

    def _adopt(self, key: str, items: Sequence[dict[str, Any]]) -> None:
        first = items[0][key]
        if not isinstance(first, Tensor):
            self._shared[key] = self.state[key] = first
            return
        values, is_number = [item[key] for item in items], first.dim() == 0
        numel = len(values) if is_number else self.param.numel()
        if _follows(values[1], first):
            flat = first.as_strided((numel,), (1,))
        else:
            flat = first.new_empty(numel)
            for item, part in zip(items, flat.unbind() if is_number else self._cut(flat), strict=True):
                item[key] = part.copy_(item[key])
        if is_number:
            self._numbers[key] = flat
        self._shared[key] = self.state[key] = flat[0].clone() if is_number else flat

    def _cut(self, flat: Tensor) -> Iterator[Tensor]:
        """What each slice has of a tensor [elements]."""
        for own, part in zip(self.slices, flat.split_with_sizes(self._sizes), strict=True):
            yield part if own.dim() == 1 else part.as_strided(own.shape, own.stride())

    def _remember(self) -> None:
        self._values = [value for item in self._items if item is not None for value in item.values()]

    def remember_numbers(self) -> None:
        """After all flat slices have shared: two of them may have parts of the same numbers."""
        self._versions = list(map(_version, self._numbers.values()))

    def is_current(self, state: State | None) -> bool:
        """Whether nobody has written into the numbers of a slice since `share`; and in ``state``, if somebody may have
        changed that, the slices have what `share` has left, in tensors whose elements may have changed."""
        if list(map(_version, self._numbers.values())) != self._versions:
            return False
        if state is None:
            return True
        values = [value for item in self._items if item is not None for value in item.values()]
        return all(map(is_, map(state.get, self.slices), self._items)) and are_same(values, self._values)

    def share(self, state: dict[Any, Any]) -> None:
        """Gives the slices, in the class's ``state``, what the class has made of `state` in its step."""
        is_new = False
        for key, value in self.state.items():
            if key in self._numbers:
                self._numbers[key].fill_(value)
                continue
            if key in self._shared and value is self._shared[key]:
                continue
            is_new, parts = True, [value] * len(self.slices)
            if isinstance(value, Tensor) and value.dim() == 0:
                with torch.inference_mode(False):  # whose tensors have no version
                    self._numbers[key] = torch.zeros(len(self.slices), dtype=value.dtype, device=value.device)
                self._numbers[key].fill_(value)
                parts = list(self._numbers[key].unbind())
            elif isinstance(value, Tensor):
                parts = list(self._cut(value))
            self._shared[key] = value
            if self._items[0] is None:
                self._items = [{} for _ in self.slices]
                state.update(zip(self.slices, self._items, strict=True))
            for item, part in zip(self._items, parts, strict=True):
                assert item is not None, "slices of one flat slice have states alike"
                item[key] = part
        if is_new:
            self._remember()


class _StepState(dict[Any, Any]):
    """What the class finds as its state during a step: those of flat slices, and the real one of all others."""

    def __init__(self, flat: Sequence[FlatSlice], others: dict[Any, Any]) -> None:
        super().__init__((one.param, one.state) for one in flat)
        self.others = others

    def __missing__(self, key: Any) -> Any:
        return self.others[key]


class FlatSlices:
    """The flat slices of one optimizer, whose class is one of torch's that update elements one by one."""

    def __init__(self, owner: ShardedOptimizer) -> None:
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self.flat: list[FlatSlice] = []  # those of the last step of the class
        self._alone: list[_Alone] = []  # other slices that have a gradient
        self._params: list[list[nn.Parameter]] = []  # of each group, what the class gets
        self._lists: list[list[Any]] = []  # of each group, its slices, when all of this was made
        self._touched: list[list[bool]] = []  # of each bucket, which parameters had a gradient then
        self._num_made, self._num_steps = 0, 0
        self.is_state_asked_for = False  # since the last step: see `ShardedOptimizer.state_of_class`

    def find(self, lists: Sequence[list[Any]]) -> bool:
        """Whether there are any in the step that begins. ``lists``: of each group, its slices."""
        owner: ShardedOptimizer = self._owner()
        touched = [owner.runtime.accumulators.touched[bucket.index] for bucket in owner.buckets]
        self._num_steps += 1
        is_same = are_same(lists, self._lists) and touched == self._touched
        state = owner.local.state if self.is_state_asked_for else None
        if not is_same or not all(one.is_current(state) for one in self.flat):
            self.forget()
            if self._num_made > 4 + self._num_steps // 4:  # parameters that take turns would pay for it in each step
                return False
            self._num_made += 1
            self._lists, self._touched = list(lists), [list(flags) for flags in touched]
            self._make(owner)
        return bool(self.flat)

    def forget(self) -> None:
        for made in (self.flat, self._alone, self._params, self._lists, self._touched):
            made.clear()

    def _make(self, owner: ShardedOptimizer) -> None:
        rank, state = owner.runtime.group.shard.rank, owner.local.state
        group_of = {id(own): k for k, slices in enumerate(self._lists) for own in slices}
        for bucket, flags in zip(owner.buckets, self._touched, strict=True):
            run: list[_Alone] = []
            for slot, is_touched in zip(bucket.slots, flags, strict=True):
                own = owner.slices.get(slot.name)
                if own is None or not is_touched or id(own) not in group_of:
                    continue
                inside, _ = bucket.layout.owned_part(slot, rank)
                one = _Alone(own, bucket, inside if own.numel() else slice(0, 0), slot)
                is_one_group = bool(run) and group_of[id(own)] == group_of[id(run[-1].own)]
                if not (is_one_group and one.follows(run, state)):
                    self._add(run, state)
                    run = []
                run.append(one)
            self._add(run, state)
        flat = [(group_of[id(one.slices[0])], one.param) for one in self.flat]
        joined = {id(own) for one in self.flat for own in one.slices}
        for number, slices in enumerate(self._lists):
            params = [param for k, param in flat if k == number]
            self._params.append(params + [own for own in slices if id(own) not in joined])

    def _add(self, run: Sequence[_Alone], state: State) -> None:
        if len(run) > 1:
            self.flat.append(FlatSlice([one.own for one in run], run[0].bucket, run[0].elements.start, state))
        else:
            self._alone += run

    def enter(self, groups: Sequence[dict[str, Any]]) -> None:
        """Gives the class flat slices and their states, and all slices their gradients."""
        owner: ShardedOptimizer = self._owner()
        for flat in self.flat:
            flat.param.grad = owner.runtime.buffers.acc_copies(flat.bucket)[0][flat.elements]
        for one in self._alone:
            one.own.grad = in_shape(owner.runtime.buffers.acc_copies(one.bucket)[0][one.elements], one.slot)
        for group, params in zip(groups, self._params, strict=True):
            group["params"] = params
        owner.local.state = _StepState(self.flat, owner.local.state)

    def leave(self, groups: Sequence[dict[str, Any]]) -> bool:
        """After a step, also one that raised or that Ctrl-C has cut off: each slice has its own state again, and no
        gradient. False if the class had no flat slices."""
        local = self._owner().local
        if not isinstance(local.state, _StepState):
            return False
        local.state = local.state.others
        for group, slices in zip(groups, self._lists, strict=True):
            group["params"] = slices
        for flat in self.flat:
            flat.param.grad = None
            flat.share(local.state)
        for flat in self.flat:
            flat.remember_numbers()
        for one in self._alone:
            one.own.grad = None
        self.is_state_asked_for = False
        return True


class _Alone(NamedTuple):
    """A slice, and where its elements are in this rank's shard of the bucket."""

    own: nn.Parameter
    bucket: Bucket
    elements: slice
    slot: Slot

    def follows(self, run: Sequence[_Alone], state: State) -> bool:
        """Whether it may stand behind these in a flat slice."""
        start, last = run[0].elements.start, run[-1]
        is_next = self.elements.start == last.elements.stop and (self.elements.start - start) % _APART == 0
        return is_next and self.elements.stop - start <= _MOST and _are_alike(last.own, self.own, state)


def _are_alike(one: Tensor, other: Tensor, state: State) -> bool:
    """Whether an update treats two slices alike, and their states lie side by side or may be moved there."""
    if 0 in (one.dim(), other.dim(), one.numel(), other.numel()):
        return False
    items, others = state.get(one), state.get(other)
    if items is None or others is None:
        return items is others
    return items.keys() == others.keys() and all(_fit(one, other, items, others, key) for key in items)


def _fit(one: Tensor, other: Tensor, items: dict[str, Any], others: dict[str, Any], key: str) -> bool:
    value, other_value = items[key], others[key]
    if type(value) is not Tensor or type(other_value) is not Tensor:
        return type(value) in _PLAIN and type(value) is type(other_value) and bool(value == other_value)
    if (value.dtype, value.device) != (other_value.dtype, other_value.device):
        return False
    if value.dim() == 0 or other_value.dim() == 0:
        fits = value.dim() == other_value.dim() and bool(value == other_value)
    else:
        fits = _lies_like(value, one) and _lies_like(other_value, other)
    if not fits or _follows(other_value, value):
        return fits
    del value, other_value
    return _is_alone(items, key) and _is_alone(others, key)


def _lies_like(value: Tensor, own: Tensor) -> bool:
    return value.shape == own.shape and value.stride() == own.stride()


def _follows(value: Tensor, before: Tensor) -> bool:
    """Whether a tensor begins in the memory of another where that ends."""
    is_next = value.data_ptr() == before.data_ptr() + before.nbytes
    return is_next and value.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def _is_alone(items: dict[str, Any], key: str) -> bool:
    """Whether nobody else holds a tensor of a state or its memory."""
    return sys.getrefcount(items[key]) == ALONE and torch_private.num_sharing(items[key]) == 2
