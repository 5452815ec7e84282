"""Which sharded weights are gathered and freed before each use of a pass, as a table with a bar for the bytes."""

from __future__ import annotations

from zc.planning.plan import Plan
from zc.planning.residency import Residency, plan_residency

WIDTH = 24  # characters of the bar, for weight_nbytes


def table(residency: Residency, plan: Plan) -> str:
    """One line per use: what it reads, what is gathered and freed before it, and the bytes that are there then."""
    cap = plan.weight_cap
    lines = [f"at most {residency.peak:,} bytes of gathered weights at a time; weight_nbytes allows {cap:,}"]
    lines.append(f"{'use':>5}  {'reads':<14} {'gathered before it':<22} {'freed before it':<18} bytes there")
    alive = 0
    for number, piece in enumerate(residency.pieces):
        alive += sum(e.stop - e.start for e in piece.gathers) - sum(e.stop - e.start for e in piece.frees)
        reads, gathers, frees = (
            ", ".join(str(extent.bucket) for extent in extents) or "-"
            for extents in (piece.reads, piece.gathers, piece.frees)
        )
        use = str(number) if number < len(residency.uses) else "end"
        bar = "#" * -(-alive * WIDTH // max(1, cap))
        lines.append(f"{use:>5}  {reads:<14} {gathers:<22} {frees:<18} {alive:>13,} |{bar:<{WIDTH}}|")
    return "\n".join(lines)


def expected_table(plan: Plan) -> str:
    """The table of a model that is not compiled yet, for a forward in the order of registration and its backward."""
    # bucket 0, and the first of the frozen ones, have what was registered last
    buckets = [(bucket.index,) for bucket in plan.sharded]
    nbytes = {bucket.index: bucket.nbytes for bucket in plan.sharded}
    return table(plan_residency((*reversed(buckets), *buckets), nbytes, plan.weight_cap), plan)
