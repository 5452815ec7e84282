"""Runs passes over a graph: checks what each requires, lints, times and writes dumps, so that passes stay pure."""

from __future__ import annotations

import collections
import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from zc.errors import PassError, ZcError
from zc.passes.base import Pass
from zc.passes.debt import debt_of

if TYPE_CHECKING:
    from zc.planning.plan import Plan


class PassRecord(NamedTuple):
    """One run of a pass, and how many seconds it took."""

    name: str
    seconds: float


def run_passes(
    graph: fx.Graph, plan: Plan, passes: Sequence[Pass], *, dump_dir: str | Path | None = None, name: str = "graph"
) -> tuple[fx.Graph, tuple[PassRecord, ...]]:
    """Returns the graph after all ``passes``, and does not change its argument. The graph's debt goes with it, as
    ``meta["debt"]`` of the output.

    With ``dump_dir``: ``<name>/00_input.txt``, then per pass the graph after it, a unified diff, and a count of its
    ops. Raises PassError if a pass lacks what it requires or returns an ill-formed graph.
    """
    debt = debt_of(graph, plan)
    provided: set[str] = set()
    records: list[PassRecord] = []
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
        records.append(PassRecord(step.name, time.perf_counter() - start))
        provided |= step.provides
        if folder is not None:
            _dump(folder, number, step.name, graph, new)
        graph = new
    return graph, tuple(records)


def _dump(folder: Path, number: int, name: str, before: fx.Graph, after: fx.Graph) -> None:
    old, new = str(before).splitlines(), str(after).splitlines()
    ops = collections.Counter(getattr(n.target, "__name__", str(n.target)) for n in after.nodes)
    counts = "\n".join(f"# {count:5d} {op}" for op, count in ops.most_common())
    (folder / f"{number:02d}_{name}.txt").write_text("\n".join(new) + "\n\n" + counts + "\n")
    diff = difflib.unified_diff(old, new, "before", "after", lineterm="")
    (folder / f"{number:02d}_{name}.diff").write_text("\n".join(diff) + "\n")
