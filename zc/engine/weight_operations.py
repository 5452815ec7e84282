"""What the nodes do that bring weights together: after an update, and while a forward or backward reads them.

`zc.engine.operations` has the table of all kinds of nodes, `zc.ranks.routes` how weights travel, `zc.engine.owners` the
node of whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zc.engine.accumulators import Accumulators
from zc.log import log
from zc.schedule.spec import Spans


def gather(
    accs: Accumulators,
    bucket: int,
    dst: str,
    src: str | None = None,
    extent: tuple[int, int] | None = None,
    scratch: str | None = None,
) -> None:
    buffers, record = accs.buffers, accs.plan.bucket(bucket)
    log.debug("bucket %d: its weights are gathered", bucket)
    room = None if scratch is None else buffers.raw(scratch)
    if src is not None:  # stage 3
        whole = buffers.gathered(dst, record, 0 if extent is None else extent[0])
        accs.routes.gather(record, whole, buffers.weight_shard(bucket), room)
        return
    flat = buffers.flat_param[bucket]
    if room is None:
        accs.routes.gather(record, flat, buffers.shard(flat, record))
        return
    masters, own = buffers.master_shard[bucket].detach(), buffers.owned(flat, record)
    accs.routes.gather(record, flat, masters, room, base=own)
    buffers.remember_shard(record)


def publish(accs: Accumulators, bucket: int, buffer: str) -> None:
    """Nothing to do: the node stands for the main stream's right to read, and its waits give it that."""
    log.debug("bucket %d: its new weights may be read", bucket)


def free_weights(accs: Accumulators, bucket: int, buffer: str, start: int, stop: int) -> None:
    log.debug("bucket %d: its weights are gone", bucket)


def read_weights(accs: Accumulators, buffer: str, use: int, buckets: Sequence[int], spans: Spans | None) -> None:
    """Nothing to do: the graph whose window this is reads them now."""


def take_weights(accs: Accumulators, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    return accs.on_take(places)
