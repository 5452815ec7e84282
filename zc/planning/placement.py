"""Tables of what each ZeRO stage shards, and of what offload keeps in host memory. No other code asks for the stage.

Sources: ZeRO, arXiv:1910.02054, sections 5.1 to 5.3; ZeRO-Offload, arXiv:2101.06840.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """One row of the stage table.

    ``shards_gradients``: every backward reduces, through a flat_grad of the ring, and each rank accumulates its shard
    of the mean. Otherwise each rank adds its own gradients to a full-size accumulator, and only the last backward
    before an update reduces it.

    ``shards_weights``: each rank keeps its shard of the weights, and a bucket is gathered while it is read. Otherwise
    all ranks keep all weights.
    """

    stage: int
    shards_gradients: bool
    shards_weights: bool = False


PLACEMENTS: dict[int, Placement] = {
    1: Placement(1, shards_gradients=False),
    2: Placement(2, shards_gradients=True),
    3: Placement(3, shards_gradients=True, shards_weights=True),
}


@dataclass(frozen=True)
class Offload:
    """Host memory has the masters and the optimizer state, and with ``accumulates_on_host`` the accumulators, too.

    An accumulator in host memory visits the device for each backward: 8 bytes per element over the bus, and 4 for the
    first backward of an update. One that stays on the device costs 4 bytes per element there, and 4 over the bus before
    each update. With ``state_on_disk`` the optimizer state lies in mapped files instead.
    """

    accumulates_on_host: bool
    state_on_disk: bool = False


OFFLOADS: dict[str, Offload] = {"cpu": Offload(True), "device": Offload(False)}  # by offload_accumulate
