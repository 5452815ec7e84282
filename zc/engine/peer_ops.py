"""Between ranks: the operations that read each other's memory, and those that bring weights together.

What is told and waited for, and who reads what, is the schedule's; where the others' buffers lie comes with their
signals (`zc.ranks.neighbours`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from zc.engine.owners import spread
from zc.kernels import reduce_rows
from zc.log import log
from zc.ranks.journal import EXCHANGES
from zc.schedule.buffer import Buffer

if TYPE_CHECKING:
    from zc.engine.buffers import Buffers
    from zc.planning.plan import Plan
    from zc.ranks.comm import Group
    from zc.ranks.work import Work

REDUCE, GATHER = EXCHANGES[:2]


def _exchange(buffer: str) -> str:
    """What ranks exchange when they read this buffer of each other."""
    return GATHER if Buffer.named(buffer).kind in ("flat_param", "gathered") else REDUCE


def sum_rows(rows: Tensor, out: Tensor, acc_dtype: torch.dtype) -> None:
    """out [n] <- the sum of rows [ranks, n] in rank order, in ``acc_dtype``."""
    total = out if out.dtype == acc_dtype else torch.empty_like(out, dtype=acc_dtype)
    reduce_rows(rows, total, scale=1.0, add=False)
    if total is not out:
        out.copy_(total)


def sum_over_replicas(replicas: Group, out: Tensor, sent: Tensor, bucket: int) -> None:
    """out [S] <- the sum of ``sent`` [S] over the replicas, in their order: the same bits on all of them. Each replica
    sums a piece, and all get all pieces.

    ``out`` is at least as wide as ``sent``: the pieces that a rank receives lie there until it has summed them.
    """
    rows = out.view(torch.uint8)[: sent.nbytes].view(sent.dtype)
    piece = torch.empty(len(out) // replicas.world_size, dtype=out.dtype, device=out.device)
    _done(replicas.all_to_all(rows, sent, bucket))
    pieces = rearrange(rows, "(replica piece) -> replica piece", replica=replicas.world_size)
    reduce_rows(pieces, piece, scale=1.0, add=False)
    _done(replicas.all_gather(out, piece, EXCHANGES[-1], bucket))


def _done(work: Work | None) -> None:
    if work is not None:
        work.wait()


class PeerOps:
    """Over one rank's buffers and group. `zc.engine.ops` knows what the accumulators hold."""

    def __init__(self, plan: Plan, buffers: Buffers, group: Group) -> None:
        self.plan, self.buffers = plan, buffers
        self.group, self.replicas = group.shard, group.replicas  # who has the shards of one whole; the same shard
        self._places: dict[str, dict[int, bytes]] = {}  # by buffer: where the other ranks' is

    def _start_reduction(self, bucket: int, sent: Tensor) -> None:
        raise NotImplementedError

    def _adds(self, bucket: int) -> bool:
        raise NotImplementedError

    def _is_reduced(self, bucket: int, out: Tensor) -> None:
        raise NotImplementedError

    def signal_full(self, bucket: int, buffer: str) -> None:
        record, what = self.plan.buckets[bucket], _exchange(buffer)
        if what == REDUCE:
            sent = self.buffers.named(buffer, record)
            self._start_reduction(bucket, sent)
        else:
            log.debug("bucket %d: its weights are gathered", bucket)
            sent = self.buffers.flat_param[bucket][slice(*record.layout.host_range(self.group.rank))]
        self.group.signal_full(what, bucket, sent)

    def await_full(self, bucket: int, buffer: str) -> None:
        self._places[buffer] = self.group.await_full(_exchange(buffer), bucket)

    def reduce_rows(self, bucket: int, dst: str, src: str) -> None:
        record, rank = self.plan.buckets[bucket], self.group.rank
        sent, out, add = self.buffers.named(src, record), self.buffers.named(dst, record), self._adds(bucket)
        is_first = self.plan.reduces_twice
        if not is_first:
            out = self.buffers.shard(out, record)

        def use(rows: Tensor, start: int, stop: int) -> None:
            if is_first:
                sum_rows(rows, out[start:stop], record.acc_dtype)
            else:
                reduce_rows(rows, out[start:stop], scale=1.0 / self.plan.num_ranks, add=add)

        places = self._places[src]
        self.group.near().rows(sent, *record.layout.host_range(rank), places, use)  # one host: the shard
        log.debug("bucket %d: all ranks' %s are reduced into %s", bucket, src, dst)
        if not is_first:
            self._is_reduced(bucket, out)

    def signal_free(self, bucket: int, buffer: str) -> None:
        self.group.signal_free(_exchange(buffer), bucket)

    def await_free(self, bucket: int, buffer: str) -> None:
        self.group.await_free(_exchange(buffer), bucket)

    # --- parameters ---

    def spread(self, bucket: int, buffer: str) -> None:
        spread(self.buffers, self.group, self.plan.buckets[bucket])

    def gather_net(self, bucket: int, buffer: str) -> None:
        log.debug("bucket %d: its weights are gathered between hosts", bucket)
        flat, layout = self.buffers.flat_param[bucket], self.plan.buckets[bucket].layout
        segment = flat[slice(*layout.host_range(self.group.rank))]
        self.group.gather_net(segment.view(layout.num_hosts, -1), bucket).wait()

    def gather(self, bucket: int, buffer: str) -> None:
        flat, record = self.buffers.flat_param[bucket], self.plan.buckets[bucket]
        if self.plan.reads_weights:
            for peer, place in self._places[buffer].items():
                self.group.near().read(flat[slice(*record.layout.host_range(peer))], peer, place)
            return
        log.debug("bucket %d: its weights are gathered", bucket)
        _done(self.group.all_gather(flat, self.buffers.shard(flat, record), "gather weights", bucket))

    def publish(self, bucket: int, buffer: str) -> None:
        """Nothing to do: the node stands for the main stream's right to read, and its waits give it that."""
        log.debug("bucket %d: its new weights may be read", bucket)
