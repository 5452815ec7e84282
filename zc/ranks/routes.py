"""How ranks bring gradients together and weights apart. A model has its routes from zc.compile on.

A schedule says what goes where, such as ``reduce(2, "acc[2]", "flat_grad[0]")``, and the plan by which hops
(`zc.planning.plan`). A route does one hop: `Messages` sends; `Memory` reads what the other ranks of a host have, where
it lies; `Encoded` sends 8 bits an element; `Replicas` sums over the ranks with one shard; `Shards` reads shards of
weights in any order, between two updates.

**When a method returns, no other rank reads or writes the buffers that it was given** (on a GPU: nothing that the
current stream runs afterwards meets such a read or write); shards of weights that are read between two updates are
given by `open`, and free when `close` returns. So the order of one rank's nodes is all that a proof needs,
whatever the routes are (docs/proof.md).

A reduction by messages is two calls, `take` and `finish`: what was sent is free before the sum is in its place, so the
next bucket may fill that buffer (where a host's sum comes back into it, after the next hop has taken that). `Messages`
sends in `take` and sums in `finish`; `Encoded` encodes in `take`, sends and sums in `finish`; `Replicas` sends and sums
in `take`. Where ranks read memory, a sum and its reads are one call, `reduce`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from zc.kernels import reduce_rows
from zc.kernels.blocks import Blocks, add_blocks, encode_blocks, sum_blocks
from zc.planning.plan import Bucket, Hop, Plan, Way, hops_to_gather, reads_shards
from zc.ranks.exchanges import Work
from zc.ranks.journal import EXCHANGES, GATHER, GATHER_SUMS, REDUCE

if TYPE_CHECKING:
    from zc.planning.wire import Rows, Wire
    from zc.ranks.exchanges import Exchanges
    from zc.ranks.group import Group
    from zc.ranks.neighbours import ReadAll


_GATHER = EXCHANGES.index(GATHER)


class Sum(NamedTuple):
    """Where a sum over ranks goes: ``out`` [n] <- scale * the sum, or with ``add`` out += that."""

    out: Tensor
    scale: float = 1.0
    add: bool = False


class Route:
    """One hop. All ranks call the same methods in the same order; each class has those that its hops need.

    ``sent`` [P], or a part of it: this rank's gradients, or a sum of some ranks'. ``scratch``: bytes, as many as
    `Hop.nbytes_scratch` or `zc.planning.allocations` say. ``whole``: a bucket's weights, or a part of them.
    """

    def reduce(self, bucket: Bucket, sent: Tensor, total: Sum) -> None:
        """``total`` <- this rank's part of the sum of all ranks' ``sent``."""
        raise NotImplementedError

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        """Returns when ``sent`` may be overwritten (on a GPU: by what the current stream runs then). ``scratch`` has
        what `finish` needs."""
        raise NotImplementedError

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        """``total`` <- this rank's part of the sum of what all ranks have sent."""
        raise NotImplementedError

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        """``whole`` <- all ranks' shards, this one's being ``shard``, which may lie in ``whole``. With ``base``, the
        shard as all ranks have it, ``whole`` += what each rank's shard is ahead of that (exact blocks replace)."""
        raise NotImplementedError


class Alone(Route):
    """One rank."""

    def reduce(self, bucket: Bucket, sent: Tensor, total: Sum) -> None:
        add_rows(total, sent.view(1, -1), bucket)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        if whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)


@dataclass(frozen=True)
class Messages(Route):
    """Collectives of a process group, or pairs of sends where that has none (gloo). ``is_native``: the group sums, too
    (NCCL's reduce_scatter)."""

    ranks: Exchanges
    hop: Hop
    is_native: bool = False

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        if self.is_native:
            out = part_of(scratch, bucket.layout.numel_shard, sent.dtype)
            self.ranks.reduce_scatter(out, sent, bucket.index).wait()
        else:
            self.ranks.all_to_all(part_of(scratch, sent.numel(), sent.dtype), sent, bucket.index).wait()

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        count = 1 if self.is_native else self.ranks.world_size
        rows = part_of(scratch, count * total.out.numel(), self.hop.dtype(bucket)).view(count, -1)
        add_rows(total, rows, bucket, keeps_rows=False)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        self.ranks.all_gather(whole, shard, GATHER, bucket.index).wait()


class Memory(Route):
    """One copy where messages make three. In a gather this rank's shard lies in ``whole`` already."""

    def __init__(self, ranks: Group) -> None:
        self.ranks, self.neighbours = ranks, ranks.neighbours

    def reduce(self, bucket: Bucket, sent: Tensor, total: Sum) -> None:
        own_range = bucket.layout.net_range(self.neighbours.rank)

        def add(places: Mapping[int, bytes]) -> None:
            for rows, start, stop in self.neighbours.rows(sent, *own_range, places):
                add_rows(total._replace(out=total.out[start:stop]), rows, bucket)

        self.read_each_other(REDUCE, bucket.index, sent, add)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        def read(places: Mapping[int, bytes]) -> None:
            for peer, place in places.items():
                self.neighbours.read(whole[slice(*bucket.layout.net_range(peer))], peer, place)

        self.read_each_other(GATHER, bucket.index, shard, read)

    def read_each_other(self, kind: str, bucket: int, tensor: Tensor, read_all: ReadAll) -> None:
        """Ranks of this host read each other's ``tensor``: a part each if it is reduced, all of it if it is gathered.
        At the end all have read, so each may write its own again (docs/proof.md). Where Ctrl-C or a signal's handler
        raises on the calling thread, this is done first, since the others wait for this rank. ``read_all`` is then
        called once more, so a sum may have parts twice: a gather alone may go on (`Phase.FAILED`)."""
        count = len(self.neighbours.ranks)
        entry = self.ranks.begin(kind, bucket, tensor.nbytes // (count if kind == REDUCE else 1) * (count - 1))
        steps = self.neighbours.offer(EXCHANGES.index(kind), bucket, tensor, read_all)
        work = Work(entry, *steps, journal=self.ranks.journal)
        try:
            work.wait()
        except RuntimeError:
            raise
        except BaseException:
            work.wait()
            raise


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
        self._ranks, self._neighbours = ranks, ranks.neighbours
        self._open: set[int] = set()
        self._kept: set[int] = set()  # until all ranks have dropped the model
        # by bucket: where the other ranks' shards are. The stream of gathers uses it; the issuing thread does when it
        # has joined that stream
        self._places: dict[int, dict[int, bytes]] = {}

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        whole[slice(*bucket.layout.shard_range(self._ranks.rank))] = shard
        for peer, place in self._places_of(bucket.index).items():
            self._neighbours.read(whole[slice(*bucket.layout.shard_range(peer))], peer, place)

    def _places_of(self, index: int) -> dict[int, bytes]:
        """Waits until all ranks have opened this bucket."""
        if index not in self._places:
            places: dict[int, bytes] = {}
            opened = self._neighbours.await_full(_GATHER, index, places)
            Work((GATHER, index), opened, journal=self._ranks.journal).wait()
            self._places[index] = places
        return self._places[index]

    def open(self, shards: Mapping[int, Tensor]) -> None:
        """The others may read ``shards``, by bucket, from here to `close`. All ranks open the same in the same
        order."""
        for index, shard in shards.items():
            if index not in self._kept:
                self._ranks.keep_alive(shard)
                self._kept.add(index)
            if index not in self._open:
                self._ranks.begin(GATHER, index, shard.nbytes * len(self._neighbours.peers))
                self._neighbours.signal_full(_GATHER, index, shard)
                self._open.add(index)

    def close(self) -> None:
        """Returns when no rank reads a shard any more, so that all of them may be written."""
        if not self._open:
            return
        buckets = sorted(self._open)
        for index in buckets:
            self._places_of(index)  # also of ranks whose shards this one has not read
        self._places.clear()
        self._neighbours.signal_free(_GATHER, buckets[0])
        all_have_read = self._neighbours.await_free(_GATHER, buckets[0])
        Work((GATHER, buckets[0]), all_have_read, journal=self._ranks.journal).wait()
        self._open.clear()


class _Code(NamedTuple):
    """Where blocks lie in what this rank sends or receives of one bucket."""

    rows: Rows
    blocks: Blocks

    def split(self, raw: Tensor) -> list[Tensor]:
        """One row of bytes for each rank."""
        return [raw[start:stop] for start, stop in itertools.pairwise(self.rows.offsets)]


class Encoded(Route):
    """Messages of few bits.

    A gradient is encoded once, by the rank that sends it, and decoded once, by the rank that sums it. A difference of
    weights is encoded by its owner and decoded by every rank, the owner included, so all have the same bits; what
    rounding leaves stays in the master and is part of the next difference. In stage 3 each gather encodes weights.
    """

    def __init__(self, ranks: Exchanges, plan: Plan, rank: int, tables: list[Tensor]) -> None:
        self._ranks, self._plan, self._rank, self._tables = ranks, plan, rank, tables
        self._codes: dict[tuple[Wire | None, int, bool], _Code] = {}

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        code = self._code(self._plan.reduce_encoding, bucket)
        encode_blocks(sent, scratch[: code.rows.nbytes], code.blocks)

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        """Sends each rank its row, and decodes those that the others send to this one."""
        wire = self._plan.reduce_encoding
        sent, received = self._code(wire, bucket), self._code(wire, bucket, is_own=True)
        count, size, end = self._ranks.world_size, received.rows.nbytes, sent.rows.nbytes
        rows = scratch[end : end + count * size].view(count, size)
        pieces = list(enumerate(sent.split(scratch)))
        self._ranks.exchange_pieces(list(enumerate(rows)), pieces, REDUCE, bucket.index).wait()
        sum_blocks(rows, total.out, received.blocks, scale=total.scale, add=total.add)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        assert scratch is not None, "the plan says that these weights travel encoded"
        wire = self._plan.gather_encoding
        code, code_of_row = self._code(wire, bucket), self._code(wire, bucket, is_own=True)
        rows = code.split(scratch)
        encode_blocks(shard, rows[self._ranks.rank], code_of_row.blocks, base=base)
        self._ranks.gather_rows(rows, GATHER, bucket.index).wait()
        add_blocks(scratch[: code.rows.nbytes], whole if base is not None else whole.zero_(), code.blocks)

    def _code(self, wire: Wire | None, bucket: Bucket, *, is_own: bool = False) -> _Code:
        """Of a row for each rank; or of this rank's own, which it gets from each rank in a reduction, and gives to all
        in a gather."""
        key = wire, bucket.index, is_own
        if key not in self._codes:
            assert wire is not None, "the plan says that this travels encoded"
            rank = self._rank
            rows = wire.own_row(bucket, rank) if is_own else wire.rows_between_hosts(self._plan, bucket, rank)
            self._codes[key] = _Code(rows, Blocks(rows.runs, wire.bits, self._tables))
        return self._codes[key]


@dataclass(frozen=True)
class Replicas(Route):
    """The ranks with one shard, which all get the same bits of its sum: each sums a piece, in the order of the ranks,
    and sends that to the others."""

    ranks: Exchanges

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        rows, out = part_of(scratch, sent.numel(), sent.dtype), part_of(scratch, sent.numel(), bucket.acc_dtype)
        piece = torch.empty(sent.numel() // self.ranks.world_size, dtype=bucket.acc_dtype, device=sent.device)
        self.ranks.all_to_all(rows, sent, bucket.index).wait()
        pieces = rearrange(rows, "(replica piece) -> replica piece", replica=self.ranks.world_size)
        add_rows(Sum(piece), pieces, bucket, keeps_rows=False)
        # into the bytes of `rows`, which have been summed
        self.ranks.all_gather(out, piece, GATHER_SUMS, bucket.index).wait()

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        add_rows(total, part_of(scratch, total.out.numel(), bucket.acc_dtype).view(1, -1), bucket, keeps_rows=False)


class Routes:
    """The routes of one model on one rank. ``tables``: a list for tensors that kernels read, which live as long."""

    def __init__(self, plan: Plan, group: Group, tables: list[Tensor]) -> None:
        self.plan, self.group, self.tables = plan, group, tables
        self._made: dict[Hop, Route] = {}
        self._to_gather: dict[tuple[int, bool], list[Route]] = {}  # by bucket, and whether exactly
        # of weights that a rank gathers when it likes, also when others don't, where it reads their shards; made here,
        # since two threads use it
        self.shards = Shards(group.shard) if reads_shards(plan) else None
        self.to_reduce = [self._of(hop) for hop in plan.hops]  # of each hop of a reduction

    def gather(
        self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None = None, base: Tensor | None = None
    ) -> None:
        """``whole`` [P] <- the weights of a bucket, hop by hop; without ``scratch`` exactly. Else as `Route.gather`."""
        key = bucket.index, scratch is None
        if key not in self._to_gather:
            hops = hops_to_gather(self.plan, bucket, is_exact=scratch is None)
            self._to_gather[key] = [self._of(hop) for hop in hops]
        routes = self._to_gather[key]
        for route in routes:
            part = whole if route is routes[-1] else whole[slice(*bucket.layout.net_range(self.group.shard.rank))]
            route.gather(bucket, part, shard, scratch, base)
            shard = part

    def _of(self, hop: Hop) -> Route:
        if hop not in self._made:
            self._made[hop] = self._make(hop)
        return self._made[hop]

    def _make(self, hop: Hop) -> Route:
        sharers, plan = self.group.shard, self.plan
        match hop.way:
            case Way.ALONE:
                return Alone()
            case Way.MESSAGES:
                return Messages(sharers.of_level(hop.among), hop, is_native=plan.reduce == "native")
            case Way.MEMORY:
                return Memory(sharers)
            case Way.SHARDS:
                assert self.shards is not None, "the plan says that ranks read each other's shards"
                return self.shards
            case Way.ENCODED:
                return Encoded(sharers.of_level(hop.among), plan, sharers.rank, self.tables)
            case Way.REPLICAS:
                assert self.group.replicas is not None, "the plan has replicas"
                return Replicas(self.group.replicas)


def add_rows(total: Sum, rows: Tensor, bucket: Bucket, *, keeps_rows: bool = True) -> None:
    """``total`` [n] <- the sum of rows [ranks, n] in rank order, in the accumulator's dtype. A sum that travels on may
    be narrower. Without ``keeps_rows`` they are undefined afterwards."""
    out = total.out
    if out.dtype != bucket.acc_dtype:
        out = torch.empty_like(out, dtype=bucket.acc_dtype)
    reduce_rows(rows, out, scale=total.scale, add=total.add, keeps_rows=keeps_rows)
    if out is not total.out:
        total.out.copy_(out)


def part_of(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of ``raw``, which are bytes."""
    return raw[: numel * dtype.itemsize].view(dtype)
