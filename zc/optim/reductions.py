"""Numbers of all elements of a sharded value: each rank's partial numbers, how ranks join them, and what comes out.

Partial numbers are fp64, and all ranks join them in one order, so all have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zc.kernels import sums_of_squares

# functions of aten, by the names of their packets
NAMES = frozenset((
    "sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero", "linalg_vector_norm", "norm", "var",
    "std",
))  # fmt: skip


class Formula(NamedTuple):
    """An elementwise function of one gradient and numbers, to be called on other gradients, too."""

    func: Any  # None: the gradient itself
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    depth: int = 0

    def of(self, grad: Tensor) -> Tensor:
        if self.func is None:
            return grad
        args = [a.of(grad) if isinstance(a, Formula) else a for a in self.args]
        kwargs = {name: a.of(grad) if isinstance(a, Formula) else a for name, a in self.kwargs}
        result: Tensor = self.func(*args, **kwargs)
        return result


GRADIENT = Formula(None)


class Reduction(NamedTuple):
    """``kind``: sum, mean, var, std with a ``correction``, norm of an ``order``, max, min, any or all."""

    kind: str
    order: float = 2.0
    correction: float = 1.0

    @property
    def is_sum(self) -> bool:
        """Whether ranks add their partial numbers. Otherwise the largest of them counts."""
        return self.kind in ("sum", "mean", "var", "std") or (self.kind == "norm" and not math.isinf(self.order))

    @property
    def is_least(self) -> bool:
        """Whether it is the smallest number, so the negative of the largest of the negatives."""
        return self.kind in ("min", "all") or (self.kind == "norm" and self.order == -math.inf)

    def partials(self, parts: Sequence[Tensor]) -> Tensor:
        """[parts, numbers] fp64."""
        if self.kind == "norm" and self.order == 2.0 and all(part.dtype.is_floating_point for part in parts):
            return sums_of_squares(parts)[:, None]
        return torch.stack([torch.stack(self._partial(part)) for part in parts])

    def _partial(self, part: Tensor) -> list[Tensor]:
        wide = part.double()
        if self.kind == "norm" and self.is_sum:
            return [(wide != 0).double().sum() if self.order == 0 else wide.abs().pow(self.order).sum()]
        if self.is_sum:
            return [wide.sum()] if self.kind in ("sum", "mean") else [wide.sum(), wide.square().sum()]
        if self.kind in ("any", "all"):
            return [wide.any().double() if self.kind == "any" else -wide.all().double()]
        if part.numel() == 0:
            return [wide.new_full((), -math.inf), wide.new_zeros(())]
        wide = wide.abs() if self.kind == "norm" else wide
        largest = -wide.amin() if self.is_least else wide.amax()
        is_nan = largest.isnan()  # apart, because a comparison of ranks may lose it
        return [largest.masked_fill(is_nan, -math.inf), is_nan.double()]

    def finish(self, joint: Tensor, counts: Sequence[int]) -> Tensor:
        """[values] fp64 <- the joint numbers [values, numbers] of values with so many elements. The host does not wait
        for the device."""
        total = joint[:, 0]
        if self.kind == "norm" and self.is_sum:
            return total if self.order == 0 else total ** (1.0 / self.order)
        if self.kind == "sum":
            return total
        is_on_host = joint.device.type == "cpu"  # a copy from memory that is not pinned would wait
        numels = torch.tensor(counts, dtype=joint.dtype, pin_memory=not is_on_host).to(joint.device, non_blocking=True)
        if self.kind in ("var", "std"):
            variance = (joint[:, 1] - total * total / numels).clamp(min=0.0) / (numels - self.correction).clamp(min=0.0)
            return variance.sqrt() if self.kind == "std" else variance
        if self.kind == "mean":
            return total / numels
        total = -total if self.is_least else total
        if self.kind in ("any", "all"):
            return total
        total = total.masked_fill(joint[:, 1] > 0, math.nan)
        return total.masked_fill(numels == 0, 0.0) if self.kind == "norm" else total


def choose(name: str, given: dict[str, Any]) -> Reduction:
    """The reduction that a function of aten asks for. ``given``: its arguments."""
    if name in ("linalg_vector_norm", "norm"):
        order = given.get("ord", given.get("p"))
        return Reduction("norm", order=2.0 if order is None else float(order))
    if name in ("var", "std"):
        correction = given.get("correction", float(given.get("unbiased", True)))
        return Reduction(name, correction=1.0 if correction is None else float(correction))
    if name == "count_nonzero":
        return Reduction("norm", order=0.0)
    return Reduction({"amax": "max", "amin": "min"}.get(name, name))


def dtype_of(name: str, dtype: torch.dtype, given: dict[str, Any]) -> torch.dtype:
    """The result's, of a value of ``dtype``."""
    if given.get("dtype") is not None:
        return given["dtype"]  # type: ignore[no-any-return]
    if name in ("any", "all"):
        return torch.bool
    if name == "count_nonzero" or (name == "sum" and not dtype.is_floating_point):
        return torch.int64
    return dtype
