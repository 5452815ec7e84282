"""What is checked: the program's own functions and objects, and what one update has shown."""

from __future__ import annotations

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
    """One thing to compare. ``kind``: of `zc.checking.report.KINDS`. ``rank``: whose, or -1 for all ranks alike."""

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
            wide = weight.detach().to("cpu", torch.float64)
            self.values[key], self.sizes[key] = (wide - first[name].double()).to(_stored(weight.dtype)), norm(weight)

    def add_state(self, states: Any, names: list[dict[int, str]]) -> None:
        """``states``: of each optimizer, its ``state_dict()``."""
        for table, part in zip(names, states, strict=True):
            for number, state in part["state"].items():
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                        name = f"{table.get(number, number)}.{key}"
                        self.values[Key("state", name)] = kept(value) if isinstance(value, Tensor) else float(value)


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def kept(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


def norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.detach().double())) if value.numel() else 0.0
