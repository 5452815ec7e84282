"""When the main stream waits for new weights in the forwards of a model (overlap_gather).

Buckets are gathered from the last to the first, in which modules are registered, so waiting for one is waiting for all
later ones. In a model with blocks, which are compiled one by one, the forward waits in steps::

    the model's call begins    for what is gathered before the first block: an embedding
    a block's call begins      for the block
    a block's call ends        for what is gathered before the next block: the last norm, the head
    the model's call ends      for blocks that have not run

Inside a block and behind it, compiled code and any other code read weights that are there. Elsewhere, code that is not
compiled waits when it reads a parameter, which is watched until then (`zc.weights.param`). Compiled code finds plain
parameters, since Dynamo guards their class. So what a compiled graph reads before its step above, later forwards wait
for at their beginning. FSDP's wrapped modules wait before their forward, too (arXiv:2304.11277).

A model without blocks is one graph, which waits for each bucket where it first reads it (`zc.passes.window_weights`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

from zc import torch_private
from zc.engine.part import Part
from zc.planning.kinds import block_of, split_name
from zc.planning.plan import Plan

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.engine.names import Places
    from zc.weights.overlapped import OverlappedWeights

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


class ForwardWaits(Part):
    """The forwards of one model on one rank. ``gather`` has this object."""

    def __init__(self, core: Core, gather: OverlappedWeights) -> None:
        super().__init__(core)
        self._gather: OverlappedWeights = weakref.proxy(gather)
        self._order: GatherOrder | None = None
        self._depth = 0  # forwards of the model inside one another
        self._num_blocks = 0  # calls of blocks inside one another
        self._start: int | None = None  # the lowest bucket that a forward waits for at its beginning
        self._reached = len(core.plan.buckets)  # the lowest bucket that steps have waited for since an update
        self._late: set[str] = set()  # Dynamo's numbers of the frames that it has compiled late in this forward
        self._num_late: Counter[str] = Counter()  # forwards by such a frame

    @property
    def order(self) -> GatherOrder:
        core = self.core
        if self._order is None or self._order.plan is not core.plan:
            self._order = GatherOrder(core.plan, core.placed)
        return self._order

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs inside."""
        is_outer = self._depth == 0
        watching = self._begin() if is_outer else nullcontext()
        self._depth += 1
        try:
            with watching:
                yield
        except BaseException:
            if is_outer:
                self._gather.watch()
            raise
        finally:
            self._depth -= 1
        if is_outer:
            self._end()

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
        """Dynamo has made a graph that reads these parameters. It finds them plain when it runs again."""
        core = self.core
        first = self.order.first_of(core.placed[name] for name in names if name in core.placed)
        if self._depth > 0 and first < self._reached:
            self._begin_with(first, f"code outside of blocks reads {core.plan.buckets[first].slots[0].name} early")

    def note_gathers(self) -> None:
        """An update launches gathers."""
        self._reached = len(self.core.plan.buckets)

    def _begin(self) -> AbstractContextManager[None]:
        """Returns the context of the forward."""
        gather = self._gather
        if not self.core.plan.kinds:
            gather.release()
            self._reached = 0  # its graph waits
            return nullcontext()
        if self._start is None:
            self._start = self.order.before_next_block(len(self.core.plan.buckets))
        self._late.clear()
        gather.watch()  # what a load has gathered
        self._reach(self._start)
        if not gather.is_in_flight:
            return nullcontext()
        thread = threading.get_ident()  # other threads may compile other models meanwhile

        def before() -> None:
            if threading.get_ident() == thread:
                self._before_compiling()

        return torch_private.before_compiling(before, lambda: None)

    def _end(self) -> None:
        self._gather.synchronize()
        self._reached = 0
        self._num_late.update(self._late)
        if any(self._num_late[frame] == MAX_LATE for frame in self._late):
            self._begin_with(0, "Dynamo compiles code outside of blocks again and again")

    def _reach(self, first: int) -> None:
        self._reached = min(self._reached, first)
        self._gather.arrive(first)

    def _before_compiling(self) -> None:
        """Dynamo compiles a frame, in which it must find plain parameters. A frame that it compiles in forward after
        forward is guarded by the class of a parameter that it does not read, such as by its dtype."""
        if not self._gather.is_in_flight:
            return
        self._gather.synchronize()
        if self._num_blocks == 0:
            self._late.add(torch_private.compile_id().partition("/")[0])

    def _begin_with(self, first: int, why: str) -> None:
        """From now on a forward waits for ``first`` and all that is gathered before it at its beginning."""
        assert self._start is not None
        self._start = min(self._start, first)
        self.core.say_once(f"overlap_gather: {why}: a forward waits at its beginning for more than the first block")
