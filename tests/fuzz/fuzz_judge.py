"""What the ranks found against what was wanted: right, refused, or a finding, with the number that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import fuzz_models
import torch
from fuzz_optimizers import is_stacked
from fuzz_oracle import Wanted
from fuzz_order import crosses
from fuzz_program import FULL_CLEARS, PART, Program, suffix
from torch import Tensor

# Relative to the largest entry of what is compared (weights: to their size and the way that they have come). An error
# of a few roundings grows over some ten operations a forward, and five updates; a gradient that is lost or counted
# twice is 0.1 and more. Norms are fp32 whatever the parameters are, so clipping brings fp32's rounding into float64.
# bfloat16 rounds each rank's part to 2^-9: of parts that cancel to a tenth of their size this is 4 % of the sum.
TOLERANCES = {"float64": 1e-6, "float32": 2e-4, "bfloat16 on the wire": 0.04, "bfloat16": 0.1, "bits on the wire": 0.3}


def _some_are_alone(program: Program) -> bool:
    """Some rank has backwards that others have not."""
    return any(len(set(op.args.get("reps", [0]))) > 1 for op in program.ops)


def _some_raised_alone(program: Program) -> bool:
    """A backward raised where ranks use other parameters, so that some ranks may have had no gradient yet."""
    forwards = {k: op.args.get("use", []) for k, op in enumerate(program.ops) if op.kind == "forward"}
    uses = [forwards[k] for op in program.ops if op.kind == "raise" for k in op.args["of"]]
    return any(entry != use[0] for use in uses for entry in use)


def _nobody_has_told(program: Program) -> bool:
    """Whether a stock norm or clipping reads gradients that nothing has told all ranks of: ranks differed in a backward
    that no_sync held back, or in how often they ran one. (DDP's would be each rank's own, or it hangs.)"""
    untold, apart, differs = False, False, set()  # apart: some rank has backwards to come that others have made
    for k, (kind, args) in enumerate(program.ops):
        if any(entry != args["use"][0] for entry in args.get("use", ())):
            differs.add(k)
        is_quiet = args.get("quiet", False)
        if _is_read_alone(kind, args) and (untold or apart):
            return True
        apart = not _tells(kind, args) and (apart or (len(set(args.get("reps", [0]))) > 1 and not is_quiet))
        if _tells(kind, args) or (kind == "zero" and args["how"] in FULL_CLEARS):
            untold = False
        elif kind == "backward":
            untold = is_quiet and (untold or not differs.isdisjoint(args["of"]))
        elif kind == "micro":
            untold = untold or len(set(args["reps"])) > 1 or (is_quiet and k in differs)
    return False


def _some_read_alone(program: Program) -> bool:
    """Whether a stock norm or clipping stands where ranks may be at different backwards, so that some of them have no
    gradient to read, and go on."""
    alone = False
    for kind, args in program.ops:
        if _is_read_alone(kind, args) and alone:
            return True
        alone = (alone or len(set(args.get("reps", [0]))) > 1) and not _tells(kind, args)
    return False


def _backward_reads_rewritten_buffer(program: Program) -> bool:
    """Whether a compiled backward may compute again what its forward made of a buffer that a later forward has written.
    `torch.compile` with Inductor raises PyTorch's error there, with and without zc."""
    compiles = any(which.options["backend"] != "eager" for which in program.launches)
    if not compiles or all(kind not in ("average", "state") for kind, _ in program.model["blocks"]):
        return False
    last = -1  # the latest forward so far
    for k, (kind, args) in enumerate(program.ops):
        if kind in ("forward", "micro"):
            last = k
        if kind in ("backward", "raise") and any(forward < last for forward in args["of"]):
            return True
    return False


def _penalty_of_rewritten_weight(program: Program) -> bool:
    """Whether a backward reads weights by a penalty, outside of compiled code, that a later compiled forward has
    written. PyTorch counts that write, as it does not where ``.data`` is written in code that is not compiled."""
    compiles = any(which.options["backend"] != "eager" for which in program.launches)
    if not compiles or not fuzz_models.has(program.model, "clamped"):
        return False
    last = -1  # the latest forward so far
    for k, (kind, args) in enumerate(program.ops):
        if kind in ("forward", "micro", "evaluate"):
            last = k
        through = args["of"] if kind in ("backward", "raise", "peek") else ()
        if any(forward < last and program.ops[forward].args.get("penalty") for forward in through):
            return True
    return False


def _writes_sharded_weights(program: Program) -> bool:
    """Whether the compiled code of a forward writes a weight in stage 3."""
    launches = [which.options for which in program.launches]
    is_refused = any(options["stage"] == 3 and options["backend"] != "eager" for options in launches)
    return is_refused and fuzz_models.has(program.model, "clamped")


def _gathers_other_weights(program: Program) -> bool:
    """Whether ranks of stage 3 that exchange messages may run other forwards than each other, which zc refuses."""
    by_messages = any(which.options["stage"] == 3 and "hosts" in which.options for which in program.launches)
    per_rank = (args[key] for _, args in program.ops for key in ("use", "reps") if key in args)
    return by_messages and any(value != values[0] for values in per_rank for value in values)


def _keeps_views(program: Program) -> bool:
    """Whether a forward of stage 3 reads a view of a weight that one before the last update has made."""
    is_sharded = any(which.options["stage"] == 3 for which in program.launches)
    return is_sharded and any(kind == "keeps" for kind, _ in program.model["blocks"])


def _loads_together_elsewhere(program: Program) -> bool:
    """Whether another launch loads a state that belongs to several parameters."""
    return is_stacked(program.optimizer) and len(program.launches) > 1


def _is_read_alone(kind: str, args: dict[str, Any]) -> bool:
    return kind in ("norms", "by_hand") or (kind == "clip" and args["how"] != "zc")


def _tells(kind: str, args: dict[str, Any]) -> bool:
    """Whether all ranks meet in it, whatever gradients they have."""
    return kind in ("step", "grads") or (kind == "clip" and args["how"] == "zc")


# (class, words) of refusals, and when a program may get one
REFUSALS = (
    ("PlanError", "is too small: the largest bucket", lambda p: _options(p, "weight_nbytes")),
    ("PlanError", "summed in float64", lambda p: p.dtype == "float64" and _options(p, "reduce_dtype")),
    # of a backward that raised, some ranks have dropped gradients and others had none
    ("ZcError", "ranks have a param.grad on different parameters",
     lambda p: _nobody_has_told(p) or _some_raised_alone(p)),
    # cleared through the optimizer's own tensors, which no param.grad shows until the next backward, then clipped
    ("ZcError", "was set to None (zero_grad) since", lambda p: p.clears & {"class", "slices"}),
    ("CheckpointError", "state belongs to parameters together", _loads_together_elsewhere),
    ("RankMismatchError", "ranks are out of step", lambda p: _some_read_alone(p) or _gathers_other_weights(p)),
    ("ZcError", "made before the last update", _keeps_views),
    ("ZcError", "compiled code of the forward writes parameter", _writes_sharded_weights),
    ("RuntimeError", "modified by an inplace operation",
     lambda p: _backward_reads_rewritten_buffer(p) or _penalty_of_rewritten_weight(p)),
    # cleared past optimizer.zero_grad on a rank that had no backward yet: no .grad was there to be missed
    ("RankMismatchError", "what the gradients hold",
     lambda p: p.clears - {"optimizer"} and (_some_are_alone(p) or _some_raised_alone(p))),
)  # fmt: skip
CUT_OFF = ("RankLostError", "RankMismatchError")  # of ranks that wait for each other in different models


def _options(program: Program, name: str) -> list[Any]:
    """Its values, of those launches that have it."""
    return [which.options[name] for which in program.launches if which.options.get(name)]


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
    """Whether some program may get it. One that cuts a rank off is none: it may leave connections broken."""
    return any(kind == error[0] and words in error[1] for kind, words, _ in REFUSALS)


def tolerance(part: Program) -> float:
    """Of one model."""
    if any(which.options.get("hosts") for which in part.launches):
        return TOLERANCES["bits on the wire"]
    if part.dtype == "bfloat16":
        return TOLERANCES["bfloat16"]
    wires = _options(part, "reduce_dtype")
    if "bfloat16" in wires:
        return TOLERANCES["bfloat16 on the wire"]
    return TOLERANCES["float32" if "float32" in wires else part.dtype]


def judge(program: Program, launches: list[list[Outcome | None]], wanted: Wanted, died: str = "") -> Verdict:
    """``launches``: of each that ran, the outcomes by rank, None for one that did not come back; ``died``: what is
    known of those."""
    last = launches[-1]
    errors = [(rank, o.error) for rank, o in enumerate(last) if o is not None and o.error is not None]
    for kind, words, applies in REFUSALS:
        matching = [error for _, error in errors if error[0] == kind and words in error[1]]
        if len(matching) == len(last) and any(applies(part) for part in program.parts):
            return Verdict("refused", f"{kind}: {words}")
    raised = any(_some_raised_alone(part) for part in program.parts)
    are_cut_off = len(errors) == len(last) and all(error[0] in CUT_OFF for _, error in errors)
    # a backward that raised on all ranks, and had brought gradients on some of them: these wait for the others there
    if are_cut_off and (crosses(program) or (raised and len(program.parts) > 1)):
        return Verdict("refused", "ranks wait for each other in different models")
    # cleared past optimizer.zero_grad after a backward that raised, before a collective of the loop's own
    if raised and any("A backward raised on rank" in error[1] for _, error in errors):
        return Verdict("refused", "RankMismatchError: a backward that raised, then a collective")
    # a rank that has a param.grad asks for its norm, another has none to ask for and leaves the loop
    asks = any(
        _some_are_alone(part) and any(op.kind in ("norms", "by_hand") for op in part.ops) for part in program.parts
    )
    if asks and 0 < len(errors) < len(last) and all(error[0] == "RankLostError" for _, error in errors):
        return Verdict("refused", "RankLostError: a norm of gradients that some ranks lack")
    if errors:
        rank, (kind, text, trace) = errors[0]
        others = "; ".join(f"rank {r}: {e[0]}: {e[1][:200]}" for r, e in errors[1:])
        return Verdict("error", f"{kind}: {text[:500]} (rank {rank}; {others or 'no other rank'})\n{trace}")
    if any(outcome is None for outcome in last):
        return Verdict("hang", died or "a rank did not come back")
    ran = [[o for o in outcomes if o is not None] for outcomes in launches]
    for rank, outcome in enumerate(ran[-1]):
        for name, value in outcome.weights.items():
            if not torch.equal(value, ran[-1][0].weights[name]):
                return Verdict("wrong", f"{name} differs between rank 0 and rank {rank}", float("inf"))
    limits = [tolerance(part) for part in program.parts]
    worst, where = 0.0, "nothing differs"
    for number, size, place in _differences(program, ran, wanted):
        size /= limits[number]
        if not size <= worst:  # NaN too
            worst, where = size, f"{place}: {size * limits[number]:.1e} (allowed {limits[number]:.0e})"
        if not size <= 1.0:
            break
    return Verdict("right" if worst <= 1.0 else "wrong", where, worst)


def _differences(program: Program, launches: list[list[Outcome]], wanted: Wanted) -> Iterator[tuple[int, float, str]]:
    """(model, relative difference, where), in the order of the loop."""
    for outcomes in launches:
        for k in sorted({k for outcome in outcomes for k in outcome.notes}):
            for rank, outcome in enumerate(outcomes):
                if (k, rank) not in wanted.loose:
                    size = _distance(outcome.notes[k], wanted.notes[rank][k])
                    yield k // PART, size, f"operation {k} on rank {rank}"
    for number in range(len(program.parts)):
        names = [name for name in wanted.weights if name.startswith(suffix(number))]
        names = [name for name in names if number > 0 or not name[0].isupper()]
        sizes = {name: wanted.weights[name].norm().item() + wanted.travelled[name] for name in names}
        floor = 0.01 * max(sizes.values())  # a gradient that is 0 but for rounding (a bias before a norm) has no scale
        for name in names:
            size = _relative(launches[-1][0].weights[name], wanted.weights[name], sizes[name] + floor)
            yield number, size, f"{name} in the end"


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
