"""The route of few bits (`zc.planning.wire`): between hosts, or among the GPUs of one. `zc.compile` hands it over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from zc.kernels import add_blocks, encode_blocks, sum_blocks
from zc.kernels.blocks import Blocks
from zc.planning.wire import Rows, own_row, place_of, rows_between_hosts
from zc.ranks.exchanges import Sum
from zc.ranks.journal import GATHER, REDUCE
from zc.ranks.routes import Route, Routes

if TYPE_CHECKING:
    from zc.planning.plan import Bucket, Encoding, Hop, Plan
    from zc.ranks.exchanges import Exchanges

_RowsOf = Callable[["Plan", "Bucket", int, int], Rows]  # of a rank, in so many bits


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
        self._codes: dict[tuple[str, int], _Code] = {}

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        code = self._sent(bucket)
        encode_blocks(sent, scratch[: code.rows.nbytes], code.blocks)

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        """Sends each rank its row, and decodes those that the others send to this one."""
        sent, received = self._sent(bucket), self._code("received", bucket, own_row, self._plan.reduce_encoding)
        count, size, end = self._ranks.world_size, received.rows.nbytes, sent.rows.nbytes
        rows = scratch[end : end + count * size].view(count, size)
        pieces = list(enumerate(sent.split(scratch)))
        self._ranks.exchange(list(enumerate(rows)), pieces, REDUCE, bucket.index).wait()
        sum_blocks(rows, total.out, received.blocks, scale=total.scale, add=total.add)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        assert scratch is not None, "the plan says that these weights travel encoded"
        code = self._code("differences", bucket, rows_between_hosts, self._plan.gather_encoding)
        own = self._code("own", bucket, own_row, self._plan.gather_encoding)
        rows = code.split(scratch)
        encode_blocks(shard, rows[place_of(self._plan, bucket, self._rank)], own.blocks, base=base)
        self._ranks.gather_rows(rows, GATHER, bucket.index).wait()
        add_blocks(scratch[: code.rows.nbytes], whole if base is not None else whole.zero_(), code.blocks)

    def _sent(self, bucket: Bucket) -> _Code:
        return self._code("sent", bucket, rows_between_hosts, self._plan.reduce_encoding)

    def _code(self, use: str, bucket: Bucket, rows_of: _RowsOf, encoding: Encoding | None) -> _Code:
        if (use, bucket.index) not in self._codes:
            assert encoding is not None, "the plan says that this travels encoded"
            rows = rows_of(self._plan, bucket, self._rank, encoding.bits)
            self._codes[use, bucket.index] = _Code(rows, Blocks(rows.runs, encoding.bits, self._tables))
        return self._codes[use, bucket.index]


def encoded(routes: Routes, hop: Hop) -> Route:
    sharers = routes.group.shard
    return Encoded(sharers.of_level(hop.among), routes.plan, sharers.rank, routes.tables)
