"""`zc.explain`: where each parameter went, how buckets are filled and reduced, what stayed empty and why, what was
compiled and what was not, each schedule with its proof, and what it costs."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from zc import torch_private
from zc.engine.accumulators import Acc
from zc.engine.ledger import Where
from zc.engine.program import Program
from zc.errors import PlanError
from zc.passes.write_in_place import nbytes_in_place
from zc.planning.plan import Bucket, Plan
from zc.planning.wire import BLOCK, exact_numel
from zc.registry import persistent_nbytes, sharded
from zc.report.html import page
from zc.schedule.nodes import summary, text

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime
    from zc.offload.host_step import HostStep


MANY_PAGE_FAULTS = 4096  # per step; each takes 2 to 3 us


class Explanation:
    """What `explain` returns. ``str()`` of it is the report; ``sections`` has its sections by name, and ``path`` is the
    page that was written."""

    def __init__(self, sections: dict[str, str], path: Path | None = None) -> None:
        self.sections, self.path = sections, path

    def __str__(self) -> str:
        return "\n\n".join(f"== {name} ==\n{body}" for name, body in self.sections.items())

    __repr__ = __str__


def explain(model: nn.Module, *, format: str = "text", path: str | Path | None = None) -> Explanation:  # noqa: A002
    """Reports on a compiled model; complete once it has run a step.

    Args:
        format: "text", or "html", which also writes one self-contained page with a picture of each schedule.
        path: where the page goes; None: zc-explain-rank<r>.html in the current folder.

    Raises:
        PlanError: zc does not know the model, or the format.
    """
    if format not in ("text", "html"):
        raise PlanError(f"format must be 'text' or 'html', got {format!r}")
    runtime = sharded(model).runtime
    on_host = [o.offload for o in sharded(model).optimizers if o.offload is not None]
    nbytes = persistent_nbytes(model)
    sharded(model).grad_shards.say_skipped()
    sections = {
        "plan": f"stage {runtime.plan.placement.stage}, rank {runtime.group.rank} of {runtime.group.world_size}, "
        f"backend {runtime.config.backend}, reduce {runtime.plan.reduce}, overlap {runtime.plan.overlap}\n"
        + "\n".join([_ways(runtime.plan), *_encoded(runtime.plan), *map(str, runtime.plan.kinds)]),
        "buckets": _buckets(runtime),
        "last step": _last_step(runtime),
        "stayed empty in the last step": _empty(runtime),
        "compilation": _compilation(runtime),
        "not covered by a schedule": _uncovered(runtime),
        "persistent bytes": "\n".join(f"{name:>16}: {n:,}" for name, n in nbytes.items())
        + f"\n{'total':>16}: {sum(nbytes.values()):,}",
        "notes": "\n".join(runtime.notes) or "none",
    }
    kinds = [type(each.optimizer).__name__ for each in sharded(model).optimizers]
    if len(kinds) > 1 or any(b.layout.owners is not None for b in runtime.plan.buckets):
        sections["optimizers"] = _optimizers(runtime, kinds)
    if runtime.plan.offload is not None:
        sections["offload"] = _offload(runtime, on_host)
    single = [p for p in runtime.eager.programs if p.num_runs]
    if single:
        sections["schedules of what came in through hooks, and at the end"] = "\n".join(
            f"{p.name}: {_verdict(p)}" for p in single
        )
    updates = [program for step in on_host for program in step.programs]
    own = [program for program in runtime.programs if program.like is None]
    programs = (*runtime.forwards, *own, *runtime.weights.programs, *updates)
    for program in programs:
        lines = [f"{p.block}: run {p.num_runs} times" for p in runtime.programs if p.like is program]
        sections[f"schedule {program.name}"] = "\n".join([_verdict(program), *lines, text(program.graph)])
    if format == "text":
        return Explanation(sections)
    written = Path(path) if path is not None else Path(f"zc-explain-rank{runtime.group.rank}.html")
    graphs = {f"schedule {p.name}": (p.graph, p.plan) for p in (*programs, *single)}
    written.write_text(page(f"zc: {type(model).__name__}", sections, graphs))
    return Explanation(sections, written)


def _ways(plan: Plan) -> str:
    """Which way each exchange takes."""
    if plan.num_ranks == 1:
        return "one rank: nothing is exchanged"
    ways = {True: "read from the other ranks' memory", False: "messages"}
    inside = f"reductions: {ways[plan.reads_rows]}; gathers of weights: {ways[plan.reads_weights]}; "
    if plan.num_replicas == 1:
        how = "messages over sockets of the host" if plan.reads_weights else "messages"
        return f"{plan.topology}; {inside}announcements and norms: {how}"
    whole = f"{plan.num_replicas} replicas of {plan.world_size} ranks that share the state"
    if plan.world_size == 1:
        return f"{whole}; reductions: messages between replicas; weights: not gathered"
    return f"{whole}, on {plan.topology}; inside a replica {inside}between replicas reductions: messages"


def _encoded(plan: Plan) -> list[str]:
    """What travels in fewer bits, and what does not."""
    ways = [f"gradients in {plan.reduce_bits} bits"] if plan.reduce_bits else []
    ways += [f"weights as differences of {plan.gather_bits} bits"] if plan.gather_bits else []
    if not ways:
        return []
    where = "between hosts" if plan.has_levels else "between ranks"
    return [f"{where} {' and '.join(ways)}, a scale per {BLOCK} elements; {exact_numel(plan):,} elements exact"]


def _optimizers(runtime: Runtime, kinds: list[str]) -> str:
    """The buckets of each optimizer, and what this rank updates."""
    rows, rank = [], runtime.group.rank
    for number, kind in enumerate(kinds):
        buckets = runtime.plan.of_optimizer(number)
        numel = sum(s.numel for b in buckets for s in b.slots)
        pairs = [(b.layout.owned(s, rank), s) for b in buckets for s in b.slots]
        mine = sum(stop - start for (start, stop), _ in pairs)
        whole = any(b.layout.owners is not None for b in buckets)
        share = f"{sum(stop > start for (start, stop), _ in pairs)} whole parameters" if whole else "an equal shard"
        rows.append(
            f"{number}: {kind}, buckets {', '.join(str(b.index) for b in buckets) or 'none'}, {numel:,} elements; this "
            f"rank updates {share}, {mine:,} elements"
        )
    return "\n".join(rows)


def _offload(runtime: Runtime, on_host: list[HostStep]) -> str:
    plan, moved = runtime.plan, runtime.accumulators.nbytes_of_last_step
    assert plan.offload is not None
    shard, whole = (sum(n) for n in zip(*((b.layout.numel_shard, b.numel) for b in plan.buckets), strict=True))
    size = plan.buckets[0].acc_dtype.itemsize
    numel = shard if plan.placement.shards_gradients else whole
    here, there = ("in use", "instead") if plan.offload.accumulates_on_host else ("instead", "in use")
    disk = on_host[0].disk
    return "\n".join(
        [
            f"optimizer state: {f'{disk.file.path}, {disk.file.nbytes:,} bytes' if disk is not None else 'in memory'}",
            f"offload_accumulate='cpu' ({here}): {size * numel:,} bytes go to the host per backward, and as many come "
            "back from the second backward of an update on; none stay on the device",
            f"offload_accumulate='device' ({there}): {size * numel:,} bytes stay on the device, {size * shard:,} go to "
            "the host per update (per backward, if microbatches are not declared with zc.no_sync)",
            "over the bus in the last step: " + ", ".join(f"{way} {nbytes:,} bytes" for way, nbytes in moved.items()),
            f"update: {'; '.join(step.how for step in on_host)}",
        ]
    )


def _buckets(runtime: Runtime) -> str:
    inline = {b for program in runtime.programs for b in program.inline_buckets if program.plan.reduces}
    widths = {"bucket": 6, "params": 6, "elements": 12, "bytes": 12, "padding": 8, "reduced": 8, "times": 5, "holds": 8}
    rows = [" ".join(f"{name:>{width}}" for name, width in widths.items())]
    reductions = runtime.accumulators.reductions_of_last_step
    for b in runtime.plan.buckets:
        how = "inline" if b.index in inline else "at end"
        state = runtime.accumulators.state[b.index]
        holds = state.value if state is not Acc.EMPTY else "nothing"
        rows.append(
            f"{b.index:>6} {len(b.slots):>6} {b.numel:>12,} {b.numel * b.param_dtype.itemsize:>12,} "
            f"{b.layout.numel_padding:>8,} {how:>8} {reductions[b.index]:>5} {holds:>8}"
        )
        rows += [f"{'':>8}{slot}" for slot in b.slots]
    return "\n".join(rows)


def _uncovered(runtime: Runtime) -> str:
    if runtime.config.backend == "eager":
        return "all: backend='eager' takes every gradient through hooks"
    if not runtime.programs:
        return "no backward has been compiled yet"
    written = set().union(*(program.brings for program in runtime.programs))
    missing = [
        f"{slot.name}: no compiled backward writes its gradient (it would come in through its hook)"
        for b in runtime.plan.buckets
        for k, slot in enumerate(b.slots)
        if (b.index, k) not in written
    ]
    return "\n".join(missing) or "nothing"


def _last_step(runtime: Runtime) -> str:
    """What filled each bucket and how many times, what this rank sent, and how long it waited."""
    if not runtime.ledger.num_steps:
        return "no step yet"
    step, plan = runtime.ledger.last, runtime.plan
    arrived = runtime.ledger.arrived(runtime.programs, step)
    rows = [f"step {runtime.ledger.num_steps}"]
    for bucket in plan.buckets:
        slots = [arrived.get((bucket.index, k), Counter[str]()) for k in range(len(bucket.slots))]
        rows.append(f"bucket {bucket.index}: {_sources(slots)}; reduced {_reductions(runtime, bucket)} times")
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
    """How to avoid page faults; docs/benchmarks.md has what they cost."""
    if num_page_faults < MANY_PAGE_FAULTS or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return ""
    return (
        "; malloc gives memory back between steps and fetches it again: MALLOC_TRIM_THRESHOLD_=17179869184 and "
        "MALLOC_MMAP_THRESHOLD_=1073741824 in the environment keep it (glibc), so do jemalloc and tcmalloc"
    )


def _reductions(runtime: Runtime, bucket: Bucket) -> int:
    return runtime.accumulators.reductions_of_last_step[bucket.index]


def _sources(slots: list[Counter[str]]) -> str:
    """``backward_0 x 2 (6 parameters), hook x 1 (1 of 7 parameters)``."""
    counts: dict[tuple[str, int], int] = {}
    for times_by_source in slots:
        for name, times in times_by_source.items():
            counts[name, times] = counts.get((name, times), 0) + 1
    if not counts:
        return "nothing"
    sources = sorted(counts.items())
    return ", ".join(f"{name} x {times} ({n} of {len(slots)} parameters)" for (name, times), n in sources)


def _empty(runtime: Runtime) -> str:
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


def _compilation(runtime: Runtime) -> str:
    if runtime.config.backend == "eager":
        return "nothing is compiled: backend='eager'"
    graphs = runtime.ledger.graphs
    again = [graph for graph in graphs if not graph.endswith("/0")]
    rows = [f"graphs: {len(graphs)} ({', '.join(graphs) or 'none'}: frame/compilation)"]
    rows.append(f"recompiles (other shapes, another module of the same class, other guards): {len(again)}")
    before = runtime.ledger.breaks_before
    breaks = {reason: n - before.get(reason, 0) for reason, n in torch_private.graph_breaks().items()}
    rows.append("graph breaks and skipped frames in this process since zc.compile:")
    rows += [f"    {n} x {' '.join(reason.split())[:300]}" for reason, n in breaks.items() if n > 0] or ["    none"]
    return "\n".join(rows)


def _verdict(program: Program) -> str:
    counts = ", ".join(f"{name} {n}" for name, n in summary(program.graph).items())
    proved = any(r.name == "verify" for r in program.records)
    verdict = "races 0, redundant 0" if proved else "NOT VERIFIED"
    seconds = sum(r.seconds for r in program.records)
    in_place, total = nbytes_in_place(program.graph, program.plan)
    made = f"gradients made in place: {in_place:,} of {total:,} bytes"
    return f"run {program.num_runs} times; {counts}; {verdict}; passes took {seconds * 1e3:.1f} ms; {made}"
