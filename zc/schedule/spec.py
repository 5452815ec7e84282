"""What each node of a schedule may look like: one frozen record per kind.

Passes and the proof match on the records. A class also says what is true of all nodes of its kind: their role, their
stream, and which of their buffers they read and write.

A field's name means the same in every kind, and `zc.schedule.arguments` says how it appears in a node's arguments:
``bucket`` and ``slot`` are numbers in the plan; ``buffer``, ``dst`` and ``src`` name buffers; ``start`` and ``stop``
are elements of one; ``grad``, ``grads``, ``inputs``, ``values`` and ``work`` are values that other nodes return.

To add a kind of node, write its record here and its function in the engine's operations, and say in
`zc.passes._transitions` what it needs and leaves in its buffers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import fx

from zc.schedule.buffer import COMM, COMPUTE, COPY, HOST, Buffer

if TYPE_CHECKING:
    from zc.planning.plan import Plan

Nodes = tuple[fx.Node, ...]
Spans = tuple[tuple[int, int], ...]  # elements [start, stop)


class Role(enum.Enum):
    """What a node does. Where ranks do not agree to reduce, the engine leaves out REDUCTION and SIGNAL."""

    COMPUTE = "compute"
    WRITE = "write"  # a gradient goes into its bucket, or is deposited
    REDUCTION = "reduction"  # other ranks' gradients come in
    OFFLOAD = "offload"  # copies between device and host memory, and the update there
    WEIGHTS = "weights"  # new weights go to all ranks
    SIGNAL = "signal"  # between ranks that read each other's memory
    SYNC = "sync"  # between the streams of one rank


@dataclass(frozen=True)
class Op:
    """What a node is. ``stream``: where nodes of the kind run under a plan with overlap (`zc.passes.place_on_streams`).
    ``reads`` and ``writes``: the fields whose buffers they access; every node also reads its inputs and writes its
    results (`zc.schedule.nodes.accesses`)."""

    role: ClassVar[Role]
    stream: ClassVar[str] = COMPUTE
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **traits: Any) -> None:
        for name, trait in traits.items():
            setattr(cls, name, trait)


@dataclass(frozen=True)
class Segment(Op, role=Role.COMPUTE):
    """Compiled pure compute; operator.getitem takes its results."""

    key: str
    inputs: Nodes


@dataclass(frozen=True)
class Deposit(Op, role=Role.WRITE):
    """Keeps the gradient until its bucket is reduced at the end of the backward."""

    bucket: int
    slot: int
    grad: fx.Node

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class BufferOp(Op):
    """Works on buffers of the plan, for one bucket."""

    bucket: int


# --- gradients are written ---


@dataclass(frozen=True)
class Cast(BufferOp, role=Role.WRITE, writes=("buffer",)):
    """With ``spans``: only into these elements of the buffer."""

    buffer: Buffer
    slots: tuple[int, ...]
    grads: Nodes
    spans: Spans | None = None


class FlattenCast(Cast):
    """buffer <- grads, cast; 0 in every other element (stage 2)."""


class AccumulateCast(Cast, reads=("buffer",)):
    """buffer += grads, in fp32; the first write of an update overwrites (stage 1)."""


@dataclass(frozen=True)
class WgradInto(BufferOp, role=Role.WRITE, reads=("buffer",), writes=("buffer",)):
    """Computes one gradient into its slot, the elements [start, stop); in stage 1 adds it. The slots of one bucket may
    have producers on several streams."""

    buffer: Buffer
    slot: int
    start: int
    stop: int
    inputs: Nodes
    how: str | None = None  # "mm" (None), "scatter", "rows": passes/write_in_place.py

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)


Write = Cast | WgradInto

# --- gradients are reduced, from buffer to buffer ---


@dataclass(frozen=True)
class Move(BufferOp, stream=COMM, reads=("src",), writes=("dst",)):
    """dst <- src."""

    dst: Buffer
    src: Buffer


WITHIN_HOST = "host"


@dataclass(frozen=True)
class Reduction(Move, role=Role.REDUCTION):
    """``among``: WITHIN_HOST for the first of two levels by messages, among the ranks of this host; None: among all, or
    of two levels between hosts."""

    among: str | None = None


class LaunchReduce(Reduction):
    """Starts the exchange of src into dst, and returns its work. Until its wait_reduce it reads src and writes dst,
    whatever else runs. Out of a ``host_sum`` it is the second reduction: between hosts, or between replicas."""


@dataclass(frozen=True)
class WaitReduce(BufferOp, role=Role.REDUCTION, stream=COMM, reads=("src",), writes=("dst",)):
    """Waits until a launch has completed."""

    work: fx.Node
    dst: Buffer
    src: Buffer
    among: str | None = None


class Accumulate(Reduction, reads=("src", "dst")):
    """acc (+)= mean over ranks of the rows in src; or host_sum <- their sum, which a second reduction takes. Among the
    ranks of a host: the start of dst, which the launch has sent, <- their sum, which the next launch takes."""


class Quantise(Move, role=Role.REDUCTION):
    """dst <- src in 8 bits, one row per rank that gets a part; then a launch sends dst instead of src. No row crosses
    hosts twice, and no gradient is encoded twice."""


class AccumulateQuantised(Move, role=Role.REDUCTION, reads=("src", "dst")):
    """acc (+)= mean over ranks of what the rows in src decode to, in rank order."""


class ReduceRows(Move, role=Role.REDUCTION, reads=("src", "dst")):
    """The same of the ranks' src, each read where it lies: into acc the mean of this rank's shard; into host_sum the
    sum over this host's ranks of the range that this rank reduces between hosts or replicas."""


# --- with offload ---


class StageShard(Move, role=Role.OFFLOAD):
    """dst <- this rank's shard of the accumulator src."""


class CopyToHost(Move, role=Role.OFFLOAD, stream=COPY):
    """Host memory <- device."""


class CopyToDevice(Move, role=Role.OFFLOAD, stream=COPY):
    """Device <- host memory; an accumulator only if it holds something."""


class Update(Move, role=Role.OFFLOAD, stream=HOST, reads=("src", "dst")):
    """Updates the masters dst of one bucket with the gradients src, on the processor."""


class CastParam(Move, role=Role.OFFLOAD, stream=HOST):
    """Host memory <- masters, cast to the parameters' dtype."""


# --- weights ---


@dataclass(frozen=True)
class Weights(BufferOp, role=Role.WEIGHTS, stream=COMM, reads=("buffer",), writes=("buffer",)):
    """Works on the weights of a bucket."""

    buffer: Buffer


class Spread(Weights):
    """Sends the whole parameters that ranks have updated to the shards in which they lie."""


class SpreadShards(Move, role=Role.WEIGHTS):
    """The same in stage 3: dst, this rank's shard <- its parts of the whole parameters that ranks have updated, each of
    which sends its own in src."""


class GatherNet(Weights):
    """This rank's range of the bucket's weights <- the shards in it, from the ranks of its number on other hosts."""


class Gather(Weights):
    """The bucket's weights <- all ranks' shards; after a `GatherNet` the ranges of this host's ranks."""


class EncodeUpdate(Move, role=Role.WEIGHTS):
    """dst <- what this rank's masters are ahead of the weights src, encoded. Masters are written, like src, on the main
    stream alone, before the schedule or after it; so what orders src orders them."""


class ExchangeUpdates(Weights):
    """The encoded differences of all ranks that share the bucket's weights (of two levels: of the ranks of this number)
    come together."""


class ApplyUpdate(Move, role=Role.WEIGHTS, reads=("src", "dst")):
    """The weights dst += the differences in src, this rank's own included: all ranks have the same bits."""


class Publish(Weights, stream=COMPUTE):
    """From here on the main stream may read the new parameters, or in stage 3 what it issues may gather them."""


# --- weights that exist while they are read (stage 3) ---


@dataclass(frozen=True)
class TakeWeights(Op, role=Role.WEIGHTS):
    """A graph's window: until the next one it reads the parameters at ``places``, (bucket, slot) each, and no others.
    operator.getitem takes them. Without places it ends the last window."""

    places: Spans

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(bucket for bucket, _ in self.places))


@dataclass(frozen=True)
class GatherShards(BufferOp, role=Role.WEIGHTS, stream=COMM, reads=("src",), writes=("dst",)):
    """Bytes [start, stop) of dst <- the bucket's weights, from all ranks' shards src."""

    dst: Buffer
    src: Buffer
    start: int
    stop: int


class GatherWeights(GatherShards):
    """The weights as they are."""


@dataclass(frozen=True)
class GatherEncoded(GatherShards, writes=("dst", "via")):
    """Weights that leave a host encoded: each rank encodes its shard into its row of via, the rows come together
    there, and each rank decodes all of them, its own included. So all ranks read the same values."""

    via: Buffer


def gather_node(plan: Plan, bucket: int, dst: Buffer, start: int, stop: int) -> GatherShards:
    """What gathers the weights of a bucket for a forward or backward."""
    src = Buffer("weight", bucket)
    if plan.encodes_weights(plan.bucket(bucket)):
        return GatherEncoded(bucket, dst, src, start, stop, Buffer("update", 0))
    return GatherWeights(bucket, dst, src, start, stop)


@dataclass(frozen=True)
class ReadWeights(Op, role=Role.WEIGHTS, reads=("buffer",)):
    """The ``use``-th window of a pass: the graph that has it reads these buckets, in bytes ``spans`` of the buffer."""

    buffer: Buffer
    use: int
    buckets: tuple[int, ...]
    spans: Spans


@dataclass(frozen=True)
class FreeWeights(BufferOp, role=Role.WEIGHTS, reads=("buffer",)):
    """Bytes [start, stop) of the buffer may be gathered into again. It counts as a read, the last one: what the graph
    of the last `ReadWeights` reads there comes between the two."""

    buffer: Buffer
    start: int
    stop: int


# --- between ranks that read each other's memory: each rank runs the same ones, in the same order ---


@dataclass(frozen=True)
class Signal(BufferOp, role=Role.SIGNAL, stream=COMM):
    """Tells the other ranks, or waits until all of them have told."""

    buffer: Buffer


class SignalFull(Signal, reads=("buffer",)):
    """The others may read the buffer."""


class AwaitFull(Signal):
    """The others' buffers may be read."""


class SignalFree(Signal):
    """This rank has read the others' buffers."""


class AwaitFree(Signal, reads=("buffer",)):
    """The others have read the buffer; since `SignalFull` nobody may have written it."""


# --- order ---


class Sync(Op, role=Role.SYNC):
    """Orders the node's stream."""


@dataclass(frozen=True)
class Event(Sync):
    """An event of the node's stream."""

    event: str


class RecordEvent(Event):
    """As torch.Stream.record_event."""


class WaitEvent(Event):
    """As torch.Stream.wait_event: for the latest record issued before."""


@dataclass(frozen=True)
class Release(Sync):
    """Frees the values' storage, on the stream that allocated it."""

    values: Nodes


AnyOp = TypeVar("AnyOp", bound=Op)


def buffers_of(op: Op) -> dict[str, Buffer]:
    """The buffers that a node names, by field."""
    return {name: item for name, item in vars(op).items() if isinstance(item, Buffer)}


def renamed(op: AnyOp, old: Buffer, new: Buffer) -> AnyOp:
    """The same node, on ``new`` instead of ``old``."""
    changes: Any = {name: new for name, item in buffers_of(op).items() if item == old}
    return replace(op, **changes)


def completes_reduction(op: Op | None) -> bool:
    """Whether the node brings a bucket's mean over all ranks into an accumulator."""
    if isinstance(op, Reduction) and op.among == WITHIN_HOST:
        return False
    return isinstance(op, Accumulate | AccumulateQuantised | ReduceRows) and op.dst.kind != "host_sum"
