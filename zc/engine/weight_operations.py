"""What the nodes do that bring weights together: after an update, and while a forward or backward reads them.

`zc.engine.operations` has the table of all kinds of nodes, `zc.engine.wire` those whose weights are encoded,
`zc.engine.owners` those of whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zc.engine.accumulators import Accumulators
from zc.engine.sums import wait
from zc.log import log
from zc.planning.plan import Level
from zc.ranks.journal import GATHER
from zc.schedule.spec import Spans

# --- after an update ---


def gather_net(accs: Accumulators, bucket: int, buffer: str) -> None:
    log.debug("bucket %d: its weights are gathered between hosts", bucket)
    flat, record = accs.buffers.flat_param[bucket], accs.plan.buckets[bucket]
    host_range = flat[slice(*record.layout.host_range(accs.sharers.rank))]
    accs.sharers.net.all_gather(host_range, accs.buffers.shard(flat, record), GATHER, bucket).wait()


def gather(accs: Accumulators, bucket: int, buffer: str) -> None:
    flat, record = accs.buffers.flat_param[bucket], accs.plan.buckets[bucket]
    log.debug("bucket %d: its weights are gathered", bucket)
    if accs.plan.reads_weights:
        own = flat[slice(*record.layout.host_range(accs.sharers.rank))]
        with accs.sharers.offering(GATHER, bucket, own) as places:
            for peer, place in places.items():
                accs.sharers.neighbours.read(flat[slice(*record.layout.host_range(peer))], peer, place)
        return
    group, rank = accs.sharers.of_level(Level.HOST if accs.plan.has_levels else Level.ALL), accs.sharers.rank
    wait(group.all_gather(flat, flat[slice(*record.layout.host_range(rank))], GATHER, bucket))


def publish(accs: Accumulators, bucket: int, buffer: str) -> None:
    """Nothing to do: the node stands for the main stream's right to read, and its waits give it that."""
    log.debug("bucket %d: its new weights may be read", bucket)


# --- weights that exist while they are read ---


def gather_weights(accs: Accumulators, bucket: int, dst: str, src: str, start: int, stop: int) -> None:
    record = accs.plan.bucket(bucket)
    out, shard, layout = accs.buffers.gathered(dst, record, start), accs.buffers.weight_shard(bucket), record.layout
    if accs.plan.world_size == 1:
        out.copy_(shard)
    elif accs.plan.reads_shards:
        out[slice(*layout.shard_range(accs.sharers.rank))] = shard
        for peer, place in accs.weight_places(bucket).items():
            accs.sharers.neighbours.read(out[slice(*layout.shard_range(peer))], peer, place)
    else:
        log.debug("bucket %d: its weights are gathered", bucket)
        wait(accs.sharers.all_gather(out, shard, GATHER, bucket))


def free_weights(accs: Accumulators, bucket: int, buffer: str, start: int, stop: int) -> None:
    log.debug("bucket %d: its weights are gone", bucket)


def read_weights(accs: Accumulators, buffer: str, use: int, buckets: Sequence[int], spans: Spans | None) -> None:
    """Nothing to do: the graph whose window this is reads them now."""


def take_weights(accs: Accumulators, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    return accs.on_take(places)
