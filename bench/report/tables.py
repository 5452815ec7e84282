"""Fills the tables of `FILES` from the committed rows under bench/results, and draws docs/benchmarks/CASE.png.

    python -m bench.report.tables [--check]

A table stands between ``<!-- table: NAME key=value ... -->`` and ``<!-- end -->``. Its rows are in NAME.csv under
bench/results, and the pairs choose among them; of several sessions that fit, the last one counts.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.table import Table

from bench.measure import ROOT
from bench.report.rows import Ratio, Row, median_of, read

RESULTS = ROOT / "bench" / "results"
MARKED = re.compile(r"(<!-- table: (\w+)((?: \w+=\S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
BASE = "zc stage 2"  # what the others are compared with
FILES = ("README.md", "docs/benchmarks.md", "docs/multinode.md")


def rows_of(path: Path, chosen: Mapping[str, str]) -> list[Row]:
    """The rows whose columns equal ``chosen``, of the session among them that has the latest one. In a value, spaces
    are written as underscores. Raises ValueError for a column that is none."""
    rows = read(path)
    unknown = set(chosen) - set(rows[0]) if rows else set()
    if unknown:
        raise ValueError(f"{path.name} has no column {sorted(unknown)}")
    fitting = [r for r in rows if all(r[k].replace(" ", "_") == v for k, v in chosen.items())]
    latest = max(fitting, key=lambda r: r["time"], default=None)
    return [r for r in fitting if latest is not None and r["session"] == latest["session"]]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, its first column left, the others right."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(rows: list[Row], provider: str, base: str, column: str = "p50_ms") -> float | None:
    """Median over repeats of provider / base: the two runs of a repeat lie next to each other in time."""
    by_repeat = {(r["repeat"], r["provider"]): r[column] for r in rows}
    ratios = [
        float(value) / float(by_repeat[number, base])
        for (number, name), value in by_repeat.items()
        if name == provider and value and by_repeat.get((number, base))
    ]
    return statistics.median(ratios) if ratios else None


HEAD = (
    "provider", "step ms p50 (p20 to p80)", "/ zc", "compiled / eager", "tokens/s/rank", "first step s, cold", "warm",
    "peak MB", "held MB", "loss after 5",
)  # fmt: skip


def cells(rows: list[Row]) -> list[list[str]]:
    """One line a provider, the fastest first; one that failed, or whose losses depart, shows why, at the end."""
    from bench.cases import COMPILED_PAIRS

    lines: list[tuple[float, list[str]]] = []
    for name in dict.fromkeys(r["provider"] for r in rows):
        own = [r for r in rows if r["provider"] == name]
        bad = next((r["status"] for r in own if r["status"] != "ok"), None)
        if bad is not None:
            lines.append((float("inf"), [name, f"no number: {bad}", *("" for _ in HEAD[2:])]))
            continue
        p20, p50, p80 = (median_of(own, c) for c in ("p20_ms", "p50_ms", "p80_ms"))
        assert p50 is not None
        line = [name, f"{_show(p50, _ms(p50))} ({_show(p20, _ms(p50))} to {_show(p80, _ms(p50))})"]
        line.append(_show(ratio(rows, name, BASE), ".3f"))
        line.append(_show(ratio(rows, name, COMPILED_PAIRS.get(name, "")), ".3f"))
        line.append(_show(median_of(own, "tokens_per_s_rank"), ",.0f"))
        line += [_show(median_of(own, "first_step_s", start=s), ".1f") for s in ("cold", "warm")]
        line += [_show(median_of(own, c), ",.0f") for c in ("peak_steady_mb", "held_mb")]
        lines.append((p50, [*line, _show(median_of(own, "loss_after_5"), ".4f")]))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _ms(value: float) -> str:
    return ",.0f" if value >= 100 else ".2f"


def _show(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def run(path: Path, chosen: Mapping[str, str]) -> str:
    """Step time, ratios, first step, memory and loss of each provider of one case."""
    rows = rows_of(path, chosen)
    if not rows:
        return f"No rows yet in {path.name} with {dict(chosen)}."
    return f"{markdown(list(HEAD), cells(rows))}\n\n{_caption(rows)}"


def rich_table(title: str, rows: list[Row]) -> Table:
    """The same table for a terminal."""
    table = Table(title=title)
    for number, name in enumerate(HEAD):
        table.add_column(name, justify="right" if number else "left")
    for line in cells(rows):
        table.add_row(*line)
    return table


def _caption(rows: list[Row]) -> str:
    whole = next((r for r in rows if r["num_params"]), None)
    if whole is None:
        return f"Session {rows[0]['session']}: no run ended."
    repeats = Counter((r["provider"], r["network"]) for r in rows).values()
    num_runs = f"{min(repeats)} to {max(repeats)}" if len(set(repeats)) > 1 else str(max(repeats))
    return (
        f"{whole['case']}: {int(whole['num_params']):,} parameters, {whole['ranks']} ranks; medians of {num_runs} "
        f"interleaved runs of {whole['steps']} steps. {whole['device']}, torch {whole['torch']}, commit "
        f"{whole['commit']}, {whole['time'][:10]}."
    )


def scale(path: Path, chosen: Mapping[str, str]) -> str:
    """One kind of bench.scale: a line an x, a column a series."""
    rows = rows_of(path, chosen)
    if not rows:
        return f"No rows yet in {path.name} with {dict(chosen)}."
    series = list(dict.fromkeys(r["series"] for r in rows))
    values = {(int(r["x"]), r["series"]): float(r["value"]) for r in rows}  # of a point measured twice the later one
    lines = [[f"{x:,}", *(_show(values.get((x, s)), ",.4g") for s in series)] for x in sorted({x for x, _ in values})]
    last = rows[-1]
    about = f"{last['kind']}, {last['unit']}. {last['device']}, torch {last['torch']}, commit {last['commit']}, "
    return f"{markdown(['', *series], lines)}\n\n{about}{last['time'][:10]}."


PACED_HEAD = (
    "provider", "network", "step ms p50 (p20 to p80)", "exposed communication ms", "host ms", "peak MB", "held MB",
)  # fmt: skip


def paced(path: Path, chosen: Mapping[str, str]) -> str:
    """One case on one real rank (no network) and on modelled networks, a line a provider and network. What is exposed:
    a step on a network less one on a network that costs nothing, median over repeats."""
    rows = rows_of(path, chosen)
    if not rows:
        return f"No rows yet in {path.name} with {dict(chosen)}."
    lines = []
    for provider, network in dict.fromkeys((r["provider"], r["network"]) for r in rows):
        own = [r for r in rows if (r["provider"], r["network"]) == (provider, network)]
        line = [provider, network or "none, 1 rank"]
        bad = next((r["status"] for r in own if r["status"] != "ok"), None)
        if bad is not None:
            lines.append([*line, f"no number: {bad}", *[""] * 4])
            continue
        p20, p50, p80 = (median_of(own, c) for c in ("p20_ms", "p50_ms", "p80_ms"))
        assert p50 is not None
        exposed = None if network in ("", "zero") else _exposed(rows, provider, network)
        line += [f"{_show(p50, _ms(p50))} ({_show(p20, _ms(p50))} to {_show(p80, _ms(p50))})", _show(exposed, ",.1f")]
        line += [_show(median_of(own, c), ",.4g") for c in ("host_ms", "peak_steady_mb", "held_mb")]
        lines.append(line)
    return f"{markdown(list(PACED_HEAD), lines)}\n\n{_caption(rows)}"


def _exposed(rows: list[Row], provider: str, network: str) -> float | None:
    times = {(r["network"], r["repeat"]): float(r["p50_ms"]) for r in rows if r["provider"] == provider and r["p50_ms"]}
    pairs = [(ms, times.get(("zero", repeat))) for (name, repeat), ms in times.items() if name == network]
    more = [ms - zero for ms, zero in pairs if zero is not None]
    return statistics.median(more) if more else None


TURNS_HEAD = ("provider", "step ms p50 (p20 to p80)", "ratio", "p20 to p80 of the ratios", "CPU ms")


def turns(path: Path, chosen: Mapping[str, str]) -> str:
    """One case of bench.turns: a line a provider, in the order in which they were given."""
    return _in_turn(path, chosen, TURNS_HEAD[-1], lambda row: _show(float(row["cpu_ms"]), _ms(float(row["cpu_ms"]))))


def hosts(path: Path, chosen: Mapping[str, str]) -> str:
    """One case of bench.hosts: the same, with what left a host in a step."""
    return _in_turn(path, chosen, "of the model leaves a host", lambda row: f"{float(row['of_model']):.2f}")


def _in_turn(path: Path, chosen: Mapping[str, str], head: str, last_of: Callable[[Row], str]) -> str:
    rows = rows_of(path, chosen)
    if not rows:
        return f"No rows yet in {path.name} with {dict(chosen)}."
    lines = []
    for row in rows:
        if row["status"] != "ok":
            lines.append([row["provider"], f"no number: {row['status']}", "", "", ""])
            continue
        p20, p50, p80 = (float(row[c]) for c in ("p20_ms", "p50_ms", "p80_ms"))
        line = [row["provider"], f"{_show(p50, _ms(p50))} ({_show(p20, _ms(p50))} to {_show(p80, _ms(p50))})"]
        line += [row["ratio"] and f"{float(row['ratio']):.3f}"]
        line += [row["ratio"] and f"{float(row['ratio_p20']):.3f} to {float(row['ratio_p80']):.3f}"]
        lines.append([*line, last_of(row)])
    last = rows[-1]
    about = f"{last['case']}: {int(last['num_params']):,} parameters, {last['ranks']} ranks"
    about += f" on {last['network']}" if last["network"] else ""
    if "rate" in last:
        about += f", {last['hosts']} hosts of {last['ranks_per_host']}, {last['rate']}"
    about += f", {last['turns']} turns; ratios to {last['base']}. {last['device']}, torch {last['torch']}, commit "
    return f"{markdown([*TURNS_HEAD[:-1], head], lines)}\n\n{about}{last['commit']}, {last['time'][:10]}."


def _all_rows(path: Path, chosen: Mapping[str, str]) -> list[Row]:
    """The good rows of all sessions whose columns equal ``chosen``."""
    fitting = [r for r in read(path) if all(r[k].replace(" ", "_") == v for k, v in chosen.items())]
    return [r for r in fitting if r["status"] == "ok"]


def cases(path: Path, chosen: Mapping[str, str]) -> str:
    """The last session of each case in which zc and at least three others ran, one line each: zc's step and memory, and
    the other providers' steps relative to zc's."""
    rows = _all_rows(path, chosen)
    lines, names = [], dict[str, None]()
    by_case: dict[str, list[Row]] = {}
    for case, session in dict.fromkeys((r["case"], r["session"]) for r in sorted(rows, key=lambda r: r["time"])):
        own = [r for r in rows if (r["case"], r["session"]) == (case, session)]
        if len({r["provider"] for r in own}) > 3 and any(r["provider"] == BASE for r in own):
            by_case[case] = own
    for own in by_case.values():
        names |= dict.fromkeys(r["provider"] for r in own if r["provider"].endswith("compile"))
    names |= dict.fromkeys(("zc stage 1", "zc stage 3", "zc stage 2, eager"))
    for case, own in by_case.items():
        base = [r for r in own if r["provider"] == BASE]
        line = [case, *(_show(median_of(base, c), ",.0f") for c in ("p50_ms", "peak_steady_mb"))]
        line += [_show(ratio(own, name, BASE), ".3f") for name in names]
        lines.append([*line, own[-1]["commit"]])
    return markdown(["case", f"{BASE}, ms", "peak MB", *names, "commit"], lines)


def ratios(path: Path, chosen: Mapping[str, str]) -> str:
    """Several cases of bench.turns, one line each: the base's step, and the other providers' ratios to it."""
    rows = _all_rows(path, chosen)
    if not rows:
        return f"No rows yet in {path.name} with {dict(chosen)}."
    (base,) = {r["base"] for r in rows}
    others = list(dict.fromkeys(r["provider"] for r in rows if r["provider"] != base))
    lines = []
    for case in dict.fromkeys(r["case"] for r in rows):
        by_provider = {r["provider"]: r for r in rows if r["case"] == case}
        line = [case, *(f"{float(by_provider[base][c]):.4g}" for c in ("p50_ms", "cpu_ms"))]
        for name in others:
            r = by_provider.get(name)
            middle, low, high = (float(r[c]) for c in ("ratio", "ratio_p20", "ratio_p80")) if r else (0.0, 0.0, 0.0)
            line.append(f"{middle:.3f} ({low:.2f} to {high:.2f})" if r else "")
        lines.append(line)
    last = rows[-1]
    about = f"Ratios to {base} (p20 to p80). {last['device']}, torch {last['torch']}, commit {last['commit']}, "
    head = ["case", f"{base}, ms", "its CPU ms", *others]
    return f"{markdown(head, lines)}\n\n{about}{last['time'][:10]}."


TABLES: dict[str, Callable[[Path, Mapping[str, str]], str]] = {
    "run": run,
    "scale": scale,
    "gpu": paced,
    "paced": paced,
    "turns": turns,
    "cases": cases,
    "ratios": ratios,
    "hosts": hosts,
}


def history(runs: list[Row], in_turn: list[Row]) -> dict[str, list[Ratio]]:
    """By case: each provider's step relative to zc's, of every session of bench.run and bench.turns, in order of
    time."""
    by_case: dict[str, list[Ratio]] = {}
    sessions: dict[tuple[str, str], list[Row]] = {}
    for row in (r for r in runs if r["status"] == "ok" and not r["network"]):
        sessions.setdefault((row["case"], row["session"]), []).append(row)
    for (case, _), rows in sessions.items():
        last = max(rows, key=lambda r: r["time"])
        for name in dict.fromkeys(r["provider"] for r in rows):
            value = ratio(rows, name, BASE) if name != BASE else None
            if value is not None:
                by_case.setdefault(case, []).append(Ratio(last["time"], last["commit"], name, value, False))
    for row in (r for r in in_turn if r["status"] == "ok" and r["base"] == BASE and r["provider"] != BASE):
        measured = Ratio(row["time"], row["commit"], row["provider"], float(row["ratio"]), True)
        by_case.setdefault(row["case"], []).append(measured)
    return {case: sorted(ratios, key=lambda r: r.time) for case, ratios in by_case.items()}


def fill(text: str, results: Path = RESULTS) -> str:
    """``text`` with every marked table made anew. Raises ValueError for a name that no function makes."""

    def made(match: re.Match[str]) -> str:
        opening, name, pairs, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"no table is named {name!r}; there are {sorted(TABLES)}")
        chosen = dict(pair.split("=", 1) for pair in pairs.split())
        file = {"ratios": "turns", "cases": "run"}.get(name, name)
        return f"{opening}{TABLES[name](results / f'{file}.csv', chosen)}\n{closing}"

    return MARKED.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.report.tables", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not up to date")
    check = parser.parse_args().check
    for path in (ROOT / name for name in FILES):
        before = path.read_text()
        after = fill(before)
        if check and before != after:
            sys.exit(f"{path.name}: a table is not what bench/results says; run python -m bench.report.tables")
        if not check:
            path.write_text(after)
    if not check:
        from bench.report.charts import draw, draw_history

        by_case = history(read(RESULTS / "run.csv"), read(RESULTS / "turns.csv"))
        draw_history(by_case, ROOT / "docs" / "benchmarks" / "ratios-over-commits.png")
        for case in dict.fromkeys(r["case"] for r in read(RESULTS / "run.csv")):
            draw(case, rows_of(RESULTS / "run.csv", {"case": case}), ROOT / "docs" / "benchmarks" / f"{case}.png")


if __name__ == "__main__":
    main()
