"""What travels encoded between hosts: the operations of `zc.planning.wire` on one rank's buffers.

A gradient is encoded once, by the rank that sends it, and decoded once, by the rank that sums it. A difference of
weights is encoded by its owner and decoded by every rank, the owner included, so all have the same bits; what rounding
leaves stays in the master and is part of the next difference. In stage 3 each gather encodes weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from zc.kernels._blocks import Blocks
from zc.kernels.decode_blocks import add_blocks, sum_blocks
from zc.kernels.encode_blocks import encode_blocks
from zc.log import log
from zc.planning.plan import Level
from zc.planning.wire import Rows, own_row_to_gather, place_of, row_of, rows_to_gather, rows_to_reduce
from zc.ranks.journal import GATHER, REDUCE, wait
from zc.schedule.buffer import Buffer

if TYPE_CHECKING:
    from zc.engine.accumulators import Accumulators
    from zc.planning.plan import Bucket


class Code(NamedTuple):
    """Where blocks lie in what this rank sends or receives of one bucket."""

    rows: Rows
    blocks: Blocks


def _sent(accs: Accumulators, bucket: int) -> Code:
    """The rows of all ranks that get a part of this rank's gradients."""
    return _code(accs, "sent", bucket, lambda record: rows_to_reduce(accs.plan, record, accs.sharers.rank))


def _received(accs: Accumulators, bucket: int) -> Code:
    """One row, as each rank sends it to this one."""
    return _code(accs, "received", bucket, lambda record: row_of(accs.plan, record, accs.sharers.rank))


def _differences(accs: Accumulators, bucket: int) -> Code:
    """The rows of differences of all ranks that share the weights."""
    return _code(accs, "differences", bucket, lambda record: rows_to_gather(accs.plan, record, accs.sharers.rank))


def _own_difference(accs: Accumulators, bucket: int) -> Code:
    """The row among them that this rank sends, on its own."""
    return _code(accs, "own", bucket, lambda record: own_row_to_gather(accs.plan, record, accs.sharers.rank))


def _code(accs: Accumulators, use: str, bucket: int, rows_of: Callable[[Bucket], Rows]) -> Code:
    if (use, bucket) not in accs.codes:
        rows = rows_of(accs.plan.buckets[bucket])
        bits = accs.plan.reduce_bits if use in ("sent", "received") else accs.plan.gather_bits
        accs.codes[use, bucket] = Code(rows, Blocks(rows.runs, bits, accs.buffers.tables))
    return accs.codes[use, bucket]


def _rows(buffer: Tensor, rows: Rows) -> list[Tensor]:
    return [buffer[start:stop] for start, stop in itertools.pairwise(rows.offsets)]


def quantise(accs: Accumulators, bucket: int, dst: str, src: str) -> None:
    record, code = accs.plan.buckets[bucket], _sent(accs, bucket)
    is_sum = Buffer.named(src).kind == "host_sum" or accs.plan.sums_in_place
    sent = accs.buffers.sent(src, record, Level.NET if is_sum else Level.ALL)
    if not is_sum:
        accs.start_reduction(bucket, sent)
    log.debug("bucket %d: %s is encoded into %s", bucket, src, dst)
    encode_blocks(sent, accs.buffers.raw(dst)[: code.rows.nbytes], code.blocks)


def exchange_encoded(accs: Accumulators, bucket: int, dst: str, src: str) -> None:
    """Sends each rank its row."""
    sent = _rows(accs.buffers.raw(src), _sent(accs, bucket).rows)
    received = list(_received_rows(accs, bucket, dst))
    accs.sharers.net.exchange(list(enumerate(received)), list(enumerate(sent)), REDUCE, bucket).wait()


def _received_rows(accs: Accumulators, bucket: int, buffer: str) -> Tensor:
    """[ranks, bytes]"""
    count, size = len(_sent(accs, bucket).rows.offsets) - 1, _received(accs, bucket).rows.nbytes
    return accs.buffers.raw(buffer)[: count * size].view(count, size)


def accumulate_quantised(accs: Accumulators, bucket: int, acc: str, src: str) -> None:
    record = accs.plan.buckets[bucket]
    log.debug("bucket %d: %s is decoded and reduced into %s", bucket, src, acc)
    rows, blocks = _received_rows(accs, bucket, src), _received(accs, bucket).blocks
    out = accs.buffers.shard(accs.buffers.named(acc, record), record)
    sum_blocks(rows, out, blocks, scale=1.0 / accs.plan.num_ranks, add=accs.is_added_to(bucket))
    accs.end_reduction(bucket, out)


def gather_differences(accs: Accumulators, bucket: int, via: str, weights: Tensor) -> None:
    """``weights``, of two levels those of a host range, += what all ranks' masters are ahead of them."""
    record, blocks = accs.plan.buckets[bucket], _own_difference(accs, bucket).blocks
    own = accs.buffers.owned(accs.buffers.flat_param[bucket], record)
    encode_blocks(accs.buffers.master_shard[bucket].detach(), _own_row(accs, bucket, via), blocks, base=own)
    _add_rows(accs, bucket, via, weights)
    accs.buffers.remember_shard(record)


def gather_encoded(accs: Accumulators, bucket: int, via: str, out: Tensor) -> None:
    """``out`` <- all ranks' shards of the weights, in stage 3."""
    encode_blocks(accs.buffers.weight_shard(bucket), _own_row(accs, bucket, via), _own_difference(accs, bucket).blocks)
    part = out
    if accs.plan.has_levels:
        part = out[slice(*accs.plan.buckets[bucket].layout.host_range(accs.sharers.rank))]
    _add_rows(accs, bucket, via, part.zero_())
    if accs.plan.has_levels:
        wait(accs.sharers.of_level(Level.HOST).all_gather(out, part, GATHER, bucket))


def _own_row(accs: Accumulators, bucket: int, buffer: str) -> Tensor:
    """Where this rank encodes what it sends."""
    return _difference_rows(accs, bucket, buffer)[place_of(accs.plan, accs.plan.buckets[bucket], accs.sharers.rank)]


def _difference_rows(accs: Accumulators, bucket: int, buffer: str) -> list[Tensor]:
    return _rows(accs.buffers.raw(buffer), _differences(accs, bucket).rows)


def _add_rows(accs: Accumulators, bucket: int, buffer: str, out: Tensor) -> None:
    """Gathers the rows of all ranks, and adds what they decode to."""
    code = _differences(accs, bucket)
    wait(accs.sharers.net.gather_rows(_difference_rows(accs, bucket, buffer), GATHER, bucket))
    add_blocks(accs.buffers.raw(buffer)[: code.rows.nbytes], out, code.blocks)
