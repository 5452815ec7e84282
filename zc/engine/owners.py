"""Moves whole parameters between the ranks that reduce their gradients and their owner (`zc.planning.layout`).

Before an update `gather_whole` sends reduced gradients to their owners. After it `spread` sends new weights to the
shards that they lie in, which are then gathered like all others. Both send each element at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zc.ranks.journal import FROM_OWNERS, TO_OWNERS
from zc.schedule.spec import Op, Spread

if TYPE_CHECKING:
    from zc.engine.buffers import Accumulators, Buffers, Function
    from zc.planning.plan import Bucket, Plan
    from zc.ranks.group import Group


def gather_whole(plan: Plan, buffers: Buffers, group: Group, buckets: Sequence[int]) -> dict[int, Tensor]:
    """Gathers the gradients of the parameters that this rank updates. Returns by bucket [elements of its run], in the
    accumulator's dtype, in host memory with offload. All ranks call it for the same buckets, after all gradients are
    finished and all streams are joined."""
    rank, whole_grads, works = group.rank, dict[int, Tensor](), []
    for index in buckets:
        bucket = plan.buckets[index]
        shard = buffers.acc_shard(bucket)
        if group.world_size == 1:
            whole_grads[index] = buffers.owned(shard, bucket)
            continue
        shard, whole = shard.to(bucket.device), buffers.whole_grads(bucket)
        received = _pieces(whole, bucket.layout.owned_range(rank)[0], bucket.layout.of_run(rank))
        sent = _pieces(shard, bucket.layout.shard_range(rank)[0], bucket.layout.of_shard(rank))
        work = group.exchange_pieces(received, sent, TO_OWNERS, index)
        works.append((work, sent))  # ``sent`` must live until the wait
        whole_grads[index] = whole
    for work, _ in works:
        work.wait()
    on_host = plan.offload is not None
    return {index: whole.cpu() if on_host else whole for index, whole in whole_grads.items()}


def spread(accs: Accumulators, bucket: int, dst: str, src: str | None = None) -> None:
    """Sends this rank's updated weights to the ranks whose shards they lie in, and receives its own shard, on the
    current stream: in flat_param, or with ``src`` from there to the shard (stage 3 with offload)."""
    record, group = accs.plan.buckets[bucket], accs.sharers
    if src is not None:
        spread_run(accs.buffers.named(dst, record), accs.buffers.staged_run(src, record), group, record)
        return
    flat, layout = accs.buffers.flat_param[bucket], record.layout
    received, sent = _pieces(flat, 0, layout.of_shard(group.rank)), _pieces(flat, 0, layout.of_run(group.rank))
    group.exchange_pieces(received, sent, FROM_OWNERS, bucket).wait()


def spread_run(shard: Tensor, run: Tensor, group: Group, bucket: Bucket) -> None:
    """In stage 3, where no rank has whole weights: from ``run``, the parameters that this rank has updated, into all
    ranks' shards, its own being ``shard``."""
    layout = bucket.layout
    if group.world_size == 1:
        shard[: run.numel()] = run
        return
    received = _pieces(shard, layout.shard_range(group.rank)[0], layout.of_shard(group.rank))
    sent = _pieces(run, layout.owned_range(group.rank)[0], layout.of_run(group.rank))
    group.exchange_pieces(received, sent, FROM_OWNERS, bucket.index).wait()


def _pieces(flat: Tensor, first: int, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, Tensor]]:
    """(rank, view) for elements [start, stop) of a bucket. ``flat`` begins at the bucket's element ``first``."""
    return [(rank, flat[start - first : stop - first]) for rank, start, stop in pieces]


OPERATIONS: dict[type[Op], Function] = {Spread: spread}
