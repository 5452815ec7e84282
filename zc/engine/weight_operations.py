"""What the nodes do that bring weights together: after an update, and while a forward or backward reads them.

`zc.engine.operations` has the table of all kinds of nodes, `zc.engine.wire` what is encoded, `zc.engine.owners` the
nodes of whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zc.engine import wire
from zc.engine.accumulators import Accumulators
from zc.log import log
from zc.planning.plan import Level
from zc.ranks.journal import GATHER, wait
from zc.schedule.spec import Spans

# --- after an update ---


def gather(accs: Accumulators, bucket: int, buffer: str, via: str | None = None) -> None:
    """Of two levels: first this rank's range of a host, from the ranks of its number on all hosts; then those of this
    host's ranks."""
    flat, record, group = accs.buffers.flat_param[bucket], accs.plan.buckets[bucket], accs.sharers
    host_range = flat[slice(*record.layout.host_range(group.rank))]
    log.debug("bucket %d: its weights are gathered", bucket)
    if via is not None:
        wire.gather_differences(accs, bucket, via, host_range if accs.plan.has_levels else flat)
        if not accs.plan.has_levels:
            return
    elif accs.plan.has_levels:
        wait(group.net.all_gather(host_range, accs.buffers.shard(flat, record), GATHER, bucket))
    if accs.plan.reads_weights:
        with group.offering(GATHER, bucket, host_range) as places:
            for peer, place in places.items():
                group.neighbours.read(flat[slice(*record.layout.host_range(peer))], peer, place)
        return
    level = Level.HOST if accs.plan.has_levels else Level.ALL
    wait(group.of_level(level).all_gather(flat, host_range, GATHER, bucket))


def publish(accs: Accumulators, bucket: int, buffer: str) -> None:
    """Nothing to do: the node stands for the main stream's right to read, and its waits give it that."""
    log.debug("bucket %d: its new weights may be read", bucket)


# --- weights that exist while they are read ---


def gather_weights(
    accs: Accumulators, bucket: int, dst: str, src: str, start: int, stop: int, via: str | None = None
) -> None:
    record = accs.plan.bucket(bucket)
    out, shard, layout = accs.buffers.gathered(dst, record, start), accs.buffers.weight_shard(bucket), record.layout
    log.debug("bucket %d: its weights are gathered", bucket)
    if via is not None:
        wire.gather_encoded(accs, bucket, via, out)
    elif accs.plan.world_size == 1:
        out.copy_(shard)
    elif accs.plan.reads_shards:
        out[slice(*layout.shard_range(accs.sharers.rank))] = shard
        for peer, place in accs.weight_places(bucket).items():
            accs.sharers.neighbours.read(out[slice(*layout.shard_range(peer))], peer, place)
    else:
        wait(accs.sharers.all_gather(out, shard, GATHER, bucket))


def free_weights(accs: Accumulators, bucket: int, buffer: str, start: int, stop: int) -> None:
    log.debug("bucket %d: its weights are gone", bucket)


def read_weights(accs: Accumulators, buffer: str, use: int, buckets: Sequence[int], spans: Spans | None) -> None:
    """Nothing to do: the graph whose window this is reads them now."""


def take_weights(accs: Accumulators, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    return accs.on_take(places)
