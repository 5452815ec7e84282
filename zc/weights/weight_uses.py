"""The windows of a pass over sharded weights, one after the other: what each gathers and frees.

A *pass* is one forward of the model, with its backward if there is one. Its compiled graphs read weights in windows
(`zc.passes.window_weights`), and each window asks here for its buckets: the pass's next *use*. The order of the uses is
that of the pass before. So the gathers of a pass are planned, proved, and run piece by piece, one piece before each use
(`zc.planning.residency`)::

    pass before     (3,) (2,) (1,) () (1,) (2,) (3,) ()      forward, then backward

       comm | gather(3, "arena[0]", src="weight[3]", extent=(0, 4096))          piece 0
       comm | gather(2, "arena[0]", src="weight[2]", extent=(4096, 8192))
    compute | read_weights("arena[0]", 0, (3,), spans=((0, 4096),))
    compute | free_weights(3, "arena[0]", 0, 4096)                              piece 1
       comm | gather(1, "arena[0]", src="weight[1]", extent=(0, 4096))
    compute | read_weights("arena[0]", 1, (2,), spans=((4096, 8192),))
    ...

Between two pieces run the graphs that read: schedules of their own, on the same streams, which touch neither the arena
nor the shards. They add order and take none away, so the proof of all pieces in a row holds for them. Their events have
other names. A pass with another order goes on right and slower: from there on each use gathers its own buckets when it
comes.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from zc.engine.core import Core, Part
from zc.engine.memory_order import in_shape
from zc.engine.program import Program
from zc.errors import ZcError
from zc.planning.plan import Plan
from zc.planning.residency import Extent, Residency, Uses, plan_residency, smallest_cap
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import FreeWeights, ReadWeights, gather_node

ARENA = Buffer("arena", 0)
PREFIX = "w"  # of the names of a pass's events
MAX_ORDERS = 16  # of passes, planned ahead; further ones gather as they come
BETWEEN = "iterate between two updates, on all ranks, and do nothing else with the model meanwhile"


def weights_graph(plan: Plan, residency: Residency) -> fx.Graph:
    """The gathers, reads and frees of a plan of residency, in its order. ``meta["uses"]`` of the output tells the proof
    which buckets each use reads."""
    graph = fx.Graph()
    for use, piece in enumerate(residency.pieces):
        for bucket, start, stop in piece.frees:
            put(graph, FreeWeights(bucket, ARENA, start, stop))
        for bucket, start, stop in piece.gathers:
            put(graph, gather_node(plan, bucket, ARENA, (start, stop)))
        if use < len(residency.uses):
            spans = tuple((start, stop) for _, start, stop in piece.reads)
            put(graph, ReadWeights(ARENA, use, tuple(bucket for bucket, _, _ in piece.reads), spans=spans))
    graph.output(()).meta["uses"] = residency.uses
    return graph


class PlannedPass(NamedTuple):
    """A piece of ``program`` runs before each use, and one after the last."""

    uses: Uses
    residency: Residency
    program: Program


class WeightUses(Part):
    """The uses of the pass that runs, on one rank."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._known: dict[Uses, PlannedPass] = {}  # with those of one use, which gathers as it comes
        self._order: list[tuple[int, ...]] = []  # uses of the pass so far
        self._expected: dict[int, Uses] = {}  # by the number of the pass in its update; -1: without gradients
        self._number = 0  # of the pass that runs
        self._planned: PlannedPass | None = None  # the pass that runs
        self._position = 0  # in its uses
        self._walk: PlannedPass | None = None  # `each_once`
        self._most_said = 0  # bytes of weights that a note has said code reads together
        self._num_changes = 0  # times that somebody may have taken the arena, or the weights may have changed

    @property
    def passes_so_far(self) -> list[tuple[str, Program]]:
        """See `zc.engine.weights.Weights`."""
        cap, known = self.core.plan.weight_cap, self._known.values()
        return [(each.residency.table(cap) if len(each.uses) > 1 else "", each.program) for each in known]

    def begin(self, number: int) -> None:
        """The ``number``-th pass of an update begins; -1: one without gradients."""
        self._number = number
        expected = self._expected.get(number) or self._expected.get(number - 1 if number > 0 else 0)
        num_orders = sum(len(uses) > 1 for uses in self._known)
        if expected is not None and (expected in self._known or num_orders < MAX_ORDERS):
            self._start(expected)

    def next(self, buckets: tuple[int, ...]) -> Sequence[Extent]:
        """The next use: runs the piece before it, and returns where it reads."""
        core, planned = self.core, self._planned
        if planned is None or self._position >= len(planned.uses) or planned.uses[self._position] != buckets:
            if planned is not None and self._position < len(planned.uses) > 1:
                core.say_once(
                    f"{core.plan.why_sharded}: a forward or backward read other weights than the one before it, or in "
                    "another order: there it gathers each bucket when it is read, not ahead"
                )
            self._close()
            planned = self._start((buckets,))
        planned.program([], core.streams, piece=self._position)
        reads = planned.residency.pieces[self._position].reads
        self._order.append(buckets)
        self._position += 1
        return reads

    def end(self, *, is_order_kept: bool) -> None:
        """The pass is over. ``is_order_kept``: the next one like it is expected to have its order."""
        self._num_changes += 1
        if self._order and is_order_kept:
            self._expected[self._number] = tuple(self._order)
        self._order.clear()
        self._close()

    def grow(self) -> None:
        """The plan is about to get more buckets."""
        self._known.clear()
        self._expected.clear()
        self._walk = None

    def each_once(self, *, is_wanted: bool) -> Generator[dict[str, Tensor], None, None]:
        """A pass outside of any forward that reads the masters' exact weights, each bucket by itself, in the order in
        which modules were registered (`ShardedWeights.units`). The next bucket is gathered meanwhile, if there is room
        for two."""
        core, plan, is_left = self.core, self.core.plan, False
        if self._walk is None:
            uses = tuple((bucket.index,) for bucket in reversed(plan.sharded))
            largest = max(bucket.nbytes_gathered for bucket in plan.sharded)
            self._walk = self._plan("weights_each", uses, plan.exact_gathers(), min(plan.weight_cap, 2 * largest))
        _, residency, program = self._walk
        with torch.inference_mode(False):
            core.buffers.make_arena(residency.nbytes)
        num_changes = self._num_changes
        for number, (index,) in enumerate(residency.uses):
            if not any(core.group.max_on_host([is_wanted and not is_left], "the next unit of whole weights")):
                break
            program([], core.streams, piece=number)
            bucket, (extent,) = plan.bucket(index), residency.pieces[number].reads
            flat = core.buffers.gathered("arena[0]", bucket, extent.start)
            slots = [slot for slot, _ in core.params_in(bucket)]
            if is_wanted and not is_left:
                try:
                    yield {slot.name: in_shape(flat[slot.offset : slot.stop], slot) for slot in slots}
                except GeneratorExit:
                    if sys.is_finalizing():  # a script has left it behind: no rank can be asked any more
                        raise
                    is_left = True
            if self._num_changes != num_changes:
                core.streams.join_main()
                raise ZcError(f"a forward, an update, a save or a load came between two whole weights: {BETWEEN}")
        else:
            program([], core.streams, piece=-1)
        core.streams.join_main()
        core.buffers.arena.clear()
        if is_left:
            raise GeneratorExit

    def _plan(self, name: str, uses: Uses, plan: Plan, cap: int) -> PlannedPass:
        nbytes = {bucket.index: bucket.nbytes for bucket in plan.sharded}
        residency = plan_residency(uses, nbytes, cap)
        program = self.core.build(weights_graph(plan, residency), plan, name=name, prefix=PREFIX)
        return PlannedPass(uses, residency, program)

    def _with_room(self, uses: Uses) -> Plan:
        """The plan, with a larger ``weight_nbytes`` where a use reads more than that. How much one reads together is
        known when Dynamo has made its graph, in any step of the run and on one rank perhaps."""
        core, plan = self.core, self.core.plan
        nbytes = {bucket.index: bucket.nbytes for bucket in plan.sharded}
        least = smallest_cap(uses, nbytes)
        if least <= plan.weight_cap:
            return plan
        if least > self._most_said:
            self._most_said = least
            largest = next(use for use in uses if smallest_cap([use], nbytes) == least)
            names = ", ".join(f"{index} ({plan.bucket(index).slots[0].name}, ...)" for index in largest)
            core.say_once(
                f"weight_nbytes={plan.weight_cap} is too small for code that reads buckets {names} together: a pass "
                f"that does so gets the {least} bytes that they need. Give weight_nbytes={least}, or a smaller "
                "bucket_nbytes"
            )
        return replace(plan, weight_nbytes=least)

    def _start(self, uses: Uses) -> PlannedPass:
        core = self.core
        self._num_changes += 1
        if uses not in self._known:
            plan = self._with_room(uses)
            self._known[uses] = self._plan(f"weights_{len(self._known)}", uses, plan, plan.weight_cap)
        self._planned, self._position = self._known[uses], 0
        with torch.inference_mode(False):
            core.buffers.make_arena(self._planned.residency.nbytes)
        return self._planned

    def _close(self) -> None:
        """No use follows in this order. A pass that is left in the middle has gathers on their way."""
        planned, self._planned = self._planned, None
        if planned is None:
            return
        if self._position == len(planned.uses):
            planned.program([], self.core.streams, piece=-1)
        else:
            self.core.streams.join_main()
