"""The proof's schedules on real streams: delays injected into one stream at a time, bitwise the serial result.

On a CPU the same schedules run over ThreadStreams (tests/engine/test_thread_streams.py); here they need a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "proof"))

from schedules import SHAPES, make, schedule

from zc.engine.streams import DeviceStreams, Task
from zc.planning.plan import Plan
from zc.schedule import codegen
from zc.schedule.buffer import COMM
from zc.schedule.nodes import op_of, results, steps
from zc.schedule.spec import Segment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: real streams and events")

NUMEL = 1 << 22  # a kernel takes longer than its launch, else the device is always done and nothing can overlap
SPIN = 20_000_000  # clock cycles: some 10 ms, far more than a whole schedule takes


class Delayed(DeviceStreams):
    """Spins on one stream before each of its tasks."""

    def __init__(self, device: torch.device, slow: str | None) -> None:
        super().__init__(device)
        self._slow = slow

    def run_on(self, stream: str, task: Task) -> None:
        if stream == self._slow:
            super().run_on(stream, lambda: torch.cuda._sleep(SPIN))
        super().run_on(stream, task)


class OneStream(DeviceStreams):
    """Every stream is the main stream: the serial reference."""

    def run_on(self, stream: str, task: Task) -> None:
        super().run_on("compute", task)

    def record(self, event: str, stream: str) -> None: ...

    def wait(self, event: str, stream: str) -> None: ...

    def join_main(self) -> None: ...


class Ops:
    """Large tensors, so that kernels take long enough to overlap; an exchange is a copy on a stream of its own, as
    NCCL's is."""

    def __init__(self, plan: Plan, counts: dict[str, int]) -> None:
        self.plan, self.counts = plan, counts
        self.wire = torch.cuda.Stream()
        self.buffers: dict[str, Tensor] = {}
        slots = max(len(b.slots) for b in plan.buckets)
        for name in [f"flat_grad[{k}]" for k in range(plan.num_buffers)] + ["scratch[0]"]:
            self.buffers[name] = torch.full((slots, NUMEL), float("nan"), device="cuda")
        for b in plan.buckets:
            self.buffers[f"acc[{b.index}]"] = torch.ones(slots, NUMEL, device="cuda")
        torch.cuda.synchronize()

    def segment(self, key: str, args: list[Tensor]) -> list[Tensor]:
        total = torch.stack(args).sum(0)
        args.clear()
        return [torch.sin(total + k + len(key)) for k in range(self.counts[key])]

    def flatten_cast(self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor]) -> None:
        self.buffers[buffer].copy_(torch.stack(list(grads)))

    def accumulate_cast(self, bucket: int, buffer: str, slots: Sequence[int], grads: Sequence[Tensor]) -> None:
        self.buffers[buffer].mul_(0.5).add_(torch.stack(list(grads)))

    def take(self, bucket: int, dst: str, src: str) -> None:
        self.wire.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.wire):
            self.buffers[dst].copy_(self.buffers[src]).mul_(1.25)
        torch.cuda.current_stream().wait_stream(self.wire)

    def finish(self, bucket: int, acc: str, src: str) -> None:
        self.buffers[acc].mul_(0.5).add_(self.buffers[src])


def run(shape: str, streams: DeviceStreams, *, stage: int, num_runs: int = 3) -> dict[str, Tensor]:
    plan = make(4, ring=2, stage=stage)
    graph = schedule(shape, plan)
    counts = {str(n.args[0]): len(results(n)) for n in steps(graph) if isinstance(op_of(n), Segment)}
    ops, go = Ops(plan, counts), codegen.load(graph)[0]
    for number in range(num_runs):
        names = [n.name for n in graph.nodes if n.op == "placeholder"]
        values = {name: torch.full((NUMEL,), 0.1 * k + number, device="cuda") for k, name in enumerate(names)}
        go(values, streams, ops)
    streams.synchronize()
    return {name: t.clone() for name, t in ops.buffers.items() if name.startswith("acc")}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_bitwise_the_serial_result_whichever_stream_is_slow(shape: str, stage: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reference = run(shape, OneStream(device), stage=stage)
    assert not any(t.isnan().any() for t in reference.values())
    for slow in (None, "compute", COMM):
        weights = run(shape, Delayed(device, slow), stage=stage)
        assert all(torch.equal(weights[k], reference[k]) for k in reference), slow


def test_without_its_waits_the_delay_shows() -> None:
    """The control: the same streams, no events, comm not delayed and compute late."""

    class NoWaits(Delayed):
        def wait(self, event: str, stream: str) -> None: ...

    device = torch.device("cuda", torch.cuda.current_device())
    reference = run("mlp", OneStream(device), stage=2)
    weights = run("mlp", NoWaits(device, "compute"), stage=2)
    assert not all(torch.equal(weights[k], reference[k]) for k in reference)


def test_the_callers_own_stream_is_home() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    reference = run("mlp", OneStream(device), stage=2)
    streams = Delayed(device, COMM)
    with torch.cuda.stream(torch.cuda.Stream()):
        first = run("mlp", streams, stage=2)
    second = run("mlp", streams, stage=2)  # home changes back
    torch.cuda.synchronize()
    for weights in (first, second):
        assert all(torch.equal(weights[k], reference[k]) for k in reference)


def test_no_host_synchronisation_and_overlap_in_a_trace(tmp_path: Path) -> None:
    """Between the first and the last launch of a schedule the host never waits for the device; an exchange and the
    compute of a later bucket run at the same time."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = make(6, ring=3)
    graph = schedule("mlp", plan)
    counts = {str(n.args[0]): len(results(n)) for n in steps(graph) if isinstance(op_of(n), Segment)}
    ops, go, streams = Ops(plan, counts), codegen.load(graph)[0], DeviceStreams(device)
    names = [n.name for n in graph.nodes if n.op == "placeholder"]

    def once() -> None:
        go({name: torch.full((NUMEL,), 0.1 * k, device="cuda") for k, name in enumerate(names)}, streams, ops)

    once()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        with torch.profiler.record_function("schedule"):
            once()
        torch.cuda.synchronize()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    span = next(e for e in events if e.get("name") == "schedule" and e.get("cat") == "user_annotation")
    inside = [e for e in events if e.get("ph") == "X" and span["ts"] <= e["ts"] <= span["ts"] + span["dur"]]
    waits = [
        e["name"]
        for e in inside
        if e["name"] in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
    ]
    assert not waits, waits
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")]
    streams_of = {e["tid"] for e in kernels}
    assert len(streams_of) >= 3, "compute, comm and the wire"
    overlapping = sum(
        a["tid"] != b["tid"] and a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
        for a in kernels
        for b in kernels
    )
    assert overlapping > 0
