"""What all parts of a compiled model share on one rank: its plan, its memory, its streams, its ranks, and its notes.

A part that needs no more than this takes a `Core`. What knows the state of a backward or an update is the `Runtime`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zc import torch_private
from zc.engine.accumulators import Accumulators
from zc.engine.binding import Operations
from zc.engine.buffers import Buffers
from zc.engine.ledger import Ledger
from zc.engine.program import Program
from zc.engine.streams import Streams
from zc.engine.unset import Unset
from zc.passes.pipeline import pipeline
from zc.planning.plan import Plan
from zc.ranks.group import Group

if TYPE_CHECKING:
    from zc.config import Config
    from zc.engine.program import Segment


class Listener:
    """What the runtime tells, and asks, the optimizers and the buffers of its model. It knows none of them; a method
    does nothing unless it is overridden."""

    def before_meeting(self) -> None:
        """This rank is at the boundary of an update, and has waited for no other rank there."""

    def after_meeting(self) -> None:
        """All ranks are at the boundary."""

    def backward_ended(self) -> None:
        """The gradients of a backward are in; `Announcements.has_grad` says of which parameters."""

    def gradients_finished(self) -> None:
        """Every rank's shard holds the mean over ranks of the sum over backwards."""

    def gradients_cleared(self, optimizer: int | None) -> None:
        """No gradient is left of one optimizer, by its number, or of all: nobody may hold a view of one."""

    def cleared_optimizers(self) -> list[int]:
        """Numbers of the optimizers whose own tensors the caller has taken the gradients of."""
        return []

    def may_be_cleared(self) -> bool:
        """The same, by a look at one tensor of each optimizer."""
        return False


class Core:
    """Made by `zc.compile`; `zc.recompile` gives it a larger plan."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        buffers: Buffers,
        group: Group,
        streams: Streams,
        params: dict[str, nn.Parameter],
    ) -> None:
        self.config, self.plan, self.buffers, self.group, self.streams = config, plan, buffers, group, streams
        weakref.finalize(buffers, streams.leave, buffers.all_tensors).atexit = False  # it holds the memory until then
        self.params = params  # that train, by name
        self.placed = dict(params)  # in a bucket of the plan: these, and frozen ones whose weights are sharded
        self.frozen: dict[str, nn.Parameter] = {}  # that do not train; one that asks for a gradient needs zc.recompile
        self.unset = Unset()  # what has no value yet, of a model that was made on meta
        self.shown: dict[str, Tensor] = {}  # what each of params has as .grad while it has a gradient, by name
        self.accumulators = Accumulators(plan, buffers, group)
        self.bind = partial(Operations, self.accumulators)  # for `zc.engine.program.build`
        self.inductor_options = config.inductor_options
        self.passes = pipeline(in_place=config.write_in_place, prove=config.verify, windows=bool(plan.sharded))
        self.programs: list[Program] = []  # of compiled backward graphs, for explain
        self.forwards: list[Program] = []  # of compiled forward graphs that are schedules
        # by canonical text: each with the check of the global state that it was compiled under
        self.compiled_segments: dict[str, list[tuple[Callable[[], bool], Segment]]] = {}
        self.ledger = Ledger()
        self.ledger.breaks_before = torch_private.graph_breaks()
        self.notes: list[str] = []  # fallbacks taken and other things worth saying, each once
        self._unsaid: list[tuple[int, str]] = []  # this rank's, with the update in which they came
        self.is_boundary = True

    @property
    def current_plan(self) -> Plan:
        return self.plan if self.is_boundary else self.plan.microbatch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_boundary = self.is_boundary, False
        try:
            yield
        finally:
            self.is_boundary = before

    def wait_for_host_memory(self) -> None:
        """Before the calling thread itself reads or writes what copies may still be on their way to."""
        if self.plan.offload is not None:
            self.streams.synchronize()

    def say_once(self, note: str) -> None:
        """Records a fallback or a condition for explain. Rank 0 warns, the first time; another rank only of what rank
        0 has not said, in `say_rest`."""
        if note in self.notes:
            return
        self.notes.append(note)
        if self.group.rank == 0:
            warnings.warn(f"zc: {note}", stacklevel=3)
            self.group.record_note(note)
        else:
            self._unsaid.append((self.ledger.num_steps, note))

    def say_rest(self) -> None:
        """At the end of an update: what has come up on this rank and not on rank 0, which has had a whole update more
        to say it."""
        while self._unsaid and self._unsaid[0][0] + 1 < self.ledger.num_steps:
            _, note = self._unsaid.pop(0)
            if not self.group.has_note(note):
                warnings.warn(f"zc, rank {self.group.rank}, not rank 0: {note}", stacklevel=3)
