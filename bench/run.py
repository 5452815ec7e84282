"""Every peer on the same work: cases x providers x repeats, interleaved, each run in fresh processes.

    python -m bench.run --cases gpt30m-fp32 --repeats 3 [--minutes 4]
    python -m bench.run --paced zero ethernet --world 8 --cases gpt30m-fp32-1k

Output of a run is kept in out/bench/SESSION/CASE/PROVIDER/REPEAT/log.txt; the end of a failed one's is printed.
A row is written as soon as its run ends; a run whose losses depart from the float64 reference, or that fails, has its
reason there in place of a number. What has a row in this session is not run again: a cut-off run goes on where it was.
A session's default name is a digest of the measured code. A provider's first run starts with an empty compile cache
("cold"), later ones find it filled.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.cases import CASES, FIRST_CASES, FIRST_PROVIDERS, PROVIDERS, version_of
from bench.cases.reference import disagreement, reference
from bench.measure import ROOT, end_on_sigterm, launch_quietly, torchrun_command, versions
from bench.network import NETWORKS
from bench.report import rows

RESULTS = ROOT / "bench" / "results" / "run.csv"
PACED_RESULTS = RESULTS.with_name("paced.csv")  # apart: a table of run.csv would take them for real ranks
WORK = ROOT / "out" / "bench"
FIRST_GUESS_S = 90.0  # how long a run takes, before one has ended


class Run(NamedTuple):
    """One cell of the matrix."""

    case: str
    provider: str
    repeat: int
    network: str = ""  # that the paced group models; none: real ranks


def matrix(
    cases: list[str], providers: list[str], repeats: int, *, as_given: bool = False, networks: Sequence[str] = ("",)
) -> list[Run]:
    """All providers of a case in turn, and that ``repeats`` times: A B C A B C, so that a slow hour hits all.

    What says most comes first: cells of FIRST_CASES and FIRST_PROVIDERS with all their repeats, then those of one of
    the two, then the others. Among these, each cell has its n-th run before any has its next. ``as_given``: the order
    is the caller's, case by case, and every provider takes its turn. The networks of a cell are neighbours.
    """
    cells = [(c, p) for c in cases for p in providers]
    if as_given:
        return [Run(c, p, k, n) for c in cases for k in range(repeats) for p in providers for n in networks]
    tiers: list[list[tuple[str, str]]] = [[], [], []]
    for case, provider in cells:
        tiers[(case not in FIRST_CASES) + (provider not in FIRST_PROVIDERS)].append((case, provider))
    return [Run(c, p, k, n) for tier in tiers for k in range(repeats) for c, p in tier for n in networks]


def left(wanted: list[Run], known: list[rows.Row], session: str) -> list[Run]:
    """What has no row in this session yet, without the repeats of what has failed: it would again."""
    rows_now = [r for r in known if r["session"] == session]
    done = {(r["case"], r["provider"], r["repeat"], r["network"]) for r in rows_now}
    hopeless = {(r["case"], r["provider"]) for r in rows_now if r["status"].startswith(("failed", "not measured"))}
    return [
        run
        for run in wanted
        if (run.case, run.provider, str(run.repeat), run.network) not in done
        and (run.case, run.provider) not in hopeless
    ]


def flags_of(run: Run, world: int, extra: Sequence[str] = ()) -> list[str]:
    """``world``: the ranks that a paced group pretends."""
    flags = [*PROVIDERS[run.provider].flags, *CASES[run.case].all_flags, *extra]
    return flags + (["--paced", run.network, "--world", str(world)] if run.network else [])


def run_once(run: Run, session: str, expected: list[float] | None, args: argparse.Namespace) -> dict[str, Any]:
    """One run in fresh processes, and its row but for session, time and place in the matrix."""
    case, provider = CASES[run.case], PROVIDERS[run.provider]
    slug = "".join(ch if ch.isalnum() else "-" for ch in run.provider)
    folder = WORK / session / run.case / slug
    cache, filled = folder / "cache", folder / "cache-is-filled"
    if not filled.exists():  # never used, or by a run that was cut off while it compiled
        shutil.rmtree(cache, ignore_errors=True)
    start = "warm" if filled.exists() else "cold"
    out = folder / "-".join(filter(None, (str(run.repeat), run.network)))
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").unlink(missing_ok=True)
    flags = flags_of(run, args.world, args.extra)
    ranks = 1 if run.network else args.ranks or case.ranks
    command = torchrun_command("bench.train", [*flags, "--out", "OUT"], ranks, python="python")
    row: dict[str, Any] = {"start": start, "version": version_of(provider) or "", "command": shlex.join(command)}
    row["network"] = run.network
    if version_of(provider) is None:
        return row | {"status": f"not measured: {provider.package} is not installed"}
    # extensions (DeepSpeed's): apart too, since a build that was cut off leaves a lock that the next one waits for
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCH_EXTENSIONS_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    ended = launch_quietly(
        "bench.train", [*flags, "--out", str(out)], ranks=ranks, env=env, log=out / "log.txt", timeout_s=args.timeout
    )
    # complete before the processes end: what goes wrong while they are torn down spoils no number
    if not (out / "run.json").exists():
        print(ended.tail, f"all of it: {out / 'log.txt'}", sep="\n", file=sys.stderr, flush=True)
        return row | {"status": f"failed: {ended.reason}"}
    filled.touch()
    record = json.loads((out / "run.json").read_text())
    losses = rows.losses_of(record)
    reason = None if expected is None else disagreement(losses, expected, case.tolerance, provider.communicates)
    return row | rows.measured(record, reason)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.run", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=[n for n, c in CASES.items() if c.suite == "cpu"])
    add("--providers", nargs="+", choices=PROVIDERS, help="in this order; left out: all, what says most first")
    add("--repeats", type=int, default=3, help="of each provider and case; the first is cold")
    add("--minutes", type=float, default=600.0, help="no run is started that would probably end later")
    add("--timeout", type=float, default=400.0, help="seconds after which a run counts as failed")
    add("--session", help="name of the session to go on with")
    add("--paced", nargs="+", choices=NETWORKS, help="one process plays rank 0 of --world on these networks")
    add("--world", type=int, default=8, help="ranks that --paced pretends")
    add("--csv", type=Path, help="run.csv, with --paced paced.csv, under bench/results")
    add("--first", action="store_true", help="the cases and providers that say most, and nothing else")
    args = parser.parse_args(argv)
    args.extra, args.ranks, args.as_given = (), None, args.providers is not None
    args.providers = args.providers or [n for n, p in PROVIDERS.items() if p.by_default]
    if args.first:
        args.cases, args.providers = list(FIRST_CASES), list(FIRST_PROVIDERS)
    args.csv = args.csv or (PACED_RESULTS if args.paced else RESULTS)
    args.session = args.session or rows.fingerprint() + (f"-paced-{args.world}" if args.paced else "")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    end_on_sigterm()
    deadline = time.monotonic() + 60 * args.minutes
    console = Console()
    networks = args.paced or ("",)
    wanted = matrix(args.cases, args.providers, args.repeats, as_given=args.as_given, networks=networks)
    todo = left(wanted, rows.read(args.csv), args.session)
    seconds: dict[tuple[str, str], float] = {}
    references: dict[str, list[float]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(todo))
        failed: set[tuple[str, str]] = set()
        for run in todo:
            if (run.case, run.provider) in failed:
                progress.advance(task)
                continue
            guess = seconds.get((run.case, run.provider), max(seconds.values(), default=FIRST_GUESS_S))
            if time.monotonic() + guess > deadline:
                console.print(f"{args.minutes:g} minutes are over: run it again to go on with session {args.session}")
                break
            about = f"{run.case}: {run.provider}" + (f", {run.network}" if run.network else "")
            progress.update(task, description=f"{about} ({run.repeat + 1}/{args.repeats})")
            # on a paced network the other ranks' data is made up, and so are the losses
            if run.case not in references and not run.network:
                references[run.case] = reference(CASES[run.case])
            started = time.monotonic()
            row = run_once(run, args.session, references.get(run.case), args)
            seconds[run.case, run.provider] = time.monotonic() - started
            about_now = {"session": args.session, "time": rows.now()}
            rows.append(args.csv, versions() | about_now | run._asdict() | row)
            progress.advance(task)
            if row["status"].startswith(("failed", "not measured")):
                failed.add((run.case, run.provider))
            if not console.is_terminal:
                outcome = f"{row['p50_ms']} ms" if row["status"] == "ok" else row["status"]
                console.print(f"{about}: {row['start']}, {outcome}", soft_wrap=True)
    from bench.report.charts import draw
    from bench.report.tables import rich_table

    if args.paced:  # a table by network: bench.report.tables
        return 0
    table = rows.read(args.csv)
    for case in args.cases:
        chosen = [r for r in table if r["session"] == args.session and r["case"] == case]
        if chosen:
            console.print(rich_table(case, chosen))
            draw(case, chosen, WORK / args.session / f"{case}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
