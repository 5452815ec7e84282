"""The schedule: what a backward pass becomes. Node kinds, and what each reads and writes.

A schedule is an ``fx.Graph`` whose call_function nodes have one of the targets below. Nothing runs these functions:
they are names. `zc.schedule.codegen` prints a schedule as Python that runs it, and `zc.verify` proves it; both look at
the same graph.

    placeholder                                   a value that exists on the home stream at entry; a parameter of a
                                                  forward names the buffer that it is a view of, meta["buffer"]
    segment(key, *inputs) -> tuple                compiled pure compute; outputs are taken by operator.getitem
    flatten_cast(bucket, buffer, slots, grads)    buffer <- grads, cast; everything else in it 0      (stage 2);
                                                  with spans=((start, stop), ...): only these elements of it
    accumulate_cast(bucket, buffer, slots, grads) buffer += grads, in fp32; the first write of an update overwrites
                                                  (stage 1)
    wgrad_into(bucket, buffer, slot, start, stop, *inputs, how)   makes a gradient in the slot's elements [start, stop)
                                                  alone (stage 1: adds it); the slots of one bucket may have producers
                                                  on several streams
    deposit(bucket, slot, grad)                   keeps the gradient until the bucket is reduced at the end of the
                                                  backward
    launch_reduce(bucket, dst, src) -> work       starts the exchange of src into dst
    wait_reduce(bucket, work, dst, src)           its completion
    accumulate(bucket, acc, src)                  acc (+)= mean over ranks of the rows in src
    stage_shard(bucket, dst, src)                 dst <- this rank's part of the accumulator src           (offload)
    copy_to_host(bucket, dst, src)                host memory <- device
    copy_to_device(bucket, dst, src)              device <- host memory; an accumulator only where it holds something
    update(bucket, master, grad)                  the optimizer's update of one bucket, by the processor
    cast_param(bucket, dst, src)                  host memory <- masters, cast to the parameters' dtype
    gather(bucket, buffer)                        flat_param <- all ranks' shards of it
    publish(bucket, buffer)                       the home stream may read the new parameters
    record_event(event) / wait_event(event)       on the node's stream
    release(*values)                              gives the values' storage back, on the stream that made them
    output

Every node but placeholder, getitem and output has ``meta["stream"]``. Buffers that the plan owns are named
``flat_grad[i]`` (the ring) and ``recv[0]``, ``acc[b]``, ``flat_param[b]``; with offload also ``staging[i]`` (a ring on
the device), and in host memory ``host[b]`` (gradients), ``master[b]`` and ``param[i]`` (a ring). Values are named after
their nodes, with a ``%``.

The host stream is the processor. It alone, copies on the copy stream, and the thread that issues schedules touch host
memory; what that thread did there itself is done when a schedule begins (docs/proof.md).

A launch is in flight until its wait_reduce: until then it reads src and writes dst, whatever runs elsewhere.

Across schedules: a plan-owned buffer may still be in use by an earlier schedule when this one starts. After the last
use on its carrier (a side stream that is not joined into home at the end) every schedule records the *carried* event
``done/<buffer>``, and the first use on another stream in a later schedule waits for it. Waiting for an event that was
never recorded is no wait (as in CUDA). docs/proof.md has the whole contract at entry and exit.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

if TYPE_CHECKING:
    from zc.planning.plan import Plan


COMPUTE, COMM, COPY, HOST = "compute", "comm", "copy", "host"
HOME = COMPUTE  # the stream on which autograd calls the schedule; its program order goes on across schedules


def _never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a schedule's nodes are names; zc.schedule.codegen runs them")


def segment(key: str, *inputs: Any) -> Any:
    _never()


def flatten_cast(bucket: int, buffer: str, slots: tuple[int, ...], grads: Any, *, spans: Any = None) -> Any:
    _never()


def accumulate_cast(bucket: int, buffer: str, slots: tuple[int, ...], grads: Any, *, spans: Any = None) -> Any:
    _never()


def wgrad_into(bucket: int, buffer: str, slot: int, start: int, stop: int, *inputs: Any, how: str = "mm") -> Any:
    _never()


def deposit(bucket: int, slot: int, grad: Any) -> Any:
    _never()


def launch_reduce(bucket: int, dst: str, src: str) -> Any:
    _never()


def wait_reduce(bucket: int, work: Any, dst: str, src: str) -> Any:
    _never()


def accumulate(bucket: int, acc: str, src: str) -> Any:
    _never()


def stage_shard(bucket: int, dst: str, src: str) -> Any:
    _never()


def copy_to_host(bucket: int, dst: str, src: str) -> Any:
    _never()


def copy_to_device(bucket: int, dst: str, src: str) -> Any:
    _never()


def update(bucket: int, master: str, grad: str) -> Any:
    _never()


def cast_param(bucket: int, dst: str, src: str) -> Any:
    _never()


def gather(bucket: int, buffer: str) -> Any:
    _never()


def publish(bucket: int, buffer: str) -> Any:
    _never()


def record_event(event: str) -> Any:
    _never()


def wait_event(event: str) -> Any:
    _never()


def release(*values: Any) -> Any:
    _never()


GRADIENT_OPS = (flatten_cast, accumulate_cast, wgrad_into, deposit, launch_reduce, wait_reduce, accumulate)
MOVES = (stage_shard, copy_to_host, copy_to_device, cast_param)  # (bucket, dst, src)
STEP_OPS = (update, gather, publish)
SYNC_OPS = (record_event, wait_event, release)
KINDS = (segment, *GRADIENT_OPS, *MOVES, *STEP_OPS, *SYNC_OPS)


class Access(NamedTuple):
    """A touch of elements [start, stop) of a buffer; WHOLE where the extent does not matter."""

    buffer: str
    start: int = 0
    stop: int = 1 << 62


def overlap(a: Access, b: Access) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def is_schedule_node(node: fx.Node) -> bool:
    """True for nodes of the kinds above: what runs on a stream."""
    return node.op == "call_function" and node.target in KINDS


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def stream_of(node: fx.Node) -> str:
    """The node's stream; values at entry and outputs are on the home stream."""
    return HOME if node.op in ("placeholder", "output") else str(node.meta["stream"])


def carried_event(buffer: str) -> str:
    """The event that later schedules wait for before they touch a plan-owned buffer."""
    return f"done/{buffer}"


def carrier(buffer: str) -> str:
    """The one side stream on which a plan-owned buffer may still be in use after the end of a schedule; HOME: on
    none."""
    assert is_plan_buffer(buffer)
    return _CARRIERS.get(buffer[: buffer.index("[")], COMM)


_CARRIERS = {"staging": COPY, "host": COPY, "master": COPY, "param": COPY, "flat_param": HOME}


def is_plan_buffer(buffer: str) -> bool:
    return not buffer.startswith("%")


def in_host_memory(buffer: str) -> bool:
    """Buffers that the processor reads or writes itself. That home comes after a copy of one says nothing to it: home's
    waits are the device's."""
    return buffer.startswith(("host[", "master[", "param["))


def value(node: fx.Node) -> Access:
    return Access(f"%{node.name}")


def results(node: fx.Node) -> tuple[fx.Node, ...]:
    """The value nodes that a node makes: a segment's getitems, else the node itself where somebody uses it."""
    if node.target is segment:
        return tuple(user for user in node.users if is_getitem(user))
    return (node,) if node.op == "placeholder" or node.target is launch_reduce else ()


def accesses(node: fx.Node) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """(reads, writes) of one node, from its kind and arguments alone."""
    inputs = tuple(value(n) for n in node.all_input_nodes)
    inputs += tuple(Access(str(n.meta["buffer"])) for n in node.all_input_nodes if "buffer" in n.meta)
    made = tuple(value(n) for n in results(node))
    if node.op != "call_function" or node.target in (segment, deposit):
        return inputs, made
    if node.target is flatten_cast:
        spans: Any = node.kwargs.get("spans", ((0, Access("").stop),))
        return inputs, tuple(Access(str(node.args[1]), int(start), int(stop)) for start, stop in spans)
    if node.target is accumulate_cast:
        return (*inputs, Access(str(node.args[1]))), (Access(str(node.args[1])),)
    if node.target is wgrad_into:
        _, buffer, _, start, stop = node.args[:5]
        own = Access(str(buffer), int(str(start)), int(str(stop)))
        return (inputs if own.buffer.startswith("flat_grad[") else (*inputs, own)), (own,)
    if node.target is launch_reduce:
        return (Access(str(node.args[2])),), (Access(str(node.args[1])), *made)
    if node.target is wait_reduce:
        return (*inputs, Access(str(node.args[3]))), (Access(str(node.args[2])),)
    if node.target is accumulate:
        return (Access(str(node.args[2])), Access(str(node.args[1]))), (Access(str(node.args[1])),)
    if node.target in MOVES:
        return (Access(str(node.args[2])),), (Access(str(node.args[1])),)
    if node.target is update:
        return (Access(str(node.args[2])), Access(str(node.args[1]))), (Access(str(node.args[1])),)
    if node.target in (gather, publish):
        return (Access(str(node.args[1])),), (Access(str(node.args[1])),)
    if node.target is release:
        return (), inputs
    return (), ()


def slots_of(node: fx.Node) -> tuple[int, ...]:
    """The slots that a write or a deposit brings the gradients of."""
    given = node.args[1] if node.target is deposit else node.args[2]
    return tuple(int(str(k)) for k in given) if isinstance(given, (list, tuple)) else (int(str(given)),)


def shared_buffers(graph: fx.Graph, plan: Plan | None) -> frozenset[str]:
    """The plan-owned buffers that need a carried event: used on their carrier and on other streams, by this schedule
    or by others under the plan. Without a plan: by this schedule, or where it names the event already."""
    users: dict[str, set[bool]] = {}
    shared: set[str] = set()
    for node in steps(graph):
        for group in accesses(node):
            for access in group:
                if is_plan_buffer(access.buffer):
                    users.setdefault(access.buffer, set()).add(stream_of(node) == carrier(access.buffer))
        if node.target in (record_event, wait_event) and str(node.args[0]).startswith(carried_event("")):
            shared.add(str(node.args[0])[len(carried_event("")) :])
    if plan is not None:
        leaves = plan.world_size > 1 or plan.offload is not None  # the accumulator of stage 1 is read on comm as well
        stays = "flat_grad[" if plan.placement.gradient_in_ring else "acc[" if leaves else None
        kinds = ("gathered[", "host[", *((stays,) if stays is not None and plan.overlap else ()))
        shared = {b for b in users if b.startswith(kinds)}
        shared |= {f"master[{b.index}]" for b in plan.buckets if not b.has_master} & users.keys()  # copied as they are
    both = {b for b, sides in users.items() if len(sides) == 2}
    return frozenset(b for b in shared | both if carrier(b) != HOME)


def steps(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that run on a stream, in program order."""
    return (node for node in graph.nodes if is_schedule_node(node))


def summary(graph: fx.Graph) -> dict[str, int]:
    """Counts for explain: nodes, streams, events, waits."""
    nodes = list(steps(graph))
    return {
        "nodes": len(nodes),
        "streams": len({stream_of(n) for n in nodes}),
        "events": len({n.args[0] for n in nodes if n.target is record_event}),
        "waits": sum(n.target is wait_event for n in nodes),
    }


def text(graph: fx.Graph) -> str:
    """The schedule, one line a node: stream, kind, arguments."""
    lines = []
    for node in steps(graph):
        name = getattr(node.target, "__name__", str(node.target))
        made = ", ".join(f"%{n.name}" for n in results(node))
        args = ", ".join([*(str(a) for a in node.args), *(f"{key}={a}" for key, a in node.kwargs.items())])
        lines.append(f"{node.meta.get('stream', '-'):>10} | {made + ' = ' if made else ''}{name}({args})")
    return "\n".join(lines)
