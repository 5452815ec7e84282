"""The caller's own optimizer object, whose class updates this rank's slices of the master shards.

Groups, hyper-parameters, schedulers and hooks stay the caller's, and the groups keep the model's own parameters. The
methods of the class run on a second object (`zc.optim.local`), whose groups have *slices*: for every parameter of which
this rank owns elements, a view into master_shard, which has a gradient inside a method alone. Hooks around ``step`` do
the rest: before the first pre-hook the gradients are finished, and before all other post-hooks the updated masters are
cast into flat_param and gathered (ZeRO, arXiv:1910.02054, section 5).

zc replaces methods of the objects (`zc.optim.local.REPLACED`); the classes stay as they are. ``model.zero_grad`` is not
replaced: zc notices a parameter whose ``.grad`` was set to None.

``step(closure)``: torch's optimizers call the closure at the start of their step, which is too late to finish
gradients. So zc calls it first, and the optimizer gets a function that only returns the loss.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import eq, itemgetter
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zc import torch_private
from zc.engine.memory_order import Sent, change_each, flattened, in_shape, is_cut, joined
from zc.engine.param_checks import ParamOfModel
from zc.errors import PlanError, ZcError, kept_params, not_its_own
from zc.kernels.copy_writes import same_bits
from zc.optim import trials
from zc.optim.assignment import is_known
from zc.optim.flat_slices import FlatSlices, are_same
from zc.optim.grad_shards import GradShards, ShardedGrad
from zc.optim.local import REPLACED, second_object, with_zero_grad
from zc.optim.sharded_value import ShardedValue
from zc.optim.state_view import StateView
from zc.optim.trials import Habits, calls_of_closure, candidates, habits_of, may_zero, mentions, on_slices
from zc.planning.layout import Rule, Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.core import Updater
    from zc.engine.runtime import Runtime
    from zc.optim.model import ParamWrites

    MakeUpdater = Callable[["ShardedOptimizer"], Updater]


_MOST_SENT = 64  # elements of a tensor among the options of a group


class Away(NamedTuple):
    """What an optimizer keeps of a parameter that has left the model, for as long as the program has the parameter:
    PyTorch's would have its state when it comes back."""

    group: int
    position: int  # in the group
    state: dict[Any, Any] | None  # of this rank's elements; None: no rank has one
    start: int  # of these
    shape: torch.Size  # of the slice that had them
    num_updates: int


class ShardedOptimizer:
    """zc's state for one of the caller's optimizers: its slices, and the hooks on it."""

    def __init__(
        self,
        number: int,
        runtime: Runtime,
        optimizer: Optimizer,
        rule: Rule,
        grad_shards: GradShards,
        writes: ParamWrites,
    ) -> None:
        self.number, self.runtime, self.optimizer, self.rule = number, runtime, optimizer, rule
        self.slices: dict[str, nn.Parameter] = {}
        self._places: dict[str, int] = {}  # addresses of the slices, in their order
        self._names: dict[int, str] = {}  # of parameters that have a slice on some rank, by id
        self.away: Any = WeakIdKeyDictionary()  # parameter -> its Away
        self._lists: list[tuple[list[Any], list[Any]]] = []  # of each group, parameters and what the class sees instead
        self._absent: set[str] = set()  # parameters in a bucket that have left the groups, when `_lists` was made
        self._groups: list[dict[str, Any]] = []  # as the class sees them
        self.grad_shards, self._writes = grad_shards, writes
        others = candidates(type(optimizer))
        self._of_class = {name: getattr(type(optimizer), name) for name in (*REPLACED, *others)}
        # what the methods of its class run on
        owner = weakref.proxy(self)

        def zero_grad(second: Optimizer, set_to_none: bool = True) -> None:
            owner.called_zero_grad[0 if set_to_none else 1] = 1
            Optimizer.zero_grad(second, set_to_none)

        self.local: Any = second_object(optimizer, zero_grad, others)
        # by the method of the class that runs now, and so by all ranks: which set to None, which made zeros
        self.called_zero_grad = [0, 0]
        self._is_known, self._may_zero = is_known(optimizer), may_zero(type(optimizer))
        self._flat = FlatSlices(self)
        self.habits = Habits()  # of an unknown class
        self.loaded_updates: dict[str, int] = {}  # inside of a load of a whole state, of each parameter
        self.asked_by_zc = False  # inside of a `state_dict()` of zc's, of which the caller hears nothing
        self._given: dict[str, Given] = {}  # inside of a method of an unknown class: gradients of slices
        self.local.state, self.local.param_groups = optimizer.state, self._groups
        self.state = StateView(self)
        vars(optimizer)["state"] = self.state
        self._num_tried = 0  # groups
        self._options = set[str]()  # of a group, those that methods of an unknown class set
        self.methods: list[str] = []  # of the class, that run on slices when the caller calls them
        self._weights_before: list[Tensor] = []  # inside of the step of a class that `_keeps_params`
        self._updating: tuple[int, ...] | None = None  # inside of the class's step: buckets with a gradient
        self.num_updates = 0  # begun since the last load, so equal on all ranks between two updates
        self.updater: Updater  # from `start` on, as the next one
        self._takes_flat: bool  # its class updates one parameter as several that lie side by side in it
        self.is_closed = False
        self._remove_hooks: Callable[[], None] | None = None
        self.hooks: list[RemovableHandle] = []  # others on the caller's object

    def start(self, make_updater: MakeUpdater) -> None:
        """Registers the hooks, by which the caller's ``step()`` updates the slices."""
        had_state = bool(self.state_of_class)
        self.updater = make_updater(self)
        self._takes_flat = self._is_known and not self.rule.whole and not self.updater.moves_slices
        self._take_options()
        if self.state_of_class and not had_state:  # of an earlier run's file
            self.state.note(self._names.values())
        self._remove_hooks = torch_private.surround_step(
            self.optimizer, self._before_hooks, self._before_step, self._after_step
        )

    def refuse_other_methods(self) -> None:
        """Raises ZcError where the class has other methods than when zc took them."""
        cls = type(self.optimizer)
        for name, method in self._of_class.items():
            if getattr(cls, name, None) != method:
                raise ZcError(
                    f"the {name} of {cls.__name__} is another one than that which zc.compile has taken, so it would "
                    "not run: the optimizer has another class now, or the function was replaced in its class. Call "
                    "zc.close(model), and then zc.compile with an optimizer that has the new one; or set a method of "
                    f"the object (optimizer.{name} = ...), which is called"
                )

    @property
    def state_of_class(self) -> dict[Any, Any]:
        """The class's own state, of slices. Who asks for it may change it, so the next step compares it with what flat
        slices have."""
        self._flat.leave(self._groups)  # of a step that Ctrl-C has cut off
        self._flat.is_state_asked_for = True
        state: dict[Any, Any] = self.local.state
        return state

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of its parameters."""
        return self.runtime.plan.of_optimizer(self.number)

    @property
    def members(self) -> list[list[str | Tensor]]:
        """Each group's parameters, the same on every rank; those in a bucket by name."""
        return [[self._names.get(id(p), p) for p in group["params"]] for group in self.optimizer.param_groups]

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Makes slices of the optimizer's parameters in these buckets. Frozen ones have none, nor a gradient, so the
        optimizer skips them."""
        slots = {slot.name: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._names.update({id(self.runtime.params[name]): name for name in slots})
        for name, (bucket, slot) in slots.items():
            self._make_slice(name, bucket, slot)
        # where parameters are cut, every rank has a slice per dtype, empty if need be: it makes the same kinds of state
        for name, (bucket, slot) in slots.items() if not self.rule.whole else ():
            if all(own_slice.dtype != bucket.acc_dtype for own_slice in self.slices.values()):
                self._make_slice(name, bucket, slot, is_empty=True)
        groups = self.optimizer.param_groups
        self._try(groups[self._num_tried :])
        self._num_tried = len(groups)
        for name, (bucket, slot) in slots.items():
            param = self.runtime.params[name]
            state, away = self.state_of_class.pop(param, None), self.away.pop(param, None)
            if away is not None and away.state is not None and not state:
                state = self._whole_state(name, away, slot)
                self.state.come_back(name, away.num_updates)
            if state:  # a fresh one, made by the optimizer's __init__ (Adagrad), or one that comes back
                self.state.note([name])
                if name in self.slices:
                    dtype = self.slices[name].dtype if away is None else None
                    self.state_of_class[self.slices[name]] = self._slice_state(bucket, slot, state, dtype)
        self._lists.clear()
        self.look_at_groups()

    def leave(self, params: Mapping[str, nn.Parameter]) -> None:
        """These parameters have left the plan: their slices go, and their states are `away`."""
        self._flat.leave(self._groups)
        self._flat.forget()
        groups = self.optimizer.param_groups
        places = {id(p): (k, n) for k, group in enumerate(groups) for n, p in enumerate(group["params"])}
        for name, param in params.items():
            is_own, has_state = id(param) in self._names, self.state.has(name)
            own_slice = self.slices.pop(name, None)
            self._names.pop(id(param), None)
            self._places.pop(name, None)
            state = self.state_of_class.pop(own_slice, {})
            self.state_of_class.pop(param, None)
            if is_own:
                copy = change_each(lambda _, item: item.clone() if isinstance(item, Tensor) else item, None, state)
                start = self.grad_shards.part(name, is_owned=True).elements.start
                shape = torch.Size([0]) if own_slice is None else own_slice.shape
                place, num_updates = places.get(id(param), (len(groups), 0)), self.state.num_updates_of(name)
                self.away[param] = Away(*place, copy if has_state else None, start, shape, num_updates)
        self.state.forget(params)
        lost = {id(param) for param in params.values()}
        for group in groups:
            group["params"] = [param for param in group["params"] if id(param) not in lost]

    def put_back(self, params: Iterable[nn.Parameter]) -> Callable[[], None]:
        """Those of these parameters that are `away` and in none of its groups are where they were again. Returns what
        undoes that."""
        groups = self.optimizer.param_groups
        before, present = [group["params"] for group in groups], {id(p) for group in groups for p in group["params"]}
        back = [(self.away[param], param) for param in params if param in self.away and id(param) not in present]
        for away, param in sorted(back, key=lambda pair: pair[0][:2]):
            if away.group < len(groups):
                group = groups[away.group]
                group["params"] = [*group["params"][: away.position], param, *group["params"][away.position :]]

        def undo() -> None:
            for group, members in zip(groups, before, strict=False):
                group["params"] = members

        return undo

    def _whole_state(self, name: str, away: Away, slot: Slot) -> dict[str, Any]:
        """The state of a parameter that comes back, whole: ranks had other elements of it. All ranks call it."""

        def sent(key: Any, item: Any) -> Sent:
            return Sent.of(item, flattened(item, slot) if is_cut(key, item, away.shape) else None)

        row = away.start, change_each(sent, None, away.state if away.shape.numel() else {})
        rows = self.runtime.group.shard.gather_objects(row, f"the optimizer state of {name}, which comes back")
        parts = [state for _, state in sorted(rows, key=itemgetter(0)) if state]
        whole: dict[str, Any] = joined(parts, slot, self.runtime.plan.buckets[0].device) if parts else {}
        return whole

    def _try(self, groups: Sequence[dict[str, Any]]) -> None:
        """Tries how an unknown optimizer treats these groups."""
        if self._is_known:
            return
        plan, ranks = self.runtime.plan, self.runtime.group.shard
        device = plan.buckets[0].device if plan.offload is None else torch.device("cpu")
        if not self._num_tried:
            block = None if self.rule.whole else self.rule.block
            self.methods = on_slices(self.local, block, groups, device)
        tried, name = habits_of(self.local, groups, device), type(self.optimizer).__name__
        self.habits = self.habits.joined(tried)
        if ranks.world_size > 1:
            self._options |= tried.options
            if tried.draws:
                self.runtime.say_once(
                    f"{name} draws random numbers in its step, and each rank draws them for the parameters that it "
                    "updates: they are others than in one process, equal on ranks with one seed, and ranks' generators "
                    "differ afterwards. Seed each rank differently, and draw what ranks must share (a mask) from a "
                    "torch.Generator of its own"
                )
            if tried.returns_own:
                self.runtime.say_once(
                    f"{name}.step() returns a number that it makes of gradients or weights: on each rank it is of the "
                    "parameters that this rank updates. Compute it in the loop, from param.grad, which all ranks share"
                )

    def note_result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called where ``step`` has returned something. What a closure returns is the loop's own."""
        if not self._is_known and _closure_in(args, kwargs) is None:
            self.runtime.say_once(
                f"{type(self.optimizer).__name__}.step(...) returned a value to a call with arguments, which zc has "
                "not tried: if the class makes it of gradients or weights, it is of the parameters that this rank "
                "updates. Compute it in the loop, from param.grad, which all ranks share"
            )

    def _make_slice(self, name: str, bucket: Bucket, slot: Slot, is_empty: bool = False) -> None:
        rank, buffers = self.runtime.group.shard.rank, self.runtime.buffers
        inside, _ = bucket.layout.owned_part(slot, rank)
        master = buffers.master_shard[bucket.index][slice(0) if is_empty else inside]
        if is_empty or master.numel():
            self.slices[name] = nn.Parameter(in_shape(master, slot))
            self._places[name] = self.slices[name].data_ptr()

    def _check_places(self, when: str) -> None:
        """Raises ZcError where a slice has left its master: updates would go to memory that nobody reads. The classes
        that get flat slices are torch's own, which update in place."""
        if self._flat.flat or self.updater.moves_slices:
            return
        if all(map(eq, map(Tensor.data_ptr, self.slices.values()), self._places.values())):
            return
        name = next(name for name, own_slice in self.slices.items() if own_slice.data_ptr() != self._places[name])
        raise ZcError(
            f"{when} the .data of the optimizer's {self.runtime.name_now(name)} was set to another tensor, and zc "
            "reads the one that it gave: an optimizer has to update in place"
        )

    def _slice_state(
        self, bucket: Bucket, slot: Slot, state: Mapping[str, Any], dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """The optimizer's state of a parameter, cut like the parameter, in this dtype; None: in its own."""
        _, elements = bucket.layout.owned_part(slot, self.runtime.group.shard.rank)
        device, shape = self.slices[slot.name].device, torch.Size(slot.shape)

        def cut(key: Any, value: Any) -> Any:
            if not is_cut(key, value, shape):
                return value
            part = flattened(value, slot)[elements]
            return in_shape(part.to(device, dtype or part.dtype, copy=True), slot)  # the whole one's memory goes

        return {key: change_each(cut, key, item) for key, item in state.items()}

    # --- the class's own view ---

    def look_at_groups(self) -> None:
        """Brings the groups of the second object up to date with the caller's: their options, and which parameters they
        have. Takes over a state that the caller has set."""
        self._flat.leave(self._groups)  # of a step that Ctrl-C has cut off
        if vars(self.optimizer)["state"] is not self.state:
            self.state = self.state.replaced_by(vars(self.optimizer)["state"])
            vars(self.optimizer)["state"] = self.state
        groups, own = self.optimizer.param_groups, self._groups
        if len(self._lists) != len(groups):
            own[:] = [{} for _ in groups]
            self._lists = [([], []) for _ in groups]
            self._absent = self._find_absent()
        for k, group in enumerate(groups):
            given, slices = self._lists[k]
            params = group["params"]
            if not are_same(given, params):
                slices = [own for own in map(self._own_of, params) if own is not None]
                self._lists[k] = list(params), slices
                self._absent = self._find_absent()
            own[k].clear()
            own[k].update(group)
            own[k]["params"] = slices

    def _find_absent(self) -> set[str]:
        """The parameters in its buckets that are in none of its groups."""
        present = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        return {name for key, name in self._names.items() if key not in present}

    def _own_of(self, param: Tensor) -> Tensor | None:
        """What the class sees in place of a parameter: its slice, nothing, or a frozen parameter itself."""
        name = self._names.get(id(param))
        return param if name is None else self.slices.get(name)

    def _limit_groups(self, *, has_grads: bool) -> None:
        """Hides from the class the groups on which it fails, and names of parameters that have no slice here.
        ``has_grads``: slices have their gradients."""
        for own, group in zip(self._groups, self.optimizer.param_groups, strict=True):
            if "param_names" in group:
                named = zip(group["param_names"], group["params"], strict=False)
                own["param_names"] = [name for name, param in named if self._own_of(param) is not None]
        if self.runtime.group.shard.world_size == 1:
            return
        if has_grads and self.habits.needs_a_gradient:
            self.local.param_groups = [
                group for group in self._groups if any(p.numel() and p.grad is not None for p in group["params"])
            ]
        elif self.habits.refuses_empty:
            trains = [any(p.numel() and p.requires_grad for p in group["params"]) for group in self._groups]
            self.local.param_groups = [group for group, is_seen in zip(self._groups, trains, strict=True) if is_seen]

    def _touched(self) -> tuple[int, ...]:
        """Its buckets of which some parameter has a gradient on some rank."""
        return tuple(b.index for b in self.buckets if any(self.runtime.accumulators.touched[b.index]))

    def _cleared(self, buckets: Sequence[int]) -> list[int]:
        """Flags of what a method of the class has done to the gradients in these buckets, as far as this rank owns some
        of them: whether it has called zero_grad, to None and to zeros, and then for each parameter whether it has set
        the gradient to None, made it zeros, left it, or changed it otherwise, as which it is left, too."""
        flags, self.called_zero_grad = self.called_zero_grad, [0, 0]
        for name in self.grad_shards.touched(buckets):
            own = self.slices.get(name)
            if own is None or not own.numel():
                flags += (0, 0, 0, 0)
                continue
            if own.grad is None:
                flags += (1, 0, 0, 0)
                continue
            is_zero = self._may_zero and not own.grad.any()
            is_edited = not is_zero and self._given[name].is_edited(own.grad)
            flags += (0, int(is_zero), int(not is_zero), int(is_edited))
            if is_edited and self._shows_grads:
                self._write_back(name, own.grad)
        return flags

    @property
    def _shows_grads(self) -> bool:
        """Whether the class has the accumulators' own memory for gradients. It has copies of whole ones."""
        return not self.rule.whole or self.runtime.group.shard.world_size == 1

    def _write_back(self, name: str, grad: Tensor) -> None:
        """The accumulators get what the class has made of a gradient, which may be another tensor."""
        given = self._given[name].grad
        if grad is not given:
            given.copy_(grad)
        for copy in self.grad_shards.copies(name)[1:]:  # with offload
            copy.copy_(given)

    def _clear(self, buckets: Sequence[int], flags: Sequence[int]) -> None:
        """Does to gradients what a method of the class has done to those of its slices. ``flags``: the largest of all
        ranks'. Raises ZcError where ranks have done different things."""
        (to_none, to_zeros), each = flags[:2], [flags[k : k + 4] for k in range(2, len(flags), 4)]
        touched, where = dict(zip(self.grad_shards.touched(buckets), each, strict=True)), self.runtime.plan.slot_of
        groups = self.optimizer.param_groups if to_none else []
        in_groups = {self._names.get(id(p)) for group in groups for p in group["params"]}
        for name, (is_none, is_zero, is_left, is_edited) in touched.items():
            if (is_none or name in in_groups) and (is_zero or is_left):
                raise ZcError(
                    f"{type(self.optimizer).__name__} has set the gradient of {self.runtime.name_now(name)} to None on "
                    "some ranks, in a "
                    "method of its class, and kept it on others: let it clear gradients on all ranks or on none"
                )
            if is_edited and self._shows_grads:
                self.grad_shards.drop_norms(name)
            elif is_edited:
                self.runtime.accumulators.edited.add(where[name])
        if to_none or to_zeros:
            self.zero_grad(set_to_none=bool(to_none))
            touched = {}
        gone = [name for name, (is_none, *_) in touched.items() if is_none]
        for name in gone:
            self.runtime.params[name].grad = None
        if gone:
            self.runtime.drop([where[name] for name in gone], set_to_none=True)
        zeros = [where[name] for name, (_, is_zero, is_left, _) in touched.items() if is_zero and not is_left]
        if zeros:
            self.grad_shards.drop_norms()
            self.runtime.drop(zeros, set_to_none=False)

    def _leave(self) -> None:
        """At the end of a method of the class, also by raising."""
        if not self._flat.leave(self._groups):
            for own_slice in self.slices.values():
                own_slice.grad = None
        self._given.clear()
        self.local.param_groups = self._groups
        for own, group in zip(self._groups, self.optimizer.param_groups, strict=False):
            if "param_names" in group:
                own["param_names"] = group["param_names"]
        self._options |= self._take_options()
        self.state.refresh()

    def _take_options(self) -> set[str]:
        """Gives the caller's groups the options that a method of the class has set in its own view of them. Returns
        their names."""
        names = set[str]()
        for own, group in zip(self.local.param_groups, self.optimizer.param_groups, strict=False):
            for key, value in own.items():
                if key != "params" and (key not in group or group[key] is not value):
                    group[key] = value
                    names.add(key)
        return names

    def _own_options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group that methods of the class set, and that can be sent."""
        return {key: group[key] for key in sorted(self._options) if key in group and _is_plain(group[key])}

    def _digests(self) -> list[int]:
        """Of each group, two numbers whose largest over the ranks add up to 0 if all have the same `_own_options`."""
        digests = [zlib.crc32(_text_of(self._own_options(group)).encode()) for group in self._groups]
        return [number for digest in digests for number in (digest, -digest)]

    def _share_options(self, numbers: Sequence[int], changed: Sequence[int]) -> None:
        """Makes options that differ between ranks those of the first rank that has updated something of the group; of
        the first that owns some of it, if none has. ``numbers``: the largest `_digests`."""
        differing = [k for k in range(len(self._groups)) if numbers[2 * k] + numbers[2 * k + 1]]
        if not differing:
            return
        updated = set(self.grad_shards.touched(changed))
        rows: list[tuple[int, dict[str, Any]]] = []
        for k in differing:
            members = [self._names.get(id(p), "") for p in self.optimizer.param_groups[k]["params"]]
            own = [name for name in members if name in self.slices and self.slices[name].numel()]
            rows.append((2 if updated.intersection(own) else int(bool(own)), self._own_options(self._groups[k])))
        name = type(self.optimizer).__name__
        of_ranks = self.runtime.group.gather_objects(rows, f"the options that {name} has set")
        for n, k in enumerate(differing):
            most, options = max((each[n] for each in of_ranks), key=lambda row: row[0])  # the first of several
            others = [row[1] for row in (each[n] for each in of_ranks) if row[0] == most > 0]
            for key in (key for key in options if len({_text_of(own.get(key)) for own in others}) > 1):
                self.runtime.say_once(
                    f"{name} sets {key!r} of parameter group {k} to something else on each rank, from the parameters "
                    "that it updates: all ranks take that of the first one"
                )
            self._options |= options.keys()
            for group in (self._groups[k], self.optimizer.param_groups[k]):
                group.update(options)

    def name_of(self, key: Any) -> str | None:
        """The name of a parameter that is in one of its buckets; None for any other key of a state."""
        return self._names.get(id(key))

    def shown(self, name: str, item: Tensor) -> Tensor:
        """A state of a slice as the caller sees it."""
        if self.runtime.group.shard.world_size == 1:
            return item
        return ShardedValue(self.grad_shards, self.grad_shards.part(name, is_owned=True), item)

    def taken(self, name: str, item: Any) -> Any:
        """The reverse of `shown`: this rank's elements of a tensor of the parameter's shape."""
        if not isinstance(item, Tensor) or self.runtime.group.shard.world_size == 1:
            return item
        part = self.grad_shards.part(name, is_owned=True)
        if isinstance(item, ShardedValue):
            is_own = item.part == part and not isinstance(item, ShardedGrad)
            flat = item.local if is_own else part.cut(item.full_tensor()).clone()
        elif item.dim() > 0 and tuple(item.shape) == part.slot.shape:
            flat = part.cut(item.detach()).clone()
        else:
            return item
        own_slice = self.slices.get(name)
        return in_shape(flat if own_slice is None else flat.to(own_slice.device), part.slot)

    def state_dict(self) -> dict[str, Any]:
        """That of the class, with slices for parameters: this rank's part. Its dicts are the caller's."""
        self.look_at_groups()
        state: dict[str, Any] = self.local.state_dict()
        items = state.get("state")
        if isinstance(items, dict):
            state["state"] = {key: dict(item) if type(item) is dict else item for key, item in items.items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """That of the class, with slices for parameters."""
        self.look_at_groups()
        self._flat.is_state_asked_for = True
        self.loaded_updates.clear()
        self.local.load_state_dict(state_dict)
        self.called_zero_grad = [0, 0]
        before = {name: self.state.num_updates_of(name) for name in self._names.values()}  # a part knows none of others
        self.state.loaded({**before, **self.loaded_updates})
        self._take_options()
        self.local.param_groups = self._groups
        self.look_at_groups()

    def _install(self, changed: Sequence[int]) -> None:
        """Gives each slice its gradient for the update. It is None if no rank had one; then the optimizer skips it."""
        runtime = self.runtime
        whole: dict[int, Tensor] = {}
        if self.rule.whole:
            runtime.wait_for_host_memory()
            assert runtime.features.gather_whole is not None, "an optimizer that reads whole parameters"
            whole = runtime.features.gather_whole(runtime.plan, runtime.buffers, runtime.group.shard, changed)
        for bucket in self.buckets:
            flags = runtime.accumulators.touched[bucket.index]
            parts = self.grad_shards.of(bucket)[0] if any(flags) and not self.rule.whole else {}
            for slot, touched in zip(bucket.slots, flags, strict=True):
                if slot.name not in self.slices:
                    continue
                own, grad = self.slices[slot.name], None
                if touched and not self.rule.whole:
                    grad = parts[slot.name] if slot.name in parts else torch.zeros_like(own)  # owns no element
                elif touched and own.numel() == slot.numel:
                    first = slot.offset - bucket.layout.owned_range(runtime.group.shard.rank)[0]
                    grad = in_shape(whole[bucket.index][first : first + slot.numel], slot)
                if grad is not None and not self._is_known:
                    grad = grad.data  # autograd counts writes to it alone
                    self._given[slot.name] = Given(grad, keeps_copy=self.habits.edits_data)
                own.grad = grad

    def _refuse_edited(self) -> None:
        """Raises ZcError where a step of the class has changed gradients, in its owners' copies alone, that the caller
        has not cleared. All ranks call it, and have the same ones."""
        edited, where = self.runtime.accumulators.edited, self.runtime.plan.slot_of
        for name in self.grad_shards.touched(bucket.index for bucket in self.buckets) if edited else ():
            if where[name] in edited and name not in self._absent:
                raise ZcError(
                    f"{type(self.optimizer).__name__} has changed the gradient of {self.runtime.name_now(name)} in its "
                    "last step, and "
                    "the loop has not cleared it since: the rank that owns this parameter changed a copy, so this step "
                    "would use the gradient as it was before. Call optimizer.zero_grad() after each step(), or let the "
                    "class change a copy (grad = p.grad.clone())"
                )

    # --- gradients ---

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's own zero_grad: clears the gradients of the parameters in its groups. One that has left them
        keeps its gradient, which goes on adding up, as in PyTorch."""
        if not set_to_none:
            self.grad_shards.drop_norms()
        pairs = itertools.zip_longest(self._lists, self.optimizer.param_groups)
        is_same = all(pair and group and are_same(pair[0], group["params"]) for pair, group in pairs)
        absent = self._absent if is_same else self._find_absent()
        if not absent:
            self.runtime.clear(set_to_none=set_to_none, optimizer=self.number)
            return
        where = self.runtime.plan.slot_of
        names = [name for name in self._names.values() if name not in absent]
        for name in names if set_to_none else ():
            self.runtime.params[name].grad = None
        self.runtime.drop([where[name] for name in names], set_to_none=set_to_none)

    # --- the hooks around step ---

    def _before_hooks(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Other pre-hooks see finished gradients; a closure has yet to make them, as in PyTorch."""
        if torch_private.has_step_pre_hooks(optimizer) and _closure_in(args, kwargs) is None:
            self.runtime.finish_gradients()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        self.refuse_other_methods()
        self.grad_shards.refuse_in_no_sync(f"{type(self.optimizer).__name__}.step()")
        self.publish_rest()
        self.grad_shards.unscaled.discard(self.number)
        self._check_places("before step()")
        if not self._is_known and self.runtime.group.shard.world_size > 1:
            arguments = {f"argument {k} of step()": arg for k, arg in [*enumerate(args), *kwargs.items()] if k}
            trials.refuse_positions(self.optimizer, arguments, self._words)
        closure = _closure_in(args, kwargs)
        if closure is not None:
            args, kwargs = self._run_closure(closure, args, kwargs)
        self.runtime.finish_gradients()
        self.look_at_groups()
        self._refuse_edited()
        self.runtime.group.record_call(f"{type(self.optimizer).__name__}.step")
        self.runtime.weights.before_writes()
        self._writes.take_over()
        if self._keeps_params:
            self._weights_before = [flat.clone() for flat in self._writes.weights_apart()]
        changed = self._touched()
        if self._takes_flat and self._flat.find([slices for _, slices in self._lists]):
            self._flat.enter(self._groups)
        else:
            self._install(changed)
        self.updater.before(changed)
        self._updating, self.grad_shards.updating = changed, self.local
        self.num_updates += 1
        self._limit_groups(has_grads=True)
        if not self._is_known:
            ParamOfModel.stepping = threading.get_ident(), self.local
            self._set_class(nn.Parameter, ParamOfModel)
        return (self.local, *args[1:]), kwargs

    def _set_class(self, old: type[nn.Parameter], new: type[nn.Parameter]) -> None:
        for param in self.runtime.params.values():
            if type(param) is old:
                param.__class__ = new

    def show_params(self) -> None:
        """The step of a class that zc does not know has ended: the model's parameters are read as ever."""
        ParamOfModel.stepping = None
        self._set_class(ParamOfModel, nn.Parameter)

    @cached_property
    def _keeps_params(self) -> bool:
        """Whether it has parameters beside its groups, when it first steps."""
        return not self._is_known and bool(kept_params(self.optimizer))

    @cached_property
    def _words(self) -> list[str]:
        """What the code of its step names."""
        return sorted(mentions(type(self.optimizer), "step"))

    @cached_property
    def _calls_of_closure(self) -> tuple[int, bool] | None:
        return (1, False) if self._is_known else calls_of_closure(self.optimizer)

    def _run_closure(self, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Calls the closure among the arguments of ``step``, of which the optimizer is the first. Returns the arguments
        for the real step, whose closure returns the loss, and may be called once.

        Raises PlanError if the optimizer does not call its closure exactly once, with the weights of before; nothing
        has changed.
        """
        calls, name = self._calls_of_closure, type(self.optimizer).__name__
        if calls is not None and calls == (1, True):
            raise PlanError(
                f"{name}.step was given a closure, and moves the weights before it calls it: zc calls the closure "
                "first, with the weights of the model, and would get other gradients. Take a variant whose step() "
                "needs no closure (schedulefree's classes without Closure), or split the step into two"
            )
        if calls is None or calls[0] != 1:
            times = "can't be tried on small data" if calls is None else f"calls it {calls[0]} times"
            raise PlanError(
                f"{name}.step was given a closure, and {times}: zc finishes the gradients between the closure "
                "and the update, so it takes optimizers that call it once. Call the closure yourself, then step()"
            )
        with torch.enable_grad():
            losses = [closure()]

        def answer() -> Any:
            if not losses:
                raise ZcError(
                    f"{name}.step called its closure a second time, after an update of this rank's weights: zc "
                    "takes optimizers that call it once"
                )
            return losses.pop()

        if "closure" in kwargs:
            return args, {**kwargs, "closure": answer}
        return (args[0], answer, *args[2:]), kwargs

    def _after_step(self, *_: Any) -> None:
        changed, self._updating, self.grad_shards.updating = self._updating or (), None, None
        if not self._is_known:
            self.show_params()
        cleared = [] if self._is_known else self._cleared(changed)
        before, self._weights_before = self._weights_before, []
        has_written = not all(map(same_bits, before, self._writes.weights_apart()))
        self._leave()
        self._check_places("in step()")
        self.updater.after(changed)
        self.state.note_update(changed)
        self._writes.remember()
        self.runtime.after_update(self.number)
        self.runtime.weights.watch()
        if not self._is_known:
            text, digests = f"the end of {type(self.optimizer).__name__}.step()", self._digests()
            numbers = self.runtime.group.max_on_host([*digests, *cleared], text)
            self._share_options(numbers, changed)
            self._clear(changed, numbers[len(digests) :])
            self._refuse_assigned()
        if has_written:
            raise ZcError(
                f"{type(self.optimizer).__name__}.step() has written weights of the model, and zc updates masters that "
                f"lie elsewhere (param_dtype, offload), so the writes are lost: {not_its_own(self.local)}"
            )

    def _refuse_assigned(self) -> None:
        """Raises ZcError where a step of the class has set the gradient of a parameter of the model to another
        tensor."""
        runtime, has_taken = self.runtime, self.runtime.listener.has_taken
        for name in self._names.values():
            grad = runtime.params[name].grad
            if grad is not None and grad is not runtime.sharded_grads[name] and not has_taken(grad):
                runtime.params[name].grad = None
                self.grad_shards.refuse_met(self.local, name)

    def run_on_slices(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs another method of the class, all ranks the same, and publishes the weights that it has changed."""
        runtime, cls = self.runtime, type(self.optimizer)
        reads_grads = "grad" in mentions(cls, name)
        if reads_grads:
            runtime.finish_gradients()
        runtime.weights.before_writes()
        self._writes.take_over()
        self.look_at_groups()
        runtime.wait_for_host_memory()
        with_grads = self._touched() if reads_grads else ()
        if reads_grads:
            self._install(with_grads)
        masters = {bucket.index: runtime.buffers.master_shard[bucket.index] for bucket in self.buckets}
        before = {index: master.clone() for index, master in masters.items()}
        self._limit_groups(has_grads=False)
        try:
            result = getattr(cls, name)(self.local, *args, **kwargs)
        finally:
            cleared = self._cleared(with_grads)
            self._leave()
            self._check_places(f"in {name}()")
            flags = [int(not torch.equal(before[index], master)) for index, master in masters.items()]
            flags += self._digests()
            flags = runtime.group.max_on_host([*flags, *cleared], f"the end of {cls.__name__}.{name}()")
            changed = tuple(index for index, is_changed in zip(masters, flags, strict=False) if is_changed)
            self.updater.publish(changed)
            self._writes.remember()
            runtime.weights.watch()
            if reads_grads:
                self.grad_shards.drop_norms()
            self._share_options(flags[len(masters) :], with_grads)
            self._clear(with_grads, flags[len(masters) + 2 * len(self._groups) :])
        return self.optimizer if result is self.local else result

    @property
    def is_updating(self) -> bool:
        """Whether the class's step has begun and not ended: it runs now, or Ctrl-C or the like has cut it off."""
        return self._updating is not None

    def publish_rest(self) -> None:
        """After a step of the class that raised: publishes what it has changed, as the other ranks do in theirs."""
        if self._updating is not None:
            self._after_step()

    def count_from_load(self) -> None:
        """A load is about to make weights and states whole, also where Ctrl-C or the like has cut off some ranks' step:
        nothing is left of that one to publish."""
        self.num_updates = 0
        if self._updating is not None:
            self._updating = None
            self._leave()

    def let_go(self) -> None:
        """Removes zc's hooks, the parameters and the state from the optimizer. Keeps no memory: compiled code may still
        refer to it through the runtime."""
        self.is_closed = True
        if self._remove_hooks is not None:
            self._remove_hooks()
        for handle in self.hooks:
            handle.remove()
        self.state_of_class.clear()
        vars(self.optimizer)["state"] = self.state_of_class
        for group in (*self.local.param_groups, *self.optimizer.param_groups):
            group["params"] = []
        self._lists.clear()
        self._given.clear()
        self.away.clear()
        self._flat.forget()
        self.slices.clear()
        self.updater.close()


class Given:
    """A gradient that a method of the class gets."""

    def __init__(self, grad: Tensor, *, keeps_copy: bool) -> None:
        """``keeps_copy``: the class may write into it without autograd's counting it."""
        self.grad, self._counts = grad, not grad.is_inference()  # what inference_mode makes has no count
        self._version = torch_private.version(grad) if self._counts else 0
        self._before = grad.clone() if keeps_copy or not self._counts else None

    def is_edited(self, grad: Tensor) -> bool:
        """Whether the method has left another one: ``grad``."""
        if grad is not self.grad or (self._counts and torch_private.version(grad) != self._version):
            return True
        return self._before is not None and not torch.equal(self._before, grad)


def replace_methods(model: nn.Module, sharded: ShardedOptimizer) -> None:
    """Puts zc's methods on an optimizer object. Those that the caller keeps beyond `zc.close` raise ZcError."""
    optimizer = sharded.optimizer
    reference, of_model = weakref.ref(sharded), weakref.ref(model)
    add, before = type(optimizer).add_param_group, optimizer.step

    def owner() -> ShardedOptimizer:
        held = reference()
        if held is None or held.is_closed:
            return refuse_closed(optimizer)
        held.refuse_other_methods()
        return held

    # a method with the signature of the class's: schedulers and GradScaler look at it. It may be a scheduler's already.
    @functools.wraps(getattr(before, "__func__", before))
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        held = owner()
        try:
            result = before(*args, **kwargs)
        except Exception as error:
            held.runtime.group.raised = f"{type(error).__name__}: {error}"  # where others have not, they are told
            held.publish_rest()  # other ranks publish the same buckets
            raise
        finally:
            held.grad_shards.updating = None  # Ctrl-C may have cut it off
            if ParamOfModel.stepping is not None:
                held.show_params()
        held.runtime.group.raised = ""
        if result is not None and (args or kwargs):
            held.note_result((optimizer, *args), kwargs)
        return result

    def zero_grad(set_to_none: bool = True) -> None:
        owner().zero_grad(set_to_none=set_to_none)

    def state_dict() -> dict[str, Any]:
        held = reference()
        return type(optimizer).state_dict(optimizer) if held is None or held.is_closed else owner().state_dict()

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        owner().load_state_dict(state_dict)

    def add_param_group(param_group: dict[str, Any]) -> None:
        held = owner()
        runtime, items = held.runtime, param_group["params"]
        if isinstance(items, set):
            add(optimizer, param_group)  # which refuses it: its order differs from rank to rank
        items = [items] if isinstance(items, Tensor) else list(items)
        params = [item[1] if isinstance(item, tuple) else item for item in items]  # of named_parameters()
        trained = of_model()
        names = {id(p): name for name, p in trained.named_parameters()} if trained is not None else {}
        absent = held._find_absent()  # its own parameters that the caller has taken out of their groups
        for param in params:
            name = names.get(id(param))
            if name is None or (runtime.params.get(name) is param and name not in absent):
                what = (
                    f"parameter {name}, which has its place: set its options in optimizer.param_groups"
                    if name
                    else f"a tensor {tuple(param.shape)} that the model lacks: register it there first, and call "
                    "zc.recompile(model) afterwards"
                )
                raise PlanError(f"add_param_group was given {what}")
        add(optimizer, {**param_group, "params": items})
        runtime.frozen.update({names[id(param)]: param for param in params if names[id(param)] not in absent})

    for name in sharded.methods:
        setattr(optimizer, name, MethodType(_on_slices(type(optimizer), name, owner), optimizer))
    # in a loop that the caller compiles Dynamo would compile hundreds of frames, and look at parameters without bytes
    step, zero_grad = torch.compiler.disable(step), torch.compiler.disable(zero_grad)  # type: ignore[no-untyped-call]
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = _override_of_zero_grad(optimizer, owner) or zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _override_of_zero_grad(optimizer: Optimizer, owner: Callable[[], ShardedOptimizer]) -> Callable[..., Any] | None:
    """Calls the zero_grad that somebody has set on the object, or that of its class, which finds zc's in place of
    torch's. None where both are torch's."""
    override: Callable[..., Any] | None = vars(optimizer).get("zero_grad")
    if override is None and type(optimizer).zero_grad is not Optimizer.zero_grad:

        def of_torch(_: Optimizer, set_to_none: bool = True) -> None:
            owner().zero_grad(set_to_none=set_to_none)

        override = MethodType(type(optimizer).zero_grad, with_zero_grad(optimizer, of_torch))
    if override is None:
        return None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch's own
    @functools.wraps(getattr(override, "__func__", override))
    def zero_grad(*args: Any, **kwargs: Any) -> Any:
        runtime = owner().runtime
        result = override(*args, **kwargs)
        runtime.notice_cleared()  # those that it has set to None itself
        return result

    return zero_grad  # type: ignore[no-any-return]


def _on_slices(cls: type[Optimizer], name: str, owner: Callable[[], ShardedOptimizer]) -> Callable[..., Any]:
    """A method of the class that runs on slices; on what the caller gives it where that is a parameter."""

    @functools.wraps(getattr(cls, name))
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
            return getattr(cls, name)(optimizer, *args, **kwargs)
        return owner().run_on_slices(name, args, kwargs)

    return run


def refuse_closed(optimizer: Optimizer, *_: Any) -> NoReturn:
    """Says that `zc.close` has taken what a method, or as a hook its step, would work on."""
    raise ZcError(
        f"zc.close(model) has released what this {type(optimizer).__name__} had: make a new optimizer over the model's "
        "parameters"
    )


def restore_methods(sharded: ShardedOptimizer) -> None:
    """Removes what `replace_methods` has put on the object, so that its class's methods apply again."""
    for name in (*REPLACED, *sharded.methods):
        vars(sharded.optimizer).pop(name, None)


def _is_plain(value: Any) -> bool:
    """Whether ranks can send it to each other in a few bytes, without a wait for a device."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.device.type == "cpu" and value.numel() <= _MOST_SENT
    return value is None or type(value) in (bool, int, float, str)


def _text_of(value: Any) -> str:
    """Says all of a plain value."""
    if isinstance(value, dict):
        return repr({key: _text_of(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return repr([*map(_text_of, value)])
    return repr(value.tolist() if isinstance(value, Tensor) else value)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of ``step``, of which the optimizer is the first."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
