"""The ranks that share one model, and their small exchanges in host memory: objects, numbers, and checks that all ranks
agree."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private
from zc.errors import PlanError, RankMismatchError
from zc.planning.plan import Plan
from zc.planning.topology import Topology, flat
from zc.ranks.exchanges import Exchanges
from zc.ranks.groups import Groups
from zc.ranks.journal import Journal
from zc.ranks.neighbours import Neighbours
from zc.ranks.topology import find
from zc.ranks.watch import Watch
from zc.ranks.work import Call, Work, collective, messages

_COMPILE = "zc.compile or zc.close"
_KNOCK = 0x7A63  # the tag of the first messages between ranks, on the caller's group


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """The name of the group's backend for tensors of this device type, or None."""
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    backend = config.get_device_backend_map().get(device_type)
    return None if backend is None else str(backend)


def host_backend(group: dist.ProcessGroup | None) -> str:
    """The backend for host memory between the ranks of ``group``: the group's own if it has one (gloo, or one that the
    program registered), otherwise gloo."""
    return backend_of(group, "cpu") or "gloo"


def patience(of_group: timedelta | None) -> float:
    """Seconds after which a rank that does not answer counts as lost: ``ZC_RANK_TIMEOUT`` in the environment, otherwise
    the timeout of the process group's own collectives, which is 10 minutes by default for NCCL."""
    seconds = os.environ.get("ZC_RANK_TIMEOUT")
    return float(seconds) if seconds else (of_group or timedelta(minutes=10)).total_seconds()


class Control(Exchanges):
    """The ranks of one model. W = ``world_size``; with one rank no process group is needed or used.

    Without ``is_near``, ranks only send messages, wherever they are. Without ``reads_memory``, they do not read each
    other's memory, because gradients and weights are on a GPU. ``whole``: all ranks that train the model, if these are
    only some of them; one journal covers all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        is_near: bool = True,
        reads_memory: bool = True,
        whole: Control | None = None,
    ) -> None:
        super().__init__(0, 1, None if whole is None else whole.journal)
        self.control: dist.ProcessGroup | None = None
        self.timeout: timedelta | None = None  # of the collectives of the caller's group
        self._given = group
        self._is_whole = whole is None
        self._may_read_memory = reads_memory
        self._groups: Groups | None = None
        self.topology: Topology = flat(1)
        self.note: str | None = None  # of the topology
        self._neighbours: Neighbours | None = None
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError(f"rank {dist.get_rank()} is not a member of the given group of {self.world_size} ranks")
        if self.world_size > 1:
            callers = group if group is not None else dist.group.WORLD
            assert callers is not None
            ranks = dist.get_process_group_ranks(callers)
            self._groups = Groups(ranks, host_backend(group))
            self.timeout = torch_private.timeout_of(callers, "cpu") or torch_private.timeout_of(callers, "cuda")
            if self.journal is None:
                number = self._groups.number_of_model()
                self.journal = Journal(Watch.of_this_process(), ranks, number, patience(self.timeout))
            self.journal.on_failure.append(self._groups.abandon)
            if backend_of(group, "cpu") == "gloo":
                self._pairs(torch.zeros(1, dtype=torch.uint8), group, _KNOCK)
            self.control = self.new_group()
            self._groups.sweep(self._gather_by_pairs)
            self.topology = flat(self.world_size)
            if is_near:
                found = find(self.rank, self.world_size, self._gather_objects, reads_memory)
                self.topology, self._neighbours = found.topology, found.neighbours
                self.note = found.note if reads_memory else None
            if self._neighbours is not None:
                self._neighbours.links.failure = self.journal.verdict
                self._neighbours.on_refusal = self.journal.fail
                self._neighbours.explained = self.journal.explained

    def _call(self, run: Callable[[], Any], what: str = _COMPILE) -> Any:
        """Returns ``run()``, which blocks until all ranks answer, from a thread. The watch may raise meanwhile."""
        assert self.journal is not None, "there are several ranks"
        call = Call(run)
        self.journal.wait(call, what, is_call=True)
        return call.result()

    def _gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``."""
        values: list[Any] = [None] * self.world_size
        self._call(lambda: dist.all_gather_object(values, value, group=self.control))
        return values

    def new_group(self, what: str = _COMPILE) -> dist.ProcessGroup:
        """Makes a group of the same ranks for host memory. It lives as long as this object, or until `close`. ``what``
        names the caller's function in errors."""
        return self._new_group(what=what)

    def _new_group(self, *options: Any, what: str = _COMPILE, **more: Any) -> dist.ProcessGroup:
        """As `Groups.new`. Making a gloo group waits for all ranks. An NCCL group waits in its first collective
        instead, and belongs to the calling thread's device."""
        groups = self._groups
        assert groups is not None, "one rank needs no group"
        if options[:1] == ("nccl",):
            return groups.new(*options, **more)
        group: dist.ProcessGroup = self._call(lambda: groups.new(*options, **more), what)
        return group

    def keep(self, tensor: Tensor) -> None:
        """Keeps memory that other ranks read until the groups are closed, also if this rank drops the model first."""
        if self._groups is not None:
            self._groups.keep(tensor)

    def close(self) -> None:
        """Closes zc's own groups. Every rank calls it, when no exchange is pending. If ranks are out of step or gone,
        it waits for nobody, and the groups stay."""
        if self.control is not None and self._groups is not None and self._groups.is_open:
            self._groups.sweep(self._gather_by_pairs, own=True)
        if self.journal is not None and self._is_whole:
            self.journal.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours = self.control = self.journal = None

    def agree_on(self, failure: Exception | None) -> None:
        """Raises on every rank if any rank has failed: that rank's own error there, RankMismatchError on the others."""
        if self.world_size > 1 and self.max_on_host([int(failure is not None)])[0]:
            texts = self._gather_objects(failure and f"{type(failure).__name__}: {failure}")
            if failure is None:
                rank = next(r for r, text in enumerate(texts) if text is not None)
                raise RankMismatchError(
                    f"rank {rank} refused its model or options, rank {self.rank} did not: {texts[rank]}"
                )
        if failure is not None:
            raise failure

    def watch(self, plan: Plan) -> bool:
        """Tells the watch that exchanges now belong to ``plan``. Returns whether the watch has its own connection to
        the store: a thread that waits for a key blocks all other threads of its client."""
        if self.journal is None:
            return True
        self.journal.describe, self.journal.timeout = plan.describe_exchange, patience(self.timeout)
        return self.journal.has_own_connection

    def tell_note(self, note: str) -> None:
        """Records in the store that rank 0 has issued this note."""
        if self.journal is not None:
            with contextlib.suppress(dist.DistError):  # the store's process has ended: the watch reports it
                self.journal.store.set(self._note_key(note), "said")

    def is_told(self, note: str) -> bool:
        """Whether rank 0 has issued this note. Waits for nobody."""
        if self.journal is not None:
            with contextlib.suppress(dist.DistError):
                return bool(self.journal.store.check([self._note_key(note)]))
        return False

    def _note_key(self, note: str) -> str:
        assert self.journal is not None
        return f"note/{self.journal.name}/{hashlib.sha256(note.encode()).hexdigest()}"

    @property
    def _all_near(self) -> Neighbours | None:
        """The other ranks, if all of them are on this host."""
        return self._neighbours if self.topology.num_hosts == 1 else None

    def _gather_by_pairs(self, row: Tensor) -> Tensor:
        """[W, n]: every rank's row [n], in host memory. It is not a collective, so a rank that left another collective
        in the middle does no harm."""
        return self._pairs(row, self.control, 1)

    def _pairs(self, row: Tensor, group: dist.ProcessGroup | None, tag: int) -> Tensor:
        rows = row.repeat(self.world_size, 1)
        works = []
        for peer in range(self.world_size):
            if peer != self.rank:
                works.append(self._post(dist.irecv, rows[peer], group_src=peer, group=group, tag=tag))
                works.append(self._post(dist.isend, row, group_dst=peer, group=group, tag=tag))
        self._work(_COMPILE, messages(works)).wait()
        return rows

    def send_to_all(self, tensors: Sequence[Tensor], what: str) -> Work:
        """Sends host tensors from rank 0 to all others, which `receive` them in this order. Nobody waits. The caller
        keeps the tensors until it has waited for the work."""
        others = range(1, self.world_size)
        works = [self._post(dist.isend, t, group_dst=r, group=self.control) for r in others for t in tensors]
        return self._work(what, messages(works))

    def receive(self, tensor: Tensor, what: str) -> None:
        """Receives the next tensor that rank 0 sends. ``what`` names it in errors."""
        work = self._post(dist.irecv, tensor, group_src=0, group=self.control)
        self._work(what, messages([work])).wait()

    def max_on_host(self, values: Sequence[int], what: str = "an exchange of a few numbers") -> list[int]:
        """The maximum of each value over the ranks. Uses only host memory, so no device synchronises. ``what`` names it
        in errors."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        near = self._all_near
        if near is not None:
            steps = near.reduce_(2, tensor, torch.maximum)
        else:
            work = self._post(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
            steps = (collective(work),)
        self._work(what, *steps).wait()
        return [int(value) for value in tensor]

    def gather_on_host(self, out: Tensor, row: Tensor, what: str) -> Work:
        """out [W * n] <- every rank's row [n], uint8, in host memory. Asynchronous. ``what`` names it in errors.

        Messages use an all-to-all of copies of the row, since gloo posts all of it at once. Its all_gather is a ring,
        whose W - 1 hops follow one another (gloo/allgather.cc, alltoall.cc).
        """
        near = self._all_near
        if near is not None:
            return self._work(what, *near.gather_rows(out, row))
        # lifetime of the copies: the work holds them
        work = self._post(dist.all_to_all_single, out, row.repeat(self.world_size), group=self.control, async_op=True)
        if self._groups is not None and work is not None:
            self._groups.started(self.control, work)
        return self._work(what, collective(work))

    def same_everywhere(self, what: str, lines: Sequence[str], so: str) -> None:
        """Raises RankMismatchError on every rank, naming the first line in which some rank differs from rank 0. ``so``
        says what to do."""
        if self.world_size == 1:
            return
        digest = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
        low, high = self.max_on_host([-digest, digest], what)
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
