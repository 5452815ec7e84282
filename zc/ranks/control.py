"""The ranks that share one model, and what they tell each other in a few bytes of host memory: objects, numbers, and
whether they agree."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zc.errors import PlanError, RankMismatchError
from zc.planning.plan import Plan
from zc.planning.topology import Topology, flat
from zc.ranks.groups import Groups
from zc.ranks.journal import Entry
from zc.ranks.neighbours import Neighbours
from zc.ranks.topology import find
from zc.ranks.watch import RankCheck, Work
from zc.ranks.works import Several, Watched, issued


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """The name of the backend for tensors of this kind of device; None where the group has none."""
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    found = config.get_device_backend_map().get(device_type)
    return None if found is None else str(found)


def host_backend(group: dist.ProcessGroup | None) -> str:
    """The backend for host memory between the ranks of ``group``: its own one where it has one (gloo, or one that the
    program has registered), else gloo."""
    return backend_of(group, "cpu") or "gloo"


def patience(of_group: timedelta | None) -> float:
    """Seconds after which a rank that does not answer is given up: ``ZC_RANK_TIMEOUT`` in the environment sets them,
    else they are those of the process group's own collectives (10 minutes, where NCCL's was made without)."""
    given = os.environ.get("ZC_RANK_TIMEOUT")
    return float(given) if given else (of_group or timedelta(minutes=10)).total_seconds()


class Control:
    """The ranks of one model. W = ``world_size``; with one rank no process group is needed or used.

    Without ``is_near`` ranks only send messages, wherever they are. Without ``reads_memory`` they do not read each
    other's memory, because gradients and weights are a GPU's.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, is_near: bool = True, reads_memory: bool = True) -> None:
        self.rank, self.world_size = 0, 1
        self.control: dist.ProcessGroup | None = None
        self.check: RankCheck | None = None
        self.timeout: timedelta | None = None  # of the collectives of the group that was given
        self._nbytes_sent: Counter[str] = Counter()  # by kind of exchange, by this rank
        self._given = group
        self._is_all = True  # who trains, not some of these: its watch and journal are theirs
        self._between, self._keeps_journal = "", True
        self._may_read_memory = reads_memory
        self._groups: Groups | None = None
        self._store: Any = None  # of notes
        self.topology: Topology = flat(1)
        self.note: str | None = None  # of the topology
        self._neighbours: Neighbours | None = None
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError(f"rank {dist.get_rank()} is not a member of the given group of {self.world_size} ranks")
        if self.world_size > 1:
            ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            self._groups = Groups(ranks, host_backend(group))
            self.control = self.new_group()
            self._groups.sweep(self._gather_by_pairs)
            self.topology = flat(self.world_size)
            if is_near:
                found = find(self.rank, self.world_size, self._gather_objects, reads_memory)
                self.topology, self._neighbours, self.note = found.topology, found.neighbours, found.note

    def _gather_objects(self, given: Any) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, given, group=self.control)
        return found

    def new_group(self) -> dist.ProcessGroup:
        """Of the same ranks, for host memory. It goes when this object does, or with `close`."""
        assert self._groups is not None, "one rank needs no group"
        return self._groups.new()

    def close(self) -> None:
        """Closes zc's own groups; every rank calls it, when nothing is under way any more. Where ranks are out of
        step or gone nobody is waited for, and the groups stay."""
        if self.control is not None and self._groups is not None and self._groups.is_open:
            self._groups.sweep(self._gather_by_pairs, own=True)
        if self.check is not None and self._is_all:
            self.check.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours = self.control = self.check = None

    def agree_on(self, failure: Exception | None) -> None:
        """Raises on every rank where some rank has failed: its own error there, RankMismatchError on the others."""
        if self.world_size > 1 and self.max_on_host([int(failure is not None)])[0]:
            found = self._gather_objects(failure and f"{type(failure).__name__}: {failure}")
            if failure is None:
                rank = next(r for r, text in enumerate(found) if text is not None)
                raise RankMismatchError(
                    f"rank {rank} refused its model or options, rank {self.rank} did not: {found[rank]}"
                )
        if failure is not None:
            raise failure

    def watch(self, plan: Plan, store: Any) -> None:
        """From here on exchanges are kept in the rank's journal, and watched through ``store``, which should be a
        connection of its own: whoever waits for a key blocks all others of its client."""
        if self.control is not None:
            own = dist.PrefixStore(f"zc/{self.control.group_name}", store)  # type: ignore[attr-defined]
            self._store = dist.PrefixStore("notes", own)  # type: ignore[attr-defined]
            self.check = RankCheck(self.rank, self.world_size, own, plan.describe_exchange, patience(self.timeout))
            assert self._groups is not None
            self.check.on_failure = self._groups.abandon
            self._watch_links()

    def _watch_links(self) -> None:
        if self._neighbours is not None and self.check is not None:
            self._neighbours.links.failure = self.check.found
            self._neighbours.explained = self.check.explained

    def tell_note(self, note: str) -> None:
        """Leaves word that rank 0 has said this."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):  # the store went with its process: the watch says so
                self._store.set(hashlib.sha256(note.encode()).hexdigest(), "said")

    def is_told(self, note: str) -> bool:
        """Whether rank 0 has said this. Waits for nobody."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                return bool(self._store.check([hashlib.sha256(note.encode()).hexdigest()]))
        return False

    def take_nbytes_sent(self) -> Counter[str]:
        """Since it was last asked: bytes that this rank has sent, by kind of exchange."""
        sent, self._nbytes_sent = self._nbytes_sent, Counter()
        return sent

    def _begin(self, kind: str, index: int, nbytes: int) -> Entry:
        """An exchange starts, of which this rank sends ``nbytes``, or other ranks read them."""
        self._nbytes_sent[kind + self._between] += nbytes
        if self.check is not None and self._keeps_journal:
            self.check.enter(kind, index)
        return kind, index

    def _others(self, nbytes: int) -> int:
        """Of what has a part for each rank: the others' parts."""
        return nbytes * (self.world_size - 1) // self.world_size

    @property
    def _all_near(self) -> Neighbours | None:
        """The other ranks, where all of them are on this host."""
        return self._neighbours if self.topology.num_hosts == 1 else None

    def _watched(self, work: Any, entry: Entry | str) -> Any:
        return work if self.check is None or work is None else Watched(work, self.check, entry)

    def _gather_by_pairs(self, row: Tensor) -> Tensor:
        """[W, n]: every rank's row [n], in host memory. Not a collective: a rank that has left the others in the
        middle of one does no harm here."""
        rows = row.repeat(self.world_size, 1)
        started = []
        for peer in range(self.world_size):
            if peer != self.rank:
                started.append(issued(dist.irecv(rows[peer], group_src=peer, group=self.control, tag=1)))
                started.append(issued(dist.isend(row, group_dst=peer, group=self.control, tag=1)))
        self._watched(Several(started), "zc.compile or zc.close").wait()
        return rows

    def send_to_all(self, tensors: Sequence[Tensor], what: str) -> Work:
        """From rank 0, in host memory, to all others, who `receive` them in this order; nobody waits. The caller
        holds the tensors until it has waited for the work."""
        others = range(1, self.world_size)
        sent = [issued(dist.isend(t, group_dst=r, group=self.control)) for r in others for t in tensors]
        return self._watched(Several(sent), what)  # type: ignore[no-any-return]

    def receive(self, tensor: Tensor, what: str) -> None:
        """What rank 0 sends next. ``what`` says in an error what this rank waited for."""
        work = issued(dist.irecv(tensor, group_src=0, group=self.control))
        self._watched(Several([work]), what).wait()

    def max_on_host(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks; host memory only, so that no device is synchronised."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        near = self._all_near
        if near is not None:
            work: Any = near.reduce_(2, tensor, torch.maximum)
            self._watched(work, "an exchange of a few numbers").wait()
            return [int(value) for value in tensor]
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        self._watched(work, "an exchange of a few numbers").wait()
        return [int(value) for value in tensor]

    def gather_on_host(self, out: Tensor, row: Tensor, what: str) -> Work:
        """out [W * n] <- every rank's row [n], uint8, in host memory. Asynchronous. ``what`` says in an error what this
        rank waited for.

        As an all-to-all of copies of the row: gloo posts all its messages at once. Its all_gather is a ring, whose
        W - 1 hops follow one another (gloo/allgather.cc, alltoall.cc).
        """
        near = self._all_near
        if near is not None:
            return self._watched(near.gather_rows(out, row), what)  # type: ignore[no-any-return]
        # lifetime of the copies: the work holds them
        work = dist.all_to_all_single(out, row.repeat(self.world_size), group=self.control, async_op=True)
        if self._groups is not None and work is not None:
            self._groups.started(self.control, work)
        return self._watched(work, what)  # type: ignore[no-any-return]

    def same_everywhere(self, what: str, lines: Sequence[str], so: str) -> None:
        """Raises RankMismatchError on every rank, naming the first line in which some rank differs from rank 0; ``so``:
        what to do then."""
        if self.world_size == 1:
            return
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
        low, high = self.max_on_host([-digest, digest])
        if -low == high:
            return
        gathered = self._gather_objects(list(lines))
        for rank, theirs in enumerate(gathered):
            for k in range(max(len(theirs), len(gathered[0]))):
                here = gathered[0][k] if k < len(gathered[0]) else "(nothing)"
                there = theirs[k] if k < len(theirs) else "(nothing)"
                if here != there:
                    raise RankMismatchError(
                        f"{what} differs between ranks: rank 0 has {here}, rank {rank} has {there}. {so}"
                    )
