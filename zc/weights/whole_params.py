"""Buckets that are *whole* in stage 3: their parameters have all their bytes.

Code that is not compiled reads the parameters themselves. Before it runs, their buckets become whole, and stay so until
the update, since autograd may have saved views of them.

Such code may also write them: clamp ``p.data``, or update a momentum encoder. All ranks write the same, as without zc.
So before masters are updated, each rank copies its own elements into its shards (`WholeParams.adopt`). Autograd does
not count writes through ``.data``. So where code has asked for that, or is not seen, elements are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from zc import torch_private
from zc.engine.core import Core, Part
from zc.engine.memory_order import flattened, in_shape
from zc.engine.program import Program
from zc.errors import ZcError
from zc.kernels.copy_writes import same_bits
from zc.planning.plan import Bucket
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import Publish, gather_node
from zc.weights.param import is_held_elsewhere
from zc.weights.state_dicts import write_value

if TYPE_CHECKING:
    from zc.engine.weights import Programs


@dataclass
class WholeBucket:
    """A bucket whose parameters have all their bytes. ``encoded`` [P]: as it came, where that differs from its
    shards."""

    empty: dict[str, Tensor]  # each parameter's ``data`` without bytes
    versions: dict[str, int]  # of each parameter, as it became whole
    encoded: Tensor | None
    is_asked: bool = False  # code that is not compiled has read it
    is_lent: bool = False  # the program may have written its memory without autograd's counting


class WholeParams(Part):
    """The buckets of one model that are whole on this rank."""

    def __init__(self, core: Core, programs: Programs) -> None:
        super().__init__(core)
        self._programs = programs  # of the model's weights, which clear them
        self.buckets: dict[int, WholeBucket] = {}
        self._bucket_of: dict[int, int] = {}  # by the parameter's id
        self._reasons: dict[str, set[int]] = {}  # why buckets became whole in this pass
        self._said: set[str] = set()  # those of earlier passes

    def empty(self) -> dict[str, Tensor]:
        """The ``data`` without bytes of each whole parameter, which has the storage that it has at any other time."""
        return {name: empty for whole in self.buckets.values() for name, empty in whole.empty.items()}

    def unshard(self, buckets: Iterable[int], *, is_exact: bool = False) -> None:
        """The parameters of these buckets have all their bytes, on all ranks: for a forward, or as the shards have
        them."""
        core, buckets = self.core, set(buckets)
        if is_exact:  # of those that a forward has read, too
            self.reshard(index for index in buckets if core.plan.encodes_gathers(core.plan.bucket(index)))
        with torch_private.outside_of_func_transforms():  # the model may run inside of one
            for index in sorted(buckets.difference(self.buckets)):
                bucket, flat = core.plan.bucket(index), self.gathered_once(index, is_exact=is_exact)
                whole = WholeBucket({}, {}, None)
                if not is_exact and core.plan.encodes_gathers(bucket):
                    whole.encoded = flat
                    core.buffers.encoded.append(flat)
                with torch.inference_mode(False), torch.no_grad(), torch_private.without_torch_function():
                    for slot, param in core.params_in(bucket):
                        whole.empty[slot.name], values = param.data, flat[slot.offset : slot.stop]
                        # what the caller may keep, or what is compared with how it came, gets memory of its own
                        is_apart = is_exact or whole.encoded is not None
                        memory = values.clone() if is_apart else torch_private.own_storage(values)
                        param.data = in_shape(memory, slot)
                        whole.versions[slot.name] = torch_private.version(param)
                self.buckets[index] = whole
        for index in buckets if is_exact else ():
            self.buckets[index].is_lent = True  # whoever asks for values as the shards have them may write all

    def unshard_for(self, reason: str, buckets: set[int]) -> None:
        """The same, for code that is not compiled; `say_reasons` says so."""
        missing = buckets.difference(self.buckets)
        if missing:
            self.unshard(missing)
            self._reasons.setdefault(reason, set()).update(missing)
        for index in buckets:
            self.buckets[index].is_asked = True

    def was_read(self, param: nn.Parameter) -> bool:
        """Whether code that is not compiled has read this parameter, and it is still whole."""
        return all(index in self.buckets and self.buckets[index].is_asked for index in self.buckets_of([param]))

    def say_reasons(self) -> None:
        """Once per reason, with the bytes of the first pass that had it."""
        core = self.core
        is_eager = core.config.backend == "eager"  # compiles nothing, so that is no fault of the model
        for reason in self._reasons.keys() - self._said:
            buckets = self._reasons[reason]
            nbytes = sum(core.plan.bucket(b).nbytes for b in buckets)
            first = next(slot.name for slot, _ in core.params_in(core.plan.bucket(min(buckets))))
            core.say_once(
                f"{core.plan.why_sharded}: {reason} {first} or its neighbors: {len(buckets)} of "
                f"{len(core.plan.sharded)} buckets, {nbytes:,} bytes, are whole on every rank from there to the "
                "update, beside weight_nbytes"
                + ("; the default backend gathers each bucket while it is read" if is_eager else "")
            )
        self._said.update(self._reasons)
        self._reasons.clear()

    def say_kept_views(self, buckets: Iterable[int]) -> None:
        """Says once if memory of whole parameters of ``buckets`` has other users while the weights become new ones."""
        core = self.core
        for bucket in map(core.plan.bucket, sorted(self.buckets.keys() & buckets)):
            for slot, param in core.params_in(bucket):
                if is_held_elsewhere(param):
                    core.say_once(
                        f"{core.plan.why_sharded}: something that shares memory with {core.name_now(slot.name)} "
                        "outlives the update: "
                        "a view that the program has kept, or the graph of a loss without its backward. It has the "
                        "values of before, where a plain model's view would have the new ones, and its memory stays "
                        "beside weight_nbytes"
                    )
                    return

    def gathered_once(self, index: int, *, is_exact: bool = True) -> Tensor:
        """[P]: the whole weights of one bucket, in memory of their own. All ranks call it. Without ``is_exact`` they
        travel encoded where those of a forward do."""
        core = self.core
        core.accumulators.open_shards()
        bucket = core.plan.bucket(index)
        with torch.inference_mode(False), torch.no_grad():
            core.buffers.whole[:] = [torch.empty(bucket.numel, dtype=bucket.param_dtype, device=bucket.device)]
            self._program(index, is_exact=is_exact)([], core.streams)
        return core.buffers.whole.pop()

    def lend(self, param: nn.Parameter) -> None:
        """The program has asked for what it could write unseen: ``param.data``, an array."""
        for index in self.buckets_of([param]):
            self.buckets[index].is_lent = True

    def adopt(self) -> None:
        """This rank's shards and masters get what the program has written into whole parameters, or ZcError says what
        they can't take. The shards are closed then: no rank reads one."""
        core = self.core
        self._refuse_others()
        if (shards := core.accumulators.routes.shards) is not None:
            shards.close()
        with torch.inference_mode(False), torch.no_grad(), torch_private.without_torch_function():
            for bucket in map(core.plan.bucket, sorted(self.buckets)):
                if not self._is_counted(bucket) and not self._is_unseen(bucket):
                    continue
                # A shard's elements say nothing of the whole parameters that its rank updates, its owners'. Where the
                # host may not ask, `write_value` takes only what differs.
                if self._may_ask(bucket) and bucket.layout.owners is None and not self._is_written(bucket):
                    continue
                came = self.buckets[bucket.index].encoded
                for slot, param in core.params_in(bucket):
                    before = None if came is None else came[slot.offset : slot.stop]
                    write_value(core, bucket, slot, param, before)
                    if before is not None:
                        before.copy_(flattened(param.detach(), slot))

    def _refuse_others(self) -> None:
        """Raises ZcError for a whole parameter that the program has given a tensor which its shards can't take. What is
        whole is freed, and nothing else has changed."""
        core = self.core
        for bucket in map(core.plan.bucket, sorted(self.buckets)):
            for slot, param in core.params_in(bucket):
                with torch_private.without_torch_function():
                    got = tuple(param.shape), param.dtype, param.device
                if got != (slot.shape, bucket.param_dtype, bucket.device):
                    self.reshard(core.sharded_buckets)
                    raise ZcError(
                        f"parameter {core.name_now(slot.name)} is {got[1]} of shape {got[0]} on {got[2]} now "
                        "(param.data = ..., model.to), and "
                        f"{core.plan.why_sharded} has shards of {bucket.param_dtype} of shape {slot.shape} on "
                        f"{bucket.device}. Give it values of that kind (param.copy_). What was written into parameters "
                        "since the last update is lost, and nothing else has changed"
                    )

    def reshard_unwritten(self, buckets: Iterable[int]) -> None:
        """After a forward without gradients: frees ``buckets``. What it has written stays whole to the update, and so
        does what a backward may read. Where the host may not ask, what the forward may have written stays, too. All
        ranks call it."""
        saved = self.saved(self.buckets)
        for bucket in map(self.core.plan.bucket, sorted((self.buckets.keys() & buckets) - saved)):
            if self._is_counted(bucket):
                continue
            if self._is_unseen(bucket):
                if not self._may_ask(bucket):
                    continue
                # gathered again: all ranks must keep what they have written, also where it is in one rank's shard
                is_lent = self.buckets[bucket.index].is_lent
                came = self.gathered_once(bucket.index, is_exact=False) if is_lent else None
                if self._is_written(bucket, came):
                    continue
            self.reshard([bucket.index])

    def _is_counted(self, bucket: Bucket) -> bool:
        """Whether autograd has counted a write since the bucket became whole."""
        versions, items = self.buckets[bucket.index].versions, self.core.params_in(bucket)
        return any(torch_private.version(param) != versions[slot.name] for slot, param in items)

    def _is_unseen(self, bucket: Bucket) -> bool:
        """Whether the program may have written it without a count: what Dynamo leaves out finds plain parameters."""
        return self.buckets[bucket.index].is_lent or self.core.config.backend != "eager"

    def _may_ask(self, bucket: Bucket) -> bool:
        """Whether the host may ask what has been written. It would wait for a device, as it does anyway with
        offload."""
        return bucket.device.type == "cpu" or self.core.plan.offload is not None

    def _is_written(self, bucket: Bucket, came: Tensor | None = None) -> bool:
        """Whether the program has written an element of this rank's shard; with ``came`` [P], the bucket's values
        before that, any element."""
        core = self.core
        whole = self.buckets[bucket.index].encoded if came is None else came
        for slot, param in core.params_in(bucket):
            shard, elements = core.buffers.weight_part(bucket, slot)
            with torch_private.without_torch_function():
                now = flattened(param.detach(), slot)
            now, before = (now[elements], shard) if whole is None else (now, whole[slot.offset : slot.stop])
            if not same_bits(now, before):
                return True
        return False

    def reshard(self, buckets: Iterable[int]) -> None:
        """The parameters of those of ``buckets`` that are whole have no bytes any more. Other tensors that share their
        memory keep it, and the values of this moment."""
        core = self.core
        for index in self.buckets.keys() & buckets:
            whole, items = self.buckets.pop(index), list(core.params_in(core.plan.bucket(index)))
            with torch.inference_mode(False), torch_private.without_torch_function():
                # it was made whole on some stream, and read on any that main comes after
                core.streams.hand_to_main([*(param for _, param in items), whole.encoded])
                for slot, param in items:
                    param.data = whole.empty[slot.name]
        core.buffers.encoded[:] = [whole.encoded for whole in self.buckets.values() if whole.encoded is not None]

    def saved(self, buckets: Iterable[int]) -> set[int]:
        """Those of ``buckets`` that a backward may still read: autograd has saved a parameter itself, not a view."""
        core = self.core
        items = ((index, core.params_in(core.plan.bucket(index))) for index in buckets)
        return {index for index, params in items if any(torch_private.is_saved(param) for _, param in params)}

    def note_first_values(self) -> None:
        """What had no value, and has no NaN now, has one."""
        unset, placed = self.core.unset.params, self.core.placed
        unset.difference_update([name for name in unset & self.empty().keys() if not placed[name].isnan().any()])

    def load(self, param: nn.Parameter, value: Tensor) -> None:
        """This rank's elements of one parameter get their part of ``value``. No rank reads a shard meanwhile."""
        core = self.core
        for bucket in map(core.plan.bucket, self.buckets_of([param])):
            slot = next(slot for slot, other in core.params_in(bucket) if other is param)
            write_value(core, bucket, slot, value)
            torch.autograd.graph.increment_version(param)  # a backward through a forward of before fails
            core.unset.params.discard(slot.name)

    def end_load(self) -> None:
        """The shards have new values, which came from no update: other ranks may read them. What was whole is old, and
        freed."""
        core = self.core
        core.accumulators.open_shards()
        self.reshard(core.sharded_buckets)

    def grow(self) -> None:
        """The plan is about to get more buckets."""
        self._bucket_of.clear()

    def _program(self, index: int, *, is_exact: bool) -> Program:
        core = self.core
        plan = core.plan.exact_gathers() if is_exact else core.plan
        kind = "whole_encoded" if plan.encodes_gathers(plan.bucket(index)) else "whole"
        if (kind, index) not in self._programs:
            graph, whole = fx.Graph(), Buffer("flat_param", index)
            put(graph, gather_node(plan, index, whole))
            put(graph, Publish(index, whole))
            graph.output(())
            self._programs[kind, index] = core.build(graph, plan, name=f"{kind}_{index}")
        return self._programs[kind, index]

    def buckets_of(self, params: Iterable[nn.Parameter]) -> set[int]:
        """The buckets of those of these parameters whose weights are sharded."""
        core = self.core
        if not self._bucket_of:
            items = ((bucket.index, param) for bucket in core.plan.sharded for _, param in core.params_in(bucket))
            self._bucket_of = {id(param): index for index, param in items}
        return {self._bucket_of[id(param)] for param in params if id(param) in self._bucket_of}
