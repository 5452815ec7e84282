"""`zc.explain`: where each parameter went, how buckets are filled and reduced, each schedule, and what it costs."""

from __future__ import annotations

from torch import nn

from zc.api import persistent_nbytes, sharded
from zc.ops import Acc
from zc.passes.write_in_place import nbytes_in_place
from zc.program import Program
from zc.runtime import Runtime
from zc.schedule import deposit, slots_of, steps, summary, text


class Explanation:
    """What `explain` returns: ``str()`` of it is the report; ``sections`` holds its parts by name."""

    def __init__(self, sections: dict[str, str]) -> None:
        self.sections = sections

    def __str__(self) -> str:
        return "\n\n".join(f"== {name} ==\n{body}" for name, body in self.sections.items())

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """A report on a compiled model; complete once it has run a backward. Raises PlanError for a model that zc does not
    know."""
    runtime = sharded(model).runtime
    nbytes = persistent_nbytes(model)
    sections = {
        "plan": f"stage {runtime.plan.placement.stage}, rank {runtime.group.rank} of {runtime.group.world_size}, "
        f"backend {runtime.config.backend}, reduce {runtime.plan.reduce}, overlap {runtime.plan.overlap}",
        "buckets": _buckets(runtime),
        "not covered by a schedule": _uncovered(runtime),
        "persistent bytes": "\n".join(f"{name:>16}: {n:,}" for name, n in nbytes.items())
        + f"\n{'total':>16}: {sum(nbytes.values()):,}",
        "notes": "\n".join(runtime.notes) or "none",
    }
    if runtime.plan.offload is not None:
        sections["offload"] = _offload(runtime)
    updates = runtime.host_programs()
    for program in (*runtime.forwards, *runtime.programs, *runtime.weights.programs, *updates):
        sections[f"schedule {program.name}"] = _program(program)
    return Explanation(sections)


def _offload(runtime: Runtime) -> str:
    plan, moved = runtime.plan, runtime.ops.nbytes_of_last_step
    assert plan.offload is not None
    shard, whole = (sum(n) for n in zip(*((b.layout.numel_shard, b.numel) for b in plan.buckets), strict=True))
    size = plan.buckets[0].acc_dtype.itemsize
    kept = shard if plan.placement.gradient_in_ring else whole
    here, there = ("in use", "instead") if plan.offload.accumulates_on_host else ("instead", "in use")
    file = runtime.state_file
    return "\n".join(
        [
            f"optimizer state: {f'{file.path}, {file.nbytes:,} bytes' if file is not None else 'in memory'}",
            f"offload_accumulate='cpu' ({here}): {size * kept:,} bytes go to the host a backward, and as many come "
            "back from the second one of an update on; none stay on the device",
            f"offload_accumulate='device' ({there}): {size * kept:,} bytes stay on the device, {size * shard:,} go to "
            "the host an update (a backward, where microbatches are not declared with zc.no_sync)",
            "over the bus in the last step: " + ", ".join(f"{way} {nbytes:,} bytes" for way, nbytes in moved.items()),
            f"update: {runtime.host_update}",
        ]
    )


def _buckets(runtime: Runtime) -> str:
    inline = {b for program in runtime.programs for b in program.inline_buckets if program.plan.reduces}
    widths = {"bucket": 6, "params": 6, "elements": 12, "bytes": 12, "padding": 8, "reduced": 8, "times": 5, "holds": 8}
    rows = [" ".join(f"{name:>{width}}" for name, width in widths.items())]
    for b in runtime.plan.buckets:
        how = "inline" if b.index in inline else "at end"
        state = runtime.ops.state[b.index]
        holds = state.value if state is not Acc.EMPTY else "nothing"
        rows.append(
            f"{b.index:>6} {len(b.slots):>6} {b.numel:>12,} {b.numel * b.param_dtype.itemsize:>12,} "
            f"{b.layout.numel_padding:>8,} {how:>8} {runtime.ops.reductions_of_last_step[b.index]:>5} {holds:>8}"
        )
        rows += [f"{'':>8}{s.name} {tuple(s.shape)} at {s.offset}" for s in b.slots]
    return "\n".join(rows)


def _uncovered(runtime: Runtime) -> str:
    if runtime.config.backend == "eager":
        return "all: backend='eager' takes every gradient through hooks"
    if not runtime.programs:
        return "no backward has been compiled yet"
    written: set[tuple[int, int]] = set()
    for program in runtime.programs:
        for node in steps(program.graph):
            if node.target is deposit:
                written.add((int(node.args[0]), int(node.args[1])))  # type: ignore[arg-type]
            elif node.target.__name__ in ("flatten_cast", "accumulate_cast", "wgrad_into"):  # type: ignore[union-attr]
                written |= {(int(node.args[0]), k) for k in slots_of(node)}  # type: ignore[arg-type]
    missing = [
        f"{slot.name}: no compiled backward writes its gradient (it would come in through its hook)"
        for b in runtime.plan.buckets
        for k, slot in enumerate(b.slots)
        if (b.index, k) not in written
    ]
    return "\n".join(missing) or "nothing"


def _program(program: Program) -> str:
    counts = ", ".join(f"{name} {n}" for name, n in summary(program.graph).items())
    proved = any(r.name == "verify" for r in program.records)
    verdict = "races 0, redundant 0" if proved else "NOT VERIFIED"
    seconds = sum(r.seconds for r in program.records)
    in_place, total = nbytes_in_place(program.graph, program.plan)
    made = f"gradients made in place: {in_place:,} of {total:,} bytes"
    return (
        f"run {program.num_runs} times; {counts}; {verdict}; passes took {seconds * 1e3:.1f} ms; {made}\n"
        f"{text(program.graph)}"
    )
