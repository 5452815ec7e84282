"""What the ranks found against what was wanted: right, refused, or a finding, with the number that shows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fuzz_oracle import Wanted
from fuzz_program import Program
from torch import Tensor

# Relative to the largest entry of what is compared (weights: to their size and the way that they have come). An error
# of a few roundings grows over some ten operations a forward, and five updates; a gradient that is lost or counted
# twice is 0.1 and more. Norms are fp32 whatever the parameters are, so clipping brings fp32's rounding into float64.
TOLERANCES = {"float64": 1e-6, "float32": 2e-4, "bfloat16 on the wire": 0.02, "bfloat16": 0.1}


def _some_are_alone(program: Program) -> bool:
    """Some rank has backwards that others have not."""
    return any(len(set(op.args.get("reps", [0]))) > 1 for op in program.ops)


def _nobody_has_told(program: Program) -> bool:
    """Ranks differ, and some backward was held back, or ran on some ranks alone: nothing may have told them of each
    other's gradients before one is read. (DDP's would be each rank's own, or it hangs.)"""
    return program.ranks_differ and (_some_are_alone(program) or any(op.args.get("quiet") for op in program.ops))


# (class, words) of refusals, and when a program may get one
REFUSALS = (
    ("PlanError", "summed in float64", lambda p: p.dtype == "float64" and p.options.get("reduce_dtype") is not None),
    ("ZcError", "ranks have a param.grad on different parameters", _nobody_has_told),
    # cleared through the optimizer's own tensors, which no param.grad shows until the next backward, then clipped
    ("ZcError", "was set to None (zero_grad) since", lambda p: p.clears & {"class", "slices"}),
    ("RankMismatchError", "ranks are out of step", _some_are_alone),
    # cleared past optimizer.zero_grad on a rank that had no backward yet: no .grad was there to be missed
    ("RankMismatchError", "what the gradients hold", lambda p: p.clears - {"optimizer"} and _some_are_alone(p)),
)  # fmt: skip


class Outcome(NamedTuple):
    """One rank's side of a program. ``error``: class, text, traceback; None where the loop came to its end."""

    error: tuple[str, str, str] | None
    notes: dict[int, Any]
    weights: dict[str, Tensor]


class Verdict(NamedTuple):
    """``kind``: right, refused, wrong, error or hang. ``difference``: the largest, in units of the tolerance."""

    kind: str
    text: str
    difference: float = 0.0

    @property
    def is_fine(self) -> bool:
        return self.kind in ("right", "refused")

    @property
    def signature(self) -> str:
        """What a smaller program must show to be the same failure."""
        return self.kind if self.kind != "error" else f"error {self.text.split(':')[0]}"


def is_refusal(error: tuple[str, str, str]) -> bool:
    """Whether some program may get it."""
    return any(kind == error[0] and words in error[1] for kind, words, _ in REFUSALS)


def tolerance(program: Program) -> float:
    if program.dtype == "bfloat16":
        return TOLERANCES["bfloat16"]
    wire = program.options.get("reduce_dtype")
    if wire == "bfloat16":
        return TOLERANCES["bfloat16 on the wire"]
    return TOLERANCES["float32" if wire == "float32" else program.dtype]


def judge(program: Program, outcomes: list[Outcome | None], wanted: Wanted, died: str = "") -> Verdict:
    """``outcomes``: by rank, None for one that did not come back; ``died``: what is known of those."""
    errors = [(rank, o.error) for rank, o in enumerate(outcomes) if o is not None and o.error is not None]
    for kind, words, applies in REFUSALS:
        matching = [error for _, error in errors if error[0] == kind and words in error[1]]
        if len(matching) == program.world_size and applies(program):
            return Verdict("refused", f"{kind}: {words}")
    # a rank that has a param.grad asks for its norm, another has none to ask for and leaves the loop
    asks = _some_are_alone(program) and any(op.kind == "norms" for op in program.ops)
    if asks and 0 < len(errors) < program.world_size and all(error[0] == "RankLostError" for _, error in errors):
        return Verdict("refused", "RankLostError: a norm of gradients that some ranks lack")
    if errors:
        rank, (kind, text, trace) = errors[0]
        others = "; ".join(f"rank {r}: {e[0]}: {e[1][:200]}" for r, e in errors[1:])
        return Verdict("error", f"{kind}: {text[:500]} (rank {rank}; {others or 'no other rank'})\n{trace}")
    found = [o for o in outcomes if o is not None]
    if len(found) < program.world_size:
        return Verdict("hang", died or "a rank did not come back")
    for rank, outcome in enumerate(found):
        for name, value in outcome.weights.items():
            if not torch.equal(value, found[0].weights[name]):
                return Verdict("wrong", f"{name} differs between rank 0 and rank {rank}", float("inf"))
    limit = tolerance(program)
    worst, where = 0.0, "nothing differs"
    for size, place in _differences(found, wanted):
        if not size <= worst:  # NaN too
            worst, where = size, place
        if not size <= limit:
            break
    kind = "right" if worst <= limit else "wrong"
    return Verdict(kind, f"{where}: {worst:.1e} (allowed {limit:.0e})", worst / limit)


def _differences(found: list[Outcome], wanted: Wanted) -> Any:
    """(relative difference, where), in the order of the loop."""
    for k in sorted({k for outcome in found for k in outcome.notes}):
        for rank, outcome in enumerate(found):
            if (k, rank) not in wanted.loose:
                yield _distance(outcome.notes[k], wanted.notes[rank][k]), f"operation {k} on rank {rank}"
    sizes = {name: value.norm().item() + wanted.travelled[name] for name, value in wanted.weights.items()}
    floor = 0.01 * max(sizes.values())  # a gradient that is 0 but for rounding (a bias before a norm) has no scale
    for name, value in wanted.weights.items():
        yield _relative(found[0].weights[name], value, sizes[name] + floor), f"{name} in the end"


def _distance(got: Any, want: Any) -> float:
    """Of a tensor, or of all tensors of a list or dict together: None must meet None, and all have one scale."""
    if isinstance(want, dict):
        # zc.full_grad has the planned parameters alone: the others must have no gradient
        pairs = [(got.get(name), value) for name, value in want.items()]
    elif isinstance(want, list):
        pairs = list(zip(got, want, strict=True))
    else:
        pairs = [(got, want)]
    if any((g is None) != (w is None) for g, w in pairs):
        return float("inf")
    there = [(g, w) for g, w in pairs if w is not None and w.numel() > 0]
    scale = max((w.abs().max().item() for _, w in there), default=0.0)
    floor = 1e-3 if not isinstance(want, Tensor) else 1e-1  # of a loss: it may pass through 0
    return max((_relative(g, w, scale + floor) for g, w in there), default=0.0)


def _relative(got: Tensor, want: Tensor, scale: float) -> float:
    if got.shape != want.shape:
        return float("inf")
    difference = torch.linalg.vector_norm(got.double() - want.double()).item()
    return difference if difference == 0.0 else difference / scale if scale > 0.0 else float("inf")
