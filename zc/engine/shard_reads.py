"""Stage 3 between ranks that read each other's memory: when a rank's shards of the weights may be read.

Between two updates nobody writes a shard. So a rank may read the others' at any time, as often as it likes, and in an
order of its own: ranks may drop different layers, see different tasks, or evaluate alone. Two points order reads and
writes, once per update::

    rank 0:  update 7   open    gather 3, gather 2, ...      close   update 8
                          |                                    |
    rank 1:  update 7   open    gather 0, gather 3, ...      close   update 8

A rank *opens* its shards by one signal per bucket, which says where the shard lies; a gather of another rank waits for
it. Before a rank writes its shards it *closes* them: it signals that its own reads are done, and waits until the others
have done theirs. The model of MPI's passive targets between two fences (MPI-2, 11.4.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zc.engine.part import Part
from zc.ranks.journal import GATHER

if TYPE_CHECKING:
    from zc.engine.core import Core


class ShardReads(Part):
    """The shards of one model on one rank. All ranks open and close the same buckets in the same order."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._open: set[int] = set()
        self._kept: set[int] = set()  # until all ranks have dropped the model

    def open(self) -> None:
        """The others may read all shards, from here to `close`."""
        core = self.core
        if not core.plan.reads_shards:
            return
        group = core.accumulators.sharers
        for bucket in core.buffers.filled:
            weight = core.buffers.weight_shard(bucket)
            if bucket not in self._kept:
                group.keep_alive(weight)
                self._kept.add(bucket)
            if bucket not in self._open:
                group.signal_full(GATHER, bucket, weight)
                self._open.add(bucket)

    def close(self) -> None:
        """Returns when no rank reads a shard any more, so that all of them may be written."""
        if not self._open:
            return
        core, buckets = self.core, sorted(self._open)
        for bucket in buckets:
            core.accumulators.weight_places(bucket)  # also of ranks whose shards this one has not read
            core.accumulators.places.pop(bucket)
        group = core.accumulators.sharers
        group.signal_free(GATHER, buckets[0])
        group.await_free(GATHER, buckets[0])
        self._open.clear()
