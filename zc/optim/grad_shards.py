"""``param.grad`` of a compiled model: a gradient that no rank holds whole; this rank's shards of it, by parameter; and
clipping.

After a backward every parameter that got a gradient has a ShardedGrad, a `zc.optim.sharded_value.ShardedValue` whose
elements lie in the accumulators. What is read of it is the mean over ranks, so the first read after a backward finishes
the gradients of all parameters. Stock ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` takes one collective
for all parameters together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from zc import torch_private
from zc.engine.memory_order import flattened, in_shape
from zc.errors import ZcError, not_its_own, optimizer_in_step
from zc.optim.sharded_value import GRADIENT, Formula, Part, Reduction, ShardedValue
from zc.planning.layout import Slot
from zc.planning.plan import Bucket
from zc.ranks.journal import GATHER_GRADIENT

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


aten = torch.ops.aten


class ShardedGrad(ShardedValue):
    """The gradient of one parameter, sharded over ranks: the parameter's shape, dtype and device, and no storage."""

    is_live = True

    @staticmethod
    def __new__(cls, owner: GradShards, name: str) -> ShardedGrad:
        param = owner.runtime.params[name]
        nothing = torch.empty(0, dtype=owner.acc_dtype(name), device=param.device)
        grad: Any = ShardedValue.__new__(cls, owner, owner.part(name), nothing, dtype=param.dtype)
        return grad  # type: ignore[no-any-return]

    def copies(self) -> list[Tensor]:
        return self.owner.live(self, self.param_name)

    def changed(self) -> None:
        self.owner.refuse_in_step(self.param_name)
        self.owner.drop_norms(self.param_name)

    @property
    def formula(self) -> tuple[Any, int]:  # type: ignore[override]
        return GRADIENT, self.owner.num_changes

    def _what(self) -> str:
        return f"the gradient of {self.name_now}"

    def set_to_zero(self) -> None:
        self.owner.zero_grad_of(self.param_name)


_IS_GONE = "the gradient of {} was set to None (zero_grad) or assigned since: take param.grad anew, or clone it before"
_MOST_ASKED = 64
IN_NO_SYNC = (
    "{} inside no_sync: under DDP each rank has gradients of its own there, and zc has their mean over ranks, so the "
    "weights would be others. Clip and step outside of no_sync, after the last microbatch; with Accelerate, clip under "
    "`if accelerator.sync_gradients:`. Local SGD needs DistributedDataParallel"
)
_OF_EACH_RANK = frozenset((  # see GradShards.nonlinear
    "mul", "div", "neg", "add", "sub", "rsub", "masked_fill", "clone", "_to_copy", "zeros_like",
    "ones_like", "full_like",
))  # fmt: skip


class GradShards:
    """The accumulators' parts, one per parameter of which this rank owns elements.

    A loop over all parameters, as stock clipping is, asks for each one by itself: what is asked then costs no loop over
    the others.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._where: dict[str, tuple[int, int]] = {}  # bucket and slot
        self._cuts: dict[int, _Cut] = {}  # by bucket
        # numbers [touched parameters] fp64 of all gradients, since the gradients last changed
        self._numbers: dict[tuple[Formula, Reduction], Tensor] = {}
        self._number_of: dict[tuple[Formula, Reduction, torch.dtype], dict[str, Tensor]] = {}  # the same by name, 0-d
        self._asked: dict[tuple[Formula, Reduction], str] = {}  # which parameter was asked for such a number first
        self.num_changes = 0  # of any gradient
        self.optimizers: list[Optimizer] = []  # the caller's
        self.updating: Optimizer | None = None  # whose class's step runs now
        # values that were assigned to param.grad, by name, until that gradient changes or is cleared
        self.taken: dict[str, weakref.ref[ShardedValue]] = {}
        self.is_read_in_no_sync = False  # a norm or the like, which a number of the program may hold until the update
        self.unscaled: set[int] = set()  # numbers of optimizers whose gradients a GradScaler has unscaled, before step

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Adds the parameters of these buckets."""
        self._where = self.runtime.plan.slot_of
        for bucket in buckets:
            self._cuts[bucket.index] = _Cut(bucket, self.runtime.group.shard.rank)

    def of(self, bucket: Bucket) -> list[dict[str, Tensor]]:
        """Views of this rank's parts of the gradients, by parameter name; the accumulator must be allocated. There are
        views of it, or of two where both device and host have one; the update reads the first. Views are made once and
        last as long as the accumulator."""
        views = self.runtime.buffers.cuts
        if bucket.index not in views:
            views[bucket.index] = list(map(self._cuts[bucket.index].views, self.runtime.buffers.acc_copies(bucket)))
        return views[bucket.index]

    def copies(self, name: str) -> list[Tensor]:
        """The views of one parameter's part, as `of` has them; empty where this rank owns no element of it."""
        return [views[name] for views in self.of(self._bucket(name)) if name in views]

    def part(self, name: str, *, is_owned: bool = False) -> Part:
        """This rank's elements of a parameter: those of its gradient, or those that this rank updates."""
        bucket, slot = self._bucket(name), self._slot(name)
        is_owned = is_owned and bucket.layout.owners is not None  # otherwise they are the same
        cut = bucket.layout.owned_part if is_owned else bucket.layout.shard_part
        return Part(slot, cut(slot, self.runtime.group.shard.rank)[1], is_owned)

    def _bucket(self, name: str) -> Bucket:
        return self.runtime.plan.buckets[self._where[name][0]]

    def _slot(self, name: str) -> Slot:
        bucket, k = self._where[name]
        return self.runtime.plan.buckets[bucket].slots[k]

    def acc_dtype(self, name: str) -> torch.dtype:
        return self._bucket(name).acc_dtype

    def shows(self, value: ShardedValue) -> bool:
        """Whether it is the ``.grad`` of its parameter."""
        return self.runtime.params[value.param_name].grad is value

    def live(self, grad: Tensor, name: str) -> list[Tensor]:
        """[n] each: the copies of this rank's elements of a gradient, which is finished."""
        self._finish(grad, name)
        self.runtime.wait_for_host_memory()
        bucket, slot = self._bucket(name), self._slot(name)
        copies = [flattened(copy, slot).view(-1) for copy in self.copies(name)]
        return copies or [shard[:0] for shard in self.runtime.buffers.acc_copies(bucket)]

    def _finish(self, grad: Tensor, name: str) -> None:
        """Waits until a gradient is reduced. Raises ZcError if it has been set to None."""
        runtime = self.runtime
        shown = runtime.params[name].grad
        if not runtime.is_finished or shown is not runtime.sharded_grads[name]:
            runtime.finish_gradients(by_grad=True)
        if grad is not runtime.sharded_grads[name] or not self._is_touched(name):
            raise ZcError(_IS_GONE.format(runtime.name_now(name)))
        self._say_if_edited()

    def _say_if_edited(self) -> None:
        """Notes that what is read is not what the class of an optimizer has made of it."""
        for index, k in sorted(self.runtime.accumulators.edited)[:1]:
            bucket = self.runtime.plan.buckets[index]
            self.runtime.say_once(
                f"{type(self.optimizers[bucket.optimizer]).__name__} changes gradients in place in its step, such as "
                f"that of {self.runtime.name_now(bucket.slots[k].name)}, on the rank that owns the parameter: what is "
                "read of them after the step, and before zero_grad(), is as it was before the step"
            )

    def refuse_whole_write(self, func: object, name: str) -> None:
        """Raises ZcError where a whole tensor must not be written with values of ``name``: by an optimizer that zc does
        not know, or that keeps parameters beside its groups, and inside a backward, where other ranks may not be."""
        optimizer = optimizer_in_step()
        own = {id(each) for each in self.optimizers}
        if optimizer is not None and own.isdisjoint(map(id, (optimizer, *vars(optimizer).values()))):
            self.refuse_met(optimizer, name)
        if torch_private.current_graph_task() != -1:
            raise ZcError(
                f"{func} inside a backward met the gradient of {self.runtime.name_now(name)}, which is sharded over "
                "ranks and not finished. "
                "Is the model inside a DistributedDataParallel? Leave that out"
            )

    def refuse_graph(self, name: str) -> None:
        """Raises ZcError where a function of a gradient is to be differentiated, which is sharded without its graph."""
        if name in self.runtime.with_graph and torch.is_grad_enabled():
            raise ZcError(
                f"{self.runtime.name_now(name)}.grad is read after backward(create_graph=True), and it is sharded over "
                "ranks without a graph: a penalty on it would have no gradient. Use torch.autograd.grad(..., "
                "create_graph=True) for what is to be differentiated; read values alone under torch.no_grad()"
            )

    def refuse_in_step(self, name: str) -> None:
        """Raises ZcError where the class of an optimizer has changed a gradient of the model in its step, which updates
        by the gradients of its slices."""
        if self.updating is not None:
            self.refuse_met(self.updating, name)

    def refuse_met(self, optimizer: Optimizer, name: str) -> NoReturn:
        raise ZcError(
            f"{type(optimizer).__name__}.step() met the gradient of {self.runtime.name_now(name)}, which is "
            f"sharded over ranks: {not_its_own(optimizer)}"
        )

    @property
    def is_in_no_sync(self) -> bool:
        """Whether this is inside no_sync, on all ranks of several."""
        return not self.runtime.is_boundary and self.runtime.plan.num_ranks > 1

    def refuse_in_no_sync(self, what: str) -> None:
        """Raises ZcError inside no_sync, on all ranks of several."""
        if self.is_in_no_sync:
            raise ZcError(IN_NO_SYNC.format(what))

    def nonlinear(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[ShardedValue]
    ) -> str | None:
        """What makes a result of ``values`` another mean than the same of each rank's own gradient, which is what DDP
        has inside no_sync: clipping does."""
        before = next((value.nonlinear for value in values if value.nonlinear is not None), None)
        if before is not None or not self.is_in_no_sync:
            return before
        tensors = [item for item in args[1:] if isinstance(item, Tensor)]
        is_of_all = any(isinstance(item, ShardedValue) or not item.dim() for item in tensors)
        name = func.overloadpacket.__name__
        what = f"{name} of {values[0]._what()}"
        if is_of_all or name.rstrip("_") not in _OF_EACH_RANK:
            return what
        numbers = [item for item in (*args[1:], *kwargs.values()) if type(item) in (int, float)]
        if self.is_read_in_no_sync and numbers:
            return f"{what} and {numbers[0]}, after a norm or the like was read"
        return None

    def forget_numbers(self) -> None:
        """The gradients may have changed: norms and the like are computed anew."""
        self._numbers.clear()
        self._number_of.clear()
        self.num_changes += 1

    def drop_norms(self, name: str | None = None) -> None:
        """To be called wherever a gradient changes: that of ``name``, or any."""
        self.forget_numbers()
        if self.taken:
            for value in self.forget_taken([name] if name is not None else list(self.taken)):
                value.is_stale = True

    # --- values that are assigned to param.grad ---

    def take(self, name: str, value: ShardedValue) -> Tensor:
        """[n]: what the accumulator is to hold of a parameter whose ``.grad`` is ``value``, which may still be used
        until the gradient changes. Handles of the gradient before are gone."""
        self.forget_taken([name])
        self.forget_numbers()
        local = value.local
        value.is_taken, self.taken[name] = True, weakref.ref(value)
        return local

    def write_taken(self, value: ShardedValue) -> None:
        """A value that was taken has been written, and so is the gradient."""
        for copy in self.live(self.runtime.sharded_grads[value.param_name], value.param_name):
            copy.copy_(value.local)
        self.forget_numbers()

    def forget_taken(self, names: Iterable[str]) -> list[ShardedValue]:
        """These gradients change or were cleared: values that were assigned to them are values of their own again.
        Returns those that somebody still has."""
        refs = [self.taken.pop(name, None) for name in names]
        values = [value for ref in refs if ref is not None and (value := ref()) is not None]
        for value in values:
            value.is_taken = False
        return values

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """See `zc.clip_grad_norm_`."""
        self.refuse_in_no_sync("zc.clip_grad_norm_")
        self.runtime.finish_gradients()
        norm: Tensor = torch.linalg.vector_norm(self._all(GRADIENT, Reduction("norm")))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        shards: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for bucket in self.runtime.plan.buckets:
            if any(self.runtime.accumulators.touched[bucket.index]):
                for shard in self.runtime.buffers.acc_copies(bucket):
                    shards.setdefault((shard.device, shard.dtype), []).append(shard)
        for (device, dtype), alike in shards.items():
            torch_private.multiply_all_(alike, scale.to(device=device, dtype=dtype))
        self.drop_norms()
        return norm.to(torch.float32)

    def are_finite(self) -> bool:
        """See `zc.grads_are_finite`. A sum of squares may overflow where a sum of magnitudes does not."""
        self.runtime.finish_gradients()
        return any(bool(self._all(GRADIENT, Reduction("norm", order)).isfinite().all()) for order in (2.0, 1.0))

    def _all(self, formula: Formula, reduction: Reduction) -> Tensor:
        """[touched parameters] fp64: a number of all gradients, which are finished, with one collective; kept until a
        gradient changes."""
        key = formula, reduction
        self._say_if_edited()
        if key in self._numbers:  # another stream may have made them
            self.runtime.streams.hand_to_main([self._numbers[key]])
        else:
            self.runtime.wait_for_host_memory()
            touched = self.touched()
            if not touched:
                return torch.zeros(0, dtype=torch.float64, device="cpu")
            parts = [formula.of(self._part(name)) for name in touched]
            self._numbers[key] = self._join(parts, reduction, [self._slot(name).numel for name in touched])
        return self._numbers[key]

    def _join(self, parts: Sequence[Tensor], reduction: Reduction, numels: Sequence[int]) -> Tensor:
        """[parts] fp64: the numbers of values of which this rank has these parts, with one collective."""
        self.runtime.streams.join_main()  # as `gather`
        joint = reduction.partials(parts).to(self.runtime.plan.buckets[0].device)
        if not reduction.is_sum:
            self.runtime.group.max_(joint)
        else:
            replicas = self.runtime.group.replicas
            if replicas is not None and replicas.rank > 0:
                joint.zero_()  # counted once, by the first; among all, so that all have the same bits
            self.runtime.group.sum_(joint)
        return reduction.finish(joint, numels)

    def reduce(self, value: ShardedValue, reduction: Reduction, dtype: torch.dtype) -> Tensor:
        """0-d: a number of all elements of ``value``. A loop that asks for the same number of several gradients, or of
        the same function of each, has two collectives at most: the second one is for all gradients."""
        name = value.param_name
        self.is_read_in_no_sync |= self.is_in_no_sync
        if value.is_live:
            self.refuse_graph(name)
            self._finish(value, name)
        formula, made_at = value.formula or (None, 0)
        if formula is None or made_at != self.num_changes:
            return self._join([value.local], reduction, [value.numel()])[0].to(dtype)
        if formula is not GRADIENT and self._asked.setdefault((formula, reduction), name) == name:
            if len(self._asked) > _MOST_ASKED:
                self._asked.clear()
            return self._join([value.local], reduction, [value.numel()])[0].to(dtype)
        key = formula, reduction, dtype
        if key in self._number_of:
            self.runtime.streams.hand_to_main([self._number_of[key][name]])
        else:
            numbers = self._all(formula, reduction).to(dtype).unbind()
            self._number_of[key] = dict(zip(self.touched(), numbers, strict=True))
        return self._number_of[key][name]

    def touched(self, buckets: Iterable[int] | None = None) -> list[str]:
        """Every parameter with a gradient on some rank, in these buckets or in any, in the same order on all."""
        flags, all_buckets = self.runtime.accumulators.touched, self.runtime.plan.buckets
        of_buckets = [all_buckets[index] for index in buckets] if buckets is not None else all_buckets
        return [slot.name for bucket in of_buckets for k, slot in enumerate(bucket.slots) if flags[bucket.index][k]]

    def _part(self, name: str) -> Tensor:
        """[n]: what this rank owns of one gradient, on the device where the update reads it; n may be 0."""
        bucket = self._bucket(name)
        view = self.of(bucket)[0].get(name)
        return self.runtime.buffers.acc_shard(bucket)[:0] if view is None else flattened(view, self._slot(name))

    def _is_touched(self, name: str) -> bool:
        bucket, k = self._where[name]
        return self.runtime.accumulators.touched[bucket][k]

    def zero_grad_of(self, name: str) -> None:
        """Exchanges nothing: a rank may have more backwards than others between this and the update."""
        self.refuse_in_step(name)
        runtime = self.runtime
        if runtime.params[name].grad is not runtime.sharded_grads[name]:
            raise ZcError(_IS_GONE.format(runtime.name_now(name)))
        self.drop_norms()
        runtime.drop([self._where[name]], set_to_none=False)

    def gather(self, part: Part, local: Tensor) -> Tensor:
        """The whole tensor [shape], on every rank, of which this one has ``local`` [n]. All ranks call it."""
        bucket, ranks = self._bucket(part.slot.name), self.runtime.group.shard
        self.runtime.streams.join_main()  # overlap_gather: all ranks exchange this after the last step's weights
        whole = torch.empty(part.slot.numel, dtype=local.dtype, device=bucket.device)
        cut = bucket.layout.owned_part if part.is_owned else bucket.layout.shard_part
        rows = [whole[cut(part.slot, rank)[1]] for rank in range(ranks.world_size)]
        rows[ranks.rank].copy_(local)
        if ranks.world_size > 1 and whole.numel():  # as bytes, because a backend may lack the dtype
            ranks.gather_rows([row.view(torch.uint8) for row in rows], GATHER_GRADIENT, bucket.index).wait()
        return in_shape(whole, part.slot)

    @torch.inference_mode(False)  # the memory that it may allocate is trained in afterwards
    def full_grads(self, bucket: Bucket) -> dict[str, Tensor | None]:
        """The whole gradients [shape] of one bucket's parameters, in acc_dtype, on every rank; None where none came."""
        runtime, ranks = self.runtime, self.runtime.group.shard
        runtime.finish_gradients()
        runtime.wait_for_host_memory()
        runtime.buffers.allocate(bucket)  # one without a gradient has no memory, and is gathered all the same
        shard = runtime.buffers.acc_shard(bucket).to(bucket.device)
        flat = shard
        if ranks.world_size > 1:
            flat = torch.empty(bucket.numel, dtype=shard.dtype, device=shard.device)
            ranks.all_gather(flat, shard.contiguous(), GATHER_GRADIENT, bucket.index).wait()
        pairs = zip(bucket.slots, runtime.accumulators.touched[bucket.index], strict=True)
        return {s.name: in_shape(flat[s.offset : s.stop], s).clone() if touched else None for s, touched in pairs}

    def unscale(self, names: Sequence[str], found_inf: Tensor, inverse: Tensor) -> None:
        """torch.amp.GradScaler: gradients times ``inverse``, those of ``names`` and all others of the same optimizers
        and dtypes. ``found_inf`` becomes 1 if any rank has an infinity or a NaN, so all ranks step or none. The host
        does not wait for the device."""
        chosen = {(bucket.optimizer, bucket.param_dtype) for bucket in map(self._bucket, names)}
        buckets = [b for b in self.runtime.plan.buckets if (b.optimizer, b.param_dtype) in chosen]
        names = [slot.name for bucket in buckets for slot in bucket.slots]  # a rank may not see one that others have
        self.runtime.finish_gradients()
        self.runtime.wait_for_host_memory()
        self.drop_norms()
        self.unscaled.update(self.runtime.plan.buckets[self._where[name][0]].optimizer for name in names)
        device = self.runtime.plan.buckets[0].device
        before = found_inf.to(device, copy=True)  # with offload it is on the CPU, and NCCL takes no CPU tensor
        infinite = before.clone()
        copies: dict[torch.device, list[Tensor]] = {}
        for name in names:
            for copy in self.copies(name) if self._is_touched(name) else ():
                copies.setdefault(copy.device, []).append(copy)
        for where, grads in copies.items():  # host memory and, with offload_accumulate="device", the device
            own = found_inf.to(where, copy=True)
            torch_private.unscale_(grads, own, inverse.to(where))
            torch.maximum(infinite, own.to(device), out=infinite)
        self.runtime.group.max_(infinite)
        found_inf.copy_(infinite)
        num_skipped = self.runtime.buffers.num_skipped  # counted on the device
        if not num_skipped:
            num_skipped.append(torch.zeros_like(infinite))
        num_skipped[0] += infinite - before  # it is called once for each dtype, with one ``found_inf``

    def say_if_skipped(self, optimizers: Iterable[int]) -> None:
        """Called when the gradients of these optimizers are cleared. Unscaled gradients that no step used were probably
        not finite. Only then is it worth waiting for the device to check."""
        if not self.unscaled.isdisjoint(optimizers):
            self.unscaled.difference_update(optimizers)
            self.say_skipped()

    def say_skipped(self) -> None:
        """Notes that a GradScaler left out steps, if it did. The host waits for the device."""
        if any(count.item() for count in self.runtime.buffers.num_skipped):
            self.runtime.say_once(
                "a GradScaler found inf or NaN in the gradients: no rank takes that step, nothing changes"
            )

    def add_grad(self, name: str, grad: Tensor) -> None:
        self.runtime.receive(*self._where[name], grad)


class _Cut:
    """How one rank's shard [S] of a bucket is cut into its parts of the gradients. One call into C++ cuts all: a model
    has hundreds, and each update cuts them anew."""

    def __init__(self, bucket: Bucket, rank: int) -> None:
        self._names: list[str] = []  # of the parts, and "" for each gap between two and the rest, in order
        self._sizes: list[int] = []
        self._shaped: list[Slot] = []  # those whose parts are not 1-D
        at = 0
        for slot in bucket.slots:
            inside, _ = bucket.layout.shard_part(slot, rank)
            if inside.start == inside.stop:
                continue
            self._names += ["", slot.name] if inside.start > at else [slot.name]
            self._sizes += [inside.start - at] if inside.start > at else []
            self._sizes.append(inside.stop - inside.start)
            if inside.stop - inside.start == slot.numel and len(slot.shape) != 1:
                self._shaped.append(slot)
            at = inside.stop
        self._names.append("")
        self._sizes.append(bucket.layout.numel_shard - at)

    def views(self, shard: Tensor) -> dict[str, Tensor]:
        """The parts, by parameter name, each `in_shape` of its slot."""
        views = dict(zip(self._names, shard.split_with_sizes(self._sizes), strict=True))
        del views[""]
        for slot in self._shaped:
            views[slot.name] = in_shape(views[slot.name], slot)
        return views
