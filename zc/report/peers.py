"""Computes what DDP and FSDP2 would keep and send for the same model, as rows beside zc's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zc.planning.nbytes import STATES

FP32 = 4


class Peer(NamedTuple):
    """Bytes of one rank: between steps with its gradients, and sent in one step."""

    held: int
    sent: int


def ddp_nbytes(numel_by_optimizer: Mapping[str, int]) -> int:
    """What DDP holds in fp32: weights, gradients (as views of its buckets), and the optimizer's state, all of it."""
    return sum(numel * FP32 * (2 + STATES.get(name, 2)) for name, numel in numel_by_optimizer.items())


def peers(
    numel_by_optimizer: Mapping[str, int], world_size: int, microbatches: int, itemsize: int, frozen_nbytes: int = 0
) -> dict[str, Peer]:
    """DDP with fp32 weights, which all-reduces once per step inside no_sync. FSDP2 with fp32 shards, which gathers
    weights of ``itemsize`` bytes for each forward and again for each backward, and reduces as many after it; what is
    gathered at one time comes on top. DDP holds frozen parameters whole, FSDP2 shards and gathers them, too.
    (arXiv:2006.15704; arXiv:2304.11277)"""
    numel, whole = sum(numel_by_optimizer.values()), ddp_nbytes(numel_by_optimizer)
    once = numel * (world_size - 1) // world_size
    frozen = 2 * microbatches * (frozen_nbytes * (world_size - 1) // world_size)
    return {
        "DDP, fp32": Peer(whole + frozen_nbytes, 2 * once * FP32),
        "FSDP2": Peer(-(-(whole + frozen_nbytes) // world_size), 3 * microbatches * once * itemsize + frozen),
    }
