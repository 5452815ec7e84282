r"""Replicas: the ranks of a mesh of two dimensions, (replicate, shard). Those of a row together have one copy of the
state, and those of a column have the same shard::

    replicate \ shard    0   1   2   3
        0                 0   1   2   3      each row is a copy of the optimizer state
        1                 4   5   6   7      rank 6 has the same shard as rank 2

A reduction ends with one hop more, between the ranks of a column. `zc.compile` hands it over. Weights need none: each
row gathers its own copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zc.planning.plan import flat
from zc.ranks.exchanges import Sum
from zc.ranks.group import Group
from zc.ranks.journal import GATHER_SUMS
from zc.ranks.routes import Route, Routes, add_rows, part_of

if TYPE_CHECKING:
    from zc.planning.plan import Bucket, Hop
    from zc.ranks.exchanges import Exchanges


def split(ranks: Group, mesh: DeviceMesh) -> tuple[Group, Group]:
    """This rank's row and column of a mesh. Every rank calls it."""
    shard = Group(mesh.get_group(1), ranks.parts, reads_memory=ranks.may_read_memory, everyone=ranks)
    replicas = Group(mesh.get_group(0), everyone=ranks)  # which send messages, wherever they are
    replicas._between = ", between replicas"
    # otherwise it follows exchanges of `shard` on another stream, and one journal has no order of the two
    replicas._keeps_journal = shard.world_size == 1
    topologies = ranks.gather_objects(str(shard.topology))
    # all ranks need one plan, and all replicas one order of summation
    hosts = f"the ranks of `shard` lie on {' or '.join(dict.fromkeys(topologies))}"
    if len(set(topologies)) > 1:
        alone = flat(shard.world_size)
        shard.send_messages(alone, f"every rank is treated as its own host, because {hosts}")
    elif shard.topology.num_hosts > 1 and shard.topology.reads_memory:
        topology = replace(shard.topology, reads_memory=False)
        shard.send_messages(topology, f"ranks of one host exchange messages, because {hosts}")
    return shard, replicas


@dataclass(frozen=True)
class Replicas(Route):
    """The ranks with one shard, which all get the same bits of its sum: each sums a piece, in the order of the ranks,
    and sends that to the others."""

    ranks: Exchanges

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        rows, out = part_of(scratch, sent.numel(), sent.dtype), part_of(scratch, sent.numel(), bucket.acc_dtype)
        piece = torch.empty(sent.numel() // self.ranks.world_size, dtype=bucket.acc_dtype, device=sent.device)
        self.ranks.all_to_all(rows, sent, bucket.index).wait()
        pieces = rearrange(rows, "(replica piece) -> replica piece", replica=self.ranks.world_size)
        add_rows(Sum(piece), pieces, bucket, keeps_rows=False)
        self.ranks.all_gather(out, piece, GATHER_SUMS, bucket.index).wait()

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        add_rows(total, part_of(scratch, total.out.numel(), bucket.acc_dtype).view(1, -1), bucket, keeps_rows=False)


def between_replicas(routes: Routes, hop: Hop) -> Route:
    assert routes.group.replicas is not None, "the plan has replicas"
    return Replicas(routes.group.replicas)
