"""Parts (c) and (d) of the proof: each gradient arrives once, each launch completes once.

They don't depend on streams: where no race is, the order in which the nodes are issued is as good as any. What is
followed is which bucket's gradient each buffer holds, and how far it has come::

    flatten_cast(2, "flat_grad[0]", ...)               flat_grad[0]: gradient of bucket 2
    %w = launch_reduce(2, "recv[0]", "flat_grad[0]")   in flight
    wait_reduce(2, %w, "recv[0]", "flat_grad[0]")      recv[0]: rows of bucket 2; flat_grad[0]: sent
    accumulate(2, "acc[2]", "recv[0]")                 recv[0]: empty; bucket 2 is done

An overwritten gradient that was not sent, rows that no accumulate took, a second reduction of one bucket: each is a
fault (PR#7985, DS#7981, DS#7366).

A bucket may be written in parts, by flatten_cast with spans and by wgrad_into: together they must write each element
once, padding included. In stage 1 accumulate_cast comes first, since it says whether the parts add or overwrite.

With offload the sum goes on to host memory, once, out of what was accumulated last, and new weights come back::

    copy_to_device(2, "staging[0]", "host[2]")         staging[0]: sum of bucket 2 so far
    accumulate(2, "staging[0]", "recv[0]")             staging[0]: total of bucket 2
    copy_to_host(2, "host[2]", "staging[0]")           staging[0]: empty; bucket 2 has landed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zc.plan import Plan
from zc.schedule import (
    accumulate,
    accumulate_cast,
    cast_param,
    copy_to_device,
    copy_to_host,
    deposit,
    flatten_cast,
    gather,
    launch_reduce,
    publish,
    slots_of,
    stage_shard,
    update,
    wait_reduce,
    wgrad_into,
)


def check(nodes: Sequence[fx.Node], plan: Plan | None) -> list[str]:
    """What is wrong, as texts that name the bucket and the nodes."""
    ledger = _Ledger(plan)
    for node in nodes:
        ledger.visit(node)
    return ledger.close()


@dataclass
class _Ledger:
    plan: Plan | None
    faults: list[str] = field(default_factory=list)
    holds: dict[str, tuple[int, str]] = field(default_factory=dict)  # buffer -> bucket, and "gradient" or "rows"
    written: dict[tuple[int, int], fx.Node] = field(default_factory=dict)
    reduced: dict[int, fx.Node] = field(default_factory=dict)  # bucket -> its launch, or its accumulate with one rank
    in_flight: dict[fx.Node, int] = field(default_factory=dict)
    summed: dict[int, fx.Node] = field(default_factory=dict)  # bucket -> its accumulation
    landed: dict[int, fx.Node] = field(default_factory=dict)  # bucket -> its copy to host memory
    step: dict[int, list[object]] = field(default_factory=dict)  # bucket -> kinds of its update, as they come
    parts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # bucket -> elements written, each time
    in_parts: set[int] = field(default_factory=set)  # buckets whose parts must add up
    opened: set[int] = field(default_factory=set)  # accumulators that accumulate_cast has emptied or kept

    def visit(self, node: fx.Node) -> None:
        if node.target in (flatten_cast, accumulate_cast, wgrad_into, deposit):
            self._write(node)
        elif node.target is launch_reduce:
            bucket, dst, src = _int(node.args[0]), str(node.args[1]), str(node.args[2])
            self._reduce(node, bucket, src)
            self._overwrite(node, dst)
            self.holds[dst] = (bucket, "in flight")
            self.in_flight[node] = bucket
        elif node.target is wait_reduce:
            self._complete(node)
        elif node.target is accumulate:
            bucket, acc, src = _int(node.args[0]), str(node.args[1]), str(node.args[2])
            visits = acc.startswith("staging[") and self.holds.pop(acc, None) in ((bucket, "sum"), (bucket, "sent"))
            if acc != f"acc[{bucket}]" and not visits:
                self.faults.append(f"{node.name} adds bucket {bucket} into {acc}, which does not hold its sum")
            if visits:
                self.holds[acc] = (bucket, "total")
            if (bucket, "total") in self.holds.values() and not visits:
                self.faults.append(f"{node.name} adds bucket {bucket} after its sum was taken for host memory")
            self.summed[bucket] = node
            if self.holds.get(src) == (bucket, "gradient"):  # one rank: nothing was sent
                self._reduce(node, bucket, src)
            elif self.holds.pop(src, None) != (bucket, "rows"):
                self.faults.append(f"{node.name} adds bucket {bucket} from {src}, which does not hold its rows")
        elif node.target in (copy_to_device, stage_shard, copy_to_host) and not _is_param(node):
            self._move(node)
        elif node.target in (update, cast_param, copy_to_device, gather, publish):
            self._step(node)

    def close(self) -> list[str]:
        for launch, bucket in self.in_flight.items():
            self.faults.append(f"{launch.name} of bucket {bucket} is never completed")
        for buffer, (bucket, what) in self.holds.items():
            if what in ("rows", "total") or (what == "gradient" and not buffer.startswith("acc[")):
                self.faults.append(f"the {what} of bucket {bucket} in {buffer} never reach the accumulator")
        if self.plan is not None and self.plan.offload is not None and self.plan.is_boundary:
            for bucket in self.summed.keys() - self.landed.keys():
                self.faults.append(f"the sum of bucket {bucket} stays on the device: {self.summed[bucket].name}")
        for bucket, kinds in self.step.items():
            self._check_step(bucket, kinds)
        if self.plan is not None:
            self._check_parts(self.plan)
        return self.faults

    def _move(self, node: fx.Node) -> None:
        bucket, dst, src = _int(node.args[0]), str(node.args[1]), str(node.args[2])
        near, far = (src, dst) if node.target is copy_to_host else (dst, src)
        wanted = f"acc[{bucket}]" if node.target is stage_shard else f"host[{bucket}]"
        if far != wanted or not near.startswith("staging["):
            self.faults.append(f"{node.name} copies bucket {bucket} from {src} to {dst}")
        unsummed = bucket not in self.summed and self.holds.get(src) == (bucket, "gradient")
        if node.target is stage_shard and unsummed and (self.plan is None or self.plan.world_size > 1):
            self.faults.append(f"{node.name} takes bucket {bucket} for host memory before it is reduced")
        if node.target is not copy_to_host:
            self._overwrite(node, dst)
            self.holds[dst] = (bucket, "sum" if node.target is copy_to_device else "total")
            return
        held = self.holds.pop(src, None)
        if held not in ((bucket, "total"), (bucket, "gradient")):
            holds = "nothing new" if held is None else f"the {held[1]} of bucket {held[0]}"
            self.faults.append(f"{node.name} copies bucket {bucket} to the host from {src}, which holds {holds}")
        if bucket in self.landed:
            self.faults.append(f"bucket {bucket} lands twice: {self.landed[bucket].name} and {node.name}")
        self.landed[bucket] = node

    def _step(self, node: fx.Node) -> None:
        bucket = _int(node.args[0])
        self.step.setdefault(bucket, []).append(node.target)
        names = {f"{kind}[{bucket}]" for kind in ("master", "host", "flat_param", "gathered")}
        wrong = [a for a in node.args[1:] if not str(a).startswith("param[") and str(a) not in names]
        if wrong:
            self.faults.append(f"{node.name} of bucket {bucket} takes {wrong[0]}")
        param = next((str(a) for a in node.args[1:] if str(a).startswith("param[")), None)
        if node.target is cast_param and param is not None:
            self._overwrite(node, param)
            self.holds[param] = (bucket, "weights")
        elif param is not None and self.holds.pop(param, None) != (bucket, "weights"):
            self.faults.append(f"{node.name} copies bucket {bucket} from {param}, which does not hold its weights")

    def _check_step(self, bucket: int, kinds: list[object]) -> None:
        order = [k for k in (update, cast_param, copy_to_device, gather, publish) if k in kinds]
        several = self.plan is None or self.plan.world_size > 1
        complete = copy_to_device in kinds and publish in kinds and (gather in kinds or not several)
        if self.plan is not None and self.plan.offload is None:  # gathered in one schedule, published there or later
            complete = True
        if kinds != order or not complete:
            names = ", ".join(getattr(k, "__name__", str(k)) for k in kinds)
            self.faults.append(f"bucket {bucket} is not updated, copied, gathered, published once, in order: {names}")

    def _write(self, node: fx.Node) -> None:
        bucket = _int(node.args[0])
        slots = list(slots_of(node))
        for slot in slots:
            if (bucket, slot) in self.written:
                first = self.written[bucket, slot].name
                self.faults.append(
                    f"the gradient of bucket {bucket}, slot {slot} is written by {first} and {node.name}"
                )
            self.written[bucket, slot] = node
        if self.plan is not None:
            num_slots = len(self.plan.buckets[bucket].slots)
            if any(slot >= num_slots for slot in slots):
                self.faults.append(f"{node.name} writes slots {slots} of bucket {bucket}, which has {num_slots}")
        if bucket in self.reduced:
            last = self.reduced[bucket].name
            self.faults.append(f"{node.name} writes a gradient of bucket {bucket} after {last} has reduced it")
        if node.target is deposit:
            return
        buffer = str(node.args[1])
        if buffer.startswith("acc[") and buffer != f"acc[{bucket}]":
            self.faults.append(f"{node.name} writes bucket {bucket} into {buffer}")
        more = self.holds.get(buffer) == (bucket, "gradient")  # one bucket's writers touch parts of its buffer
        if buffer.startswith("staging[") and not more and self.holds.pop(buffer, None) != (bucket, "sum"):
            self.faults.append(f"{node.name} adds bucket {bucket} into {buffer}, which does not hold its sum")
        if not more or (node.target is flatten_cast and "spans" not in node.kwargs):
            self._overwrite(node, buffer)
        self.holds[buffer] = (bucket, "gradient")
        self._fill(node, bucket, slots[0] if node.target is wgrad_into else -1)

    def _fill(self, node: fx.Node, bucket: int, slot: int) -> None:
        """Which elements of a bucket a node writes: parts must add up to the whole, zeros of the padding included."""
        parts = self.parts.setdefault(bucket, [])
        if node.target is wgrad_into:
            start, stop = _int(node.args[3]), _int(node.args[4])
            parts.append((start, stop))
            if self.plan is not None and "how" in node.kwargs and slot < len(self.plan.buckets[bucket].slots):
                at = self.plan.buckets[bucket].slots[slot]
                if (start, stop) != (at.offset, at.stop):
                    extent = f"slot {slot} is [{at.offset}, {at.stop})"
                    self.faults.append(f"{node.name} writes [{start}, {stop}) of bucket {bucket}; {extent}")
            if not str(node.args[1]).startswith("flat_grad[") and bucket not in self.opened:
                self.faults.append(f"{node.name} adds to {node.args[1]} before accumulate_cast has emptied or kept it")
        else:
            spans: Any = node.kwargs.get("spans", ((0, 1 << 62),))
            parts.extend((int(a), int(b)) for a, b in spans)
            if node.target is accumulate_cast:
                self.opened.add(bucket)
        if node.kwargs:
            self.in_parts.add(bucket)

    def _check_parts(self, plan: Plan) -> None:
        for bucket in sorted(self.in_parts):
            reached = 0
            numel = plan.buckets[bucket].numel
            for start, stop in [*sorted(self.parts[bucket]), (numel, numel)]:
                if start > reached:
                    self.faults.append(f"nobody writes the elements [{reached}, {start}) of bucket {bucket}")
                elif start < min(reached, stop):
                    self.faults.append(
                        f"the elements [{start}, {min(stop, reached)}) of bucket {bucket} are written twice"
                    )
                reached = max(reached, stop)

    def _overwrite(self, node: fx.Node, buffer: str) -> None:
        bucket, what = self.holds.pop(buffer, (-1, ""))
        if what in ("gradient", "rows", "sum", "total", "weights"):
            self.faults.append(f"{node.name} overwrites the {what} of bucket {bucket} in {buffer}")

    def _reduce(self, node: fx.Node, bucket: int, src: str) -> None:
        if bucket in self.reduced:
            self.faults.append(f"bucket {bucket} is reduced twice: {self.reduced[bucket].name} and {node.name}")
        self.reduced[bucket] = node
        held = self.holds.pop(src, None)
        # an accumulator may hold what earlier microbatches have left in it
        if src.startswith("staging["):
            self.holds[src] = (bucket, "sent")
        if held not in ((bucket, "gradient"), (bucket, "sum")) and not (held is None and src == f"acc[{bucket}]"):
            holds = "nothing of this schedule" if held is None else f"the {held[1]} of bucket {held[0]}"
            self.faults.append(f"{node.name} reduces bucket {bucket} from {src}, which holds {holds}")

    def _complete(self, node: fx.Node) -> None:
        bucket, work, dst, src = _int(node.args[0]), node.args[1], str(node.args[2]), str(node.args[3])
        if not isinstance(work, fx.Node) or self.in_flight.pop(work, None) is None:
            self.faults.append(f"{node.name} completes {work}, which is not in flight")
            return
        if (bucket, dst, src) != (_int(work.args[0]), str(work.args[1]), str(work.args[2])):
            self.faults.append(f"{node.name} names another bucket or buffers than {work.name}, which it completes")
        self.holds[dst] = (bucket, "rows")


def _is_param(node: fx.Node) -> bool:
    return node.target is copy_to_device and str(node.args[1]).startswith("flat_param[")


def _int(value: object) -> int:
    return int(str(value))
