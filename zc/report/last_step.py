"""Reports on the last step of a compiled model: what filled each bucket, what was sent, and how long it waited."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from zc.engine.ledger import Where
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime

MANY_PAGE_FAULTS = 4096  # per step; each takes 2 to 3 us


def last_step(runtime: Runtime) -> str:
    """What filled each bucket and how many times, what this rank sent, and how long it waited."""
    if not runtime.ledger.num_steps:
        return "no step yet"
    step, plan = runtime.ledger.last, runtime.plan
    arrived = runtime.ledger.arrived(runtime.programs, step)
    rows = [f"step {runtime.ledger.num_steps}"]
    for bucket in plan.buckets:
        slots = [arrived.get((bucket.index, k), Counter[str]()) for k in range(len(bucket.slots))]
        rows.append(f"bucket {bucket.index}: {sources(slots)}; reduced {reductions(runtime, bucket)} times")
    sent = ", ".join(f"{kind} {n:,}" for kind, n in sorted(step.nbytes_sent.items())) or "nothing"
    rows.append(f"bytes sent by this rank: {sent}; in all {sum(step.nbytes_sent.values()):,}")
    moved = ", ".join(f"{way} {n:,}" for way, n in runtime.accumulators.nbytes_of_last_step.items() if n)
    rows += [f"bytes over the bus: {moved}"] if moved else []
    if step.exposed_s is not None:
        rows.append(f"exposed wait: the calling thread waited {step.exposed_s * 1e3:.1f} ms for exchanges")
    else:
        rows.append("exposed wait: not measured on the host (one rank, or a device that waits by itself)")
    if plan.world_size > 1:
        waits = (f"{len(s)} {where} ({sum(s) * 1e3:.1f} ms)" for where, s in step.waits.items())
        rows.append(f"waits of the calling thread for what other ranks announce of a backward: {', '.join(waits)}")
    if step.num_page_faults is not None and plan.buckets[0].device.type == "cpu":
        rows.append(f"page faults: {step.num_page_faults:,}{_advice(step.num_page_faults)}")
    return "\n".join(rows)


def _advice(num_page_faults: int) -> str:
    """How to avoid page faults; docs/decisions.md says what they cost."""
    if num_page_faults < MANY_PAGE_FAULTS or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return ""
    return (
        "; malloc gives memory back between steps and fetches it again: MALLOC_TRIM_THRESHOLD_=17179869184 and "
        "MALLOC_MMAP_THRESHOLD_=1073741824 in the environment keep it (glibc), so do jemalloc and tcmalloc"
    )


def reductions(runtime: Runtime, bucket: Bucket) -> int:
    return runtime.accumulators.reductions_of_last_step[bucket.index]


def sources(slots: list[Counter[str]]) -> str:
    """``backward_0 x 2 (6 parameters), hook x 1 (1 of 7 parameters)``."""
    counts: dict[tuple[str, int], int] = {}
    for times_by_source in slots:
        for name, times in times_by_source.items():
            counts[name, times] = counts.get((name, times), 0) + 1
    if not counts:
        return "nothing"
    sources = sorted(counts.items())
    return ", ".join(f"{name} x {times} ({n} of {len(slots)} parameters)" for (name, times), n in sources)


def empty(runtime: Runtime) -> str:
    if not runtime.ledger.num_steps:
        return "no step yet"
    arrived = runtime.ledger.arrived(runtime.programs, runtime.ledger.last)
    rows = []
    for bucket in runtime.plan.buckets:
        missing = [(bucket.index, k) for k in range(len(bucket.slots)) if (bucket.index, k) not in arrived]
        if len(missing) == len(bucket.slots):
            rows.append(f"bucket {bucket.index}: all of it")
        rows += [f"{bucket.slots[where[1]].name}: {_why(runtime, where)}" for where in missing]
    return "\n".join(rows) or "nothing"


def _why(runtime: Runtime, where: Where) -> str:
    writers = [program.name for program in runtime.programs if where in program.brings]
    if writers:
        return f"{', '.join(writers)} would write its gradient, and did not run; its hook did not fire either"
    if runtime.config.backend == "eager":
        return "its hook did not fire: it took part in no backward on this rank"
    return "no compiled backward writes it, and its hook did not fire: it took part in no backward on this rank"
