"""What is checked: the program's own functions and objects; what one update has shown; and what a check has found, as a
table and as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from zc.config import Config
from zc.errors import PlanError
from zc.optim.assignment import given_in

if TYPE_CHECKING:
    from zc.ranks.group import Group


Step = Callable[[nn.Module, Any], Tensor]
Update = Callable[[nn.Module, Any], Any]


@dataclass
class Loop:
    """``batches``: by rank, then by update and microbatch. ``random``: by rank, the state of its generators.
    ``is_together``: the step calls collectives, so each rank runs its own batches alone. ``rounding``: of the coarsest
    dtype that the step computes with."""

    step: Step
    update: Update
    model: nn.Module
    optimizer: Any
    num_updates: int
    microbatches: int
    config: Config
    options: dict[str, Any]
    ranks: Group
    device: torch.device
    batches: list[list[Any]] = field(default_factory=list)
    random: list[dict[str, Any]] = field(default_factory=list)
    is_together: bool = False
    rounding: float = 0.0

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    def batch(self, rank: int, update: int, k: int) -> Any:
        return self.batches[rank][update * self.microbatches + k]

    def options_for(self, backend: str) -> dict[str, Any]:
        """Those of `compile` that this backend takes. Inductor draws the random numbers that PyTorch draws."""
        left_out = {"eager": ("mode", "options", "dynamic", "fullgraph"), "aot_eager": ("mode", "options")}
        options = {name: value for name, value in self.options.items() if name not in left_out.get(backend, ())}
        if backend == "inductor" and options.get("mode") is None:
            options["options"] = {"fallback_random": True, **(options.get("options") or {})}
        return options | {"backend": backend}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Raises PlanError for what is no loss."""
        loss = self.step(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PlanError(f"step returned {what}: let it return the loss, a tensor of one element, without backward")
        if not loss.requires_grad:
            raise PlanError(
                "the loss of step needs no gradient: compute it from the model that step is given, its first argument, "
                "and leave detach(), item() and no_grad() out"
            )
        return loss


def steps_of(model: nn.Module, optimizer: Any) -> None:
    """The default update."""
    for each in given_in(optimizer):
        each.step()


class Key(NamedTuple):
    """One thing to compare. ``kind``: of `KINDS`. ``rank``: whose, or -1 for all ranks alike."""

    kind: str
    name: str
    rank: int = -1


@dataclass
class Moment:
    """What one update has shown. A weight is here as how far it has gone from its first value; ``sizes``: of weights,
    their norms, of which storing rounds a part. ``notes``: what could not be seen."""

    values: dict[Key, Tensor | float | None] = field(default_factory=dict)
    sizes: dict[Key, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, kind: str) -> Iterator[tuple[Key, Any]]:
        return ((key, value) for key, value in self.values.items() if key.kind == kind)

    def add_weights(self, weights: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            key = Key("weight", name)
            moved = weight.detach().to("cpu", torch.float64) - first[name].double()
            self.values[key], self.sizes[key] = moved.to(wide(weight.dtype)), norm(weight)

    def add_state(self, states: Any, names: list[dict[int, str]]) -> None:
        """``states``: of each optimizer, its ``state_dict()``."""
        for table, part in zip(names, states, strict=True):
            for number, state in part["state"].items():
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                        name = f"{table.get(number, number)}.{key}"
                        self.values[Key("state", name)] = kept(value) if isinstance(value, Tensor) else float(value)


def wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def kept(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


def norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.detach().double())) if value.numel() else 0.0


# --- what a check has found ---

# in the order in which one follows from the other
NAMES = {
    "loss": "losses",
    "gradient": "gradients",
    "weight": "weights",
    "state": "optimizer state",
    "buffer": "buffers",
}
KINDS = tuple(NAMES)


@dataclass(frozen=True)
class Finding:
    """``code``: the kind of fault, a word of docs/check.md. ``rank``: the first that saw it. ``backend``: of zc, where
    it takes zc to see it."""

    code: str
    text: str
    rank: int = 0
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True)
class Worst:
    """Of one backend and kind: the largest distance from the reference over what is allowed, and where."""

    ratio: float = 0.0
    where: str = ""
    num_compared: int = 0


@dataclass
class Report:
    """The result of `zc.check`, the same on every rank. ``findings``: faults. ``notes``: what is as under DDP and yet
    unlike one device, and what could not be checked. ``worst``: by backend and kind."""

    world_size: int
    updates: int
    microbatches: int
    options: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    worst: dict[str, dict[str, Worst]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    needed_nbytes: int = 0

    @property
    def is_fine(self) -> bool:
        return not self.findings

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]

    def to_json(self) -> str:
        """An object with ``is_fine``, ``findings``, ``notes``, ``worst`` and what was run."""
        data = {
            "is_fine": self.is_fine,
            "ranks": self.world_size,
            "updates": self.updates,
            "microbatches": self.microbatches,
            "options": {name: str(value) for name, value in self.options.items()},
            "findings": [vars(finding) for finding in self.findings],
            "notes": [vars(note) for note in self.notes],
            "worst": {
                backend: {kind: vars(worst) for kind, worst in row.items()} for backend, row in self.worst.items()
            },
            "first": self.first,
            "needed_nbytes": self.needed_nbytes,
        }
        return json.dumps(_finite(data), indent=1)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        lines = [
            f"zc.check: {_count(self.world_size, 'rank')}, {_count(self.updates, 'update')} of "
            f"{_count(self.microbatches, 'microbatch', 'es')}{f', {options}' if options else ''}"
        ]
        lines += _table(self.worst)
        lines += [f"first difference, {backend}: {where}" for backend, where in self.first.items()]
        lines += [f"FAULT {finding}" for finding in self.findings]
        lines += [f"note  {note}" for note in self.notes]
        lines.append("no fault found" if self.is_fine else f"{_count(len(self.findings), 'fault')} found")
        return "\n".join(lines)


def _table(worst: dict[str, dict[str, Worst]]) -> list[str]:
    if not worst:
        return []
    rows = [["distance from plain PyTorch / allowed", *(f"zc, {backend}" for backend in worst)]]
    for kind in KINDS:
        cells = [row.get(kind, Worst()) for row in worst.values()]
        if any(cell.num_compared for cell in cells):
            rows.append([NAMES[kind], *(f"{cell.ratio:.2g}" if cell.num_compared else "-" for cell in cells)])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _count(number: int, what: str, many: str = "s") -> str:
    return f"{number} {what}{many * (number != 1)}"


def _finite(data: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return data if not isinstance(data, float) or abs(data) < float("inf") else str(data)
