"""The pass protocol (docs/design.md): a named pure function from graph and plan to a new graph. The runner
checks what each pass requires, lints, times and writes dumps, so that passes stay pure.

A schedule's debt: the gradients that its graph returned before the first pass. `verify` proves that they arrive.

A backward graph, with ``w`` and ``b`` in slots 0 and 1 of bucket 2::

    output (%mm, %sum, %relu, None)  grad_of=("w", "b", None, "frozen")      gradients {(2, 0), (2, 1)}

An output that is None owes nothing: AOTAutograd had no gradient for it. A schedule that returns no gradient says in
``output.meta["debt"]`` what it is for (zc/engine/deposits.py), or owes nothing (forwards, gathers, updates). The
runner computes the debt before the first pass and puts it on the output of each pass, so that no pass can lose it.

A bucket is *whole* if the graph owes all its slots. This schedule writes it, and reduces it if the plan's backward
reduces. Of any other bucket the graph owes only some slots, and other graphs or hooks bring the rest. This schedule
deposits its gradients, or in stage 1 adds them to the partial sum. The flush or the boundary then owes the reduction.
"""

from __future__ import annotations

import collections
import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from zc.errors import PassError, ZcError

if TYPE_CHECKING:
    from zc.passes.verify import ProofPart
    from zc.planning.plan import Plan


class Pass(NamedTuple):
    """One pass. ``run`` does not change its input, and returns a new graph; a proof returns what it has proved. It must
    not use a collective, the clock, the environment, random numbers or the rank."""

    name: str
    run: Callable[[fx.Graph, Plan], fx.Graph]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()


class Pipelines(NamedTuple):
    """The passes that make a schedule of a backward graph, and of a forward graph whose weights come while it reads
    them. ``landing`` makes the graph that copies one bucket's reduced gradient to host memory, with offload.
    ``parts``: of the proof, that features bring."""

    backward: tuple[Pass, ...]
    forward: tuple[Pass, ...]
    landing: Callable[[Plan, int], fx.Graph] | None = None
    parts: tuple[ProofPart, ...] = ()


def copy_node(node: fx.Node, graph: fx.Graph, where: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copies a node to the end of another graph, with its name and metadata. ``where`` maps old nodes to new ones."""
    where[node] = new = graph.node_copy(node, where.__getitem__)
    new.meta.pop("record", None)  # it names nodes of the old graph, and would keep that alive
    return new


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same nodes in the same order, with their names and metadata."""
    new = fx.Graph(owning_module=graph.owning_module)
    where: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copy_node(node, new, where)
    return new


def returned_by(graph: fx.Graph) -> list[Any]:
    """The values that the graph returns, as a list."""
    returned: Any = graph.output_node().args[0]
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def is_random(node: fx.Node) -> bool:
    """Whether a second run gives other values: of a random operator, or of what runs one for a checkpoint."""
    called = (node.target, *node.args)
    return any(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in called)


@dataclass(frozen=True)
class Debt:
    """``gradients``: (bucket, slot), each to be written or deposited once. ``sums``: buckets to reduce, whose partial
    sum exists. ``totals``: buckets to copy to host memory, whose reduced sum exists (offload)."""

    gradients: frozenset[tuple[int, int]] = frozenset()
    sums: frozenset[int] = frozenset()
    totals: frozenset[int] = frozenset()

    def whole(self, plan: Plan) -> frozenset[int]:
        """Buckets of which every gradient is owed here."""
        num_owed = collections.Counter(bucket for bucket, _ in self.gradients)
        return frozenset(b for b, num_slots in num_owed.items() if num_slots == len(plan.buckets[b].slots))

    def reductions(self, plan: Plan) -> frozenset[int]:
        """Buckets whose mean over ranks has to be accumulated here, once."""
        sends = plan.num_ranks > 1 or plan.placement.shards_gradients  # else the partial sum is the total
        return self.sums | (self.whole(plan) if plan.reduces and sends else frozenset())

    def landings(self, plan: Plan) -> frozenset[int]:
        """Buckets of which something has to be copied to host memory here, once."""
        if plan.offload is None:
            return frozenset()
        if not plan.offload.accumulates_on_host:
            return self.totals | self.sums | (self.whole(plan) if plan.is_boundary else frozenset())
        written = self.whole(plan) if plan.placement.shards_gradients else frozenset(b for b, _ in self.gradients)
        return self.sums | written


def debt_of(graph: fx.Graph, plan: Plan) -> Debt:
    """The debt of a graph, as it was before the first pass."""
    meta = graph.output_node().meta
    if "debt" in meta:
        debt: Debt = meta["debt"]
        return debt
    where = plan.slot_of
    pairs = zip(returned_by(graph), meta.get("grad_of", ()), strict=False)
    return Debt(frozenset(where[name] for grad, name in pairs if name is not None and isinstance(grad, fx.Node)))


def run_passes(
    graph: fx.Graph, plan: Plan, passes: Sequence[Pass], *, dump_dir: str | Path | None = None, name: str = "graph"
) -> tuple[fx.Graph, dict[str, float]]:
    """Returns the graph after all ``passes``, and how many seconds each took. Does not change its argument. The graph's
    debt goes with it, as ``meta["debt"]`` of the output.

    With ``dump_dir``: ``<name>/00_input.txt``, then per pass the graph after it, a unified diff, and a count of its
    ops. Raises PassError if a pass lacks what it requires or returns an ill-formed graph.
    """
    debt = debt_of(graph, plan)
    provided: set[str] = set()
    seconds: dict[str, float] = {}
    folder = Path(dump_dir) / name if dump_dir is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "00_input.txt").write_text(str(graph) + "\n")
    for number, step in enumerate(passes, start=1):
        missing = step.requires - provided
        if missing:
            raise PassError(
                f"pass {step.name} requires {sorted(missing)}, the passes before it provide {sorted(provided)}"
            )
        start = time.perf_counter()
        try:
            new = step.run(graph, plan)
            new.lint()  # type: ignore[no-untyped-call, unused-ignore]
            new.output_node().meta["debt"] = debt  # no pass changes it
        except ZcError:
            raise
        except Exception as error:
            raise PassError(f"pass {step.name} failed on {name}: {type(error).__name__}: {error}") from error
        seconds[step.name] = time.perf_counter() - start
        provided |= step.provides
        if folder is not None:
            _dump(folder, number, step.name, graph, new)
        graph = new
    return graph, seconds


def _dump(folder: Path, number: int, name: str, before: fx.Graph, after: fx.Graph) -> None:
    old, new = str(before).splitlines(), str(after).splitlines()
    ops = collections.Counter(getattr(n.target, "__name__", str(n.target)) for n in after.nodes)
    counts = "\n".join(f"# {count:5d} {op}" for op, count in ops.most_common())
    (folder / f"{number:02d}_{name}.txt").write_text("\n".join(new) + "\n\n" + counts + "\n")
    diff = difflib.unified_diff(old, new, "before", "after", lineterm="")
    (folder / f"{number:02d}_{name}.diff").write_text("\n".join(diff) + "\n")
