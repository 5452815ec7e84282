"""Parts (c) and (d) of the proof: each gradient arrives once, each launch completes once.

They don't depend on streams: where no race is, the order in which the nodes are issued is as good as any. What is
followed is which bucket's gradient each buffer holds, and how far it has come::

    flatten_cast(2, "flat_grad[0]", ...)               flat_grad[0]: gradient of bucket 2
    %w = launch_reduce(2, "recv[0]", "flat_grad[0]")   in flight
    wait_reduce(2, %w, "recv[0]", "flat_grad[0]")      recv[0]: rows of bucket 2; flat_grad[0]: sent
    accumulate(2, "acc[2]", "recv[0]")                 recv[0]: empty; bucket 2 is done

An overwritten gradient that was not sent, rows that no accumulate took, a second reduction of one bucket: each is a
fault (PR#7985, DS#7981, DS#7366).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from zc.plan import Plan
from zc.schedule import (
    accumulate,
    accumulate_cast,
    deposit,
    flatten_cast,
    launch_reduce,
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
            if acc != f"acc[{bucket}]":
                self.faults.append(f"{node.name} adds bucket {bucket} into {acc}")
            if self.holds.get(src) == (bucket, "gradient"):  # one rank: nothing was sent
                self._reduce(node, bucket, src)
            elif self.holds.pop(src, None) != (bucket, "rows"):
                self.faults.append(f"{node.name} adds bucket {bucket} from {src}, which does not hold its rows")

    def close(self) -> list[str]:
        for launch, bucket in self.in_flight.items():
            self.faults.append(f"{launch.name} of bucket {bucket} is never completed")
        for buffer, (bucket, what) in self.holds.items():
            if what == "rows" or (what == "gradient" and not buffer.startswith("acc[")):
                self.faults.append(f"the {what} of bucket {bucket} in {buffer} never reach the accumulator")
        return self.faults

    def _write(self, node: fx.Node) -> None:
        bucket = _int(node.args[0])
        given = node.args[1] if node.target is deposit else node.args[2]
        slots = [_int(k) for k in given] if isinstance(given, (list, tuple)) else [_int(given)]
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
        if self.holds.get(buffer) != (bucket, "gradient") or node.target is flatten_cast:
            self._overwrite(node, buffer)
        self.holds[buffer] = (bucket, "gradient")

    def _overwrite(self, node: fx.Node, buffer: str) -> None:
        bucket, what = self.holds.pop(buffer, (-1, ""))
        if what == "gradient" or what == "rows":
            self.faults.append(f"{node.name} overwrites the {what} of bucket {bucket} in {buffer}")

    def _reduce(self, node: fx.Node, bucket: int, src: str) -> None:
        if bucket in self.reduced:
            self.faults.append(f"bucket {bucket} is reduced twice: {self.reduced[bucket].name} and {node.name}")
        self.reduced[bucket] = node
        held = self.holds.pop(src, None)
        # an accumulator may hold what earlier microbatches have left in it
        if held != (bucket, "gradient") and not (held is None and src == f"acc[{bucket}]"):
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


def _int(value: object) -> int:
    return int(str(value))
