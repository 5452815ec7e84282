"""Part (d) of the proof, of stage 3: weights are there while they are read, within the cap.

It walks two kinds of graphs in the order of issue. Part (a) shows that the streams keep that order: gathers write the
bytes that reads and frees read.

A pass's gathers (`zc.weights.weight_uses`) are a table of what is alive::

    gather(3, "arena[0]", src="weight[3]", extent=(0, 4096))    alive: 3 in [0, 4096)
    read_weights("arena[0]", 0, (3,), spans=((0, 4096),))       3 is there, in that extent
    free_weights(3, "arena[0]", 0, 4096)                        nothing is alive

A graph reads in windows (`zc.passes.window_weights`). Between the take of a window and the next one its parameters are
there, and nowhere else::

    %take = take_weights(((3, 0),))                             opens a window
    %getitem = %take[0]
    %segment_0 = segment("segment_0", %x, %getitem)             reads inside it
    take_weights(())                                            ends it

A value that shares storage with a parameter (``meta["storage"]``) has to stay in its window, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from zc.planning.layout import ALIGN_NBYTES
from zc.planning.plan import Plan
from zc.schedule.buffer import MAIN, Buffer
from zc.schedule.nodes import item_of, results, stream_of
from zc.schedule.spec import Cast, Deposit, FreeWeights, Gather, Op, ReadWeights, Segment, TakeWeights

if TYPE_CHECKING:
    from zc.passes.verify import Order


def check(order: Order, plan: Plan) -> list[str]:
    """The faults, as texts that name the bucket, the use and the extents."""
    return _Arena(order, plan).faults + _Windows(order, plan).faults


class _Arena:
    """The buckets that are alive in an arena, gather by gather."""

    def __init__(self, order: Order, plan: Plan) -> None:
        self.plan = plan
        self.faults: list[str] = []
        self._alive: dict[tuple[Buffer, int], tuple[str, int, int]] = {}  # buffer, bucket -> gather, start, stop
        self._freed: dict[tuple[Buffer, int], str] = {}
        self._num_uses = 0
        self._uses: tuple[tuple[int, ...], ...] | None = order.nodes[-1].meta.get("uses")
        for node, op in zip(order.nodes, order.ops, strict=True):
            if isinstance(op, Gather) and op.dst.kind == "arena":
                self._gather(node, op)
            elif isinstance(op, ReadWeights):
                self._read(node, op)
            elif isinstance(op, FreeWeights):
                self._free(node, op)
            if isinstance(op, ReadWeights | FreeWeights) and stream_of(node) != MAIN:
                self.faults.append(f"{node.name} stands on {stream_of(node)}; graphs read on {MAIN}")
        for (buffer, bucket), (name, start, stop) in self._alive.items():
            self.faults.append(f"bucket {bucket} of {name} lies in {buffer} {_range(start, stop)} at the end")
        if self._uses is not None and self._num_uses != len(self._uses):
            self.faults.append(f"the schedule has {self._num_uses} uses, and the pass {len(self._uses)}")

    def _gather(self, node: fx.Node, op: Gather) -> None:
        if op.extent is None:
            self.faults.append(
                f"{node.name} gathers bucket {op.bucket} into all of {op.dst}, and needs an extent of it"
            )
            return
        (start, stop), nbytes, cap = op.extent, self.plan.bucket(op.bucket).nbytes, self.plan.weight_cap
        place = f"bucket {op.bucket} into {op.dst} {_range(start, stop)}"
        if (op.dst, op.bucket) in self._alive:
            name, *extent = self._alive[op.dst, op.bucket]
            text = f"{node.name} gathers {place}, and it lies in {_range(*extent)} since {name}: nobody has freed it"
            self.faults.append(text)
        for (buffer, bucket), (name, *extent) in self._alive.items():
            if buffer == op.dst and bucket != op.bucket and start < extent[1] and extent[0] < stop:
                other = f"bucket {bucket} lies in {_range(*extent)} since {name}"
                self.faults.append(f"{node.name} gathers {place}, and {other}")
        if start < 0 or start % ALIGN_NBYTES:
            self.faults.append(f"{node.name} gathers {place}, which starts at no multiple of {ALIGN_NBYTES} bytes")
        if stop - start != nbytes:
            self.faults.append(f"{node.name} gathers {place}, and its weights have {nbytes} bytes")
        if stop > cap:
            self.faults.append(f"{node.name} gathers {place}, and weight_nbytes allows {cap} bytes")
        self._alive[op.dst, op.bucket] = (node.name, start, stop)

    def _read(self, node: fx.Node, op: ReadWeights) -> None:
        if op.use != self._num_uses:
            self.faults.append(f"{node.name} is use {op.use} of the pass, after {self._num_uses} others")
        elif self._uses is not None and (op.buckets,) != self._uses[op.use : op.use + 1]:
            self.faults.append(f"{node.name} reads buckets {op.buckets}, and use {op.use} {self._uses[op.use :][:1]}")
        self._num_uses += 1
        if len(op.buckets) != len(op.spans):
            self.faults.append(f"{node.name} reads {len(op.buckets)} buckets in {len(op.spans)} extents")
        for bucket, (start, stop) in zip(op.buckets, op.spans, strict=False):
            self._check_place(f"use {op.use} reads", op.buffer, bucket, start, stop)

    def _free(self, node: fx.Node, op: FreeWeights) -> None:
        self._check_place(f"{node.name} frees", op.buffer, op.bucket, op.start, op.stop)
        if self._alive.pop((op.buffer, op.bucket), None) is not None:
            self._freed[op.buffer, op.bucket] = node.name

    def _check_place(self, what: str, buffer: Buffer, bucket: int, start: int, stop: int) -> None:
        """Checks that a bucket lies just there."""
        what = f"{what} bucket {bucket} in {buffer} {_range(start, stop)}"
        if (buffer, bucket) not in self._alive:
            freed = self._freed.get((buffer, bucket))
            self.faults.append(f"{what}, and nobody has gathered it{f' since {freed}' if freed else ''}")
            return
        name, *extent = self._alive[buffer, bucket]
        if extent != [start, stop]:
            self.faults.append(f"{what}, and {name} has gathered it into {_range(*extent)}")


def _range(start: int, stop: int) -> str:
    return f"[{start}, {stop})"


class _Windows:
    """Which window each value of a graph belongs to."""

    def __init__(self, order: Order, plan: Plan) -> None:
        self.faults: list[str] = []
        self._window: fx.Node | None = None  # the take of the present one
        self._of: dict[fx.Node, fx.Node] = {}  # a parameter, or what shares storage with one -> the take of its window
        steps = list(zip(order.nodes, order.ops, strict=True))
        takes = {node: op for node, op in steps if isinstance(op, TakeWeights)}
        placeholders = order.nodes[-1].graph.find_nodes(op="placeholder")
        params = {n: n.meta["weight"] for n in placeholders if "weight" in n.meta}
        self._places = {item: op.places[item_of(item)] for take, op in takes.items() for item in results(take)
                       if item_of(item) < len(op.places)}  # fmt: skip
        storages = {n.meta.get("storage") for n in (*params, *self._places)} - {None}
        for node, op in steps:
            if isinstance(op, TakeWeights):
                self._open(node, op, plan)
            self._check_inputs(node, op, params)
            if op is not None and self._window is not None:
                for value in results(node):
                    if node is self._window or value.meta.get("storage") in storages:
                        self._of[value] = self._window
        if self._window is not None and takes[self._window].places:
            self.faults.append(f"the window of {self._window.name} is never ended: a take without places has to")

    def _open(self, node: fx.Node, op: TakeWeights, plan: Plan) -> None:
        self._window = node
        if stream_of(node) != MAIN:
            self.faults.append(f"{node.name} takes weights on {stream_of(node)}; graphs read on {MAIN}")
        for item in results(node):
            if item_of(item) >= len(op.places):
                self.faults.append(f"%{item.name} is item {item_of(item)} of {node.name}, which has {len(op.places)}")
        slots = {b.index: b.slots for b in plan.with_weights}
        for bucket, slot in op.places:
            if not (bucket in slots and 0 <= slot < len(slots[bucket]) and not slots[bucket][slot].is_left):
                self.faults.append(f"{node.name} takes bucket {bucket}, slot {slot}: the plan has no such parameter")

    def _check_inputs(self, node: fx.Node, op: Op | None, params: dict[fx.Node, tuple[int, int]]) -> None:
        for used in node.all_input_nodes:
            if used in params and op is not None:
                text = f"{node.name} reads %{used.name} ({_slot(params[used])}), which has no bytes outside of windows"
                self.faults.append(text)
            if used not in self._of:
                continue
            take = self._of[used]
            param = f" ({_slot(self._places[used])})" if used in self._places else ", which shares their storage,"
            what = f"the weights %{used.name}{param} of the window of {take.name}"
            if op is None:
                self.faults.append(f"the graph returns {what}")
            elif take is not self._window:
                self.faults.append(f"{node.name} reads {what} in that of {self._window and self._window.name}")
            elif stream_of(node) != MAIN:
                self.faults.append(f"{node.name} reads {what} on {stream_of(node)}, and nothing ends it there")
            elif isinstance(op, Deposit) or (isinstance(op, Cast) and used in op.grads):
                self.faults.append(f"{node.name} keeps {what} as a gradient")
            elif isinstance(op, Segment) and used in _donated(node, op):
                self.faults.append(f"{node.name} may overwrite {what}")


def _donated(node: fx.Node, op: Segment) -> Sequence[fx.Node]:
    body = node.meta.get("segment")
    return [op.inputs[k] for k in body.meta.get("donated", ())] if body is not None else []


def _slot(place: tuple[int, int]) -> str:
    return f"bucket {place[0]}, slot {place[1]}"
