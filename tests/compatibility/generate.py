"""Runs the table of training loops and writes docs/compatibility.md.

    python tests/compatibility/generate.py [--only WORD ...] [--backend NAME ...]

All cells take some 20 minutes on two cores. Outcomes are kept in tests/compatibility/results.csv, so a part of the
table can be run again alone; the document is made from that file.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, RESULTS = ROOT / "docs" / "compatibility.md", Path(__file__).with_name("results.csv")
TITLES = {
    1: "Multi-task loops (deepspeed#7579)",
    2: "Between a forward and the next",
    3: "Inside the model, and several models",
    4: "Parameters",
    5: "Checkpointing and precision",
    6: "param.grad, optimizers, schedulers",
    7: "Gradients that are dropped, and ranks that differ",
    10: "With overlap_gather=True",
    11: "Several optimizers, and whole parameters",
    13: "Written without knowing of zc",
    14: "With shard_frozen=True",
    15: "Weights that the forward writes, tensors that leave zc.whole_parameters",
}
HEAD = """# Training loops: right, or refused with a reason

Each row is a model and a loop, run as it stands on 2 gloo ranks and, in plain PyTorch and float64, with gradients
averaged over ranks before each step. *right*: every weight (and loss, norm and gradient that the loop notes) agrees
within the row's tolerance, 2e-5 relative where no note says otherwise. *refused*: the error of the note is raised on
every rank, and nothing hangs. Columns are backend and stage. Loops that `tests/distributed` and `tests/checkpoint`
compare with DDP or with one process, over a mesh of two dimensions say, are not repeated here. DDP itself reduces only
the first of two backwards of one forward (`retain_graph=True`), so its ranks drift apart; here as in zc both count.

Made by `python tests/compatibility/generate.py` from `tests/compatibility/results.csv`. Do not edit."""

TEXT = 600  # characters of an error that are kept: its end says what to do

Key = tuple[str, str, int]


def main() -> None:
    parser = argparse.ArgumentParser(prog="generate", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name has one of these words")
    parser.add_argument("--backend", nargs="*", default=[])
    parser.add_argument(
        "--missing", action="store_true", help="only cells that are not right or refused in the results"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; --missing goes on")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "distributed")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from run_rows import ALL_CELLS, run_cells

    outcomes = read()
    chosen = [c for c in ALL_CELLS if not args.only or any(word in c.row for word in args.only)]
    chosen = [c for c in chosen if not args.backend or c.backend in args.backend]
    if args.missing:
        chosen = [c for c in chosen if outcomes.get(tuple(c), ("", ""))[0] not in ("right", "refused")]
    started = time.monotonic()
    for k in range(0, len(chosen), 12):
        if time.monotonic() - started > args.seconds:
            break
        for cell, outcome in run_cells(chosen[k : k + 12]).items():
            outcomes[tuple(cell)] = (outcome.kind, outcome.text)  # type: ignore[index]
            if not outcome.is_fine:
                print(f"{outcome.kind}: {cell}: {outcome.text}", flush=True)
        print(f"{min(k + 12, len(chosen))} of {len(chosen)} cells, {time.monotonic() - started:.0f} s", flush=True)
        write(outcomes, [tuple(cell) for cell in ALL_CELLS])  # type: ignore[misc]
    write(outcomes, [tuple(cell) for cell in ALL_CELLS])  # type: ignore[misc]
    DOCUMENT.write_text(document(outcomes))


def read() -> dict[Key, tuple[str, str]]:
    if not RESULTS.exists():
        return {}
    with RESULTS.open(newline="") as file:
        return {(r["row"], r["backend"], int(r["stage"])): (r["kind"], r["text"]) for r in csv.DictReader(file)}


def write(outcomes: dict[Key, tuple[str, str]], order: list[Key]) -> None:
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "backend", "stage", "kind", "text"])
        writer.writerows([*key, outcomes[key][0], outcomes[key][1][:TEXT]] for key in order if key in outcomes)


def document(outcomes: dict[Key, tuple[str, str]]) -> str:
    from rows import BACKENDS, ROWS, STAGES

    keys = [(backend, stage) for backend in BACKENDS for stage in STAGES]
    kinds = [kind for (name, _, _), (kind, _) in outcomes.items() if name in ROWS]
    lines = [HEAD, f"\n{len(ROWS)} rows, {len(kinds)} cells: " + ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)
    ) + "."]  # fmt: skip
    for item, title in TITLES.items():
        lines += ["", f"## {title}", "", "| row | " + " | ".join(f"{b} {s}" for b, s in keys) + " | note |"]
        lines += ["|---" * (len(keys) + 2) + "|"]
        for row in (r for r in ROWS.values() if r.item == item):
            cells = [outcomes.get((row.name, *key), ("not run", ""))[0] for key in keys]
            lines.append(f"| {row.name} | {' | '.join(cells)} | {note(row, outcomes, keys)} |")
    return "\n".join(lines) + "\n"


def note(row: object, outcomes: dict[Key, tuple[str, str]], keys: list[tuple[str, int]]) -> str:
    from rows import Row

    assert isinstance(row, Row)
    refused = [key for key in keys if outcomes.get((row.name, *key), ("", ""))[0] == "refused"]
    where = "in stage 3: " if refused and all(stage == 3 for _, stage in refused) else ""
    texts = [where + re.sub(r"[|<>]", "", outcomes[(row.name, *key)][1]) for key in refused[:1]]
    texts += [row.note] if row.note else []
    if row.tolerance != 2e-5:
        texts.append(f"within {row.tolerance:g}")
    return "; ".join(texts)


if __name__ == "__main__":
    main()
