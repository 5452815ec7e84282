"""The ranks that share one model, and their small exchanges in host memory: objects, numbers, checks of equality."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private
from zc.errors import PlanError, RankMismatchError, ZcError
from zc.machine import accelerator_type
from zc.planning.plan import Plan, Topology, flat
from zc.ranks.exchanges import Call, Exchanges, Work, collective, messages
from zc.ranks.journal import Journal
from zc.ranks.process import ProcessGroups

if TYPE_CHECKING:
    from zc.ranks.neighbours import Neighbours
    from zc.ranks.watch import Watch

_COMPILE = "zc.compile or zc.close"
ErrorOf = Callable[[Exception | None, int, str], Exception]
_FIRST_TAG = 0x7A63  # of the first messages between ranks, on the caller's group


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


GatherObjects = Callable[[Any], Sequence[Any]]  # every rank's object, by rank; all ranks call it
FindHosts = Callable[[int, int, GatherObjects, bool], "tuple[Topology, Neighbours | None, str | None]"]


class Parts(NamedTuple):
    """What `zc.compile` hands over to the ranks of a model. ``find_hosts``: None: every rank counts as its own host,
    and all send messages. ``watch_of``: the watch of this process; None: nobody looks for ranks that are out of
    step."""

    find_hosts: FindHosts | None = None
    watch_of: Callable[[], Watch] | None = None


NO_PARTS = Parts()


class Control(Exchanges):
    """The ranks of one model. W = ``world_size``; with one rank no process group is needed or used.

    Without ``reads_memory``, ranks do not read each other's memory, because gradients and weights are on a GPU.
    ``everyone``: all ranks that train the model, if these are only some of them; one journal covers all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        parts: Parts = NO_PARTS,
        *,
        reads_memory: bool = True,
        everyone: Control | None = None,
    ) -> None:
        super().__init__(0, 1, None if everyone is None else everyone.journal)
        self.control: dist.ProcessGroup | None = None
        self.timeout: timedelta | None = None  # of the collectives of the caller's group
        self._group = group  # the caller's; None: the default group
        self._closes_journal = everyone is None
        self.parts, self.may_read_memory = parts, reads_memory
        self._process_groups: ProcessGroups | None = None
        self.topology: Topology = flat(1)
        self.note: str | None = None  # of the topology
        self.raised = ""  # the error of the last step() on this rank; "" after one that has succeeded
        self._neighbours: Neighbours | None = None
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise PlanError(f"rank {dist.get_rank()} is not a member of the given group of {self.world_size} ranks")
        if self.world_size > 1:
            self.numbers = ranks = dist.get_process_group_ranks(self.callers_group)
            self._process_groups = ProcessGroups(ranks, host_backend(group))
            timeouts = (torch_private.timeout_of(self.callers_group, device) for device in ("cpu", accelerator_type()))
            self.timeout = next(filter(None, timeouts), None)
            if self.journal is None and parts.watch_of is not None:
                number = self._process_groups.number_of_model()
                self.journal = Journal(parts.watch_of(), ranks, number, patience(self.timeout))
            if self.journal is not None:
                self.journal.on_failure.append(self._process_groups.abandon)
            if backend_of(group, "cpu") == "gloo":
                self._pairs(torch.zeros(1, dtype=torch.uint8, device="cpu"), self.callers_group, _FIRST_TAG)
            self.control = self.new_group()
            self._process_groups.close_dropped(self._gather_by_pairs)
            self.topology = flat(self.world_size)
            if parts.find_hosts is not None:
                self.topology, self._neighbours, note = parts.find_hosts(
                    self.rank, self.world_size, self.gather_objects, reads_memory
                )
                self.note = note if reads_memory else None
            if self._neighbours is not None:
                self._neighbours.name_ranks(self.numbers, self.journal)

    @property
    def callers_group(self) -> dist.ProcessGroup:
        group = self._group if self._group is not None else dist.group.WORLD
        assert group is not None, "a process group is initialised"
        return group

    @property
    def object_group(self) -> dist.ProcessGroup | None:
        """`control`, for torch's exchanges of objects."""
        self.check_default_group()
        return self.control

    def check_default_group(self) -> None:
        """Raises ZcError if the program has destroyed the default group: torch then sends objects in no other one, and
        makes none."""
        if not dist.is_initialized():
            raise ZcError(
                "the program has destroyed the default process group (torch.distributed.destroy_process_group()), "
                f"without which torch sends no objects between the {self.world_size} ranks of this model and makes no "
                "groups: save, load and read whole states before that, or call init_process_group again with as many "
                "ranks"
            )

    @property
    def can_exchange(self) -> bool:
        """Whether an exchange can complete: there are other ranks, not closed, and none is known to be lost."""
        return self.control is not None and (self.journal is None or not self.journal.has_failed)

    def call(self, text: str, run: Callable[[], Any], device: torch.device | None = None) -> Any:
        """Returns ``run()``, which blocks until other ranks answer. It runs in a thread, whose device is ``device``, so
        the watch may raise meanwhile. ``text`` says in errors what this rank was doing."""
        call = Call(run, device)
        self.wait_for(call, text)
        return call.result()

    def wait_for(self, call: Call, text: str) -> None:
        """Raises RankLostError if a rank that ``call`` waits for is gone."""
        if self.journal is None:
            call()
            return
        self.record_call(text)
        exposed_s = self.journal.exposed_s
        try:
            self.journal.wait(call, text, is_call=True)
        finally:
            self.journal.exposed_s = exposed_s  # no part of a training step

    def gather_objects(self, value: Any, text: str = _COMPILE) -> list[Any]:
        """Every rank's ``value``, which is pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        group = self.object_group
        self.call(text, lambda: dist.all_gather_object(values, value, group=group))
        return values

    def new_group(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        *,
        text: str = _COMPILE,
        device: torch.device | None = None,
        **options: Any,
    ) -> dist.ProcessGroup:
        """Makes a group of the same ranks, as `ProcessGroups.new`; by default for host memory. It lives as long as this
        object, or until `close`. ``text`` names the caller's function in errors.

        Making a gloo group waits for all ranks. An NCCL group waits in its first collective instead, and belongs to the
        calling thread's device. Any other is made where ``device``, that of its tensors, is the current one.
        """
        assert self._process_groups is not None, "one rank needs no group"
        self.check_default_group()
        new = partial(self._process_groups.new, backend, timeout, device=device, **options)
        group: dist.ProcessGroup = new() if backend == "nccl" else self.call(text, new, device)
        return group

    def keep_alive(self, tensor: Tensor) -> None:
        """Keeps memory that other ranks read until the groups are closed, also if this rank drops the model first."""
        if self._process_groups is not None:
            self._process_groups.keep_alive(tensor)

    def close(self) -> None:
        """Closes zc's own groups. Every rank calls it, when no exchange is pending. If ranks are out of step or gone,
        it waits for nobody, and the groups stay."""
        if self.control is not None and self._process_groups is not None and self._process_groups.is_open:
            self._process_groups.close_dropped(self._gather_by_pairs, and_own=True)
        if self.journal is not None and self._closes_journal:
            self.journal.close()
        if self._neighbours is not None:
            self._neighbours.close()
        self._neighbours = self.control = self.journal = None

    def failure(self, text: str) -> ZcError:
        """The error to raise for what this rank alone has found: on all ranks, where a watch can tell them."""
        return RankMismatchError(text) if self.journal is None else self.journal.fail(RankMismatchError, text)

    @contextlib.contextmanager
    def together(self, error_of: ErrorOf, text: str = _COMPILE) -> Iterator[None]:
        """The body succeeds on all ranks, or raises on each what ``error_of`` makes of this rank's own error, if it has
        one, of the first rank that failed, and of the text of that rank's error."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  (raised below, when the others know)
            failure = error
        texts = self.gather_objects(failure and f"{type(failure).__name__}: {failure}", text)
        rank = next((rank for rank, said in enumerate(texts) if said is not None), None)
        if rank is None:
            return
        raised = error_of(failure, rank, texts[rank])
        if raised is failure:
            raise raised
        raise raised from failure

    def refuse_together(self, what: str = "refused its model or options") -> contextlib.AbstractContextManager[None]:
        """The body refuses nothing, or raises on every rank: its own error where it refused, RankMismatchError
        elsewhere, with ``what`` the other rank did."""

        def error_of(failure: Exception | None, rank: int, text: str) -> Exception:
            words = f"rank {rank} {what}, rank {self.rank} did not: {text}"
            return RankMismatchError(words) if failure is None else failure

        return self.together(error_of)

    def record_call(self, what: str, *, shared: bool = True) -> None:
        """Adds a call of the program to the `Trail`."""
        if self.journal is not None:
            self.journal.watch.trail.add(self.journal.name, what, shared=shared)

    def set_plan(self, plan: Plan) -> None:
        """From here on the journal's entries are exchanges of ``plan``."""
        if self.journal is not None:
            self.journal.plan, self.journal.timeout = plan, patience(self.timeout)

    def record_note(self, note: str) -> None:
        """Records in the store that rank 0 has issued this note."""
        if self.journal is not None:
            with contextlib.suppress(dist.DistError):  # the store's process has ended: the watch reports it
                self.journal.watch.store.set(self._note_key(note), "said")

    def has_note(self, note: str) -> bool:
        """Whether rank 0 has issued this note. Waits for nobody."""
        if self.journal is not None:
            with contextlib.suppress(dist.DistError):
                return bool(self.journal.watch.store.check([self._note_key(note)]))
        return False

    def _note_key(self, note: str) -> str:
        assert self.journal is not None
        return f"note/{self.journal.name}/{hashlib.sha256(note.encode()).hexdigest()}"

    @property
    def _all_on_this_host(self) -> Neighbours | None:
        """The other ranks, if all of them are on this host."""
        return self._neighbours if self.topology.num_hosts == 1 else None

    def _gather_by_pairs(self, row: Tensor) -> Tensor:
        """[W, n]: every rank's row [n], in host memory. Not a collective: one that a rank has left in the middle does
        no harm to it."""
        return self._pairs(row, self.control, 1)

    def _pairs(self, row: Tensor, group: dist.ProcessGroup | None, tag: int) -> Tensor:
        rows = row.repeat(self.world_size, 1)
        works = []
        for peer in range(self.world_size):
            if peer != self.rank:
                works.append(self._post(dist.irecv, rows[peer], group_src=peer, group=group, tag=tag))
                works.append(self._post(dist.isend, row, group_dst=peer, group=group, tag=tag))
        Work(_COMPILE, messages(works, group), journal=self.journal).wait()
        return rows

    def send_to_all(self, tensors: Sequence[Tensor], text: str) -> Work:
        """Sends host tensors from rank 0 to all others, which `receive` them in this order. Asynchronous: the caller
        keeps the tensors until it has waited for the work."""
        others = range(1, self.world_size)
        works = [self._post(dist.isend, t, group_dst=r, group=self.control) for r in others for t in tensors]
        return Work(text, messages(works), journal=self.journal)

    def receive(self, tensor: Tensor, text: str) -> None:
        """Receives the next tensor that rank 0 sends. ``text`` names it in errors."""
        work = self._post(dist.irecv, tensor, group_src=0, group=self.control)
        Work(text, messages([work]), journal=self.journal).wait()

    def max_on_host(self, values: Sequence[int], text: str = "an exchange of a few numbers") -> list[int]:
        """The maximum of each value over the ranks. Uses only host memory, so no device synchronises. ``text`` names it
        in errors."""
        if self.world_size == 1:
            return list(values)
        self.record_call(text)
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        neighbours = self._all_on_this_host
        if neighbours is not None:
            steps = neighbours.reduce_(2, tensor, torch.maximum)
        else:
            work = self._post(dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
            steps = (collective(work),)
        Work(text, *steps, journal=self.journal).wait()
        return [int(value) for value in tensor]

    def gather_on_host(self, rows: bytearray, row: bytes, text: str) -> Work:
        """``rows``, [W * n] bytes <- every rank's ``row`` of n. Asynchronous. ``text`` names it in errors.

        Messages use an all-to-all of copies of the row, since gloo posts all of it at once. Its all_gather is a ring,
        whose W - 1 hops follow one another (gloo/allgather.cc, alltoall.cc).
        """
        neighbours = self._all_on_this_host
        if neighbours is not None:
            return Work(text, *neighbours.gather_bytes(rows, row), journal=self.journal)
        # lifetime: the work holds the tensors, and these the bytes
        sent, received = (
            torch.frombuffer(each, dtype=torch.uint8) for each in (bytearray(row * self.world_size), rows)
        )
        work = self._post(dist.all_to_all_single, received, sent, group=self.control, async_op=True)
        if self._process_groups is not None and work is not None:
            self._process_groups.record_collective(self.control, work)
        return Work(text, collective(work), journal=self.journal)

    def same_everywhere(
        self, subject: str, lines: Sequence[str], advice: str, *, instead: Sequence[str] | None = None
    ) -> None:
        """Raises RankMismatchError on every rank, naming the first line in which some rank differs from rank 0.
        ``advice`` says what to do. ``instead``: ranks that agree in these lines need not agree in the others."""
        if self.world_size == 1:
            return
        digests = [_digest(each) for each in (lines, instead) if each is not None]
        largest = self.max_on_host([number for digest in digests for number in (-digest, digest)], subject)
        if any(-low == high for low, high in zip(largest[::2], largest[1::2], strict=True)):
            return
        answers = self.gather_objects((list(lines), self.raised))
        gathered, raised = [theirs for theirs, _ in answers], [text for _, text in answers]
        alone = [f" Before that, step() raised on rank {rank}: {text}" for rank, text in enumerate(raised) if text]
        for rank, theirs in enumerate(gathered):
            for k in range(max(len(theirs), len(gathered[0]))):
                here = gathered[0][k] if k < len(gathered[0]) else "(nothing)"
                there = theirs[k] if k < len(theirs) else "(nothing)"
                if here != there:
                    error = RankMismatchError(
                        f"{subject} differs between ranks: rank 0 has {here}, rank {rank} has {there}. {advice}"
                        + "".join(alone if len(set(raised)) > 1 else [])
                    )
                    raise error if self.journal is None else self.journal.reported(error)


def _digest(lines: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
