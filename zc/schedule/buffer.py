"""The buffers of a schedule by name, and what each kind of them is: docs/proof.md prints the table.

A buffer that the plan owns is a `Buffer`. Everything else that a node accesses is a value, named after the node that
returns it, ``%name``.

Across schedules: a plan-owned buffer may still be in use by an earlier schedule when this one starts. After the last
use on its carrier every schedule records the *carried* event ``done/<buffer>``, and the first use on another stream in
a later schedule waits for it. Waiting for an event that was never recorded is no wait (as in CUDA). docs/proof.md has
the whole contract at entry and exit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from zc.planning.hops import Hop
    from zc.planning.plan import Plan


COMPUTE, COMM, COPY, HOST = "compute", "comm", "copy", "host"
COMM_HOST = "comm.host"  # with two levels: what ranks of one host exchange; it ends with each schedule
MAIN = COMPUTE  # the stream on which autograd calls the schedule; its program order goes on across schedules


class Kind(NamedTuple):
    """What is true of all buffers of one kind.

    ``holds``: what lies there, in words.
    ``carrier``: the one side stream on which such a buffer may still be in use when a schedule has ended; MAIN: none.
    ``on_host``: the processor itself reads or writes it. A wait of the main stream is the device's, and does not order
    it.
    ``is_shared``: under which plans other schedules may use the buffer number ``index`` on its carrier and elsewhere.
    It then needs a carried event, whatever this schedule does. ``shared`` says the same in words.
    """

    holds: str
    carrier: str
    on_host: bool = False
    shared: str = "never"
    is_shared: Callable[[Plan, int], bool] = lambda plan, index: False


def _is_summed(plan: Plan) -> bool:
    """Accumulators that are read on comm as well: partial sums that are sent, or copied to host memory."""
    return not plan.placement.shards_gradients and (plan.num_ranks > 1 or plan.offload is not None)


def _sums_apart(plan: Plan, hop: Hop) -> bool:
    """Whether this hop of a reduction has a stream of its own beside comm, which takes its sum."""
    return hop.is_direct and len(plan.hops) > 1


def _gathers_while_reading(plan: Plan) -> bool:
    return plan.overlap and bool(plan.sharded)


KINDS = {
    "flat_grad": Kind("gradients of one bucket; a ring", COMM, shared="stage 2 with overlap",
                      is_shared=lambda plan, _: plan.overlap and plan.placement.shards_gradients),
    "scratch": Kind("what ranks have sent in one hop of a reduction", COMM),
    "update": Kind("encoded differences between the masters of one bucket and its weights", COMM),
    "host_sum": Kind("several hops: the sum of one, over the ranks of a host or replica; a ring", COMM,
                 shared="with overlap, where ranks read each other's memory",
                 is_shared=lambda plan, _: plan.overlap and any(_sums_apart(plan, hop) for hop in plan.hops)),
    "acc": Kind("the accumulator of bucket i", COMM, shared="stage 1 with overlap, if its sums are sent or offloaded",
                is_shared=lambda plan, _: plan.overlap and _is_summed(plan)),
    "flat_param": Kind("the weights of bucket i", MAIN),
    "gathered": Kind("the same with overlap_gather, as the last update left them", COMM, shared="always",
                     is_shared=lambda plan, _: True),
    "weight": Kind("sharded weights: this rank's shard of the weights of bucket i", COMM,
                   shared="with overlap", is_shared=lambda plan, _: _gathers_while_reading(plan)),
    "arena": Kind("sharded weights: gathered weights, each bucket in bytes of its own while it is read", COMM,
                  shared="with overlap", is_shared=lambda plan, _: _gathers_while_reading(plan)),
    "staging": Kind("offload: a gradient between device and host memory, or stage 3's updated whole parameters; a ring",
                    COPY),
    "host": Kind("offload: the gradient of bucket i that the update reads", COPY, on_host=True, shared="always",
                 is_shared=lambda plan, _: True),
    "master": Kind("offload: the masters of bucket i", COPY, on_host=True, shared="where they are copied as they are",
                   is_shared=lambda plan, index: not plan.buckets[index].has_master),
    "param": Kind("offload: masters, cast to the parameters' dtype; a ring", COPY, on_host=True),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Buffer:
    """Number ``index`` of its kind: of a ring, or of a bucket. ``str()`` gives its name in a schedule,
    ``flat_grad[0]``."""

    kind: str
    index: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.index < 0:
            raise ValueError(f"{self.kind}[{self.index}] is no buffer: {', '.join(KINDS)}")

    def __str__(self) -> str:
        return f"{self.kind}[{self.index}]"

    @staticmethod
    @functools.cache
    def named(name: str) -> Buffer:
        """The buffer whose name this is."""
        kind, bracket, index = name.removesuffix("]").partition("[")
        if not (bracket and name.endswith("]") and index.isdecimal()):
            raise ValueError(f"{name!r} is no buffer's name, such as 'flat_grad[0]'")
        return Buffer(kind, int(index))

    @property
    def carrier(self) -> str:
        return KINDS[self.kind].carrier

    @property
    def on_host(self) -> bool:
        return KINDS[self.kind].on_host

    def is_shared(self, plan: Plan) -> bool:
        return KINDS[self.kind].is_shared(plan, self.index)


Place = Buffer | str  # a buffer, or a value by name


class Access(NamedTuple):
    """An access to elements [start, stop) of a buffer; to all of it where the extent does not matter."""

    buffer: Place
    start: int = 0
    stop: int = 1 << 62


def overlap(a: Access, b: Access) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


_CARRIED = "done/"


def carried_event(buffer: Buffer) -> str:
    """The event that later schedules wait for before they access a plan-owned buffer."""
    return f"{_CARRIED}{buffer}"


def carried_by(event: str) -> Buffer | None:
    """The buffer whose carried event this is; None: one of this schedule alone."""
    return Buffer.named(event.removeprefix(_CARRIED)) if event.startswith(_CARRIED) else None
