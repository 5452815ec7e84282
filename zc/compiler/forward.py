"""A forward graph as a schedule, in which weights come while it reads them: sharded ones in windows, and those that an
update has gathered, under overlap_gather, where each bucket is first read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zc.compiler.graphs import CompiledGraph, Origin, Traced
from zc.engine.overlap_gather import WeightGather
from zc.engine.program import Program
from zc.errors import ZcError
from zc.passes import cut_forward, insert_events, outline_segments, place_on_streams, verify, window_weights

_SCHEDULE = (outline_segments.PASS, place_on_streams.PASS, insert_events.PASS, verify.PASS)


class CompiledForward(CompiledGraph):
    """One program per block."""

    def __init__(self, origin: Origin, traced: Traced) -> None:
        plan = origin.runtime.plan
        super().__init__(origin, traced, weights=plan.sharded_names or plan.slot_of())
        self.get(self.traced_for, None)  # while Dynamo's context is open

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        runtime = self.runtime
        program = self.program(args)
        outputs = program(args, runtime.streams)
        if isinstance(runtime.weights, WeightGather):
            runtime.weights.has_run(program)
        return outputs

    def program(self, args: Sequence[Any]) -> Program:
        """The one for the block whose parameters are among ``args``."""
        if self.inside is None:
            return self.get(None, None)
        member = self.member_of(args)
        if member is None:
            raise ZcError(f"a forward of a block like {self.inside.name} got parameters of several blocks")
        return self.get(member, None)

    @property
    def owned(self) -> list[Program]:
        return self.runtime.forwards

    def build(self, member: str | None, variant: None) -> Program:
        runtime = self.runtime
        first = window_weights.PASS if runtime.plan.sharded else cut_forward.PASS
        passes = [p for p in (first, *_SCHEDULE) if runtime.config.verify or p.name != "verify"]
        passes = [p._replace(requires=frozenset()) for p in passes]
        return self._built(self._copy_for(member), runtime.plan, passes)
