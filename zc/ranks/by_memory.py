"""The routes on which ranks of one host on a CPU read each other's memory. `zc.compile` hands them over.

`zc.ranks.neighbours` has the signals and the reads, docs/proof.md why nobody writes what another rank reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from zc.planning.hops import Hop, Way
from zc.ranks.exchanges import Sum
from zc.ranks.journal import EXCHANGES, GATHER, REDUCE
from zc.ranks.neighbours import Neighbours
from zc.ranks.routes import Route, Routes, add_rows
from zc.ranks.work import Work

if TYPE_CHECKING:
    from zc.planning.plan import Bucket
    from zc.ranks.group import Group


class Offers:
    """What the ranks of this host let each other read."""

    def __init__(self, ranks: Group) -> None:
        assert isinstance(ranks.neighbours, Neighbours), "the plan says that ranks read each other's memory"
        self.ranks, self.neighbours = ranks, ranks.neighbours

    @contextlib.contextmanager
    def offering(self, kind: str, bucket: int, tensor: Tensor) -> Iterator[dict[int, bytes]]:
        """Inside, ranks of this host read each other's ``tensor``: yields where those of the others lie. At the end all
        have read, so each may write its own again (docs/proof.md)."""
        self.signal_full(kind, bucket, tensor)
        yield self.await_full(kind, bucket)
        self.signal_free(kind, bucket)
        self.await_free(kind, bucket)

    def signal_full(self, kind: str, bucket: int, tensor: Tensor) -> None:
        """Lets the others on this host read ``tensor``: a part each if it is reduced, all of it if it is gathered."""
        count = len(self.neighbours.ranks)
        read = tensor.nbytes // count if kind == REDUCE else tensor.nbytes
        self.ranks.begin(kind, bucket, read * (count - 1))
        self.neighbours.signal_full(EXCHANGES.index(kind), bucket, tensor)

    def await_full(self, kind: str, bucket: int) -> dict[int, bytes]:
        """Waits for all others' signals. Returns the addresses of their data, for `read` and `rows`."""
        places: dict[int, bytes] = {}
        step = self.neighbours.await_full(EXCHANGES.index(kind), bucket, places)
        Work((kind, bucket), step, journal=self.ranks.journal).wait()
        return places

    def signal_free(self, kind: str, bucket: int) -> None:
        """Signals that this rank has read the others' data."""
        self.neighbours.signal_free(EXCHANGES.index(kind), bucket)

    def await_free(self, kind: str, bucket: int) -> None:
        """Returns once all others have read this rank's data."""
        step = self.neighbours.await_free(EXCHANGES.index(kind), bucket)
        Work((kind, bucket), step, journal=self.ranks.journal).wait()


class Memory(Route):
    """One copy where messages make three."""

    def __init__(self, ranks: Group) -> None:
        self._offers = Offers(ranks)

    def reduce(self, bucket: Bucket, sent: Tensor, total: Sum) -> None:
        def use(rows: Tensor, start: int, stop: int) -> None:
            add_rows(total._replace(out=total.out[start:stop]), rows, bucket)

        with self._offers.offering(REDUCE, bucket.index, sent) as places:
            self._offers.neighbours.rows(sent, *bucket.layout.host_range(self._offers.neighbours.rank), places, use)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        with self._offers.offering(GATHER, bucket.index, shard) as places:
            for peer, place in places.items():
                self._offers.neighbours.read(whole[slice(*bucket.layout.host_range(peer))], peer, place)


class Shards(Route):
    """The same for shards of weights that nobody writes between two updates (stage 3). There a rank may read the
    others' at any time, as often as it likes, and in an order of its own: ranks may drop different layers, see
    different tasks, or evaluate alone. Two points order reads and writes, once per update::

        rank 0:  update 7   open    gather 3, gather 2, ...      close   update 8
                              |                                    |
        rank 1:  update 7   open    gather 0, gather 3, ...      close   update 8

    A rank *opens* its shards by one signal per bucket, which says where the shard lies; a gather of another rank waits
    for it. Before a rank writes its shards it *closes* them: it signals that its own reads are done, and waits until
    the others have done theirs. The model of MPI's passive targets between two fences (MPI-2, 11.4.1). """

    def __init__(self, ranks: Group) -> None:
        self._ranks, self._offers = ranks, Offers(ranks)
        self._open: set[int] = set()
        self._kept: set[int] = set()  # until all ranks have dropped the model
        # by bucket: where the other ranks' shards are. The stream of gathers uses it; the issuing thread does when it
        # has joined that stream
        self._places: dict[int, dict[int, bytes]] = {}

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        whole[slice(*bucket.layout.shard_range(self._ranks.rank))] = shard
        for peer, place in self._places_of(bucket.index).items():
            self._offers.neighbours.read(whole[slice(*bucket.layout.shard_range(peer))], peer, place)

    def _places_of(self, index: int) -> dict[int, bytes]:
        """Waits until all ranks have opened this bucket."""
        if index not in self._places:
            self._places[index] = self._offers.await_full(GATHER, index)
        return self._places[index]

    def open(self, shards: Mapping[int, Tensor]) -> None:
        """The others may read ``shards``, by bucket, from here to `close`. All ranks open the same in the same
        order."""
        for index, shard in shards.items():
            if index not in self._kept:
                self._ranks.keep_alive(shard)
                self._kept.add(index)
            if index not in self._open:
                self._offers.signal_full(GATHER, index, shard)
                self._open.add(index)

    def close(self) -> None:
        """Returns when no rank reads a shard any more, so that all of them may be written."""
        if not self._open:
            return
        buckets = sorted(self._open)
        for index in buckets:
            self._places_of(index)  # also of ranks whose shards this one has not read
        self._places.clear()
        self._offers.signal_free(GATHER, buckets[0])
        self._offers.await_free(GATHER, buckets[0])
        self._open.clear()


def by_memory(routes: Routes, hop: Hop) -> Route:
    return (Shards if hop.way is Way.SHARDS else Memory)(routes.group.shard)
