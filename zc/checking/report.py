"""What a check has found, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

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
