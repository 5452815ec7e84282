"""A program: one proved schedule with its compiled segments, ready to be called."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.profiler import record_function

from zc import torch_private
from zc.engine.streams import Streams
from zc.passes.base import Pass, run_passes
from zc.passes.certificate import certificate
from zc.planning.plan import Plan
from zc.schedule import codegen, spec
from zc.schedule.nodes import ops as ops_in

if TYPE_CHECKING:
    from zc.engine.operations import MayReduce, Operations

Segment = Callable[[list[Any]], Sequence[Any]]
CompileSegment = Callable[[fx.GraphModule], Segment]


@dataclass
class Program:
    """A schedule and what explain tells of it; a call runs it once. ``pieces``: what runs it, as `codegen.load` gives
    it. Most have one piece; between those of a pass's gathers (`zc.weights.weight_uses`) other schedules run."""

    name: str
    graph: fx.Graph
    plan: Plan
    pieces: Sequence[codegen.Run]
    operations: Operations
    seconds: Mapping[str, float]  # that each pass took, by name
    num_runs: int = 0
    block: str | None = None  # the block that it runs for
    like: Program | None = None  # the program that it was made from, which the passes have made for another block
    placeholders: tuple[str, ...] = field(init=False)
    outputs: Any = field(init=False)
    buckets: frozenset[int] = field(init=False)  # that it writes or reduces
    reductions: tuple[int, ...] = field(init=False)  # buckets that it reduces between ranks, in order
    gradients: frozenset[tuple[int, int]] = field(init=False)  # that it writes or deposits: (bucket, slot)
    _named: Sequence[codegen.RunNamed] | None = None  # made when it first runs under a profiler, or clocked

    def __post_init__(self) -> None:
        self.placeholders = tuple(n.name for n in self.graph.nodes if n.op == "placeholder")
        self.outputs = self.graph.output_node().args[0]
        records = [op for _, op in ops_in(self.graph)]
        on_buckets = [op for op in records if isinstance(op, spec.BucketOp)]
        self.buckets = frozenset(op.bucket for op in on_buckets if op.role in (spec.Role.WRITE, spec.Role.REDUCTION))
        exchanged = on_buckets if self.plan.num_ranks > 1 else []
        self.reductions = tuple(
            op.bucket for op in exchanged if isinstance(op, spec.Reduction) and op.brings_mean(self.plan)
        )
        writes = (op for op in records if isinstance(op, spec.Write | spec.Deposit))
        self.gradients = frozenset((op.bucket, slot) for op in writes for slot in op.slots)

    @property
    def num_writes(self) -> int:
        """Buckets that pass through the ring."""
        return len({op.bucket for _, op in ops_in(self.graph) if isinstance(op, spec.Write)})

    def __call__(
        self,
        args: list[Any],
        streams: Streams,
        may_reduce: MayReduce | None = None,
        buckets: Collection[int] | None = None,
        piece: int = 0,
    ) -> tuple[Any, ...]:
        """Runs the schedule, or one of its pieces. Where ``may_reduce`` says no, nothing is reduced: the runtime gets
        the gradients as deposits, or a partial sum keeps them. None: there is nobody to ask. ``buckets``: it runs for
        these alone."""
        values: dict[str, Any] = dict(zip(self.placeholders, args, strict=True))
        args.clear()  # the schedule frees each value at its last use; the caller's list must not keep it alive
        self.num_runs += piece == 0
        operations = self.operations if may_reduce is None else self.operations.reducing_if(may_reduce)
        operations = operations if buckets is None else operations.on_buckets(buckets)
        if streams.clock.is_on or torch_private.is_profiling():  # who ask for the names of operations
            if self._named is None:
                self._named = codegen.load(self.graph, self.plan)
            with record_function(f"zc {self.name}"):
                self._named[piece](values, streams, operations, streams.clock.named(self.name))
        else:
            self.pieces[piece](values, streams, operations)
        return tuple([values[item.name] if isinstance(item, fx.Node) else item for item in self.outputs])


def build(
    graph: fx.Graph,
    plan: Plan,
    passes: Sequence[Pass],
    operations: Operations,
    compile_segment: CompileSegment | None = None,
    *,
    name: str,
    dump_dir: str | Path | None = None,
) -> Program:
    """Takes ``graph`` through ``passes``, compiles its segments, and generates the Python that runs it.
    ``operations`` get the segments, and are of this program alone. ``dump_dir``: where to keep what the passes make,
    the Python, and the certificate of what was proved (`zc.passes.certificate`)."""
    scheduled, seconds = run_passes(graph, plan, passes, dump_dir=dump_dir, name=name)
    for node, op in ops_in(scheduled):
        if isinstance(op, spec.Segment):
            assert compile_segment is not None
            operations.segments[op.key] = compile_segment(node.meta["segment"])
    if dump_dir is not None:
        folder = Path(dump_dir, name)
        (folder / "schedule.py").write_text(codegen.generate(scheduled))
        if "verify" in seconds:
            (folder / "certificate.json").write_text(json.dumps(certificate(scheduled, plan), indent=1) + "\n")
    return Program(name, scheduled, plan, codegen.load(scheduled), operations, seconds)
