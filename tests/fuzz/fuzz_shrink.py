"""A failing program made small: fewer operations, plain options, a smaller model, while it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from fuzz_judge import Verdict
from fuzz_optimizers import PLAINEST
from fuzz_program import BY_RANK, Op, Program, is_legal
from fuzz_ranks import verdicts

ROUNDS = 30  # of candidates; a round is one job
HANGS = 12  # candidates that may hang before we stop: each takes a minute


def shrink(program: Program, verdict: Verdict, **how: Any) -> tuple[Program, Verdict]:
    """The smallest found, and its verdict. ``how``: for `verdicts`."""
    hangs = 0
    for _ in range(ROUNDS):
        candidates = [c for c in _candidates(program) if is_legal(c)]
        if verdict.kind == "hang":
            candidates = candidates[:6]
        better = None
        for start in range(0, len(candidates), 12):  # the boldest first
            some = candidates[start : start + 12]
            for k, candidate_verdict in sorted(verdicts(some, **how)):
                hangs += candidate_verdict.kind == "hang"
                if candidate_verdict.signature == verdict.signature and better is None:
                    better = some[k], candidate_verdict
            if better is not None or hangs > HANGS:
                break
        if better is None:
            break
        program, verdict = better
    return program, verdict


def _candidates(program: Program) -> Iterator[Program]:
    """Smaller ones, those that drop most first."""
    parts = program.parts
    if len(parts) > 1:
        for number in range(len(parts)):  # without this model
            first, *others = [*parts[:number], *parts[number + 1 :]]
            yield dataclasses.replace(first, others=tuple(others))
    if len(program.launches) > 1:  # without the last launch
        first, *others = [part.with_ops(part.ops[: part.launches[-1].start - 1]) for part in parts]
        yield dataclasses.replace(first, others=tuple(others))
    for number, part in enumerate(parts):
        for smaller in _smaller(part):
            first, *others = [*parts[:number], smaller, *parts[number + 1 :]]
            yield dataclasses.replace(first, others=tuple(others))


def _smaller(program: Program) -> Iterator[Program]:
    """Of one model's program."""
    size = len(program.ops) // 2
    while size >= 1:
        for start in range(0, len(program.ops) - size + 1, size):
            yield without_ops(program, range(start, start + size))
        size //= 2
    for key in sorted(program.options.keys() - {"stage", "backend", "bucket_nbytes"}):
        options = {k: v for k, v in program.options.items() if k != key}
        dtype = "float32" if key == "param_dtype" else program.dtype
        if key == "offload":
            options.pop("offload_accumulate", None)
        yield dataclasses.replace(program, options=options, dtype=dtype)
    if program.backend != "eager":
        yield dataclasses.replace(program, options={**program.options, "backend": "eager"})
    if program.dtype == "float64":
        yield dataclasses.replace(program, dtype="float32")
    if program.world_size > 2 and len(program.launches) == 1:
        yield _fewer_ranks(program)
    yield from _smaller_models(program)
    for k, op in enumerate(program.ops):
        for args in _plainer(op.args):
            yield _with_op(program, k, Op(op.kind, args))
    if program.optimizer != PLAINEST:
        yield dataclasses.replace(program, optimizer=PLAINEST)


def without_ops(program: Program, dropped: Sequence[int]) -> Program:
    """Operations that are left keep what they refer to; those that lose all of it go too."""
    gone, number, ops = set(dropped), {}, []
    for k, (kind, args) in enumerate(program.ops):
        of = [j for j in args.get("of", []) if j not in gone]
        if k in gone or ("of" in args and not of):
            gone.add(k)
            continue
        number[k] = len(ops)
        ops.append(Op(kind, {**args, "of": [number[j] for j in of]} if "of" in args else args))
    return dataclasses.replace(program, ops=tuple(ops))


def _with_op(program: Program, k: int, op: Op) -> Program:
    return dataclasses.replace(program, ops=(*program.ops[:k], op, *program.ops[k + 1 :]))


def _fewer_ranks(program: Program) -> Program:
    ops = [Op(kind, {k: _cut(v) if k in BY_RANK else v for k, v in args.items()}) for kind, args in program.ops]
    return dataclasses.replace(program, world_size=program.world_size - 1, ops=tuple(ops))


def _cut(by_rank: Any) -> Any:
    return by_rank[:-1] if isinstance(by_rank, list) else by_rank


def _plainer(args: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One operation, with one thing less to read."""
    plain = {"quiet": False, "retain": False, "penalty": 0.0, "scale": 1.0, "inference": False, "walks": False}
    for key, value in plain.items():
        if args.get(key, value) != value:
            yield {**args, key: value}
    for key in ("use", "rows", "reps"):
        if key in args and any(entry != args[key][0] for entry in args[key]):
            yield {**args, key: [args[key][0]] * len(args[key])}
    if len(args.get("of", ())) > 1:
        yield {**args, "of": args["of"][:1]}


def _smaller_models(program: Program) -> Iterator[Program]:
    model = program.model
    for k in range(len(model["blocks"])):
        if len(model["blocks"]) > 1 and not any(shared == k for _, shared in model["blocks"]):
            yield _without_block(program, k)
    if model["heads"]:
        last = len(model["heads"]) - 1
        ops = [_renamed(op, lambda use: [h for h in use if h != last], f"head{last}.") for op in program.ops]
        yield dataclasses.replace(
            program, model={**model, "heads": model["heads"][:-1]}, ops=tuple(o for o in ops if o)
        )
    for k, (kind, shared) in enumerate(model["blocks"]):
        if kind not in ("linear", "fault") or shared is not None:
            blocks = [*model["blocks"][:k], ["linear" if kind != "fault" else kind, None], *model["blocks"][k + 1 :]]
            yield dataclasses.replace(program, model={**model, "blocks": blocks})
    if model["frozen"]:
        yield dataclasses.replace(program, model={**model, "frozen": []})
    if model["tokens"] and "tied" not in model["heads"]:
        yield dataclasses.replace(program, model={**model, "tokens": False})
    if model["dim"] > 2:
        yield dataclasses.replace(program, model={**model, "dim": 2})


def _without_block(program: Program, k: int) -> Program:
    model = program.model

    def moved(j: int) -> int:
        return j - (j > k)

    blocks = [[kind, None if shared is None else moved(shared)] for kind, shared in model["blocks"]]
    smaller = {**model, "blocks": blocks[:k] + blocks[k + 1 :], "frozen": [moved(j) for j in model["frozen"] if j != k]}
    ops = []
    for kind, args in program.ops:
        args = dict(args)
        if "block" in args:
            if args["block"] == k:
                continue
            args["block"] = moved(args["block"])
        if "name" in args and args["name"].startswith("b"):
            block, dot, rest = args["name"][1:].partition(".")
            args["name"] = f"b{moved(int(block))}{dot}{rest}"
        ops.append(Op(kind, args))
    if len(ops) < len(program.ops):
        return program  # an operation names the block: the numbers of losses would change
    return dataclasses.replace(program, model=smaller, ops=tuple(ops))


def _renamed(op: Op, change: Any, gone: str) -> Op:
    args = dict(op.args)
    if "use" in args:
        args["use"] = [change(use) for use in args["use"]]
    return Op(op.kind, args)
