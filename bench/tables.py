"""Fills the tables of README.md from the committed rows under bench/results.

    python -m bench.tables [--check]

A table stands between ``<!-- table: NAME key=value ... -->`` and ``<!-- end -->``. Its rows are in NAME.csv under
bench/results, and the pairs choose among them; of several sessions that fit, the last one counts.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.measure import ROOT

RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(r"(<!-- table: (\w+)((?: \w+=\S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
Row = dict[str, str]


def rows_of(path: Path, chosen: Mapping[str, str]) -> list[Row]:
    """The rows whose columns equal ``chosen``, of the last session among them. ValueError for a column that is none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    unknown = set(chosen) - set(rows[0] if rows else {})
    if unknown:
        raise ValueError(f"{path.name} has no column {sorted(unknown)}")
    # a run that failed says nothing of its sizes, but belongs to its session
    fitting = [r for r in rows if all(r[k] == v for k, v in chosen.items())]
    session = max((r["session"] for r in fitting), default=None)
    return [r for r in rows if r["session"] == session]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, its first column left, the others right."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def median_of(rows: list[Row], column: str, **chosen: str) -> float | None:
    """Median of a column over the rows that have it."""
    values = [float(r[column]) for r in rows if r[column] and all(r[k] == v for k, v in chosen.items())]
    return statistics.median(values) if values else None


def ratio(rows: list[Row], system: str, base: str, column: str = "p50_ms") -> float | None:
    """Median over rounds of system / base: the two runs of a round lie next to each other in time."""
    by_round = {(r["round"], r["system"]): r[column] for r in rows}
    ratios = [
        float(value) / float(by_round[number, base])
        for (number, name), value in by_round.items()
        if name == system and value and by_round.get((number, base))
    ]
    return statistics.median(ratios) if ratios else None


def compare_ddp(path: Path, chosen: Mapping[str, str]) -> str:
    """Step time, first step, memory and loss of each system; a system whose runs disagree shows why."""
    rows = rows_of(path, chosen)
    if not rows:
        return f"No rows yet in {path.name} with {dict(chosen)}."
    systems = list(dict.fromkeys(r["system"] for r in rows))
    base, floor = systems[0], "no communication"
    head = ["system", "step ms p50 (p20 to p80)", f"/ {base}"]
    head += [f"/ {floor}"] * (floor in systems)
    head += ["first step s, cold", "warm", "peak MB, steady", "over all", "held MB", "final loss"]
    body = []
    for name in systems:
        own = [r for r in rows if r["system"] == name]
        bad = next((r["status"] for r in own if r["status"] != "ok"), None)
        if bad is not None:
            body.append([name, f"no number: {bad}"] + ["" for _ in head[2:]])
            continue
        p20, p50, p80 = (_show(median_of(own, c), ",.0f") for c in ("p20_ms", "p50_ms", "p80_ms"))
        line = [name, f"{p50} ({p20} to {p80})", _show(ratio(rows, name, base), ".3f")]
        line += [_show(ratio(rows, name, floor), ".3f")] * (floor in systems)
        line += [_show(median_of(own, "first_step_s", start=s), ".1f") for s in ("cold", "warm")]
        line += [_show(median_of(own, c), ",.0f") for c in ("peak_steady_mb", "peak_mb", "persistent_mb")]
        body.append([*line, _show(median_of(own, "final_loss"), ".4f")])
    return f"{markdown(head, body)}\n\n{_caption(rows)}"


def _show(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _caption(rows: list[Row]) -> str:
    whole = next((r for r in rows if r["layers"]), None)
    if whole is None:
        return f"Session {rows[0]['session']}: no run ended."
    rounds = len({r["round"] for r in rows})
    return (
        f"{int(whole['num_params']):,} parameters, {whole['layers']} blocks, {whole['ranks']} ranks of one thread, "
        f"{int(whole['seq']) * int(whole['batch']):,} tokens a rank, fp32, AdamW; medians of {rounds} interleaved runs "
        f"of {whole['steps']} steps. {whole['device']}, torch {whole['torch']}, commit {whole['commit']}, "
        f"{whole['session'][:10]}: `{whole['command']}`"
    )


TABLES: dict[str, Callable[[Path, Mapping[str, str]], str]] = {"compare_ddp": compare_ddp}


def fill(text: str, results: Path = RESULTS) -> str:
    """``text`` with every marked table made anew. Raises ValueError for a name that no function makes."""

    def made(match: re.Match[str]) -> str:
        opening, name, pairs, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"no table is named {name!r}; there are {sorted(TABLES)}")
        chosen = dict(pair.split("=", 1) for pair in pairs.split())
        return f"{opening}{TABLES[name](results / f'{name}.csv', chosen)}\n{closing}"

    return MARKED.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.tables", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where README.md is not up to date")
    check = parser.parse_args().check
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = fill(before)
    if check and before != after:
        sys.exit("README.md: a table is not what bench/results says; run python -m bench.tables")
    if not check:
        readme.write_text(after)


if __name__ == "__main__":
    main()
