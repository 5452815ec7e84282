"""A forward graph as a schedule, in which weights come while it reads them: sharded ones in windows, and those that an
update has gathered, under overlap_gather, where each bucket is first read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zc.compiler.graphs import CompiledGraph, Origin, Traced
from zc.engine.program import Program
from zc.errors import ZcError
from zc.passes import outline_segments, window_weights
from zc.passes.pipeline import scheduling


class CompiledForward(CompiledGraph):
    """A forward graph, with one program for each member."""

    def __init__(self, origin: Origin, traced: Traced) -> None:
        plan = origin.runtime.plan
        super().__init__(origin, traced, weights=plan.sharded_names or plan.slot_of())
        self.get(self.traced_for, None)  # while Dynamo's context is open

    def program(self, args: Sequence[Any]) -> Program:
        """The one for the block whose parameters are among ``args``."""
        if self.block is None:
            return self.get(None, None)
        member = self.member_of(args)
        if member is None:
            raise ZcError(f"a forward of a block like {self.block.name} got parameters of several blocks")
        return self.get(member, None)

    @property
    def owned(self) -> list[Program]:
        return self.runtime.forwards

    def build(self, member: str | None, variant: None) -> Program:
        plan = self.runtime.plan
        passes = scheduling(window_weights.PASS, outline_segments.PASS, prove=self.runtime.config.verify)
        return self._run_passes(self._copy_for(member), plan, passes)
