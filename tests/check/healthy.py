"""``python tests/check/healthy.py --programs 200``: zc.check on loops that are right, made of programs of the fuzzer:
their models, optimizers and options, with microbatches. It must find no fault.

Ranks have equally many rows here: else the mean over ranks is not the mean over samples, which is a fault to zc.check.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in (HERE, *(HERE.parent / name for name in (".", "distributed", "fuzz"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import fuzz_draw  # noqa: E402
import fuzz_models  # noqa: E402
import fuzz_optimizers  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fuzz_judge import is_refusal  # noqa: E402
from fuzz_program import Program  # noqa: E402
from harness import RanksFailed, run_ranks, shutdown  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import zc  # noqa: E402

# "clamped late": backwards write a weight, and the reference runs ranks one after the other; stage 3 refuses "keeps"
WITHOUT = frozenset({"inductor", "wire", "clamped late", "keeps", "models", "relaunch", "differ"})
A_JOB = 20


def draw(seed: int, without: frozenset[str] = frozenset()) -> Program:
    return fuzz_draw.draw(seed, WITHOUT | without)


def arguments(program: Program, rank: int) -> dict[str, Any]:
    """What zc.check takes."""
    rng, model = random.Random(program.seed), program.model
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint}
    wide = torch.float64 if program.dtype == "float64" else torch.float32
    names.update(DTYPE=getattr(torch, program.dtype), WIDE=wide)
    text = fuzz_models.text(model) + "\n\n" + fuzz_optimizers.classes(program.optimizer)
    exec(compile(text, "<program>", "exec"), names)
    torch.manual_seed(0)
    net = names["Net"]().to(wide)
    names["params"] = list(net.parameters())
    rows, microbatches = rng.randint(3, 6), rng.choice((1, 1, 2, 3))
    use = tuple(sorted(rng.sample(range(len(model["heads"])), rng.randint(0, len(model["heads"])))))

    def step(net: nn.Module, batch: tuple[Tensor, list[Tensor]]) -> Tensor:
        x, targets = batch
        return sum((out.to(wide) - y).square().mean() for out, y in zip(net(x, use), targets, strict=True))

    def make(number: int) -> tuple[Tensor, list[Tensor]]:
        g = torch.Generator().manual_seed(100 * number + rank)
        if model["tokens"]:
            x = torch.randint(0, fuzz_models.VOCAB, (rows,), generator=g)
        else:
            x = torch.randn(rows, model["dim"], generator=g).bfloat16().to(names["DTYPE"])
        widths = [model["heads"][k] for k in use] or [model["dim"]]
        widths = [fuzz_models.VOCAB if width == "tied" else width for width in widths]
        return x, [torch.randn(rows, width, generator=g).to(wide) for width in widths]

    options = {
        name: getattr(torch, value) if name.endswith("dtype") else value for name, value in program.options.items()
    }
    return {
        "step": step,
        "model": net,
        "optimizer": eval(program.optimizer, names),
        "batches": [make(k) for k in range(2 * microbatches)],
        "updates": 2,
        "microbatches": microbatches,
        **options,
    }


def run(rank: int, world_size: int, seeds: list[int]) -> dict[int, tuple[list[str], float, str]]:
    """Job. By seed: the codes, the largest distance over what is allowed (-1 where zc refuses), and the report."""
    outcomes = {}
    for seed in seeds:
        torch._dynamo.reset()
        try:
            report = zc.check(**arguments(draw(seed), rank))
        except zc.ZcError as error:
            refused = is_refusal((type(error).__name__, str(error), ""))
            outcomes[seed] = ([] if refused else [type(error).__name__], -1.0, str(error))
            continue
        worst = max((each.ratio for row in report.worst.values() for each in row.values()), default=0.0)
        outcomes[seed] = (report.codes, worst, str(report))
    return outcomes


def main() -> int:
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--a-job", type=int, default=A_JOB)
    args = parser.parse_args()
    bad, refused, largest, count = 0, 0, 0.0, 0
    seeds = range(args.first, args.first + args.programs)
    jobs = []
    for size in (2, 3):
        own = [seed for seed in seeds if draw(seed).world_size == size]
        jobs += [(size, own[k : k + args.a_job]) for k in range(0, len(own), args.a_job)]
    for size, some in track(jobs, "healthy programs"):
        try:
            outcomes = run_ranks(run, size, some, timeout=60.0 * len(some))[0]
        except RanksFailed as failed:
            print(some, failed, flush=True)
            bad += len(some)
            continue
        for seed, (codes, worst, report) in outcomes.items():
            count, largest = count + 1, max(largest, worst)
            if codes:
                bad += 1
                print(f"--- {seed}\n{report}", flush=True)
            else:
                refused += worst < 0.0
                print(f"{seed} {f'{worst:.3g}' if worst >= 0.0 else f'refused: {report}'}", flush=True)
    print(f"{count} programs, {refused} refused by zc, {bad} with a fault or an error")
    print(f"the largest distance is {largest:.2g} of what is allowed")
    shutdown()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.modules["healthy"] = sys.modules["__main__"]
    run.__module__ = "healthy"
    sys.exit(main())
