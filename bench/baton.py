"""Jobs that take turns: each keeps processes, memory and a compiler of its own, and one of them trains at a time.

A slow spell of a shared machine then falls on all of them alike (as in bench.turns, whose systems share processes and
so have no memory of their own to measure). Turn ``n`` belongs to job ``n % num_jobs``; a TCPStore of the parent process
holds a key for each turn that has begun, what is going on, and the number of steps that were trained.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import NamedTuple

from torch.distributed import TCPStore

from bench.report.progress import Progress

LONGEST_WAIT = timedelta(hours=1)
POLL_S = 0.25


class Seat(NamedTuple):
    """A job's place among the others, as ``--baton port,job,num_jobs,steps`` gives it to each of its ranks."""

    port: int
    job: int
    num_jobs: int
    steps_per_turn: int

    @classmethod
    def parse(cls, text: str) -> Seat:
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return ",".join(map(str, self))


class InTurn(Progress):
    """A rank's progress: it waits for its job's turns, and rank 0 tells the parent process what goes on.

    All ranks of a job end a turn before the next job begins. The last turn has what comes after the last step.
    """

    def __init__(self, seat: Seat, title: str, rank: int, world_size: int) -> None:
        super().__init__(0, title, shown=False)
        self.seat, self.rank, self.world_size = seat, rank, world_size
        self.store = TCPStore("127.0.0.1", seat.port, is_master=False, timeout=LONGEST_WAIT)
        self.turn = seat.job

    def __enter__(self) -> InTurn:
        self._begin_turn()
        self._news.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end_turn()

    def say(self, what: str) -> None:
        if self.rank == 0:
            self.store.set("status", f"{self.title}: {what}")

    def tick(self, status: str) -> None:
        if not self.done:
            self._news.detach()
        self.done += 1
        self.say(status)
        if self.rank == 0:
            self.store.add("steps", 1)
        if self.done % self.seat.steps_per_turn == 0:
            self._end_turn()
            self._begin_turn()

    def _begin_turn(self) -> None:
        self.store.wait([f"turn {self.turn}"], LONGEST_WAIT)

    def _end_turn(self) -> None:
        if self.store.add(f"ranks at the end of turn {self.turn}", 1) == self.world_size:
            self.store.set(f"turn {self.turn + 1}", "begun")
        self.turn += self.seat.num_jobs


def new_store() -> TCPStore:
    """The parent process's end of it; its port is ``store.port``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONGEST_WAIT)
    store.set("status", "all ranks import torch")
    store.set("turn 0", "begun")
    return store


def wait_for(jobs: Sequence[subprocess.Popen[bytes]], store: TCPStore, progress: Progress) -> None:
    """Shows what the jobs report until all have ended. If one fails, ends the others and raises CalledProcessError."""
    said, waiting = "", list(jobs)
    try:
        while waiting:
            status, num_steps = store.get("status").decode(), store.add("steps", 0)
            if num_steps > progress.done:
                for _ in range(num_steps - progress.done):
                    progress.tick(status)
            elif status != said:
                progress.say(status)
            said = status
            with suppress(subprocess.TimeoutExpired):
                waiting[0].wait(POLL_S)
            for job in [j for j in waiting if j.poll() is not None]:
                waiting.remove(job)
                if job.returncode:
                    raise subprocess.CalledProcessError(job.returncode, job.args)
    finally:
        for job in waiting:
            job.terminate()
        for job in waiting:
            job.wait(60)
