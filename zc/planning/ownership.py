"""Decides which rank updates which parameter, for optimizers that read whole ones, over the whole model.

The most expensive update is assigned first, always to the rank with the least load (LPT; Graham, 1969) whose elements
stay below 1.1 times their mean, since state takes memory. Neighbours of one shape go to different ranks, so most of a
bucket's gradients are reduced on their owner. With more ranks than parameters, some own nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zc.planning.layout import Rule
    from zc.planning.packing import ParamSpec
    from zc.planning.plan import Plan

Shape = tuple[int, ...]
ROOM = 1.1  # times the mean number of elements per rank, unless one parameter is larger


def elements(shape: Shape) -> float:
    """The cost of an elementwise update, or of an unknown one."""
    return float(math.prod(shape))


def newton_schulz(shape: Shape) -> float:
    """FLOPs of one of Muon's iterations on [m, n], m <= n: the Gram matrix and its product with the matrix, 2 m m n
    each, and the Gram matrix squared, 2 m m m (Jordan et al., Muon, 2024). A tensor with more dimensions counts as a
    matrix of its first dimension by the others."""
    if len(shape) < 2 or 0 in shape:
        return float(math.prod(shape))
    m, n = sorted((shape[0], math.prod(shape[1:])))
    return 4.0 * m * m * n + 2.0 * m * m * m


COSTS: dict[str, Callable[[Shape], float]] = {"elements": elements, "newton_schulz": newton_schulz}


def assign_owners(
    params: Sequence[ParamSpec], rules: Sequence[Rule], world_size: int, after: Plan | None = None
) -> dict[str, int]:
    """Assigns a rank to each parameter of an optimizer that reads whole ones. ``params``: of all optimizers, in order
    of registration; ``after``: a plan whose owners have their load already."""
    specs, owners = params[::-1], dict[str, int]()
    for number, rule in enumerate(rules):
        if not rule.whole:
            continue
        cost, loads = COSTS[rule.cost], dict[int, tuple[float, int]]()  # by rank: cost and elements
        for bucket in after.buckets if after is not None else ():
            for slot, rank in zip(bucket.slots, bucket.layout.owners or (), strict=False):
                load, count = loads.get(rank, (0.0, 0))
                is_own = bucket.optimizer == number  # other optimizers' costs have other units
                loads[rank] = (load + (cost(slot.shape) if is_own else 0.0), count + slot.numel)
        for spec in specs:
            if spec.name in owners:
                load, count = loads.get(owners[spec.name], (0.0, 0))
                loads[owners[spec.name]] = (load, count + math.prod(spec.shape))
        shapes = [(spec.name, spec.shape) for spec in specs if spec.optimizer == number]
        owners.update(assign(shapes, cost, world_size, loads))
    return owners


def assign(
    shapes: Sequence[tuple[str, Shape]],
    cost: Callable[[Shape], float],
    world_size: int,
    assigned: Mapping[int, tuple[float, int]],
) -> dict[str, int]:
    """The rank that updates each parameter. ``assigned``: cost and elements that ranks have already.

    Considers at most one new rank per parameter, so 4,096 ranks take no longer than a few.
    """
    numel = {name: math.prod(shape) for name, shape in shapes}
    total = sum(numel.values()) + sum(count for _, count in assigned.values())
    limit = max(ROOM * total / world_size, float(max(numel.values(), default=0)))
    loads = dict(assigned)
    for rank in range(world_size):
        if len(loads) >= len(assigned) + len(shapes):
            break
        loads.setdefault(rank, (0.0, 0))
    heap = [(load, count, rank) for rank, (load, count) in loads.items()]
    heapq.heapify(heap)
    owners: dict[str, int] = {}
    for name, shape in sorted(shapes, key=lambda item: -cost(item[1])):  # stable: neighbours stay neighbours
        full = []
        while heap and heap[0][1] + numel[name] > limit:
            full.append(heapq.heappop(heap))
        # if it fits nowhere, the rank with the fewest elements gets it
        chosen = heapq.heappop(heap) if heap else min(full, key=lambda item: (item[1], item[0], item[2]))
        if chosen in full:
            full.remove(chosen)
        load, count, rank = chosen
        owners[name] = rank
        for item in (*full, (load + cost(shape), count + numel[name], rank)):
            heapq.heappush(heap, item)
    return owners
