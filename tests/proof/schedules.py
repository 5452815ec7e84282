"""Schedules to prove things about, written by hand from a few shapes of models, then placed and given their events by
the passes under test."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from simulation import Case
from torch import fx

from zc.config import Config
from zc.engine.weights import gather_graph, publish_graph
from zc.offload.host_step import step_graph
from zc.passes import insert_events, offload_gradients, reduce_buckets, scheduling, window_weights
from zc.passes.base import Debt
from zc.planning.layout import Rule
from zc.planning.ownership import assign_owners
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, Topology, flat
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import (
    AccumulateCast,
    Cast,
    Deposit,
    FlattenCast,
    Gather,
    Publish,
    Segment,
    WgradInto,
)

Shape = Callable[["Builder"], Sequence[fx.Node]]
NOTHING_OWED = Debt()


def make(
    num_buckets: int, *, slots: int = 2, stage: int = 2, ring: int = 2, overlap: bool = True, world_size: int = 2,
    overlap_gather: bool = False, offload: str | None = None, dtype: torch.dtype = torch.float32, reads: bool = False,
    num_hosts: int = 1, num_replicas: int = 1, in_8_bits: bool = False, is_owned: bool = False,
) -> Plan:  # fmt: skip
    """Buckets of ``slots`` parameters of 2 elements each; ``offload``: where accumulators are then; ``reads``: ranks
    of one of ``num_hosts`` read each other's memory; ``is_owned``: the optimizer reads whole parameters."""
    specs = [ParamSpec(f"p{k}", (2,), dtype, torch.device("cpu")) for k in range(num_buckets * slots)]
    config = Config(
        stage=stage, reduce_dtype=torch.int8 if in_8_bits else None, gather_dtype="int4" if in_8_bits else None,
        bucket_nbytes=slots * 2 * dtype.itemsize, num_buffers=ring, overlap=overlap, overlap_gather=overlap_gather,
        offload=offload and "cpu", offload_accumulate=offload or "cpu",
    )  # fmt: skip
    is_flat = not reads and num_hosts == 1
    topology = flat(world_size) if is_flat else Topology(num_hosts, world_size // num_hosts, reads)
    rules = (Rule(whole=is_owned),)
    owners = assign_owners(specs, rules, world_size)
    return make_plan(specs, config, topology, num_replicas=num_replicas, rules=rules, owners=owners)


def by_messages(num_buckets: int, *, overlap: bool = True, **options: Any) -> Plan:
    """Two levels: 2 hosts of 2 ranks that can't read each other's memory."""
    return make(num_buckets, ring=2 if overlap else 1, overlap=overlap, world_size=4, num_hosts=2, **options)


class Builder:
    """Builds one schedule under a plan; ``in_place``: gradients written slot by slot."""

    def __init__(self, plan: Plan, *, in_place: bool = False, tag: str = "") -> None:
        self.tag = tag  # segments are told apart by their keys, also across graphs
        self.plan, self.in_place = plan, in_place
        self.graph = fx.Graph()
        self._segments = itertools.count()
        self._written = itertools.count()
        self._owed: set[tuple[int, int]] = set()

    def placeholder(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def segment(self, inputs: Sequence[fx.Node], num_outputs: int) -> list[fx.Node]:
        key = f"segment_{self.tag}{next(self._segments)}"
        call = put(self.graph, Segment(key, tuple(inputs)), name=key)
        return [self.graph.call_function(operator.getitem, (call, k)) for k in range(num_outputs)]

    def bucket(self, index: int, grads: Sequence[fx.Node]) -> None:
        """All gradients of one bucket, and its reduction where the plan says so."""
        ring = next(self._written) % self.plan.num_buffers
        write: Cast = AccumulateCast(index, Buffer("acc", index), tuple(range(len(grads))), tuple(grads))
        if self.plan.placement.shards_gradients:
            write = FlattenCast(index, Buffer("flat_grad", ring), write.slots, write.grads)
        for slot, grad in enumerate(grads):
            self._owe(index, slot, grad)
        last = self._in_place(write) if self.in_place else put(self.graph, write)
        if self.plan.reduces:
            reduce_buckets.insert_reduction(self.graph, self.plan, last, index, ring)

    def _in_place(self, write: Cast) -> fx.Node:
        """Zeros in the padding, and every gradient made in its slot."""
        bucket = self.plan.buckets[write.bucket]
        stops = [*(slot.offset for slot in bucket.slots[1:]), bucket.numel]
        spans = tuple((slot.stop, stop) for slot, stop in zip(bucket.slots, stops, strict=True) if slot.stop < stop)
        put(self.graph, replace(write, slots=(), grads=(), spans=spans))
        for k, (slot, grad) in enumerate(zip(bucket.slots, write.grads, strict=True)):
            last = put(self.graph, WgradInto(write.bucket, write.buffer, k, slot.offset, slot.stop, (grad,)))
            last.meta["gradient_of"] = ((write.bucket, k),)
        return last

    def part(self, index: int, slot: int, grad: fx.Node) -> None:
        """One gradient of a bucket whose others come from elsewhere: kept for a flush, or in stage 1 added to the
        partial sum, as `zc.passes.bucket_gradients` has it."""
        if len(self.plan.buckets[index].slots) == 1:
            self.bucket(index, [grad])
            return
        self._owe(index, slot, grad)
        if self.plan.placement.shards_gradients:
            put(self.graph, Deposit(index, slot, grad))
        else:
            put(self.graph, AccumulateCast(index, Buffer("acc", index), (slot,), (grad,)))

    def _owe(self, index: int, slot: int, grad: fx.Node) -> None:
        self._owed.add((index, slot))
        grad.meta["gradient_of"] = (*grad.meta.get("gradient_of", ()), (index, slot))

    def finish(self, returned: Sequence[fx.Node | None]) -> fx.Graph:
        self.graph.output(tuple(returned))
        with_copies = offload_gradients.run(self.graph, self.plan)
        return placed(self.plan, with_copies, Debt(frozenset(self._owed)))


def mlp(b: Builder, buckets: Sequence[int] | None = None) -> list[fx.Node]:
    """A chain: each layer's segment makes its gradients and the gradient of its input."""
    grad = b.placeholder("tangent")
    for index in buckets if buckets is not None else range(len(b.plan.buckets)):
        saved = b.placeholder(f"saved_{index}")
        slots = len(b.plan.buckets[index].slots)
        *grads, grad = b.segment([grad, saved], slots + 1)
        b.bucket(index, grads)
    return [grad]


def tied(b: Builder) -> list[fx.Node]:
    """A GPT with a tied embedding: the head's part of the first weight lives until the embedding's part is there."""
    num = len(b.plan.buckets)
    weight, x = b.placeholder("weight"), b.placeholder("tangent")
    part, x = b.segment([x, weight], 2)
    for index in range(num - 1):
        saved = b.placeholder(f"saved_{index}")
        *grads, x = b.segment([x, saved, weight], len(b.plan.buckets[index].slots) + 1)
        b.bucket(index, grads)
    grads = b.segment([x, part], len(b.plan.buckets[num - 1].slots))
    b.bucket(num - 1, grads)
    return []


def encoder_decoder(b: Builder) -> list[fx.Node]:
    """Two chains: every decoder layer adds to the encoder's output gradient, and the encoder follows."""
    num, x = len(b.plan.buckets), b.placeholder("tangent")
    memory: list[fx.Node] = []
    for index in range(num):
        slots = len(b.plan.buckets[index].slots)
        saved = b.placeholder(f"saved_{index}")
        if index < num // 2:
            *grads, x, cross = b.segment([x, saved], slots + 2)
            memory.append(cross)
        else:
            *grads, x = b.segment([*(memory or [x]), saved], slots + 1)
            memory = []
        b.bucket(index, grads)
    return [x]


def independent(b: Builder) -> list[fx.Node]:
    """Heads side by side: each segment makes one gradient of a bucket."""
    x = b.placeholder("tangent")
    for index in range(len(b.plan.buckets)):
        grads = [b.segment([x], 1)[0] for _ in b.plan.buckets[index].slots]
        b.bucket(index, grads)
    return []


SHAPES: dict[str, Shape] = {"mlp": mlp, "tied": tied, "encdec": encoder_decoder, "heads": independent}


def schedule(shape: str, plan: Plan, *, in_place: bool = False) -> fx.Graph:
    builder = Builder(plan, in_place=in_place)
    return builder.finish(SHAPES[shape](builder))


def part_of(plan: Plan, buckets: Sequence[int], still_whole: Sequence[int] = ()) -> fx.Graph:
    """One graph of several (graph breaks): some buckets whole, of others one gradient."""
    b = Builder(plan, tag=f"{buckets[0]}_")
    *_, grad = mlp(b, buckets)
    for index in still_whole:
        (half,) = b.segment([grad], 1)
        b.part(index, 0, half)
    return b.finish([grad])


def forward(plan: Plan, layers_a_bucket: int = 1) -> fx.Graph:
    """A chain of layers that read their parameters where the last update's gathers write them, and a head tied to the
    first bucket read."""
    b = Builder(plan, tag="f")
    params = {k.index: b.placeholder(f"param_{k.index}") for k in plan.buckets}
    for index, param in params.items():
        param.meta["buffer"] = f"gathered[{index}]"
    x = b.placeholder("x")
    saved = []
    for index in sorted(params, reverse=True):
        for _ in range(layers_a_bucket):
            x, saved_tensors = b.segment([x, params[index]], 2)
            saved.append(saved_tensors)
    (x,) = b.segment([x, params[max(params)]], 1)
    b.graph.output((x, *saved, params[0]))  # a parameter that the backward needs as well
    return placed(plan, window_weights.run(b.graph, plan))


def placed(plan: Plan, graph: fx.Graph, debt: Debt = NOTHING_OWED) -> fx.Graph:
    """With its streams and events; what it owes, and under which plan, goes with it."""
    new = insert_events.run(scheduling.run(graph, plan), plan)
    new.output_node().meta.update(debt=debt, plan=plan)
    return new


def step_of(plan: Plan, buckets: Sequence[int] | None = None, *, with_update: bool = True) -> fx.Graph:
    """The optimizer's step in host memory."""
    chosen = tuple(range(len(plan.buckets)) if buckets is None else buckets)
    return placed(plan, step_graph(plan, chosen, with_update=with_update))


def gathers_of(plan: Plan) -> fx.Graph:
    """Stage 3: every bucket whole, in memory of its own."""
    graph = fx.Graph()
    for bucket in plan.buckets:
        whole, shard = (Buffer(kind, bucket.index) for kind in ("flat_param", "weight"))
        put(graph, Gather(bucket.index, whole, shard))
        put(graph, Publish(bucket.index, whole))
    graph.output(())
    return placed(plan, graph)


def offloaded() -> Iterator[Case]:
    """Training steps with offload: microbatches, a boundary, the update, in stage 3 gathers; and all of it again."""
    for mode, stage, num_buckets, ring, world_size, overlap, dtype in (
        ("cpu", 2, 1, 1, 2, True, torch.float32), ("cpu", 2, 3, 2, 2, True, torch.bfloat16),
        ("cpu", 2, 5, 3, 2, True, torch.float32), ("cpu", 2, 3, 1, 2, True, torch.float32),
        ("cpu", 2, 3, 2, 2, False, torch.bfloat16), ("cpu", 2, 3, 2, 1, True, torch.float32),
        ("cpu", 1, 1, 2, 2, True, torch.float32), ("cpu", 1, 4, 2, 2, True, torch.bfloat16),
        ("cpu", 1, 3, 1, 2, False, torch.float32), ("cpu", 1, 3, 2, 1, True, torch.bfloat16),
        ("device", 2, 1, 1, 2, True, torch.float32), ("device", 2, 4, 2, 2, True, torch.bfloat16),
        ("device", 2, 3, 1, 2, False, torch.float32), ("device", 2, 3, 2, 1, True, torch.float32),
        ("device", 1, 2, 2, 2, True, torch.float32), ("device", 1, 4, 3, 2, True, torch.bfloat16),
        ("device", 1, 3, 2, 2, False, torch.float32), ("device", 1, 3, 2, 1, True, torch.bfloat16),
        ("cpu", 3, 3, 2, 2, True, torch.bfloat16), ("cpu", 3, 3, 1, 2, True, torch.float32),
        ("device", 3, 4, 2, 2, True, torch.float32), ("cpu", 3, 2, 2, 2, False, torch.bfloat16),
        ("cpu", 3, 3, 2, 1, True, torch.float32),
    ):  # fmt: skip
        plan = make(
            num_buckets, stage=stage, ring=ring, overlap=overlap, world_size=world_size, offload=mode, dtype=dtype
        )
        inside, outside = (schedule("mlp", p) for p in (plan.microbatch(), plan))
        label = f"{'' if overlap else ' no overlap'}{' bf16' if dtype == torch.bfloat16 else ''}"
        name = f"offload {mode} b{num_buckets} r{ring} s{stage} w{world_size}{label}"
        gathers = (gathers_of(plan),) if plan.placement.shards_weights else ()
        step, copies = step_of(plan), step_of(plan, with_update=False)
        yield Case(name, plan, (inside, outside, step, *gathers, outside, copies, *gathers))
    for ring, overlap, dtype in ((2, True, torch.bfloat16), (1, True, torch.float32), (2, False, torch.float32)):
        plan = make(3, stage=3, ring=ring, overlap=overlap, offload="cpu", dtype=dtype, is_owned=True)
        name = f"offload cpu whole parameters b3 r{ring} s3{'' if overlap else ' no overlap'}"
        yield Case(name, plan, (schedule("mlp", plan), gathers_of(plan), step_of(plan), gathers_of(plan)))
    plan = make(12, ring=3, offload="cpu")
    graph = schedule("encdec", plan)
    yield Case("offload cpu encdec b12 r3 s2 w2", plan, (graph, step_of(plan), graph))


@functools.cache
def cases() -> tuple[Case, ...]:
    """What the proof is shown on: every schedule twice in a row at least, so that the carried events count. Made once,
    a second of CPU; nobody writes to them."""
    return tuple(_made())


def _made() -> Iterator[Case]:
    for shape in SHAPES:
        for num_buckets, ring, stage in (
            (1, 1, 2), (2, 1, 2), (3, 2, 2), (4, 2, 2), (5, 3, 2), (8, 4, 2), (3, 1, 2), (2, 2, 1), (4, 2, 1),
            (6, 1, 1),
        ):  # fmt: skip
            plan = make(num_buckets, stage=stage, ring=ring)
            graph = schedule(shape, plan)
            yield Case(f"{shape} b{num_buckets} r{ring} s{stage}", plan, (graph, graph))
    for num_buckets, ring, stage in ((1, 1, 2), (3, 2, 2), (4, 2, 2), (6, 3, 2), (3, 1, 1)):
        plan = make(num_buckets, slots=3, ring=ring, stage=stage)
        graph = schedule("heads", plan, in_place=True)
        yield Case(f"in place b{num_buckets} r{ring} s{stage}", plan, (graph, graph))
    plan = make(6, ring=2)
    graphs = (part_of(plan, (0, 1), (2,)), part_of(plan, (3, 4, 5)))
    yield Case("graph break", plan, (*graphs, *graphs))
    plan = make(4, stage=1)
    inside, outside = schedule("mlp", replace(plan, is_boundary=False)), schedule("mlp", plan)
    yield Case("no_sync", plan, (inside, outside, outside, inside))
    for shape, num_buckets, ring, stage, overlap, more in (
        ("mlp", 3, 2, 2, True, {}), ("heads", 3, 1, 2, True, {}), ("tied", 3, 2, 1, True, {}),
        ("mlp", 2, 1, 2, False, {}), ("mlp", 3, 1, 2, True, {"num_hosts": 2, "world_size": 4}),
        ("tied", 3, 2, 1, True, {"num_hosts": 2, "world_size": 4}), ("mlp", 3, 2, 2, True, {"num_replicas": 2}),
        ("mlp", 2, 2, 1, True, {"num_replicas": 2}), ("mlp", 3, 2, 2, True, {"overlap_gather": True}),
    ):  # fmt: skip
        plan = make(num_buckets, ring=ring, stage=stage, overlap=overlap, reads=True, **more)
        graph, gathers = schedule(shape, plan), placed(plan, gather_graph(plan, range(num_buckets)))
        ahead = (forward(plan),) if plan.overlap_gather else ()
        name = f"memory {shape} b{num_buckets} r{ring} s{stage}{'' if overlap else ' no overlap'} {' '.join(more)}"
        yield Case(name, plan, (graph, graph, gathers, *ahead, graph))
    for num_buckets, layers in ((1, 1), (3, 2), (8, 1)):
        plan = make(num_buckets, overlap_gather=True)
        gathers = placed(plan, gather_graph(plan, range(num_buckets)))
        some = placed(plan, gather_graph(plan, [0]))  # the others had no gradient
        wholly = placed(plan, publish_graph(plan, range(num_buckets)))  # what `zc.synchronize` runs
        ahead = forward(plan, layers)
        graphs = (gathers, ahead, schedule("mlp", plan), gathers, ahead, some, wholly, gathers, wholly)
        yield Case(f"overlap_gather b{num_buckets} l{layers}", plan, graphs)
    for shape, num_buckets, ring, stage, overlap in (
        ("mlp", 4, 2, 2, True), ("heads", 3, 1, 2, True), ("mlp", 2, 1, 2, False), ("tied", 3, 2, 1, True),
    ):  # fmt: skip
        plan = make(num_buckets, stage=stage, ring=ring, overlap=overlap, num_replicas=2)
        inside, outside = schedule(shape, plan.microbatch()), schedule(shape, plan)
        name = f"2 replicas {shape} b{num_buckets} r{ring} s{stage}{'' if overlap else ' no overlap'}"
        yield Case(name, plan, (inside, outside, outside))
    for shape, num_buckets, stage, overlap in (("mlp", 4, 2, True), ("tied", 3, 1, True), ("heads", 2, 2, False)):
        plan = make(num_buckets, ring=2 if overlap else 1, stage=stage, overlap=overlap, in_8_bits=True)
        gathers = placed(plan, gather_graph(plan, range(num_buckets)))
        name = f"8 bits {shape} b{num_buckets} s{stage}{'' if overlap else ' no overlap'}"
        yield Case(name, plan, (schedule(shape, plan), gathers) * 2)
    for shape, num_buckets, stage, overlap, in_8_bits in (
        ("mlp", 4, 2, True, False), ("tied", 3, 1, True, True), ("heads", 2, 2, False, True),
        ("mlp", 3, 1, True, False),
    ):  # fmt: skip
        plan = by_messages(num_buckets, stage=stage, overlap=overlap, in_8_bits=in_8_bits)
        gathers = placed(plan, gather_graph(plan, range(num_buckets)))
        name = f"2 hosts of 2 {shape} b{num_buckets} s{stage}{' 8 bits' if in_8_bits else ''}"
        yield Case(name, plan, (schedule(shape, plan), gathers) * 2)
    plan = by_messages(3, num_replicas=2)
    yield Case("2 replicas on 2 hosts of 2", plan, (schedule("mlp", plan),) * 2)
    plan = make(3, overlap_gather=True, in_8_bits=True)
    gathers = placed(plan, gather_graph(plan, range(3)))
    yield Case("8 bits overlap_gather b3", plan, (gathers, forward(plan), schedule("mlp", plan), gathers))
    plan = make(64, ring=4)
    yield Case("mlp b64 r4 s2", plan, (schedule("mlp", plan),) * 2)
    plan = make(64, stage=1)
    yield Case("tied b64 s1", plan, (schedule("tied", plan),) * 2)


def surrounded(case: Case, graph: fx.Graph) -> Case:
    """The schedule first, twice in a row and last, so that every past and future that it must be ordered with is there,
    with the others of the training step in between."""
    others = [g for g in dict.fromkeys(case.graphs) if g is not graph]
    return replace(case, graphs=(graph, graph, *others, graph))
