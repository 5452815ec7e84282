"""What each node of a schedule may look like: one frozen record a kind, which passes and proof match on.

A field's name means the same in every kind, and `zc.schedule.arguments` says how it stands in a node's: ``bucket`` and
``slot`` are numbers in the plan; ``buffer``, ``dst`` and ``src`` name buffers; ``start`` and ``stop`` are elements of
one; ``grad``, ``grads``, ``inputs``, ``values`` and ``work`` are values, made by other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from zc.schedule.buffer import Buffer

Nodes = tuple[fx.Node, ...]
Spans = tuple[tuple[int, int], ...]  # elements [start, stop)


@dataclass(frozen=True)
class Op:
    """What a node is."""


@dataclass(frozen=True)
class Segment(Op):
    """Compiled pure compute; its results are taken by operator.getitem."""

    key: str
    inputs: Nodes


@dataclass(frozen=True)
class Deposit(Op):
    """Keeps the gradient until the bucket is reduced at the end of the backward."""

    bucket: int
    slot: int
    grad: fx.Node

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class BufferOp(Op):
    """On buffers of the plan, for one bucket."""

    bucket: int


# --- gradients are written ---


@dataclass(frozen=True)
class Cast(BufferOp):
    """With spans: only these elements of the buffer."""

    buffer: Buffer
    slots: tuple[int, ...]
    grads: Nodes
    spans: Spans | None = None


class FlattenCast(Cast):
    """buffer <- grads, cast; everything else in it 0 (stage 2)."""


class AccumulateCast(Cast):
    """buffer += grads, in fp32; the first write of an update overwrites (stage 1)."""


@dataclass(frozen=True)
class WgradInto(BufferOp):
    """Makes a gradient in the slot's elements [start, stop) alone (stage 1: adds it); the slots of one bucket may have
    producers on several streams."""

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

# --- and go from buffer to buffer ---


@dataclass(frozen=True)
class Move(BufferOp):
    """dst <- src."""

    dst: Buffer
    src: Buffer


class LaunchReduce(Move):
    """Starts the exchange of src into dst, and makes its work. In flight until its wait_reduce: until then it reads src
    and writes dst, whatever runs elsewhere."""


@dataclass(frozen=True)
class WaitReduce(BufferOp):
    """The completion of a launch."""

    work: fx.Node
    dst: Buffer
    src: Buffer


class Accumulate(Move):
    """dst (+)= mean over ranks of the rows in src."""


class ReduceRows(Move):
    """dst (+)= mean over ranks of their src, each read where it lies: this rank's part of it."""


class SumRows(Move):
    """dst <- sum over the ranks of this host of their src, each read where it lies: of the segment that the ranks of
    this one's number reduce between hosts."""


class SumReceived(Move):
    """dst <- sum over the ranks of ``shard`` of the rows in src (a mesh of two dimensions)."""


@dataclass(frozen=True)
class ReduceReplicas(Move):
    """dst (+)= mean over all ranks of this rank's shard: src is what ``shard`` has of it on each replica. Each replica
    sums its piece of the shard, of rows that it receives in ``via``, and all get all pieces: one sum, the same bits."""

    via: Buffer


class StageShard(Move):
    """dst <- this rank's part of the accumulator src (offload)."""


class CopyToHost(Move):
    """Host memory <- device."""


class CopyToDevice(Move):
    """Device <- host memory; an accumulator only where it holds something."""


class Update(Move):
    """The optimizer's update of one bucket's masters dst by the gradients src, by the processor."""


class CastParam(Move):
    """Host memory <- masters, cast to the parameters' dtype."""


# --- weights ---


@dataclass(frozen=True)
class Weights(BufferOp):
    buffer: Buffer


class Spread(Weights):
    """What ranks have updated of whole parameters goes into the shards that it lies in."""


class GatherNet(Weights):
    """Of the bucket's weights this rank's segment <- the shards of the ranks of its number, on the other hosts."""


class Gather(Weights):
    """The bucket's weights <- all ranks' shards of them; behind a `GatherNet` the segments of this host's ranks."""


class Publish(Weights):
    """The home stream may read the new parameters."""


# --- between ranks that read each other's memory: each runs the same ones, in the same order ---


@dataclass(frozen=True)
class Signal(BufferOp):
    """Tells the others, or waits until all of them have told."""

    buffer: Buffer


class SignalFull(Signal):
    """The others may read the buffer."""


class AwaitFull(Signal):
    """Theirs may be read."""


class SignalFree(Signal):
    """This rank has read theirs."""


class AwaitFree(Signal):
    """The others have read the buffer. Since `SignalFull` nobody may have written what they read."""


# --- order ---


class Sync(Op):
    """On the node's stream."""


@dataclass(frozen=True)
class Event(Sync):
    event: str


class RecordEvent(Event):
    pass


class WaitEvent(Event):
    """For the latest record issued before."""


@dataclass(frozen=True)
class Release(Sync):
    """Gives the values' storage back, on the stream that made them."""

    values: Nodes


AnyOp = TypeVar("AnyOp", bound=Op)


def buffers_of(op: Op) -> dict[str, Buffer]:
    """The buffers that a node names, by field."""
    return {name: item for name, item in vars(op).items() if isinstance(item, Buffer)}


def renamed(op: AnyOp, old: Buffer, new: Buffer) -> AnyOp:
    """The same on ``new`` wherever it names ``old``."""
    changes: Any = {name: new for name, item in buffers_of(op).items() if item == old}
    return replace(op, **changes)
