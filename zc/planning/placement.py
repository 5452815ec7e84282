"""The stage is data: what each ZeRO stage keeps partial, sharded or replicated between microbatches.

Partial: every rank holds a full-size sum of its own gradients, not yet reduced. Shard: each rank holds 1/W of the sum
over all ranks. No code outside this table asks which stage it is. Source: ZeRO, arXiv:1910.02054, sections 5.1 and 5.2.
What host memory holds in its place is data as well (ZeRO-Offload, arXiv:2101.06840).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Between(enum.Enum):
    """What a gradient is between two microbatches of one update."""

    PARTIAL = "partial"
    SHARD = "shard"


@dataclass(frozen=True)
class Placement:
    """One row of the stage table."""

    stage: int
    gradient: Between
    reduces_every_backward: bool  # otherwise: at the boundary only
    gradient_in_ring: bool  # gradients pass through a flat_grad of the ring, else they are added to acc_flat at once


PLACEMENTS: dict[int, Placement] = {
    1: Placement(1, Between.PARTIAL, reduces_every_backward=False, gradient_in_ring=False),
    2: Placement(2, Between.SHARD, reduces_every_backward=True, gradient_in_ring=True),
}


@dataclass(frozen=True)
class Offload:
    """What lies in host memory: masters and optimizer state always, the accumulators with ``accumulates_on_host``.

    An accumulator in host memory visits the device for each backward: 8 bytes an element over the bus, 4 for the first
    one of an update. One that stays on the device costs its 4 bytes there, and 4 over the bus at the boundary. With
    ``state_on_disk`` the optimizer's state lies in mapped files instead.
    """

    accumulates_on_host: bool
    state_on_disk: bool = False


OFFLOADS: dict[str, Offload] = {"cpu": Offload(True), "device": Offload(False)}  # by offload_accumulate
