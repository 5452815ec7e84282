"""Two ranks in one: the operations of a schedule on tensors of a few elements, made so that order shows.

Both ranks have the same data, so what the peer would send is this rank's own other half. Every read-modify-write keeps
only a part of what it finds (0.5 x + y), so that two writes in the wrong order never give the right sum. `Plain` keeps
all of it: what it leaves in the accumulators can be compared with autograd's gradients.

Segments by hand make numbers up; those of a compiled model (tests/proof/compiled.py) are run, on the tensors of a real
backward, and what they were given to overwrite is NaN afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from adversary import AdversarialStreams, Chooser, Values
from torch import Tensor, fx

from zc.planning.plan import Plan
from zc.schedule import codegen
from zc.schedule.buffer import HOST, MAIN, Buffer, carried_event
from zc.schedule.nodes import accesses, item_of, ops, results, shared_buffers, steps, stream_of
from zc.schedule.spec import Segment, WgradInto

NAN = float("nan")
# what holds something from one schedule to the next
LASTING = ("acc", "host", "master", "flat_param", "gathered", "weight")


def is_lasting(name: str) -> bool:
    return Buffer.named(name).kind in LASTING


@dataclass
class Simulation:
    """``ops`` of one rank. Ring and receive buffers are NaN until written; accumulators start at 1."""

    plan: Plan
    streams: AdversarialStreams
    num_results: dict[str, int]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    touched: dict[tuple[int, int], int] = field(default_factory=dict)  # bucket, slot -> gradients that came
    num_done: int = 0
    published: list[Tensor] = field(default_factory=list)
    opened: dict[str, Tensor] = field(default_factory=dict)  # accumulator -> what wgrad_into adds to
    aside: dict[int, Tensor] = field(default_factory=dict)  # bucket -> its reduced sum from before, taken once

    start, keep, keep_host, gain, shift = 1.0, 0.5, 0.5, 1.25, 1.0

    def buffer(self, name: str) -> Tensor:
        if name not in self.buffers:
            sizes = [b.numel for b in self.plan.buckets]
            first, size = NAN, max(sizes)
            if is_lasting(name):
                first, index = self.start, Buffer.named(name).index
                size = sizes[index] if index < len(sizes) else size
            self.buffers[name] = torch.full((size,), first, dtype=torch.float64)
        return self.buffers[name]

    def part(self, name: str, bucket: int) -> Tensor:
        """What one bucket has of a buffer: a ring is as long as the largest."""
        return self.buffer(name)[: self.plan.buckets[bucket].numel]

    def bound(self, graph: fx.Graph) -> Bound:
        return Bound(self, {op.key: n.meta.get("segment") for n, op in ops(graph) if isinstance(op, Segment)})

    def segment(self, key: str, args: list[Any]) -> list[Tensor]:
        total = torch.stack([a.sum() for a in args]).sum() if args else torch.zeros((), dtype=torch.float64)
        args.clear()
        self.num_done += 1
        salt = sum(map(ord, key)) % 17 + 1
        return [torch.sin(total + salt + k) for k in range(self.num_results[key])]

    def _put(
        self, out: Tensor, bucket: int, slots: Sequence[int], grads: Sequence[Tensor | None], spans: Spans
    ) -> None:
        """Into each span the gradients that begin there, and zeros; ``spans`` None: the whole bucket."""
        layout = self.plan.buckets[bucket]
        for slot, grad in zip(slots, grads, strict=True):
            self.touched[bucket, slot] = self.touched.get((bucket, slot), 0) + (grad is not None)
        for start, stop in spans if spans is not None else ((0, layout.numel),):
            new = torch.zeros(stop - start, dtype=out.dtype)
            for slot, grad in zip(slots, grads, strict=True):
                at = layout.slots[slot].offset - start
                if grad is not None and 0 <= at < stop - start:
                    flat = _flat(grad, layout.slots[slot].numel)
                    new[at : at + len(flat)] = flat  # raises where it does not end there
            out[start:stop] += new

    def flatten_cast(
        self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor], spans: Spans = None
    ) -> None:
        out = self.part(buffer, bucket)
        for start, stop in spans if spans is not None else ((0, len(out)),):
            out[start:stop] = 0.0
        self._put(out, bucket, slots, grads, spans)

    def accumulate_cast(
        self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor], spans: Spans = None
    ) -> None:
        out = self.part(buffer, bucket)
        self.aside[bucket] = out.clone()
        self.opened[buffer] = self.keep * out
        before = self.opened[buffer].clone()
        if spans is not None:  # the other slots are wgrad_into's to fill
            out.fill_(NAN)
        for start, stop in spans if spans is not None else ((0, len(out)),):
            out[start:stop] = before[start:stop]
        self._put(out, bucket, slots, grads, spans)

    def wgrad_into(
        self, bucket: int, buffer: str, slot: int, start: int, stop: int, *inputs: Tensor, how: str | None = None
    ) -> None:
        self.num_done += 1
        self.touched[bucket, slot] = self.touched.get((bucket, slot), 0) + 1
        numel = self.plan.buckets[bucket].slots[slot].numel
        if how is None:
            grad = _flat(torch.stack([a.sum() for a in inputs]).sum() + bucket + slot, numel)
        elif how == "mm":
            grad = torch.matmul(*inputs).reshape(-1)
        else:
            index, values = inputs[0], inputs[-1]
            if how == "scatter":
                values = values.where(inputs[1], 0.0)
            rows = torch.zeros(numel // values.shape[-1], values.shape[-1], dtype=values.dtype)
            grad = rows.index_put((index.clamp(0, len(rows) - 1),), values, accumulate=True).reshape(-1)
        assert len(grad) == stop - start, "its shape is not that of its elements"
        out, opened = self.part(buffer, bucket), self.opened.get(buffer)
        if Buffer.named(buffer).kind == "flat_grad":
            out[start:stop] = grad
        elif opened is not None:
            out[start:stop] = opened[start:stop] + grad
            opened[start:stop] = out[start:stop]  # a second one adds to it

    def deposit(self, bucket: int, slot: int, grad: Tensor) -> None:
        before = self.kept.get((bucket, slot))
        self.kept[bucket, slot] = grad.clone() if before is None else self.keep * before + grad

    def take(self, bucket: int, dst: str, src: str, hop: int = 0) -> None:
        self.part(dst, bucket).copy_(self._sent(bucket, src, hop))

    def finish(self, bucket: int, dst: str, src: str, hop: int = 0) -> None:
        rows = self.part(src, bucket).clone()
        self._spend(src)
        self._sum(bucket, self.part(dst, bucket), rows, hop)

    def reduce(self, bucket: int, dst: str, src: str, hop: int = 0) -> None:
        self._sum(bucket, self.part(dst, bucket), self._sent(bucket, src, hop), hop)

    def _sent(self, bucket: int, src: str, hop: int) -> Tensor:
        """What comes in from other ranks: each hop has others."""
        gain = self.gain if hop == 0 else 1.0 + 2.0 * hop * self.shift
        rows = gain * self.part(src, bucket) + self.shift * bucket
        self._spend(src)
        return rows

    def _spend(self, src: str) -> None:
        self.buffer(src).fill_(NAN)

    def _sum(self, bucket: int, out: Tensor, rows: Tensor, hop: int) -> None:
        rows = (1.0 + 0.25 * hop * self.shift) * rows
        if hop < len(self.plan.hops) - 1:
            out.copy_(self.gain * rows)
        elif self.plan.placement.shards_gradients:
            out.copy_(self.keep * out + rows)
        else:
            before = self.aside.pop(bucket, torch.zeros_like(out))  # what was reduced already is added after
            out.copy_(rows + (1.0 - self.keep) * 0.5 * before)

    def _copy(self, bucket: int, dst: str, src: str) -> None:
        self.part(dst, bucket).copy_(self.part(src, bucket))

    stage_shard = copy_to_device = _copy

    def copy_to_host(self, bucket: int, dst: str, src: str) -> None:
        # keeps a part: a wrong value that the next copy would hide stays to be seen
        out = self.part(dst, bucket)
        out.copy_(self.keep_host * out + self.part(src, bucket))

    def cast_param(self, bucket: int, dst: str, src: str) -> None:
        self.part(dst, bucket).copy_(1.5 * self.part(src, bucket))

    def update(self, bucket: int, master: str, grad: str) -> None:
        out = self.part(master, bucket)
        out.copy_(0.5 * out + self.part(grad, bucket))

    def spread(self, bucket: int, dst: str, src: str | None = None) -> None:
        self.part(dst, bucket).copy_(self.gain * self.part(src or dst, bucket) + bucket)
        if src is not None:
            self.part(src, bucket).fill_(NAN)

    def gather(
        self, bucket: int, dst: str, src: str | None = None, extent: Any = None, scratch: str | None = None
    ) -> None:
        out = self.part(dst, bucket)
        if src is not None:
            out.copy_(1.25 * self.part(src, bucket) + bucket)
            return
        if scratch is not None:  # as if another bucket's rows had been there
            self.part(scratch, bucket).copy_(0.5 * out + 2.0)
            out.add_(self.part(scratch, bucket))
            self.part(scratch, bucket).fill_(NAN)
        self.buffer(dst).copy_(1.25 * self.buffer(dst) + bucket)

    def publish(self, bucket: int, buffer: str) -> None:
        self.published.append(self.buffer(buffer).clone())


Spans = Sequence[tuple[int, int]] | None


class Plain(Simulation):
    """Sums as they are, from zero."""

    start, keep, keep_host, gain, shift = 0.0, 1.0, 0.0, 1.0, 0.0


class Bound:
    """The operations together with the segments of one schedule, by key: the generated code calls these."""

    def __init__(self, sim: Simulation, bodies: dict[str, fx.GraphModule | None]) -> None:
        self._sim, self._bodies = sim, bodies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sim, name)

    def segment(self, key: str, args: list[Any]) -> Sequence[Any]:
        body = self._bodies[key]
        if body is None:
            return self._sim.segment(key, args)
        inputs = list(args)
        args.clear()
        self._sim.num_done += 1
        outputs = [m.clone() if any(m is a for a in inputs) else m for m in body(*inputs)]
        for k in body.meta["donated"]:  # Inductor may have written its results there
            if inputs[k].is_floating_point():
                inputs[k].fill_(NAN)
        return outputs


def _flat(grad: Tensor, numel: int) -> Tensor:
    """A gradient's elements; a made-up one is a single number."""
    return grad.reshape(-1) if grad.numel() == numel and grad.dim() else grad.expand(numel)


@dataclass(frozen=True)
class Case:
    """Schedules that run one after the other under one plan, as a training loop would run them."""

    name: str
    plan: Plan
    graphs: tuple[fx.Graph, ...]


def run(
    case: Case, choose: Chooser, *, contract: bool = True, kind: type[Simulation] = Simulation
) -> dict[str, Tensor]:
    """What is left after all schedules, under one order: every accumulator, everything kept and returned, and how much
    of the compute streams' work was done when the main stream came to its end. With ``contract``, the caller and other
    schedules, earlier and later, do their worst as well."""
    streams = AdversarialStreams(choose)
    facts = [_facts(graph, case.plan) for graph in case.graphs]
    num_results = {key: number for each in facts for key, number in each.num_results.items()}
    sim = kind(case.plan, streams, num_results)
    final: dict[str, Tensor] = {}
    expected = 0
    carried = _carried(case)
    if contract:
        _past(sim, sorted({buffer for each in facts for buffer in each.buffers}), carried)
    for number, (graph, each) in enumerate(zip(case.graphs, facts, strict=True)):
        values = Values()
        expected += each.num_segments
        if contract:  # an evaluation reads the weights, and may still be at it when the schedule is issued
            streams.run_on(MAIN, _read(sim, sorted(b for b in each.buffers if b.kind == "flat_param")))
        streams.run_on(MAIN, _enter(values, graph, number, sim))
        each.issue(values, streams, sim.bound(graph))
        streams.run_on(MAIN, _leave(values, graph, number, final, sim, expected))
    if contract:
        _future(sim, carried)
    streams.synchronize()
    final.update({k: v for k, v in sim.buffers.items() if is_lasting(k)})
    final.update({f"published {k}": v for k, v in enumerate(sim.published)})
    final.update({f"kept {k}": v for k, v in sim.kept.items()})
    final.update({f"touched {k}": torch.tensor(v) for k, v in sim.touched.items()})
    return final


class _Facts(NamedTuple):
    """What every order of a schedule has in common. ``nodes``: what the graph was then."""

    graph: fx.Graph
    plan: Plan
    nodes: list[tuple[Any, ...]]
    issue: codegen.Run
    num_results: dict[str, int]
    num_segments: int
    buffers: frozenset[Buffer]
    shared: frozenset[Buffer]


_FACTS: dict[int, _Facts] = {}  # of the last graphs, by id


def _facts(graph: fx.Graph, plan: Plan) -> _Facts:
    """One graph runs under many orders: its Python and its buffers are the same in all of them."""
    meta = ("stream", "buffer")
    nodes = [(node, node.target, node.args, node.kwargs, *map(node.meta.get, meta)) for node in graph.nodes]
    facts = _FACTS.get(id(graph))
    if facts is not None and facts.graph is graph and facts.plan is plan and facts.nodes == nodes:
        return facts
    if len(_FACTS) >= 32:
        _FACTS.clear()
    touched = {a.buffer for n in steps(graph) for group in accesses(n) for a in group}
    segments = [(node, op) for node, op in ops(graph) if isinstance(op, Segment)]
    _FACTS[id(graph)] = facts = _Facts(
        graph,
        plan,
        nodes,
        codegen.load(graph)[0],
        {op.key: 1 + max(map(item_of, results(node)), default=-1) for node, op in segments},
        sum(isinstance(op, Segment | WgradInto) for _, op in ops(graph)),
        frozenset(b for b in touched if isinstance(b, Buffer)),
        shared_buffers(graph, plan),
    )
    return facts


def _read(sim: Simulation, weights: Sequence[Buffer]) -> Callable[[], None]:
    return lambda: sim.published.extend(sim.buffer(str(buffer)).clone() for buffer in weights)


def _past(sim: Simulation, buffers: Sequence[Buffer], carried: Sequence[Buffer]) -> None:
    """The entry contract. The caller has used every buffer that the plan owns, on the main stream; earlier schedules
    have used those that have a carried event, one after the other in an order that nobody knows: so each on a stream of
    its own here, which only the carrier itself comes after."""
    for buffer in (b for b in buffers if b.on_host):
        sim.streams.run_on(MAIN, _scale(sim.buffer(str(buffer)), 0.5 if is_lasting(str(buffer)) else NAN))
    # the thread that issues is the processor: it has done what it did with host memory. It does not come after what
    # main only waits for, so this is not repeated before later schedules
    sim.streams.record("entry", MAIN)
    sim.streams.wait("entry", HOST)
    for buffer in (b for b in buffers if not b.on_host):
        sim.streams.run_on(MAIN, _scale(sim.buffer(str(buffer)), 0.5 if is_lasting(str(buffer)) else NAN))
    for buffer in carried:
        # powers of two: it does not matter whether the caller or the earlier schedule came first
        factor = 0.25 if is_lasting(str(buffer)) else NAN
        sim.streams.run_on(f"past.{buffer}", _scale(sim.buffer(str(buffer)), factor))
        sim.streams.record(carried_event(buffer), f"past.{buffer}")
        sim.streams.wait(carried_event(buffer), buffer.carrier)


def _future(sim: Simulation, carried: Sequence[Buffer]) -> None:
    """The exit contract: whoever comes after the main stream and a buffer's carried event may overwrite it."""
    sim.streams.record("end", MAIN)
    sim.streams.record("the processor's end", HOST)
    for buffer in carried:
        sim.streams.wait("the processor's end" if buffer.on_host else "end", f"future.{buffer}")
        sim.streams.wait(carried_event(buffer), f"future.{buffer}")
        ring = not is_lasting(str(buffer))
        sim.streams.run_on(f"future.{buffer}", _overwrite(sim.buffer(str(buffer)), ring=ring))


def _scale(out: Tensor, factor: float) -> Callable[[], object]:
    return lambda: out.mul_(factor)


def _overwrite(out: Tensor, *, ring: bool) -> Callable[[], object]:
    return lambda: out.fill_(NAN) if ring else out.mul_(0.5).add_(7.0)


def _carried(case: Case) -> list[Buffer]:
    return sorted({buffer for graph in case.graphs for buffer in _facts(graph, case.plan).shared})


def _enter(values: Values, graph: fx.Graph, number: int, sim: Simulation) -> Callable[[], None]:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]

    def task() -> None:
        inputs = copy.deepcopy([n.meta.get("given") for n in placeholders])  # in one: what shares storage still does
        for k, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
            if "kept" in node.meta:  # a flush takes what was deposited
                value = sim.kept.get(node.meta["kept"], value)
            elif "buffer" in node.meta:  # a parameter
                value = sim.buffer(node.meta["buffer"])
            elif value is None:
                value = torch.full((2,), 0.01 * (k + 1) + 0.1 * number, dtype=torch.float64)
            values[node.name] = value

    return task


def _leave(
    values: Values, graph: fx.Graph, number: int, final: dict[str, Tensor], sim: Simulation, expected: int
) -> Callable[[], None]:
    returned = graph.output_node().all_input_nodes

    def task() -> None:
        for node in returned:
            value = torch.as_tensor(values.pop(node.name))
            final[f"schedule {number} {node.name}"] = value.clone()  # the caller's, to free as well
        late = torch.tensor(NAN if sim.num_done < expected else 0.0)
        final[f"schedule {number} joined"] = late

    return task


def plan_of(graph: fx.Graph) -> Plan:
    """The plan that a schedule was made for: that of a microbatch, in some."""
    plan: Plan = graph.output_node().meta["plan"]
    return plan


def replaced(case: Case, graph: fx.Graph, by: fx.Graph) -> Case:
    return replace(case, graphs=tuple(by if g is graph else g for g in case.graphs))


def is_wrong(case: Case, reference: dict[str, Tensor], orders: Iterable[Chooser]) -> bool:
    """Whether some order gives another result, NaN, or no result at all."""
    for choose in orders:
        try:
            result = run(case, choose)
        except (RuntimeError, AssertionError, ValueError, IndexError, KeyError, TypeError):
            return True
        if not same(reference, result):
            return True
    return False


def lanes(case: Case) -> list[str]:
    """What a chooser can hurry or delay."""
    streams = {stream_of(n) for graph in case.graphs for n in steps(graph)} | {MAIN}
    return [*sorted(streams), "past.", "future."]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise, and nowhere NaN."""
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and not a[k].isnan().any() and not b[k].isnan().any() for k in a
    )
