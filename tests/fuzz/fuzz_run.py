"""``python tests/fuzz/fuzz_run.py``: random programs against the reference; keeps what failed, smaller.

--programs 2000 --first 0     seeds
--without class,slices        leaves features out (blocks, operations, ways to clear, options)
--only stage3                 programs with these groups of options (fuzz_options.GROUPS) alone
--out out/fuzz                folder for verdicts.txt and what failed: <seed>.json (as drawn), <seed>.py (small)
--shrink 20                   how many failures are made small
--replay FILE.json            runs kept programs again
--device simulated            on the device of tests/simulated_device, every read and write checked
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent, HERE.parent / "distributed"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import fuzz_draw  # noqa: E402
import fuzz_options  # noqa: E402
import fuzz_script  # noqa: E402
import fuzz_shrink  # noqa: E402
from fuzz_judge import Verdict  # noqa: E402
from fuzz_program import Program  # noqa: E402
from fuzz_ranks import verdicts  # noqa: E402
from harness import shutdown  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: E402

BLOCK = 240  # programs drawn at once: jobs of both world sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--without", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--shrink", type=int, default=20)
    parser.add_argument("--replay", type=Path, nargs="*")
    parser.add_argument("--side", choices=("zc", "ddp"), default="zc")
    parser.add_argument("--device", choices=("cpu", "simulated"), default="cpu")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    without = frozenset(filter(None, arguments.without.split(",")))
    only = frozenset(filter(None, arguments.only.split(",")))
    if arguments.device == "simulated":
        sys.path.insert(0, str(HERE.parent / "simulated_device"))
        import device_fuzz

        device_fuzz.use()
        without |= device_fuzz.WITHOUT
    if unknown := only - fuzz_options.GROUPS.keys():
        parser.error(f"--only {','.join(sorted(unknown))}: the groups are {', '.join(fuzz_options.GROUPS)}")
    if arguments.replay:
        programs = [Program.from_json(path.read_text()) for path in arguments.replay]
    else:
        programs = [fuzz_draw.draw(arguments.first + k, without, only) for k in range(arguments.programs)]
    if arguments.device == "simulated":
        programs = [program for program in programs if device_fuzz.takes(program)]
    try:
        failed = run_all(programs, arguments.side, arguments.out)
        make_small(failed[: arguments.shrink] if arguments.side == "zc" else [], arguments.out)
    finally:
        shutdown()
    return 1 if failed else 0


def run_all(programs: list[Program], side: str, out: Path) -> list[tuple[Program, Verdict]]:
    """Runs all, keeps and returns what failed."""
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failed: list[tuple[Program, Verdict]] = []
    margins: dict[str, float] = {}
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("programs", total=len(programs))
        for first in range(0, len(programs), BLOCK):
            some = programs[first : first + BLOCK]
            for k, verdict in verdicts(some, side):
                program = some[k]
                counts[verdict.kind] += 1
                with (out / "verdicts.txt").open("a") as log:  # a run that is stopped has said what it saw
                    log.write(f"{program.seed} {verdict.kind} {verdict.text.splitlines()[0]}\n")
                refusals.update([verdict.text] if verdict.kind == "refused" else [])
                bar.update(task, advance=1, description=", ".join(f"{n} {kind}" for kind, n in counts.most_common()))
                if verdict.is_fine:
                    margins[program.dtype] = max(margins.get(program.dtype, 0.0), verdict.difference)
                    continue
                failed.append((program, verdict))
                bar.console.print(
                    f"program {program.seed}: {verdict.kind}: {verdict.text.splitlines()[0]}", markup=False
                )
                (out / f"{program.seed}.json").write_text(program.to_json())
                texts = [fuzz_script.body(program, launch) for launch in range(len(program.launches))]
                (out / f"{program.seed}.txt").write_text("\n\n".join([f"{verdict.kind}: {verdict.text}", *texts]))
    seconds = time.monotonic() - started
    for text, number in refusals.most_common():
        print(f"{number} refused: {text}")
    print(f"{len(programs)} programs in {seconds:.0f} s ({seconds / max(len(programs), 1):.2f} s each): {dict(counts)}")
    print("largest difference of a right one / its tolerance:", {k: f"{v:.2g}" for k, v in sorted(margins.items())})
    return sorted(failed, key=lambda pair: pair[0].seed)


def make_small(failed: list[tuple[Program, Verdict]], out: Path) -> None:
    for program, verdict in failed:
        small, last = fuzz_shrink.shrink(program, verdict)
        path = out / f"{program.seed}.py"
        first = last.text.splitlines()[0]
        path.write_text(
            fuzz_script.script(small, f"Program {program.seed} of the fuzzer, made small: {last.kind}: {first}")
        )
        (out / f"{program.seed}.small.json").write_text(small.to_json())
        print(f"\n# program {program.seed}: {last.kind}: {first}\n# {path}\n{fuzz_script.body(small)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
