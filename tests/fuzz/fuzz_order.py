"""Several models in one loop: in which order each rank runs their operations.

Each model's operations are a program of their own. Its operations carry ``at``, a number, or one for each rank; a rank
runs the operations of all models by these numbers. Ranks may differ in where *private* operations stand, which
exchange nothing: ranks then work on different models at one time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fuzz_program import Illegal, Op, Program, syncs_buffers

Place = tuple[int, int]  # the model, and its operation
LOCAL = ("forward", "peek", "evaluate", "lr", "hook", "zero")  # kinds that never wait for another rank
GATHERS = ("forward", "peek", "evaluate")  # but in stage 3


def is_private(part: Program, k: int, stage: int) -> bool:
    """Whether an operation exchanges nothing: stage 1 holds back what no_sync brings. After a backward that raised,
    zero_grad reduces what other ranks wait for."""
    kind, args = part.ops[k]
    if kind == "zero":
        since = next((op.kind for op in reversed(part.ops[:k]) if op.kind in ("raise", "zero", "step")), "")
        return since != "raise"
    if kind == "lr":
        return True
    is_held_back = kind in ("forward", "backward", "micro") and args["quiet"] and stage == 1
    return is_held_back and not syncs_buffers(part.model, part.options)


def order(program: Program, launch: int, rank: int) -> list[Place]:
    """What ``rank`` runs in this launch, in order."""
    places = []
    for number, part in enumerate(program.parts):
        which = part.launches[launch]
        for k in range(which.start, which.stop):
            at = part.ops[k].args.get("at", k)
            places.append((at[rank] if isinstance(at, list) else at, number, k))
    return [(number, k) for _, number, k in sorted(places)]


def orders(program: Program, launch: int) -> list[list[Place]]:
    """By rank."""
    return [order(program, launch, rank) for rank in range(program.launches[launch].world_size)]


def shared(parts: Sequence[Program], launch: int, places: Sequence[Place]) -> list[Place]:
    """Those that are not private."""
    stages = [int(part.launches[launch].options["stage"]) for part in parts]
    return [(n, k) for n, k in places if not is_private(parts[n], k, stages[n])]


def check_order(program: Program) -> None:
    """Raises Illegal where ranks would meet in different orders."""
    sizes = [[which.world_size for which in part.launches] for part in program.parts]
    if any(of_part != sizes[0] for of_part in sizes):
        raise Illegal(f"launches differ: {sizes}")
    for launch in range(len(program.launches)):
        by_rank = orders(program, launch)
        for number in range(len(program.parts)):
            own = [[k for other, k in places if other == number] for places in by_rank]
            if any(ks != sorted(ks) for ks in own):
                raise Illegal(f"launch {launch}: the operations of model {number} are out of order")
        meetings = [shared(program.parts, launch, places) for places in by_rank]
        if any(places != meetings[0] for places in meetings):
            raise Illegal(f"launch {launch}: ranks meet in different orders")


class Waits:
    """Models on which some rank may still wait for the others, after backwards that they have not made."""

    def __init__(self, parts: Sequence[Program], launch: int) -> None:
        self.parts, self.launch = parts, launch
        self.undeclared: set[int] = set()
        self.declared: set[int] = set()

    @property
    def open(self) -> set[int]:
        return self.undeclared | self.declared

    def crosses(self, number: int, k: int) -> bool:
        """Whether one rank may wait here, in this model, for a rank that waits in another one."""
        part = self.parts[number]
        op, options = part.ops[k], part.launches[self.launch].options
        stage = int(options["stage"])
        is_local = op.kind in LOCAL and not syncs_buffers(part.model, part.options)
        is_local = is_local and not (stage == 3 and op.kind in GATHERS)
        waits_here = not is_local and not is_private(part, k, stage)
        return waits_here and bool(self.open - {number})

    def add(self, number: int, k: int) -> None:
        part = self.parts[number]
        (kind, args), stage = part.ops[k], int(part.launches[self.launch].options["stage"])
        if kind in ("step", "clip", "grads", "norms", "by_hand"):
            self.undeclared.discard(number)
            self.declared.discard(number)
        elif kind == "backward" and not args["quiet"]:
            self.declared.discard(number)
        elif kind == "micro" and len(set(args["reps"])) > 1:
            if not args["quiet"]:
                self.undeclared.add(number)
            elif stage >= 2:
                self.declared.add(number)


def crosses(program: Program) -> bool:
    """Whether ranks may wait for each other in different models, which zc must end with an error on each."""
    for launch in range(len(program.launches)):
        waits = Waits(program.parts, launch)
        for number, k in orders(program, launch)[0]:
            if waits.crosses(number, k):
                return True
            waits.add(number, k)
    return False


# --- drawing ---


def interleave(rng: random.Random, parts: Sequence[Program], may_cross: bool, may_differ: bool) -> list[Program]:
    """The parts, whose operations have got their ``at``."""
    ordered: list[list[Op]] = [[] for _ in parts]
    for launch, which in enumerate(parts[0].launches):
        common = _common(rng, parts, launch, may_cross)
        by_rank = [list(common) for _ in range(which.world_size)]
        if may_differ:
            for places in by_rank:
                _move_private(rng, parts, launch, places)
        ats = [{place: at for at, place in enumerate(places)} for places in by_rank]
        for number, part in enumerate(parts):
            mine = part.launches[launch]
            for k in range(mine.start, mine.stop):
                numbers = [at[number, k] for at in ats]
                at: Any = numbers if len(set(numbers)) > 1 else numbers[0]
                ordered[number].append(Op(part.ops[k].kind, {**part.ops[k].args, "at": at}))
            if mine.stop < len(part.ops):
                ordered[number].append(part.ops[mine.stop])  # the relaunch itself
    return [part.with_ops(ops) for part, ops in zip(parts, ordered, strict=True)]


def _common(rng: random.Random, parts: Sequence[Program], launch: int, may_cross: bool) -> list[Place]:
    left = [list(range(part.launches[launch].start, part.launches[launch].stop)) for part in parts]
    waits, common = Waits(parts, launch), []
    while any(left):
        number = rng.choice([n for n, ks in enumerate(left) if ks])
        if waits.open and not may_cross:
            number = next((n for n in sorted(waits.open) if left[n]), number)
        for _ in range(rng.choice((1, 1, 2, 4))):
            if left[number]:
                k = left[number].pop(0)
                waits.add(number, k)
                common.append((number, k))
    return common


def _move_private(rng: random.Random, parts: Sequence[Program], launch: int, places: list[Place]) -> None:
    """Private operations change places with those of other models beside them, on this rank alone."""
    private = set(places) - set(shared(parts, launch, places))
    for _ in range(3):
        for at in range(len(places) - 1):
            one, other = places[at : at + 2]
            if one[0] != other[0] and (one in private or other in private) and rng.random() < 0.4:
                places[at : at + 2] = other, one
