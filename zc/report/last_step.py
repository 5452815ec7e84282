"""Reports on the last step of a compiled model: what filled each bucket, what was sent, and how long it waited."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime

MANY_PAGE_FAULTS = 4096  # per step; each takes 2 to 3 us


def sources(runtime: Runtime) -> list[list[Counter[str]]]:
    """For each bucket and each of its slots: how often each schedule, or "hook", brought the gradient."""
    arrived = runtime.ledger.arrived(runtime.programs, runtime.ledger.last)
    return [
        [arrived.get((bucket.index, k), Counter[str]()) for k in range(len(bucket.slots))]
        for bucket in runtime.plan.buckets
    ]


def last_step(runtime: Runtime) -> str:
    """What filled each bucket and how many times, what this rank sent, and how long it waited."""
    if not runtime.ledger.num_steps:
        return "no step yet"
    step, plan = runtime.ledger.last, runtime.plan
    rows = [f"step {runtime.ledger.num_steps}"]
    for bucket, slots in zip(plan.buckets, sources(runtime), strict=True):
        rows.append(f"bucket {bucket.index}: {text_of_sources(slots)}; {text_of_reductions(runtime, bucket)}")
    sent = ", ".join(f"{kind} {n:,}" for kind, n in sorted(step.nbytes_sent.items())) or "nothing"
    rows.append(f"bytes sent by this rank: {sent}; in all {sum(step.nbytes_sent.values()):,}")
    moved = ", ".join(f"{way} {n:,}" for way, n in step.nbytes_moved.items() if n)
    rows += [f"bytes over the bus: {moved}"] if moved else []
    if step.exposed_s is not None:
        rows.append(f"exposed wait: the calling thread waited {step.exposed_s * 1e3:.1f} ms for exchanges")
    else:
        rows.append("exposed wait: not measured on the host (one rank, or a device that waits by itself)")
    if step.waits:
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


def text_of_reductions(runtime: Runtime, bucket: Bucket) -> str:
    times = runtime.ledger.last.num_reductions[bucket.index]
    return f"reduced {times} time{'s' * (times != 1)}"


def text_of_sources(slots: list[Counter[str]]) -> str:
    """``backward_0 x 2 (6 of 7 parameters), hook x 1 (1 of 7 parameters)``. The schedules of equal blocks are one:
    ``backward_0 of 5 blocks x 1 (55 of 55 parameters)``."""
    counts: Counter[tuple[str, int]] = Counter()  # (schedule, times) -> parameters
    blocks: dict[tuple[str, int], set[str]] = {}
    for times_by_source in slots:
        for name, times in times_by_source.items():
            schedule, _, block = name.partition(" of ")
            counts[schedule, times] += 1
            blocks.setdefault((schedule, times), set()).add(block)
    lines = []
    for (schedule, times), number in sorted(counts.items()):
        names = sorted(blocks[schedule, times])
        of = f" of {len(names)} blocks" if len(names) > 1 else f" of {names[0]}" if names[0] else ""
        lines.append(f"{schedule}{of} x {times} ({number} of {len(slots)} parameters)")
    return ", ".join(lines) or "nothing"


def without_gradient(runtime: Runtime) -> str:
    """Which parameters got no gradient in the last step, and why."""
    if not runtime.ledger.num_steps:
        return "no step yet"
    rows = []
    for bucket, slots in zip(runtime.plan.buckets, sources(runtime), strict=True):
        missing = [k for k, times in enumerate(slots) if not times and not bucket.slots[k].is_left]
        if len(missing) == bucket.num_params:
            rows.append(f"bucket {bucket.index}: all of it")
        rows += [f"{bucket.slots[k].name}: {_why(runtime, (bucket.index, k))}" for k in missing]
    return "\n".join(rows) or "nothing"


def _why(runtime: Runtime, where: tuple[int, int]) -> str:
    writers = [program.name for program in runtime.programs if where in program.gradients]
    if writers:
        return f"{', '.join(writers)} would write its gradient, and did not run; its hook did not fire either"
    if runtime.config.backend == "eager":
        return "its hook did not fire: it took part in no backward on this rank"
    return "no compiled backward writes it, and its hook did not fire: it took part in no backward on this rank"
