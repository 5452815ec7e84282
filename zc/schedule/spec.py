"""What each node of a schedule may look like: one frozen record per kind.

Passes and the proof match on the records. A class also says what is true of all nodes of its kind: their role, their
stream, which of their buffers they read and write, what they need in these and what they leave there.

A field's name means the same in every kind: ``bucket`` and ``slot`` are numbers in the plan; ``buffer``, ``dst`` and
``src`` name buffers; ``start`` and ``stop`` are elements of one; ``grad``, ``grads`` and ``inputs`` are
values that other nodes return. `zc.schedule.nodes` says how a field of each type appears in a node's arguments.

To add a kind of node, write its record here and its function in the engine's operations.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import fx

from zc.schedule.buffer import (
    AFTER,
    BEFORE,
    CAST,
    COMM,
    COMPUTE,
    COPY,
    GATHERED,
    GRADIENT,
    HOST,
    LANDED,
    NEW,
    NOTHING,
    OLD,
    PUBLISHED,
    SENT,
    SUM,
    TAKEN,
    TOTAL,
    Buffer,
    Row,
)

if TYPE_CHECKING:
    from zc.planning.plan import Plan

Nodes = tuple[fx.Node, ...]  # one argument, a list
Operands = tuple[fx.Node, ...]  # one argument each, the last ones
Extent = tuple[int, int]  # elements, or bytes of the arena, [start, stop)
Spans = tuple[Extent, ...]
EventName = str


class Role(enum.Enum):
    """What a node does. Where ranks do not agree to reduce, the engine leaves out REDUCTION and what follows from it
    (`zc.engine.operations.instead_of_reducing`)."""

    COMPUTE = "compute"
    WRITE = "write"  # a gradient goes into its bucket
    DEPOSIT = "deposit"  # a gradient waits for the rest of its bucket
    REDUCTION = "reduction"  # other ranks' gradients come in
    OFFLOAD = "offload"  # copies between device and host memory, and the update there
    WEIGHTS = "weights"  # new weights go to all ranks
    SYNC = "sync"  # between the streams of one rank


@dataclass(frozen=True)
class Op:
    """The record of one node. These are true of all nodes of a kind:

    ``stream``: where they run under a plan with overlap (`zc.passes.scheduling`, which has one exception).
    ``reads``, ``writes``: the fields whose buffers they access; every node also reads its inputs and writes its results
    (`zc.schedule.nodes.accesses`).
    ``returns_items``: whether they return a list, whose items operator.getitem takes; others return nothing.
    ``contents``: what they need in their buffers, and what they leave there. The proof refuses a node that writes a
    buffer of which its kind says nothing here.
    """

    role: ClassVar[Role]
    stream: ClassVar[str] = COMPUTE
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()
    returns_items: ClassVar[bool] = False
    contents: ClassVar[tuple[Row, ...]] = ()

    def __init_subclass__(cls, **traits: Any) -> None:
        for name, trait in traits.items():
            setattr(cls, name, trait)

    @property
    def buffers(self) -> dict[str, Buffer]:
        """The buffers that the node names, by field."""
        return {name: item for name, item in vars(self).items() if isinstance(item, Buffer)}

    @property
    def read_fields(self) -> tuple[str, ...]:
        """The fields whose buffers this node reads."""
        return self.reads

    def extents(self, field: str) -> Spans | None:
        """Which elements of the buffer in ``field`` the node accesses; None: all of them."""
        return None


@dataclass(frozen=True)
class Segment(Op, role=Role.COMPUTE, returns_items=True):
    """Compiled pure compute."""

    key: str
    inputs: Operands


@dataclass(frozen=True)
class BucketOp(Op):
    """Works for one bucket."""

    bucket: int


# --- gradients are written ---


@dataclass(frozen=True)
class Deposit(BucketOp, role=Role.DEPOSIT):
    """Keeps the gradient until its bucket is flushed: complete, at the backward's end, or at the boundary."""

    slot: int
    grad: fx.Node

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Cast(BucketOp, role=Role.WRITE, writes=("buffer",)):
    """Writes gradients of a bucket into one buffer, cast to its dtype. ``spans``: only into these elements of it."""

    buffer: Buffer
    slots: tuple[int, ...]
    grads: Nodes
    spans: Spans | None = None


class FlattenCast(Cast):
    """buffer <- grads, cast; 0 in every other element (stage 2)."""

    contents = (Row("buffer", "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),)

    def extents(self, field: str) -> Spans | None:
        return self.spans


class AccumulateCast(Cast, reads=("buffer",)):
    """buffer += grads, in fp32; the first write of an update overwrites (stage 1)."""

    contents = (Row("buffer", "acc staging", (SUM,), GRADIENT, "partial"),)


@dataclass(frozen=True)
class WgradInto(BucketOp, role=Role.WRITE, reads=("buffer",), writes=("buffer",)):
    """Computes one gradient into its slot, the elements [start, stop); in stage 1 adds it."""

    buffer: Buffer
    slot: int
    start: int
    stop: int
    inputs: Operands
    how: str | None = None  # "mm" (None), "scatter", "rows": passes/write_in_place.py

    contents = (
        Row("buffer", "flat_grad", (NOTHING, GRADIENT), GRADIENT, "ring"),
        Row("buffer", "acc staging", (GRADIENT,), GRADIENT, "partial"),  # accumulate_cast has emptied or kept it
    )

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)

    @property
    def read_fields(self) -> tuple[str, ...]:
        return () if self.buffer.kind == "flat_grad" else self.reads  # a flat_grad is overwritten

    def extents(self, field: str) -> Spans:
        return ((self.start, self.stop),)


Write = Cast | WgradInto

# --- gradients are reduced, from buffer to buffer ---


@dataclass(frozen=True)
class Move(BucketOp, stream=COMM, reads=("src",), writes=("dst",)):
    """dst <- src."""

    dst: Buffer
    src: Buffer


@dataclass(frozen=True)
class Reduction(Move, role=Role.REDUCTION):
    """One hop of a reduction, number ``hop`` of the plan's, or a part of it (`zc.planning.plan`)."""

    hop: int = 0

    def brings_mean(self, plan: Plan) -> bool:
        """Whether it brings a bucket's mean over all ranks into an accumulator: the last node of a reduction."""
        return self.hop < len(plan.hops) and plan.hops[self.hop].is_last and self.dst.kind != "scratch"


_FROM = (  # a hop's src, once it is taken
    Row("src", "flat_grad host_sum", (BEFORE,), NOTHING),
    Row("src", "acc staging", (BEFORE,), SENT, "partial"),
)
_INTO_SUMS = (Row("dst", "acc staging", (SUM,), AFTER, "ring"), Row("dst", "acc staging", (SENT,), AFTER, "partial"))


class Reduce(Reduction, reads=("src", "dst")):
    """dst <- the sum of several ranks' src, in rank order: of this rank's part of the bucket. When it returns, the
    others have read src as well. The last hop adds the mean over all ranks to an accumulator."""

    contents = (*_FROM, Row("dst", "host_sum", (NOTHING,), AFTER), *_INTO_SUMS)


class Take(Reduction):
    """The first part of such a hop, where the sum comes later: dst, scratch <- all that `Finish` needs. src is free."""

    contents = (*_FROM, Row("dst", "scratch", (NOTHING,), TAKEN))


class Finish(Reduction, reads=("src", "dst"), writes=("dst", "src")):
    """The second part: dst <- the hop's sum, of what is in src, scratch, and what others send if the route sends here.
    src is undefined afterwards."""

    contents = (
        Row("src", "scratch", (TAKEN,), NOTHING),
        Row("dst", "flat_grad host_sum", (NOTHING,), AFTER),
        *_INTO_SUMS,
    )


# --- with offload ---


class StageShard(Move, role=Role.OFFLOAD):
    """dst <- this rank's shard of the accumulator src."""

    contents = (
        Row("src", "acc", (TOTAL, SUM), LANDED),
        Row("src", "acc", (GRADIENT,), LANDED, "alone"),
        Row("dst", "staging", (NOTHING,), TOTAL),
    )


class CopyToHost(Move, role=Role.OFFLOAD, stream=COPY):
    """Host memory <- device."""

    contents = (Row("src", "staging", (TOTAL, GRADIENT), NOTHING), Row("dst", "host", (SUM,), LANDED))


class CopyToDevice(Move, role=Role.OFFLOAD, stream=COPY):
    """Device <- host memory; an accumulator only if it holds something."""

    contents = (
        Row("src", "host", (SUM,), SUM),
        Row("dst", "staging", (NOTHING,), SUM, beside="host"),
        Row("src", "master", (OLD, NEW), CAST),
        Row("src", "param", (CAST,), NOTHING),
        Row("dst", "flat_param", (OLD,), NEW, "replicated"),
        Row("dst", "weight", (OLD,), NEW, "sharded"),
        Row("dst", "staging", (NOTHING,), NEW, "sharded", beside="master param"),
    )


class Update(Move, role=Role.OFFLOAD, stream=HOST, reads=("src", "dst")):
    """Updates the masters dst of one bucket with the gradients src, on the processor."""

    contents = (Row("dst", "master", (OLD,), NEW), Row("src", "host", (SUM,), SUM))


class CastParam(Move, role=Role.OFFLOAD, stream=HOST):
    """Host memory <- masters, cast to the parameters' dtype."""

    contents = (Row("src", "master", (OLD, NEW), CAST), Row("dst", "param", (NOTHING,), CAST))


# --- weights ---


@dataclass(frozen=True)
class Weights(BucketOp, role=Role.WEIGHTS, stream=COMM, reads=("src",), writes=("dst",)):
    """dst <- weights of a bucket that other ranks have. ``src`` has this rank's; None: dst has them."""

    dst: Buffer
    src: Buffer | None = None

    @property
    def read_fields(self) -> tuple[str, ...]:
        return ("dst",) if self.src is None else self.reads


class Spread(Weights):
    """dst, this rank's shard <- its parts of the whole parameters that ranks have updated, each of which sends its
    own."""

    contents = (
        Row("dst", "flat_param", (NEW,), NEW, "offload"),
        Row("dst", "flat_param gathered", (OLD,), OLD, "device"),
        Row("src", "staging", (NEW,), NOTHING),
        Row("dst", "weight", (OLD,), NEW, "sharded", beside="staging"),
    )


@dataclass(frozen=True)
class Gather(Weights, writes=("dst", "scratch")):
    """dst <- the bucket's weights, from all ranks' shards; ``extent``: into these bytes of it.

    With ``scratch`` they leave a host encoded: each rank encodes its shard into its row of scratch, all rows are
    gathered there, and each rank decodes all of them, its own included. So all ranks have the same bits. After an
    update these are differences, what masters are ahead of dst. Like the weights, only the main stream writes masters,
    before the schedule or after it; so the order of dst is theirs, too. """

    extent: Extent | None = None
    scratch: Buffer | None = None

    contents = (
        Row("dst", "flat_param", (NEW,), GATHERED, "offload"),
        Row("dst", "flat_param gathered", (OLD,), GATHERED, "device exact"),
        Row("dst", "flat_param gathered", (OLD,), GATHERED, "device encoded", beside="update"),
        Row("src", "weight", (OLD,), OLD),
        Row("dst", "flat_param", (OLD,), GATHERED, beside="weight"),
        Row("dst", "arena", (NOTHING,), NOTHING),  # `zc.passes.residency` knows what its extents hold
        Row("scratch", "update", (NOTHING,), NOTHING),
    )

    def extents(self, field: str) -> Spans | None:
        return (self.extent,) if field == "dst" and self.extent is not None else None


def gather_node(plan: Plan, bucket: int, dst: Buffer, extent: Extent | None = None) -> Gather:
    """The node that gathers a bucket's weights: into ``extent`` of the arena; into memory of their own; or after an
    update, where dst is what it has written."""
    record = plan.bucket(bucket)
    src = Buffer("weight", bucket) if plan.is_sharded(record) else None
    return Gather(bucket, dst, src, extent, Buffer("update", 0) if plan.encodes_gathers(record) else None)


@dataclass(frozen=True)
class Publish(BucketOp, role=Role.WEIGHTS, reads=("buffer",), writes=("buffer",)):
    """From here on the main stream may read the new parameters, or in stage 3 what it issues may gather them."""

    buffer: Buffer

    contents = (
        Row("buffer", "flat_param", (GATHERED,), PUBLISHED),
        Row("buffer", "flat_param", (NEW, OLD), PUBLISHED, "unsharded"),
        Row("buffer", "gathered", (OLD, GATHERED), PUBLISHED),
        Row("buffer", "weight", (NEW,), PUBLISHED),
    )


# --- weights that exist while they are read (stage 3) ---


@dataclass(frozen=True)
class TakeWeights(Op, role=Role.WEIGHTS, returns_items=True):
    """A graph's window: until the next one it reads the parameters at ``places``, (bucket, slot) each, and no others.
    Without places it ends the last window."""

    places: Spans

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(bucket for bucket, _ in self.places))


@dataclass(frozen=True)
class ReadWeights(Op, role=Role.WEIGHTS, reads=("buffer",)):
    """The ``use``-th window of a pass: the graph that has it reads these buckets, in bytes ``spans`` of the buffer."""

    buffer: Buffer
    use: int
    buckets: tuple[int, ...]
    spans: Spans = field(kw_only=True)

    def extents(self, field: str) -> Spans:
        return self.spans


@dataclass(frozen=True)
class FreeWeights(BucketOp, role=Role.WEIGHTS, reads=("buffer",)):
    """Bytes [start, stop) of the buffer may be gathered into again. It counts as their last read: the reads of the
    graph after the last `ReadWeights` come before it."""

    buffer: Buffer
    start: int
    stop: int

    def extents(self, field: str) -> Spans:
        return ((self.start, self.stop),)


# --- order ---


@dataclass(frozen=True)
class Sync(Op, role=Role.SYNC):
    """Orders the node's stream, by an event."""

    event: EventName


class RecordEvent(Sync):
    """As torch.Stream.record_event."""


class WaitEvent(Sync):
    """As torch.Stream.wait_event: for the latest record issued before."""


AnyOp = TypeVar("AnyOp", bound=Op)


def renamed(op: AnyOp, old: Buffer, new: Buffer) -> AnyOp:
    """The same node, on ``new`` instead of ``old``."""
    changes: Any = {name: new for name, buffer in op.buffers.items() if buffer == old}
    return replace(op, **changes)
