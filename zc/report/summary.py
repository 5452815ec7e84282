"""What matters of a compiled model, in figures and in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from zc import torch_private
from zc.engine.program import Program
from zc.errors import megabytes
from zc.optim.trials import num_kept
from zc.planning.allocations import of_ddp
from zc.planning.plan import Plan
from zc.registry import persistent_nbytes, sharded
from zc.schedule.nodes import ops
from zc.schedule.spec import Deposit, WgradInto, Write

if TYPE_CHECKING:
    from torch import nn

    from zc.engine.runtime import Runtime


@dataclass(frozen=True)
class Summary:
    """The figures of one rank. ``fallbacks``: what did not go as requested, a few words each. ``num_unproved``: the
    schedules that run without their proof."""

    nbytes: int
    ddp_nbytes: int
    nbytes_sent: int
    exposed_s: float | None
    num_recompiles: int
    fallbacks: tuple[str, ...]
    num_schedules: int
    num_unproved: int
    num_steps: int

    def __str__(self) -> str:
        """One sentence: whether something fell back, and the figures of the last step."""
        fell = f"Look at {', '.join(self.fallbacks)}." if self.fallbacks else "Nothing fell back."
        figures = [f"{megabytes(self.nbytes)} per rank (DDP in fp32: {megabytes(self.ddp_nbytes)})"]
        figures.append(f"{self.num_recompiles} recompile{'s' * (self.num_recompiles != 1)}")
        if self.num_steps:
            figures.append(f"{megabytes(self.nbytes_sent)} sent in the last step")
        if self.exposed_s is not None:
            figures.append(f"which waited {self.exposed_s * 1e3:,.1f} ms for communication")
        return f"{fell} {', '.join(figures)}."


def nbytes_in_place(graph: fx.Graph, plan: Plan) -> tuple[int, int]:
    """Bytes, in the dtype of the buffer they go to, of the gradients that a schedule makes in place, and of all that it
    writes or deposits. Each byte made in place saves reading it once and writing it once more."""
    in_place = total = 0
    for _, op in ops(graph):
        if not isinstance(op, Write | Deposit):
            continue
        bucket = plan.buckets[op.bucket]
        dtype = bucket.reduce_dtype if plan.placement.shards_gradients else bucket.acc_dtype
        nbytes = sum(bucket.slots[k].numel for k in op.slots) * dtype.itemsize
        total += nbytes
        in_place += nbytes if isinstance(op, WgradInto) else 0
    return in_place, total


def schedules(runtime: Runtime) -> list[Program]:
    """Those of forwards, of backwards and of gathers of weights."""
    return [*runtime.forwards, *runtime.programs, *runtime.weights.programs]


def is_proved(program: Program) -> bool:
    return any(record.name == "verify" for record in program.records)


def summarize(model: nn.Module) -> Summary:
    runtime, optimizers = sharded(model).runtime, sharded(model).optimizers
    states = [num_kept(each.local) for each in optimizers]
    programs = schedules(runtime)
    unproved = sum(not is_proved(program) for program in programs)
    expected = {torch_private.SKIPPED} if runtime.plan.kinds else set()
    breaks = sum(n for reason, n in graph_breaks(runtime).items() if reason not in expected)
    by_hooks = len(uncovered(runtime)) if runtime.config.backend != "eager" and runtime.ledger.num_steps else 0
    counts = [
        (breaks, "graph break", "graph breaks"),
        (by_hooks, "gradient through its hook", "gradients through their hooks"),
        (unproved, "schedule without its proof", "schedules without their proof"),
        (len(runtime.notes), "note", "notes"),
    ]
    last = runtime.ledger.last
    return Summary(
        nbytes=sum(persistent_nbytes(model).values()),
        ddp_nbytes=of_ddp(runtime.plan, states) + sum(param.nbytes for param in runtime.frozen.values()),
        nbytes_sent=sum(last.nbytes_sent.values()),
        exposed_s=last.exposed_s,
        num_recompiles=sum(not graph.endswith("/0") for graph in runtime.ledger.graphs),
        fallbacks=tuple(f"{n} {one if n == 1 else many}" for n, one, many in counts if n),
        num_schedules=len(programs),
        num_unproved=unproved,
        num_steps=runtime.ledger.num_steps,
    )


def graph_breaks(runtime: Runtime) -> dict[str, int]:
    """Why Dynamo broke graphs in this process since `zc.compile`, and how often.

    It always skips the function that has a loop over blocks. Gradients through hooks and a note say what that leaves
    uncompiled.
    """
    before = runtime.ledger.breaks_before
    times = {reason: n - before.get(reason, 0) for reason, n in torch_private.graph_breaks().items()}
    return {reason: n for reason, n in times.items() if n > 0}


def uncovered(runtime: Runtime) -> list[str]:
    """The parameters whose gradients no compiled backward writes."""
    written = set().union(*(program.gradients for program in runtime.programs))
    slots = [((b.index, k), slot) for b in runtime.plan.buckets for k, slot in enumerate(b.slots) if not slot.is_left]
    return [slot.name for where, slot in slots if where not in written]
