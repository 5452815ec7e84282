"""ThreadStreams: order where an event asks for it, no other; errors come home; threads end."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import adversary
import pytest
import torch
from adversary import Values
from late_gathers import Delayed
from schedules import SHAPES, make, schedule
from simulation import Simulation, same
from torch import Tensor

from zc.engine.streams import ThreadStreams
from zc.errors import ZcError
from zc.schedule import codegen
from zc.schedule.buffer import MAIN
from zc.schedule.nodes import op_of, results, steps
from zc.schedule.spec import Segment


def run_on_threads(shape: str, delays: dict[str, float]) -> dict[str, Tensor]:
    plan = make(3, ring=2)
    graph = schedule(shape, plan)
    counts = {str(n.args[0]): len(results(n)) for n in steps(graph) if isinstance(op_of(n), Segment)}
    streams = Delayed(delays)
    sim = Simulation(plan, streams, counts)
    for _ in range(2):
        names = [n.name for n in graph.nodes if n.op == "placeholder"]
        values = Values({n: torch.full((2,), 0.1 * k, dtype=torch.float64) for k, n in enumerate(names)})
        codegen.load(graph)[0](values, streams, sim.bound(graph))
        left = {n.name for n in graph.output_node().all_input_nodes}
        streams.join_main()
        assert set(values) == left, "what is not returned has been freed"
    streams.close()
    return {k: v for k, v in sim.buffers.items() if k.startswith("acc")}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_one_result_whichever_stream_is_slow(shape: str) -> None:
    reference = run_on_threads(shape, {})
    for slow in ("compute", "comm"):
        assert same(reference, run_on_threads(shape, {slow: 0.002})), slow


def test_streams_run_side_by_side_and_events_order_them() -> None:
    streams, seen = ThreadStreams(), []
    gate = threading.Event()
    streams.run_on("comm", lambda: (gate.wait(5), seen.append("comm")))
    streams.record("e", "comm")
    streams.run_on("copy", lambda: seen.append("copy"))
    streams.wait("e", "compute.1")
    streams.run_on("compute.1", lambda: seen.append("after"))
    while "copy" not in seen:  # not held up by comm
        time.sleep(0.001)
    assert seen == ["copy"]
    gate.set()
    streams.synchronize()
    assert seen == ["copy", "comm", "after"]


def test_a_wait_sees_the_latest_record_before_it_and_no_record_is_no_wait() -> None:
    streams, seen = ThreadStreams(), []
    streams.wait("never", "compute")
    streams.record("e", "comm")
    streams.wait("e", "compute")
    gate = threading.Event()
    streams.run_on("comm", lambda: gate.wait(5))
    streams.record("e", "comm")  # a wait issued before is not for this one
    streams.wait("e", "copy")
    streams.run_on("copy", lambda: seen.append(gate.is_set()))
    gate.set()
    streams.synchronize()
    assert seen == [True]


def test_an_error_comes_home_once_and_nobody_waits_for_ever() -> None:
    streams, seen = ThreadStreams(), []

    def fail() -> None:
        raise ValueError("in a lane")

    streams.run_on("comm", fail)
    streams.run_on("comm", lambda: seen.append("skipped"))
    streams.record("e", "comm")
    with pytest.raises(ValueError, match="in a lane"):
        streams.join_main()
    streams.wait("e", "compute")  # reached, in spite of the error
    streams.run_on("comm", lambda: seen.append("again"))
    streams.synchronize()
    assert seen == ["again"]


def test_a_wait_raises_an_error_also_where_the_fence_is_reached() -> None:
    """Whoever waits reads next. A reached fence says that the tasks before it were tried."""
    streams, reached = ThreadStreams(), threading.Event()

    def fail() -> None:
        raise ValueError("in a lane")

    streams.record("before", "comm")
    streams.run_on("comm", fail)
    streams.record("e", "comm")
    streams.wait("e", "copy")
    streams.run_on("copy", reached.set)
    assert reached.wait(60), "so the fence is reached"
    with pytest.raises(ValueError, match="in a lane"):
        streams.wait("e", "compute")
    streams.wait("e", "compute")  # raised once
    assert streams.error_before("e") == "ValueError: in a lane", "and told for as long as there is no later record"
    assert streams.error_before("before") is None
    streams.record("e", "comm")
    streams.synchronize()
    assert streams.error_before("e") is None


def test_lanes_make_no_autograd_graph() -> None:
    streams, seen = ThreadStreams(), []
    weight = torch.ones(2, requires_grad=True)
    streams.run_on("comm", lambda: seen.append((weight * 2).requires_grad))
    streams.synchronize()
    assert seen == [False]


class Interrupt(BaseException):
    """As Ctrl-C, which would end the tests if it came out."""


@pytest.mark.parametrize("how", ["idle", "busy", "fails", "cut off", "has failed"])
def test_the_calling_thread_runs_what_it_would_wait_for(how: str) -> None:
    """Where no thread has anything to do. The threads run what an error or Ctrl-C has left, as if it were theirs."""
    streams, gate = ThreadStreams(), threading.Event()
    seen: list[tuple[str, bool]] = []

    def run(name: str, error: BaseException | None = None) -> None:
        seen.append((name, threading.current_thread() is threading.main_thread() and not torch.is_grad_enabled()))
        if error is not None:
            raise error

    streams.run_on("comm", lambda: gate.wait(60) if how == "busy" else None)
    if how != "busy":
        streams.synchronize()
    error = {"fails": RuntimeError("of a task"), "cut off": Interrupt("of a task")}.get(how)
    raises = contextlib.nullcontext() if how in ("idle", "busy") else pytest.raises(BaseException, match="of a task")
    if how == "has failed":  # and nobody has raised it yet
        streams.run_on("comm", lambda: run("before", RuntimeError("of a task")))
        streams.record("of the failed", "comm")
        while streams.error_before("of the failed") is None:
            time.sleep(0.001)
    with raises, streams.on_calling_thread():
        streams.run_on("comm", lambda: run("first", error))
        streams.record("of the first", "comm")
        streams.wait("of the first", "copy")
        streams.run_on("copy", lambda: run("second"))
        streams.record("of the second", "copy")
        streams.run_on("comm", lambda: run("third"))
        assert how == "has failed" or not seen, "nobody has waited yet"
        gate.set()
        streams.wait("of the second", "compute")
        assert ("third", True) not in seen
        streams.wait("of the first", "compute")
    streams.synchronize()
    # a thread reaches its fences after an error, too, and runs no further task until it has been raised
    wanted = {"first": how != "busy", "second": how == "idle", "third": False}
    if how == "has failed":
        wanted = {"before": False, "second": False}
    if how in ("fails", "has failed"):  # the third may come before that or after
        wanted.pop("third", None)
        seen = [(name, is_here) for name, is_here in seen if name != "third"]
    assert dict(seen) == wanted and len(seen) == len(wanted)


def test_threads_end_with_their_owner() -> None:
    def alive() -> int:
        return sum(t.name == "zc ending" for t in threading.enumerate())

    streams = ThreadStreams()
    streams.run_on("ending", lambda: None)
    assert alive() == 1
    del streams
    gc.collect()
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() == 0


def test_adversary_and_threads_agree_in_program_order() -> None:
    """The adversary's protocol is the same one."""
    for make_streams in (ThreadStreams, lambda: adversary.AdversarialStreams(adversary.in_order)):
        streams, seen = make_streams(), []
        streams.run_on("compute", lambda seen=seen: seen.append(1))
        streams.record("e", "compute")
        streams.wait("e", "comm")
        streams.run_on("comm", lambda seen=seen: seen.append(2))
        streams.join_main()
        streams.run_on("compute", lambda seen=seen: seen.append(3))
        streams.synchronize()
        assert seen == [1, 2, 3]


_LATE = """
import atexit, os, torch
from zc.engine import streams
from zc.ranks import process
if hooked := os.fork():
    os.waitpid(hooked, 0)
else:
    atexit.unregister(streams._end_lanes)
    atexit.unregister(process._end_threads)
made = streams.ThreadStreams()
a = torch.ones(1000, 1000, dtype=torch.float64)
def late():
    for _ in range(8):
        a @ a
    print("hooked" if hooked else "not hooked", flush=True)
made.run_on("comm", late)
"""


def test_what_is_under_way_at_exit_is_done_first() -> None:
    """A script whose last gathers nobody waits for. Without the hook (the control, a fork) the interpreter is torn down
    under the thread: what it had to do is lost, or std::terminate ends a process that had succeeded."""
    run = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=120)
    assert run.stdout == "hooked\n" and run.returncode == 0, run.stderr


def test_a_forked_process_has_no_threads_to_wait_for() -> None:
    """A child that evaluated while gathers were under way (overlap_gather) waited for ever."""
    streams, gate, (end, begin) = ThreadStreams(), threading.Event(), os.pipe()
    streams.run_on("comm", lambda: None)
    streams.record("done", "comm")
    streams.join_main()
    streams.run_on("comm", gate.wait)
    streams.record("under way", "comm")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        calls = (lambda: streams.wait("done", MAIN), lambda: streams.wait("under way", MAIN), streams.join_main)
        for call in calls:
            try:
                call()
                os.write(begin, b"no error\n")
            except ZcError as error:
                os.write(begin, f"{error}\n".encode())
        os._exit(0)
    os.close(begin)
    assert os.waitpid(child, 0)[1] == 0, "it waits"
    with open(end) as file:
        first, *others = file.read().splitlines()
    assert first == "no error"
    assert len(others) == 2 and all("none of its threads, which gather weights" in text for text in others)
    gate.set()
    streams.join_main()
    streams.close()
