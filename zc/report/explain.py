"""`zc.explain` reports on a compiled model: its buckets and how they are filled and reduced, what was compiled, each
fallback with its reason, and each schedule with its proof and costs. It also tells what the last step did: what filled
each bucket, what was sent, how long it waited. `Summary` has what matters of that, in figures and in one sentence.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx, nn

from zc import torch_private
from zc.engine.buffers import Acc
from zc.engine.program import Program
from zc.errors import PlanError, megabytes
from zc.offload.host_step import HostStep
from zc.optim.trials import num_kept
from zc.planning.allocations import of_ddp
from zc.planning.plan import Bucket, Plan, Way, hops_to_gather
from zc.registry import persistent_nbytes, sharded
from zc.report.html import BucketBar, measured, page
from zc.schedule.nodes import ops, text
from zc.schedule.nodes import summary as counts_of
from zc.schedule.spec import Deposit, WgradInto, Write

if TYPE_CHECKING:
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
        dtype = bucket.grad_dtype if plan.placement.shards_gradients else bucket.acc_dtype
        nbytes = sum(bucket.slots[k].numel for k in op.slots) * dtype.itemsize
        total += nbytes
        in_place += nbytes if isinstance(op, WgradInto) else 0
    return in_place, total


def all_schedules(runtime: Runtime) -> list[Program]:
    """Those of forwards, of backwards and of gathers of weights."""
    return [*runtime.forwards, *runtime.programs, *runtime.weights.programs]


def is_proved(program: Program) -> bool:
    return "verify" in program.seconds


def summarize(model: nn.Module) -> Summary:
    runtime, optimizers = sharded(model).runtime, sharded(model).optimizers
    states = [num_kept(each.local) for each in optimizers]
    programs = all_schedules(runtime)
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


LONGEST_LIST = 30  # lines of a section that `str` shows


class Explanation:
    """What `explain` returns. ``str()`` gives the report: first one sentence, ``summary``, then sections with long
    lists cut short. ``sections`` has them whole, by name. ``path`` is the page that was written, if any."""

    def __init__(self, first: Summary, sections: dict[str, str], path: Path | None = None) -> None:
        self.summary, self.sections, self.path = first, sections, path

    def __str__(self) -> str:
        parts = [str(self.summary)] + ([f"The page is {self.path}"] if self.path is not None else [])
        return "\n\n".join([*parts, *(f"== {name} ==\n{_folded(name, body)}" for name, body in self.sections.items())])

    __repr__ = __str__


def explain(model: nn.Module, *, format: str = "text", path: str | Path | None = None) -> Explanation:  # noqa: A002
    """Reports on a compiled model; complete once it has run a step.

    Args:
        format: "text", or "html", which also writes one self-contained page with a picture of one step as it ran.
        path: where the page goes; None: zc-explain-rank<r>.html in the current folder.

    Raises:
        PlanError: zc does not know the model, or the format.
    """
    if format not in ("text", "html"):
        raise PlanError(f"format must be 'text' or 'html', got {format!r}")
    sharded(model).grad_shards.say_skipped()
    sections = _sections(model)
    first = summarize(model)
    if format == "text":
        return Explanation(first, sections)
    rank = sharded(model).runtime.group.rank
    file = Path(path) if path is not None else Path(f"zc-explain-rank{rank}.html").absolute()
    file.write_text(_page(model, first, sections))
    return Explanation(first, sections, file)


def _sections(model: nn.Module) -> dict[str, str]:
    runtime, optimizers = sharded(model).runtime, sharded(model).optimizers
    nbytes = persistent_nbytes(model)
    sections = {
        "plan": f"{_stage(runtime.plan)}, rank {runtime.group.rank} of {runtime.group.world_size}, "
        f"backend {runtime.config.backend}, reduce {runtime.plan.reduce}, overlap {runtime.plan.overlap}\n"
        + "\n".join([_ways(runtime.plan), *_encoded(runtime.plan), *map(str, runtime.plan.kinds)]),
        "buckets": _buckets(runtime),
        "last step": last_step(runtime),
        "stayed empty in the last step": without_gradient(runtime),
        "compilation": _compilation(runtime),
        "not covered by a schedule": _uncovered(runtime),
        "persistent bytes": "\n".join(f"{name:>16}: {n:,}" for name, n in nbytes.items())
        + f"\n{'total':>16}: {sum(nbytes.values()):,}",
        "notes": "\n".join(runtime.notes) or "none",
    }
    kinds = [type(each.optimizer).__name__ for each in optimizers]
    if len(kinds) > 1 or any(b.layout.owners is not None for b in runtime.plan.buckets):
        sections["optimizers"] = _optimizers(runtime, kinds)
    for number, table in enumerate(table for table, _ in runtime.weights.passes_so_far if table):
        sections[f"residency of weights, pass {number}"] = table
    if runtime.plan.offload is not None:
        sections["offload"] = _offload(runtime, [o.updater for o in optimizers if isinstance(o.updater, HostStep)])
    by_bucket = _schedules_of_buckets(runtime)
    if by_bucket:
        sections["schedules of gradients that came through hooks or waited for the end"] = "\n".join(
            f"{p.name}: {_verdict(p)}" for p in by_bucket
        )
    for program in _printed(model):
        blocks = [f"{p.block}: run {p.num_runs} times" for p in all_schedules(runtime) if p.like is program]
        sections[f"schedule {program.name}"] = "\n".join([_verdict(program), *blocks, text(program.graph)])
    return sections


def _page(model: nn.Module, first: Summary, sections: Mapping[str, str]) -> str:
    runtime = sharded(model).runtime
    step = runtime.streams.clock.step()
    of_passes = [program for _, program in runtime.weights.passes_so_far]
    programs = [*_printed(model), *_schedules_of_buckets(runtime), *all_schedules(runtime), *of_passes]
    return page(
        title=f"zc: {type(model).__name__}, {_stage(runtime.plan)}, rank {runtime.group.rank} of "
        f"{runtime.group.world_size}",
        summary=first,
        step=measured(step, programs) if step is not None else None,
        buckets=_bars(runtime),
        notes=runtime.notes,
        sections=sections,
    )


def _printed(model: nn.Module) -> list[Program]:
    """The schedules that have a section: those of equal blocks once, and the updates in host memory."""
    schedules = all_schedules(sharded(model).runtime)
    updates = [program for each in sharded(model).optimizers for program in each.updater.programs]
    return [*(p for p in schedules if p.like is None), *updates]


def _schedules_of_buckets(runtime: Runtime) -> list[Program]:
    """The schedules that ran for one bucket each, of gradients that came through hooks."""
    return [program for program in runtime.deposits.programs if program.num_runs]


def _folded(name: str, body: str) -> str:
    """The first lines of a long list; schedules stay whole."""
    lines = body.splitlines()
    if name.startswith("schedule") or len(lines) <= LONGEST_LIST:
        return body
    num_left = len(lines) - LONGEST_LIST
    return "\n".join([*lines[:LONGEST_LIST], f"... {num_left} more lines: zc.explain(model).sections[{name!r}]"])


def _bars(runtime: Runtime) -> list[BucketBar]:
    bars = []
    for bucket, slots in zip(runtime.plan.buckets, sources(runtime), strict=True):
        names = {name for times in slots for name in times}
        state = "empty" if not names else "hooks" if "hook" in names else "compiled"
        said = f"{len(slots)} parameters, {text_of_reductions(runtime, bucket)}"
        params = [f"filled by {text_of_sources(slots)}", *map(str, bucket.slots)]
        bars.append(BucketBar(bucket.index, bucket.numel * bucket.param_dtype.itemsize, state, said, params))
    return bars


def _stage(plan: Plan) -> str:
    is_mixed = plan.sharded and not plan.placement.shards_weights
    return f"stage {plan.placement.stage}{' with frozen parameters in shards' if is_mixed else ''}"


def _ways(plan: Plan) -> str:
    """How each exchange travels: by messages, or by reading memory."""
    if plan.num_ranks == 1:
        return "one rank: nothing is exchanged"
    words = {True: "read from the other ranks' memory", False: "messages"}

    def gathered(bucket: Bucket) -> bool:
        return any(hop.way in (Way.MEMORY, Way.SHARDS) for hop in hops_to_gather(plan, bucket))

    gathers = gathered(plan.buckets[0])
    inside = f"reductions: {words[plan.hops[0].way is Way.MEMORY]}; gathers of weights: {words[gathers]}; "
    if plan.frozen and gathered(plan.frozen[0]) != gathers:
        inside += f"of frozen ones: {words[gathered(plan.frozen[0])]}; "
    if plan.num_replicas == 1:
        how = "messages over sockets of the host" if gathers else "messages"
        return f"{plan.topology}; {inside}announcements and norms: {how}"
    whole = f"{plan.num_replicas} replicas of {plan.world_size} ranks that share the state"
    if plan.world_size == 1:
        return f"{whole}; reductions: messages between replicas; weights: not gathered"
    return f"{whole}, on {plan.topology}; inside a replica {inside}between replicas reductions: messages"


def _encoded(plan: Plan) -> list[str]:
    """What travels in fewer bits, and what does not."""
    gradients, weights = plan.reduce_encoding, plan.gather_encoding
    ways = [f"gradients in {gradients.bits} bits"] if gradients is not None else []
    how = "weights in" if plan.placement.shards_weights else "weights as differences of"
    ways += [f"{how} {weights.bits} bits"] if weights is not None else []
    encoding = gradients or weights
    if encoding is None:
        return []
    where = "between hosts" if plan.topology.has_levels else "between ranks"
    exact = encoding.exact_numel(plan)
    return [f"{where} {' and '.join(ways)}, a scale per {encoding.block} elements; {exact:,} elements exact"]


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
    plan, moved = runtime.plan, runtime.ledger.last.nbytes_moved or {"to_host": 0, "to_device": 0}
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
    inline = {b for program in runtime.programs for b in program.buckets if program.plan.reduces}
    widths = {"bucket": 6, "params": 6, "elements": 12, "bytes": 12, "padding": 8, "reduced": 8, "times": 5, "holds": 8}
    rows = [" ".join(f"{name:>{width}}" for name, width in widths.items())]
    reductions = runtime.ledger.last.num_reductions
    for b in runtime.plan.buckets:
        how = "inline" if b.index in inline else "at end"
        state = runtime.accumulators.state[b.index]
        holds = state.value if state is not Acc.EMPTY else "nothing"
        rows.append(
            f"{b.index:>6} {len(b.slots):>6} {b.numel:>12,} {b.numel * b.param_dtype.itemsize:>12,} "
            f"{b.layout.numel_padding:>8,} {how:>8} {reductions[b.index]:>5} {holds:>8}"
        )
        rows += [f"{'':>8}{slot}" for slot in b.slots]
    rows += [
        f"{b.index:>6} {len(b.slots):>6} {b.numel:>12,} {b.nbytes:>12,} {b.layout.numel_padding:>8,}   frozen: "
        f"{b.nbytes // runtime.plan.world_size:,} bytes on this rank, gathered while they are read"
        for b in runtime.plan.frozen
    ]
    return "\n".join(rows)


def _uncovered(runtime: Runtime) -> str:
    if runtime.config.backend == "eager":
        return "all: backend='eager' takes every gradient through hooks"
    if not runtime.programs:
        return "no backward has been compiled yet"
    why = "no compiled backward writes its gradient (it would come in through its hook)"
    return "\n".join(f"{name}: {why}" for name in uncovered(runtime)) or "nothing"


def _compilation(runtime: Runtime) -> str:
    if runtime.config.backend == "eager":
        return "nothing is compiled: backend='eager'"
    graphs = runtime.ledger.graphs
    again = [graph for graph in graphs if not graph.endswith("/0")]
    rows = [f"graphs: {len(graphs)} ({', '.join(graphs) or 'none'}: frame/compilation)"]
    causes = "an evaluation under no_grad, other shapes, another module of the same class, other guards"
    rows.append(f"recompiles ({causes}): {len(again)}")
    rows.append("graph breaks and skipped frames in this process since zc.compile:")
    breaks = graph_breaks(runtime)
    rows += [f"    {n} x {' '.join(reason.split())[:300]}" for reason, n in breaks.items()] or ["    none"]
    if runtime.plan.kinds:
        rows.append("    (Dynamo skips the function that has the loop over blocks: each block is compiled on its own)")
    return "\n".join(rows)


def _verdict(program: Program) -> str:
    counts = ", ".join(f"{name} {n}" for name, n in counts_of(program.graph).items())
    verdict = "races 0, redundant 0" if is_proved(program) else "NOT VERIFIED"
    in_place, total = nbytes_in_place(program.graph, program.plan)
    share = f"gradients made in place: {in_place:,} of {total:,} bytes"
    took = f"passes took {sum(program.seconds.values()) * 1e3:.1f} ms"
    return f"run {program.num_runs} times; {counts}; {verdict}; {took}; {share}"


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
    if plan.num_ranks > 1:
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
