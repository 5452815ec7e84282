"""Modelled networks: what a collective takes, from its bytes and the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """latency + bytes / bandwidth. All numbers are a model's, chosen by hand (docs/benchmarks.md says from what).

    ``busbw``: bytes a second through one rank's link, as nccl-tests count it; ``latency_s``: of every collective;
    ``hop_s``: for each of the log2(W) levels of a tree; ``peer_s``: for each message of an all-to-all.
    """

    name: str
    busbw: float
    latency_s: float = 0.0
    hop_s: float = 0.0
    peer_s: float = 0.0

    def seconds(self, kind: str, nbytes: int, world_size: int) -> float:
        """``nbytes`` of the whole buffer: what all_reduce sums, all_gather fills, the other two of W rows read."""
        others = world_size - 1
        if not others or math.isinf(self.busbw):
            return 0.0
        wire = {
            "all_reduce": 2 * nbytes * others / world_size,
            "all_gather": nbytes * others / world_size,
            "reduce_scatter": nbytes * others / world_size,
            "all_to_all": nbytes * others / world_size,
            "broadcast": float(nbytes),
            "p2p": float(nbytes),
            "barrier": 0.0,
        }[kind]
        if kind == "p2p":
            return self.latency_s + wire / self.busbw
        steps = self.peer_s * others if kind == "all_to_all" else self.hop_s * math.ceil(math.log2(world_size))
        return self.latency_s + steps + wire / self.busbw


NETWORKS = {
    n.name: n
    for n in (
        Network("zero", math.inf),
        Network("nvlink", 360e9, latency_s=12e-6, hop_s=2e-6, peer_s=0.5e-6),  # 8 GPUs, NVLink and NVSwitch
        Network("400g", 45e9, latency_s=20e-6, hop_s=5e-6, peer_s=1e-6),  # 400 Gb/s a GPU, nine tenths of it
        Network("ethernet", 1.1e9, latency_s=60e-6, hop_s=30e-6, peer_s=10e-6),  # 10 Gb/s
    )
}
