"""How ranks bring gradients together and weights apart. A model has its routes from zc.compile on.

A schedule says what goes where, such as ``reduce(2, "acc[2]", "flat_grad[0]")``, and the plan by which hops
(`zc.planning.plan`). A route does one hop: `Messages` sends; `Memory` reads what the other ranks of a host have, where
it lies; `Encoded` sends 8 bits an element; `Replicas` sums over the ranks with one shard; `Shards` reads shards of
weights in any order, between two updates.

**When a method returns, no other rank reads or writes the buffers that it was given** (on a GPU: nothing that the
current stream runs afterwards meets such a read or write); shards of weights that are read between two updates are
given by `open`, and free when `close` returns. So the order of one rank's nodes is all that a proof needs,
whatever the routes are (docs/proof.md).

A reduction by messages is two calls, `take` and `finish`: the gradients are free before the sum is in its place, so the
next bucket may fill their buffer. `Messages` sends in `take` and sums in `finish`; `Encoded` encodes in `take`, sends
and sums in `finish`; `Replicas` sends and sums in `take`. Where ranks read memory, a sum and its reads are one call,
`reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zc.kernels import reduce_rows
from zc.planning.plan import Bucket, Hop, Level, Plan, Way, hops_to_gather, reads_shards
from zc.ranks.exchanges import Sum
from zc.ranks.journal import GATHER

if TYPE_CHECKING:
    from zc.ranks.exchanges import Exchanges
    from zc.ranks.group import Group


class Route:
    """One hop. All ranks call the same methods in the same order; each class has those that its hops need.

    ``sent`` [P], or a part of it: this rank's gradients, or a sum of some ranks'. ``scratch``: bytes, as many as
    `Hop.nbytes_scratch` or `zc.planning.allocations` say. ``whole``: a bucket's weights, or a part of them.
    """

    def reduce(self, bucket: Bucket, sent: Tensor, total: Sum) -> None:
        """``total`` <- this rank's part of the sum of all ranks' ``sent``."""
        raise NotImplementedError

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        """Returns when ``sent`` may be overwritten. ``scratch`` has what `finish` needs."""
        raise NotImplementedError

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        """``total`` <- this rank's part of the sum of what all ranks have sent."""
        raise NotImplementedError

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        """``whole`` <- all ranks' shards, this one's being ``shard``, which may lie in ``whole``. With ``base``, the
        shard as all ranks have it, ``whole`` += what each rank's shard is ahead of that."""
        raise NotImplementedError

    def open(self, shards: Mapping[int, Tensor]) -> None:
        """The others may read ``shards``, by bucket, from here to `close`. All ranks open the same in the same
        order."""
        raise NotImplementedError

    def close(self) -> None:
        """Returns when no rank reads a shard any more, so that all of them may be written."""
        raise NotImplementedError


class Alone(Route):
    """One rank."""

    def reduce(self, bucket: Bucket, sent: Tensor, total: Sum) -> None:
        add_rows(total, sent.view(1, -1), bucket)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        if whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)


@dataclass(frozen=True)
class Messages(Route):
    """Collectives of a process group. ``is_native``: it sums itself (NCCL's reduce_scatter)."""

    ranks: Exchanges
    hop: Hop
    is_native: bool = False

    def take(self, bucket: Bucket, sent: Tensor, scratch: Tensor) -> None:
        if self.is_native:
            out = part_of(scratch, bucket.layout.numel_shard, sent.dtype)
            self.ranks.reduce_scatter(out, sent, bucket.index).wait()
        else:
            self.ranks.all_to_all(part_of(scratch, sent.numel(), sent.dtype), sent, bucket.index).wait()

    def finish(self, bucket: Bucket, scratch: Tensor, total: Sum) -> None:
        count = 1 if self.is_native else self.ranks.world_size
        rows = part_of(scratch, count * total.out.numel(), self.hop.dtype(bucket)).view(count, -1)
        add_rows(total, rows, bucket, keeps_rows=False)

    def gather(self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None, base: Tensor | None) -> None:
        self.ranks.all_gather(whole, shard, GATHER, bucket.index).wait()


class Routes:
    """The routes of one model on one rank. ``tables``: a list for tensors that kernels read, which live as long;
    ``makers``: of those ways by which a feature makes bytes travel."""

    def __init__(self, plan: Plan, group: Group, tables: list[Tensor], makers: Mapping[Way, MakeRoute] = {}) -> None:
        self.plan, self.group, self.tables, self._makers = plan, group, tables, makers
        self._made: dict[Hop, Route] = {}
        self._to_gather: dict[tuple[int, bool], list[Route]] = {}  # by bucket, and whether exactly
        # of weights that a rank gathers when it likes: made here, since two threads use it
        self.shards = self._of(Hop(Way.SHARDS, Level.ALL, plan.world_size)) if self.gathers_alone else Route()

    @property
    def gathers_alone(self) -> bool:
        """Whether a rank may gather sharded weights when others don't: it reads their shards (`Shards`)."""
        return reads_shards(self.plan)

    def to_reduce(self, hop: int) -> Route:
        """The route of this hop of a reduction."""
        return self._of(self.plan.hops[hop])

    def gather(
        self, bucket: Bucket, whole: Tensor, shard: Tensor, scratch: Tensor | None = None, base: Tensor | None = None
    ) -> None:
        """``whole`` [P] <- the weights of a bucket, hop by hop; without ``scratch`` exactly. Else as `Route.gather`."""
        key = bucket.index, scratch is None
        if key not in self._to_gather:
            hops = hops_to_gather(self.plan, bucket, is_exact=scratch is None)
            self._to_gather[key] = [self._of(hop) for hop in hops]
        routes = self._to_gather[key]
        for route in routes:
            part = whole if route is routes[-1] else whole[slice(*bucket.layout.net_range(self.group.shard.rank))]
            route.gather(bucket, part, shard, scratch, base)
            shard = part

    def _of(self, hop: Hop) -> Route:
        if hop not in self._made:
            self._made[hop] = self._make(hop)
        return self._made[hop]

    def _make(self, hop: Hop) -> Route:
        if hop.way in self._makers:
            return self._makers[hop.way](self, hop)
        sharers, plan = self.group.shard, self.plan
        match hop.way:
            case Way.ALONE:
                return Alone()
            case Way.MESSAGES:
                return Messages(sharers.of_level(hop.among), hop, is_native=plan.reduce == "native")
        raise AssertionError(f"zc.compile has handed over no way to travel by {hop.way.value}")


MakeRoute = Callable[[Routes, Hop], Route]


def add_rows(total: Sum, rows: Tensor, bucket: Bucket, *, keeps_rows: bool = True) -> None:
    """``total`` [n] <- the sum of rows [ranks, n] in rank order, in the accumulator's dtype. A sum that travels on may
    be narrower. Without ``keeps_rows`` they are undefined afterwards."""
    out = total.out
    if out.dtype != bucket.acc_dtype:
        out = torch.empty_like(out, dtype=bucket.acc_dtype)
    reduce_rows(rows, out, scale=total.scale, add=total.add, keeps_rows=keeps_rows)
    if out is not total.out:
        total.out.copy_(out)


def part_of(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of ``raw``, which are bytes."""
    return raw[: numel * dtype.itemsize].view(dtype)
