"""A program: a model, the options of zc.compile and a list of operations; data, from one seed or from a file. More
models of the same loop are programs of their own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import fuzz_models
from fuzz_optimizers import is_stacked

FULL_CLEARS = ("optimizer", "model", "class", "params", "slices")  # every gradient is None afterwards
ZEROS = ("optimizer_zeros", "model_zeros", "class_zeros")  # zeros where there was a gradient
BETWEEN_UPDATES = ("freeze", "thaw", "replace", "save", "load", "relaunch")
BY_RANK = ("rows", "use", "reps", "at")  # arguments with one entry for each rank
PART = 1000  # number of an operation: its model's number times this, and its place in the model's operations


class Op(NamedTuple):
    """One statement of the loop. ``args``: numbers, names and, where ranks may differ, a list with one entry a rank."""

    kind: str
    args: dict[str, Any]


class Launch(NamedTuple):
    """Operations [start, stop) of a model, and what they run with. The next launch begins with what the one before it
    has saved."""

    start: int
    stop: int
    world_size: int
    options: dict[str, Any]
    frozen: list[int]


@dataclass(frozen=True)
class Program:
    """``world_size`` and ``options``: of the first launch; an operation "relaunch" has those of the next."""

    seed: int
    world_size: int
    dtype: str  # of the parameters while they train; bfloat16: param_dtype of a float32 model
    model: dict[str, Any]
    optimizer: str  # a call, whose parameters are `params`
    options: dict[str, Any]
    ops: tuple[Op, ...]
    others: tuple[Program, ...] = ()  # more models in the same loop: fuzz_order has where their operations stand

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        return Program.from_data(json.loads(text))

    @staticmethod
    def from_data(data: dict[str, Any]) -> Program:
        others = tuple(Program.from_data(other) for other in data.get("others", ()))
        return Program(**{**data, "ops": tuple(Op(kind, args) for kind, args in data["ops"]), "others": others})

    def with_ops(self, ops: Sequence[Op]) -> Program:
        return dataclasses.replace(self, ops=tuple(ops))

    @property
    def parts(self) -> tuple[Program, ...]:
        """One program for each model."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)

    @cached_property
    def launches(self) -> list[Launch]:
        result, start, world_size, options = [], 0, self.world_size, self.options
        frozen = at_start = list(self.model["frozen"])
        for k, (kind, args) in enumerate(self.ops):
            if kind in ("freeze", "thaw"):
                frozen = [b for b in frozen if b != args["block"]] + ([args["block"]] if kind == "freeze" else [])
            if kind == "relaunch":
                result.append(Launch(start, k, world_size, options, at_start))
                start, world_size, options, at_start = k + 1, args["world_size"], args["options"], frozen
        return [*result, Launch(start, len(self.ops), world_size, options, at_start)]

    @property
    def backend(self) -> str:
        return str(self.options["backend"])

    @property
    def clears(self) -> frozenset[str]:
        """Ways to clear gradients that it takes."""
        return frozenset(op.args["how"] for op in self.ops if op.kind == "zero")

    @property
    def ranks_differ(self) -> bool:
        """In what they use or in how often."""
        return any(
            len({json.dumps(entry) for entry in op.args.get(key, [])}) > 1 for op in self.ops for key in ("use", "reps")
        )


def suffix(number: int) -> str:
    """Of the names of one model, among several."""
    return "" if number == 0 else "ABCD"[number]


class Illegal(Exception):
    """What is wrong with a program, which no generator would have made."""


def syncs_buffers(model: fuzz_models.Model, options: dict[str, Any]) -> bool:
    """Whether a forward makes the buffers rank 0's."""
    return fuzz_models.has(model, *fuzz_models.BUFFERED) and options.get("broadcast_buffers", True)


def leaves_buffers(ops: Sequence[Op]) -> bool:
    """Whether DDP broadcasts no buffers in the forward after these operations: the one before it was in no_sync, or
    without gradients."""
    for kind, args in reversed(ops):
        if kind in ("forward", "micro", "evaluate"):
            return kind == "evaluate" or bool(args.get("quiet"))
        if kind == "relaunch":
            break
    return False


def check(program: Program) -> None:
    """Raises Illegal for a program that DDP could not run either, or that zc refuses by its documentation."""
    pending: set[int] = set()  # losses that wait for their backward
    has_grads = uneven = waiting = aborted = snapshot = saved = False
    names, model = set(fuzz_models.trainable(program.model)), program.model
    world_size = program.world_size
    frozen, options, buffers = set(model["frozen"]), program.options, syncs_buffers(model, program.options)
    for k, (kind, args) in enumerate(program.ops):
        if aborted and not (kind == "zero" and args["how"] in FULL_CLEARS):
            raise Illegal(f"{k}: gradients of a backward that raised must be cleared")
        if any(len(args[key]) != world_size for key in BY_RANK if isinstance(args.get(key), list)):
            raise Illegal(f"{k}: not one entry for each rank")
        if kind in BETWEEN_UPDATES and (has_grads or uneven or waiting):
            raise Illegal(f"{k}: {kind} inside of an update")
        if kind in ("step", "write", "reset", "restore", *BETWEEN_UPDATES):
            pending.clear()
        if kind in ("forward", "evaluate", "micro") and buffers:
            pending.clear()  # DDP's broadcast of buffers breaks a backward that waits behind another forward
        if args.get("penalty") and options["stage"] == 3:
            raise Illegal(f"{k}: parameters without bytes are read")
        if kind == "restore" and buffers and leaves_buffers(program.ops[:k]):
            # zc has broadcast before the snapshot what DDP broadcasts in the forward after it
            raise Illegal(f"{k}: buffers that were each rank's own, and stay so in the next forward")
        if kind == "forward":
            pending.add(k)
        elif kind in ("backward", "raise", "collective", "peek"):
            if not set(args["of"]) <= pending:
                raise Illegal(f"{k}: no loss {args['of']}")
            if kind == "collective" and uneven:
                raise Illegal(f"{k}: a collective where ranks have done other numbers of undeclared backwards")
            if kind == "collective" and waiting:
                raise Illegal(f"{k}: a collective behind other numbers of backwards in no_sync, which stage 2 reduces")
            if kind == "raise" and not fuzz_models.has(model, "fault"):
                raise Illegal(f"{k}: nothing can raise")
        if kind in ("backward", "raise"):
            has_grads = True
            if not args.get("retain"):
                pending -= set(args["of"])
        if kind == "raise":
            if waiting and buffers:
                raise Illegal(f"{k}: after it, ranks wait for buffers and for other numbers of backwards in no_sync")
            aborted = True
            pending.clear()
        if kind == "micro":
            has_grads = True
            if len(set(args["reps"])) > 1 and not args["quiet"]:
                if buffers:
                    raise Illegal(f"{k}: undeclared backwards in other numbers")
                uneven = True
            waiting = waiting or (options["stage"] >= 2 and len(set(args["reps"])) > 1)
        if kind in ("step", "clip", "grads", "norms", "by_hand"):
            uneven = False
        if kind in ("step", "clip", "grads", "norms", "by_hand") or (kind == "backward" and not args["quiet"]):
            waiting = False
        if kind == "zero" and args["how"] in FULL_CLEARS:
            has_grads = aborted = False
        if "name" in args and args["name"] not in names:
            raise Illegal(f"{k}: no parameter {args['name']}")
        if "block" in args and not args["block"] < len(model["blocks"]):
            raise Illegal(f"{k}: no block {args['block']}")
        if any(head >= len(model["heads"]) for use in args.get("use", []) for head in use):
            raise Illegal(f"{k}: no such head")
        if fuzz_models.has(model, *fuzz_models.BUFFERED) and min(args.get("rows", [9])) < 3:
            raise Illegal(f"{k}: too few rows for a BatchNorm, or for torch.compile (fuzz_models.BUFFERED)")
        if kind == "thaw":
            if args["block"] not in frozen or options.get("offload") is not None:
                raise Illegal(f"{k}: nothing to thaw")
            frozen.discard(args["block"])
        if kind in ("freeze", "replace") and not fuzz_models.may_freeze(model["blocks"], args["block"]):
            raise Illegal(f"{k}: a shared block is frozen or replaced")
        if kind == "freeze":
            frozen.add(args["block"])
        if not fuzz_models.trains(model, frozen):
            raise Illegal(f"{k}: nothing is left to train")
        if kind in ("freeze", "thaw", "replace", "reset") and is_stacked(program.optimizer):
            raise Illegal(f"{k}: a group with a state of its own gets other parameters")
        if kind == "replace" and (frozen & {args["block"]} or options.get("offload") or len(program.launches) > 1):
            raise Illegal(f"{k}: a replaced block that is frozen, or offloaded, or that another launch lacks")
        if kind in ("freeze", "thaw"):
            names = set(fuzz_models.trainable({**model, "frozen": frozen}))
        if (kind == "restore" and not snapshot) or (kind == "load" and not saved):
            raise Illegal(f"{k}: {kind} of nothing")
        snapshot, saved = snapshot or kind == "snapshot", (saved or kind == "save") and kind != "replace"
        if kind == "relaunch":
            snapshot = saved = False
            world_size, options = args["world_size"], args["options"]
    if fuzz_models.has(model, *fuzz_models.WRITING) and program.ranks_differ:
        raise Illegal("ranks with other passes than each other, which write weights")
    if fuzz_models.has(model, "clamped late") and any(kind == "raise" for kind, _ in program.ops):
        raise Illegal("a backward that writes a weight, perhaps before it raises")
    if fuzz_models.has(model, "clamped late") and any(args.get("penalty") for _, args in program.ops):
        raise Illegal("a penalty on a weight that backwards write: the reference runs the ranks' one after the other")
    if any(kind == "buffers_written" for kind, _ in program.ops) and program.ranks_differ:
        raise Illegal("ranks with other numbers of forwards than rank 0, whose buffers they need")
    if aborted:
        raise Illegal("gradients of a backward that raised are left")


def is_legal(program: Program) -> bool:
    try:
        check_all(program)
    except Illegal:
        return False
    return all(fuzz_models.trains(part.model, part.model["frozen"]) for part in program.parts)


def check_all(program: Program) -> None:
    """All models of a program, and their order."""
    from fuzz_order import check_order  # which stands on this module

    for part in program.parts:
        check(part)
    check_order(program)
