"""The collectives that zc uses, over one process group, and the checks that all ranks agree.

Two groups: *data* carries gradients and weights, *control* carries a few bytes of host memory a step (which parameters
got a gradient, a hash of the order of reductions). On CPU both are groups of zc's own: gloo matches collectives by
their order, and the comm stream's thread must not race with the program's own collectives on the caller's group.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zc.errors import PlanError, RankMismatchError

_NBYTES_TEXT = 1024  # of what a rank tells the others of itself in an error


class Work(Protocol):
    def wait(self) -> Any: ...


class Several:
    """Several works as one. Holds them, and with them their buffers, until all are done."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def host_backend(group: dist.ProcessGroup | None) -> str:
    """The backend for host memory between the ranks of ``group``: its own one where it has one (gloo, or one that the
    program has registered), else gloo."""
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return str(config.get_device_backend_map().get("cpu", "gloo"))


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank is a member of the group"
    return work


class Group:
    """The ranks that share one model. W = ``world_size``; with one rank no process group is needed or used."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size = 0, 1
        self.data: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self._given = group
        self._gathers_by_pairs = False
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError(f"rank {dist.get_rank()} is not a member of the given group of {self.world_size} ranks")
        if self.world_size > 1:
            self.control = self._new_group()

    def open_data(self, device: torch.device) -> None:
        """Makes the group that carries gradients and weights of ``device``."""
        if self.world_size > 1:
            given = self._given if self._given is not None else dist.group.WORLD
            self.data = self._new_group() if device.type == "cpu" else given
            self._gathers_by_pairs = device.type == "cpu" and host_backend(given) == "gloo"

    def _new_group(self) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self._given if self._given is not None else dist.group.WORLD)
        backend = host_backend(self._given)
        made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        return made

    def agree_on(self, failure: Exception | None) -> None:
        """Raises on every rank where some rank has failed: its own error there, RankMismatchError on the others."""
        if self.world_size > 1 and self.max_on_host([int(failure is not None)])[0]:
            found: list[Any] = [None] * self.world_size
            dist.all_gather_object(found, failure and f"{type(failure).__name__}: {failure}", group=self.control)
            if failure is None:
                rank = next(r for r, text in enumerate(found) if text is not None)
                raise RankMismatchError(
                    f"rank {rank} refused its model or options, rank {self.rank} did not: {found[rank]}"
                )
        if failure is not None:
            raise failure

    def all_to_all(self, out: Tensor, rows: Tensor) -> Work | None:
        """out[s*S:(s+1)*S] on rank r <- rows[r*S:(r+1)*S] of rank s; both [P], contiguous. Asynchronous."""
        work: Work | None = dist.all_to_all_single(out, rows, group=self.data, async_op=True)
        return work

    def reduce_scatter(self, out: Tensor, flat: Tensor) -> Work | None:
        """out [S] <- sum over ranks of this rank's rows of flat [P]. Asynchronous."""
        # torch 2.13 renames the collective and warns on the old name; 2.11 has only the old one
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return call(out, flat, op=dist.ReduceOp.SUM, group=self.data, async_op=True)  # type: ignore[no-any-return]

    def all_gather(self, out: Tensor, shard: Tensor) -> Work | None:
        """out [P] <- every rank's shard [S]; shard may be this rank's slice of out. Asynchronous."""
        if self._gathers_by_pairs:
            return self._gather_by_pairs(out, shard)
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return call(out, shard, group=self.data, async_op=True)  # type: ignore[no-any-return]

    def _gather_by_pairs(self, out: Tensor, shard: Tensor) -> Work:
        """Sends and receives, straight into place: gloo's own all_gather fills a buffer of [P] first and copies it out
        (2 ranks, 25 MB: 11 to 13 ms against 7)."""
        numel, own = shard.numel(), out[self.rank * shard.numel() : (self.rank + 1) * shard.numel()]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        started: list[Work] = []
        for distance in range(1, self.world_size):  # all start with their neighbour: nobody is asked by all at once
            source, target = (self.rank - distance) % self.world_size, (self.rank + distance) % self.world_size
            theirs = out[source * numel : (source + 1) * numel]
            started.append(_started(dist.irecv(theirs, group_src=source, group=self.data)))
            started.append(_started(dist.isend(shard, group_dst=target, group=self.data)))
        return Several(started)

    def sum_(self, value: Tensor) -> None:
        """Adds a small tensor over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(value, group=self.data)

    def max_(self, value: Tensor) -> None:
        """The largest over the ranks, elementwise, in place."""
        if self.world_size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.data)

    def broadcast_(self, tensor: Tensor) -> None:
        """Rank 0's values, in place, any dtype. ``tensor`` is contiguous."""
        if self.world_size > 1 and tensor.numel():
            # as bytes: gloo knows no bool, and a broadcast does no arithmetic
            dist.broadcast(tensor.view(-1).view(torch.uint8), group_src=0, group=self.data)

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks; host memory only, so that no device is synchronised."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        return [int(value) for value in tensor]

    def max_async_on_host(self, values: Tensor) -> Work | None:
        """The largest of each value over the ranks, in place, in host memory. Asynchronous; None with one rank."""
        if self.world_size == 1:
            return None
        work: Work | None = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        return work

    def tell_each_other(self, text: str, tag: int) -> list[str]:
        """Every rank's text, by sends and receives: unlike a collective they need no order among other exchanges."""
        own = torch.tensor(list(text.encode()[:_NBYTES_TEXT].ljust(_NBYTES_TEXT)), dtype=torch.uint8)
        found = [own if rank == self.rank else torch.zeros_like(own) for rank in range(self.world_size)]
        started: list[Work] = []
        for rank in range(self.world_size):
            if rank != self.rank:
                started.append(_started(dist.isend(own, group_dst=rank, group=self.control, tag=tag)))
                started.append(_started(dist.irecv(found[rank], group_src=rank, group=self.control, tag=tag)))
        Several(started).wait()
        return [bytes(item.tolist()).decode(errors="replace").strip() for item in found]

    def same_everywhere(self, what: str, lines: Sequence[str]) -> None:
        """Raises RankMismatchError on every rank, naming the first line in which some rank differs from rank 0."""
        if self.world_size == 1:
            return
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
        low, high = self.max_on_host([-digest, digest])
        if -low == high:
            return
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, list(lines), group=self.control)
        for rank, theirs in enumerate(gathered):
            for k in range(max(len(theirs), len(gathered[0]))):
                here = gathered[0][k] if k < len(gathered[0]) else "(nothing)"
                there = theirs[k] if k < len(theirs) else "(nothing)"
                if here != there:
                    raise RankMismatchError(f"{what} differs between ranks: rank 0 has {here}, rank {rank} has {there}")


def check_initialized() -> None:
    """Raises where torchrun started several ranks and nobody has called init_process_group: each would train alone."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            f"WORLD_SIZE is {world_size} (torchrun), but no process group is initialised: call "
            "torch.distributed.init_process_group() before zc.compile"
        )
