"""Weights that come while the next forward runs (``overlap_gather``), in stages 1 and 2.

``optimizer.step()`` returns with the gathers launched, in the order in which modules were registered: from the plan's
last bucket to its first. So waiting for one bucket is waiting for all later ones. The next forward waits for each
bucket before it first reads it. (The idea is that of PyTorch's FSDP, arXiv:2304.11277, and Megatron's
overlap_param_gather; megatron-lm#950 shows what a missing wait does.) A model with blocks, which are compiled one by
one, waits in steps::

    the model's call begins    for what is gathered before the first block: an embedding
    a block's call begins      for the block
    a block's call ends        for what is gathered before the next block: the last norm, the head
    the model's call ends      for blocks that have not run

Inside a block and after it, compiled code and any other code read weights that are there. Elsewhere, code that is not
compiled waits when it reads a parameter, which is watched until then (`zc.weights.param`). Compiled code finds plain
parameters, since Dynamo guards their class. So what a compiled graph reads before its step above, later forwards wait
for at their beginning. A wait is a schedule::

       comm | gather(1, "gathered[1]")                  compute | wait_event("done/gathered[1]")
       comm | record_event("done/gathered[1]")    ...   compute | publish(1, "gathered[1]")
       comm | gather(0, "gathered[0]")
       comm | record_event("done/gathered[0]")

The forward of any other model is a schedule itself (`CompiledForward`), which `zc.passes.window_weights` has cut::

    compute | wait_event("done/gathered[1]")
    compute | segment("segment_0", %primals_1, %primals_9)
    compute | wait_event("done/gathered[0]")
    compute | segment("segment_1", %getitem_2, %primals_2)

``gathered[b]`` is flat_param[b]; its name carries an event from schedule to schedule. After the model's call all
weights may be read. Before it, any read waits for the buckets of the parameters that it reads.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from zc import torch_private
from zc.engine.core import Core, weakly
from zc.engine.param_checks import Places
from zc.engine.program import Program
from zc.engine.weights import Weights, publish_graph
from zc.errors import ZcError
from zc.planning.plan import Plan, block_of, split_name
from zc.schedule.buffer import Buffer, carried_event
from zc.weights.param import ManagedParams, is_held_elsewhere

MAX_LATE = 3  # forwards in which Dynamo compiles one frame while weights are on their way


class GatherOrder:
    """Where the parameters of a plan come in the order of its gathers."""

    def __init__(self, plan: Plan, params: Mapping[str, nn.Parameter]) -> None:
        self.plan = plan
        slots = [(bucket.index, slot.name) for bucket in plan.buckets for slot in bucket.slots if not slot.is_left]
        self._bucket_of = {id(params[name]): bucket for bucket, name in slots}
        members = block_of(plan.kinds)
        self._of_blocks = {bucket for bucket, name in slots if split_name(name, members) is not None}

    def first_of(self, params: Iterable[nn.Parameter]) -> int:
        """The lowest bucket of these parameters, which is gathered last; without any, one more than there are."""
        last = len(self.plan.buckets)
        return min((self._bucket_of.get(id(param), last) for param in params), default=last)

    def before_next_block(self, bucket: int) -> int:
        """The lowest bucket that is gathered after ``bucket`` and before those of the next block."""
        while bucket > 0 and bucket - 1 not in self._of_blocks:
            bucket -= 1
        return bucket


class OverlappedWeights(Weights):
    """The gathers of one model on one rank, and the waits for them."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.in_flight: set[int] = set()  # buckets for whose gathers the main stream has not waited
        self.managed = ManagedParams(self, "overlap_gather", come=True)
        weakref.finalize(self, self.managed.release).atexit = False  # later there is nobody to wait for
        self._unseen: str | None = None  # why zc could miss a read of the new weights; None: it can't
        self._order: GatherOrder | None = None
        self._depth = 0  # forwards of the model inside one another
        self._num_blocks = 0  # calls of blocks inside one another
        self._start: int | None = None  # the lowest bucket that a forward waits for at its beginning
        self._reached = len(core.plan.buckets)  # the lowest bucket that steps have waited for since an update
        self._late: set[str] = set()  # Dynamo's numbers of the frames that it has compiled late in this forward
        self._num_late: Counter[str] = Counter()  # forwards by such a frame
        synchronize = weakly(self.synchronize)
        wait = torch_private.only_eager(lambda *_: synchronize())
        self._on_modules = [
            partial(nn.Module.register_state_dict_pre_hook, hook=wait),
            partial(nn.Module.register_load_state_dict_pre_hook, hook=wait),
        ]
        if not core.plan.kinds:  # in a model with blocks Dynamo would compile each module that has this one
            self._on_modules.append(partial(nn.Module.register_forward_pre_hook, hook=wait, prepend=True))

    @property
    def order(self) -> GatherOrder:
        core = self.core
        if self._order is None or self._order.plan is not core.plan:
            self._order = GatherOrder(core.plan, core.placed)
        return self._order

    # --- where the model runs ---

    def call_of(self, module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The compiled forward waits for weights. A model that is not compiled does so by its hooks."""
        return None if call is None else self._inside(call)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self.managed.used("a forward"):
            is_outer = self._depth == 0
            watching = self._begin() if is_outer else nullcontext()
            self._depth += 1
            try:
                with watching:
                    yield
            except BaseException:
                if is_outer:
                    self.watch()
                raise
            finally:
                self._depth -= 1
            if is_outer:
                self._end()

    @property
    def around_block(self) -> Callable[[Places], AbstractContextManager[None]]:
        return partial(OverlappedWeights.block, weakref.proxy(self))

    @contextmanager
    def block(self, places: Places) -> Iterator[None]:
        """A block with these parameters runs inside, compiled or not."""
        order = self.order
        first = order.first_of(param for _, _, param in places)
        self._reach(first)
        self._num_blocks += 1
        try:
            yield
        finally:
            self._num_blocks -= 1
        self._reach(order.before_next_block(first))

    def note_graph(self, names: Iterable[str | None]) -> None:
        """It finds them plain when it runs again."""
        core = self.core
        first = self.order.first_of(core.placed[name] for name in names if name in core.placed)
        if self._depth > 0 and first < self._reached:
            self._begin_with(first, f"code outside of blocks reads {core.plan.buckets[first].slots[0].name} early")

    def _begin(self) -> AbstractContextManager[None]:
        """Returns the context of the forward."""
        if not self.core.plan.kinds:
            self.managed.release()
            self._reached = 0  # its graph waits
            return nullcontext()
        if self._start is None:
            self._start = self.order.before_next_block(len(self.core.plan.buckets))
        self._late.clear()
        self._reach(self._start)
        return torch_private.before_compiling(self._before_compiling, lambda: None) if self.in_flight else nullcontext()

    def _end(self) -> None:
        self.synchronize()
        self._reached = 0
        self._num_late.update(self._late)
        if any(self._num_late[frame] == MAX_LATE for frame in self._late):
            self._begin_with(0, "Dynamo compiles code outside of blocks again and again")

    def _reach(self, first: int) -> None:
        self._reached = min(self._reached, first)
        self.arrive(first)

    def _before_compiling(self) -> None:
        """Dynamo compiles a frame, in which it must find plain parameters. A frame that it compiles in forward after
        forward is guarded by the class of a parameter that it does not read, such as by its dtype."""
        if not self.in_flight:
            return
        self.synchronize()
        if self._num_blocks == 0:
            self._late.add(torch_private.compile_id().partition("/")[0])

    def _begin_with(self, first: int, why: str) -> None:
        """From now on a forward waits for ``first`` and all that is gathered before it at its beginning."""
        assert self._start is not None
        self._start = min(self._start, first)
        self.core.say_once(f"overlap_gather: {why}: a forward waits at its beginning for more than the first block")

    def note_forward(self, forward: Program) -> None:
        """A schedule of a forward has published all buckets of its plan. `zc.recompile` may have added more since."""
        buckets = self.in_flight.intersection(range(len(forward.plan.buckets)))
        self._refuse_failed(buckets)
        self.in_flight.difference_update(buckets)

    def waiting_for(self, names: Iterable[str] | None) -> Callable[[], None]:
        placed = self.core.placed
        first = 0 if names is None else self.order.first_of(placed[name] for name in names)
        arrive = weakly(self.arrive)
        return lambda: arrive(first)

    # --- updates ---

    def before_writes(self) -> None:
        with self.managed.used("an update or a load"):
            super().before_writes()
            self.managed.update = self.managed.enter("an update or a load")

    def published(self, buckets: Sequence[int]) -> None:
        self.managed.update = None
        super().published(buckets)

    def _fill(self, buckets: Sequence[int], *, is_exact: bool) -> None:
        """Launches the gathers of ``buckets``. Whoever has waited for them may read flat_param."""
        if not buckets:
            return
        self._unseen = self._why_unseen()  # before the gathers are launched, since they have views of their own
        super()._fill(buckets, is_exact=is_exact)
        self.in_flight.update(buckets)
        self._reached = len(self.core.plan.buckets)

    def watch(self) -> None:
        """Called at the end of a step. From then on a read of a parameter waits for its gather. If zc could miss such a
        read, the step waits itself, and says so once."""
        if not self.in_flight:
            return
        core = self.core
        if self._unseen is None:
            for bucket in self.in_flight:
                self.managed.add(param for _, param in core.params_in(core.plan.buckets[bucket]))
        else:
            core.say_once(f"overlap_gather: {self._unseen}: step() waits for the weights wherever that is so")
            self.synchronize()

    def _why_unseen(self) -> str | None:
        """What may read new weights without zc noticing; None: nothing."""
        params = self.core.params
        others = sorted({type(p).__name__ for p in params.values() if type(p) is not nn.Parameter})
        if others:
            return f"parameters of class {', '.join(others)} can't be watched"
        for name, param in params.items():
            if is_held_elsewhere(param):
                return (
                    f"something other than the parameter holds the memory of {self.core.name_now(name)} (a view, "
                    "p.data, p.detach() or an array kept from before the step), and may be read unseen"
                )
        return None

    def arrive(self, first: int) -> None:
        """Makes the main stream wait for the gathers of bucket ``first`` and all later ones, which come before it. On
        CUDA the host does not wait."""
        for bucket in sorted((bucket for bucket in self.in_flight if bucket >= first), reverse=True):
            core = self.core
            self._publish(bucket)([], core.streams)
            self._refuse_failed([bucket])
            self.in_flight.discard(bucket)
            self.managed.release(param for _, param in core.params_in(core.plan.buckets[bucket]))

    def synchronize(self) -> None:
        """Makes the main stream wait for all gathers."""
        self.arrive(0)

    def _refuse_failed(self, buckets: Iterable[int]) -> None:
        """Raises ZcError where a gather has failed, also after its own error has been raised and caught. These buckets
        stay in flight, so every read of them fails."""
        core = self.core
        for index in buckets:
            bucket = core.plan.buckets[index]
            error = core.streams.error_before(carried_event(Buffer.named(core.plan.weights_buffer(index))))
            if error is not None:
                raise ZcError(
                    f"the new weights of {bucket.slots[0].name} and others in bucket {index} have not arrived on rank "
                    f"{core.group.rank}: their gather failed with {error}. What the parameters have is no step's "
                    "weights: start again from the last checkpoint"
                )

    def read(self, params: Sequence[nn.Parameter], why: str = "") -> None:
        if self.in_flight:  # another model's read may ask, also while this one is taken apart
            self.arrive(self.order.first_of(params) if params else 0)

    def _publish(self, bucket: int) -> Program:
        """The schedule that waits for one bucket. They are all alike, and explain shows the first one."""
        if ("publish", bucket) not in self._programs:
            program = self._build("publish", self.core.plan, publish_graph(self.core.plan, [bucket]))
            program.like = next((first for (kind, _), first in self._programs.items() if kind == "publish"), None)
            program.block = f"bucket {bucket}"
            self._programs["publish", bucket] = program
        return self._programs["publish", bucket]
