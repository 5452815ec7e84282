"""The device itself: it is as late, and as strict, as a real one, and it tells what a program has not ordered."""

from __future__ import annotations

import copy
import ctypes
import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_ranks import needs_device, run_on_device
from harness import RanksFailed
from torch import Tensor

pytestmark = needs_device
KERNELS = str(Path(__file__).resolve().parents[1] / "kernels")
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)


def _said(races: list[Any]) -> list[str]:
    return [
        f"{r.how}: {r.before.operator} ({r.before.phase}), {r.now.operator} ({r.now.phase}), {r.buffer}" for r in races
    ]


def _two_streams(rank: int, world_size: int, is_ordered: bool) -> tuple[list[str], float]:
    import simulated

    side = torch.Stream("sim")
    with simulated.late({"default": 20_000}):
        with simulated.phase("writes"):
            x = torch.zeros(8, device="sim")
            simulated.install().set_name(x, "x")
            x.fill_(3.0)
        if is_ordered:
            side.wait_stream(torch.accelerator.current_stream())
        with simulated.phase("reads"), side:
            y = x * 2
            y.record_stream(side)
    simulated.synchronize()
    return _said(simulated.races()), float(y.cpu().sum())


def test_a_read_that_nothing_orders_is_reported_by_operator_buffer_and_phase() -> None:
    assert run_on_device(_two_streams, 1, True) == [([], 48.0)]
    [(races, value)] = run_on_device(_two_streams, 1, False)
    assert races == ["read after write: aten::fill_ (writes), aten::mul (reads), x"]
    assert value != 48.0, "the stream was late"


def _host_waits(rank: int, world_size: int) -> Any:
    import simulated

    compiled = simulated.install()
    x = torch.ones(4, device="sim")
    event = torch.Event("sim")
    with simulated.late({"default": 100_000}):
        with simulated.phase("busy"):
            y = (x + 1).sum()
            x.to(torch.float64)
            torch.nonzero(torch.zeros(0, device="sim"))  # its size depends on data
            torch.ones(3).pin_memory().to("sim", non_blocking=True)
        event.record()
        is_early = not event.query()
        with simulated.phase("asks"):
            y.item()
            event.synchronize()
            torch.accelerator.current_stream().synchronize()
            torch.tensor([1.0], device="sim")
            y.cpu()
    return is_early, compiled.host_waits(), float(y)


def test_the_host_goes_on_and_its_waits_are_counted_by_phase_and_operator() -> None:
    [(is_early, waits, value)] = run_on_device(_host_waits, 1)
    assert is_early and value == 8.0
    assert {key: n for key, n in waits.items() if key[0]} == {
        ("busy", "aten::nonzero"): 1,
        ("asks", "aten::item"): 1,
        ("asks", "synchronize an event"): 1,
        ("asks", "synchronize a stream"): 1,
        ("asks", "aten::copy_ from the host"): 1,
        ("asks", "aten::copy_ to the host"): 1,
    }


def _freed_in_use(rank: int, world_size: int, is_recorded: bool) -> Any:
    import simulated

    side = torch.Stream("sim")
    out = torch.zeros(1000, device="sim")
    x = torch.ones(1000, device="sim")
    simulated.install().set_name(x, "x")
    address = x.data_ptr()
    simulated.synchronize()
    with simulated.late({"side": 50_000}):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            out.copy_(x)
        if is_recorded:
            x.record_stream(side)
        del x
        fresh = torch.empty(1000, device="sim")
        is_given_away = fresh.data_ptr() == address
        simulated.synchronize()
    return _said(simulated.races()), is_given_away, bool(out.isnan().any().cpu())


def test_memory_that_another_stream_uses_is_poisoned_when_it_is_freed() -> None:
    what = "write after read: aten::copy_ (), the allocator, which gives freed memory away (), x, freed"
    [(races, is_given_away, is_nan)] = run_on_device(_freed_in_use, 1, False)
    assert [r.replace("copy on the device", "aten::copy_") for r in races] == [what] and is_given_away and is_nan
    assert run_on_device(_freed_in_use, 1, True) == [([], False, False)]


def _reused(rank: int, world_size: int) -> Any:
    import simulated

    addresses = []
    for _ in range(2):
        x = torch.ones(1000, device="sim")
        addresses.append(x.data_ptr())
        y = x + 1
        del x
    fresh = torch.empty(1000, device="sim")
    out = (len(set(addresses)), bool(fresh.isnan().all().cpu()), float(y.sum().cpu()))
    return out, simulated.races(), simulated.install().nbytes_allocated(rank)


def test_one_stream_reuses_memory_without_a_wait_and_finds_nothing_of_before_in_it() -> None:
    [(out, races, nbytes)] = run_on_device(_reused, 1)
    assert out[1:] == (True, 2000.0) and not races and nbytes >= 2 * 4096


def _host_touch(rank: int, world_size: int) -> int:
    x = torch.ones(4, device="sim")
    return ctypes.c_int.from_address(x.data_ptr()).value


def test_a_host_that_touches_device_memory_ends() -> None:
    with pytest.raises(RanksFailed, match="exit code -11"):
        run_on_device(_host_touch, 1)


def _pinned(rank: int, world_size: int, kind: str, is_waited: bool) -> list[str]:
    import simulated

    compiled = simulated.install()
    host = torch.ones(4096)
    if kind == "registered":
        assert compiled.register_memory(host.data_ptr(), host.nbytes) == 0
        assert compiled.register_memory(host.data_ptr(), 16) == 712
    else:
        host = host.pin_memory()
    assert host.is_pinned()
    device = torch.zeros(4096, device="sim")
    with simulated.late({"default": 30_000}):
        device.copy_(host[:2048].repeat(2), non_blocking=True)
        device[:2048].copy_(host[:2048], non_blocking=True)
        host[2048:].add_(1)  # no byte that the copy reads
        event = torch.accelerator.current_stream().record_event()
        if is_waited:
            event.synchronize()
        with simulated.phase("host"):
            host[:2048].add_(1)
            host[:1].add_(1)
        host.copy_(device, non_blocking=True)
        if is_waited:
            torch.accelerator.current_stream().synchronize()
        host.sum()
        simulated.synchronize()
        if kind == "registered":
            assert compiled.unregister_memory(host.data_ptr()) == 0
            assert compiled.unregister_memory(host.data_ptr()) == 713
    return _said(simulated.races())


@pytest.mark.parametrize("kind", ["pinned", "registered"])
def test_a_host_that_touches_memory_of_a_queued_copy_is_reported(kind: str) -> None:
    assert run_on_device(_pinned, 1, kind, True) == [[]]
    [races] = run_on_device(_pinned, 1, kind, False)
    assert [r.split(f", {kind}")[0] for r in races] == [
        "read after write: copy to the host (), aten::sum ()",
        "write after read: copy from the host (), aten::add_ (host)",
    ]


def _times(rank: int, world_size: int) -> float:
    import simulated

    side = torch.Stream("sim")
    start, stop = (torch.Event("sim", enable_timing=True) for _ in range(2))
    with simulated.late({"side": 30_000}), side:
        start.record()
        torch.ones(1, device="sim")
        stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def test_events_tell_the_time_on_their_stream() -> None:
    assert run_on_device(_times, 1)[0] >= 60.0


def _backward(rank: int, world_size: int) -> Any:
    import simulated

    side = torch.Stream("sim")
    w = torch.ones(4, device="sim", requires_grad=True)
    seen = []
    w.register_hook(lambda grad: seen.append((threading.get_ident(), torch.accelerator.current_stream())))
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss = (w * w).sum()
    torch.accelerator.current_stream().wait_stream(side)
    loss.backward()
    value = w.grad.cpu().tolist()  # type: ignore[union-attr]
    return value, seen[0][0] != threading.get_ident(), seen[0][1] == side, _said(simulated.races())


def test_a_backward_runs_in_the_thread_of_the_device_on_the_stream_of_its_forward() -> None:
    assert run_on_device(_backward, 1) == [([2.0] * 4, True, True, [])]


def _inference(rank: int, world_size: int) -> Any:
    import simulated

    x = torch.eye(4, device="sim")
    with torch.inference_mode():
        y = x @ x + x
        y.mul_(2)
        torch.sum(y, 0, out=y.new_empty(4))
        dist.all_reduce(y, async_op=True).wait()
        rows = y.new_empty(4 * world_size, 4)
        dist.all_gather_into_tensor(rows, y)
    return rows.is_inference(), rows.sum().item(), _said(simulated.races())


def test_operators_and_collectives_in_inference_mode() -> None:
    """Threads that are in no such mode write the tensors."""
    assert run_on_device(_inference, 2) == [(True, 64.0, [])] * 2


def _layer(rank: int, world_size: int, layer: torch.nn.Module, x: Tensor) -> list[float]:
    losses, there = [], copy.deepcopy(layer).to("sim")
    for module, batch in ((layer, x), (there, x.to("sim"))):
        loss = module(batch).float().square().mean()
        loss.backward()
        module.eval()
        with torch.no_grad():
            losses += [float(loss), float(module(batch).float().square().mean())]
    pairs = zip(layer.parameters(), there.parameters(), strict=True)
    gradients = [float((a.grad - b.grad.cpu()).abs().max()) for a, b in pairs]  # type: ignore[operator, union-attr]
    return [*gradients, abs(losses[0] - losses[2]), abs(losses[1] - losses[3])]


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (torch.nn.Conv2d(2, 3, 3, padding=1), torch.randn(2, 2, 5, 5)),
        (torch.nn.BatchNorm1d(4), torch.randn(3, 4)),
        (torch.nn.LayerNorm(4, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)),
    ],
    ids=lambda case: type(case).__name__,
)
def test_layers_whose_kernels_differ_between_devices(layer: torch.nn.Module, x: Tensor) -> None:
    assert max(run_on_device(_layer, 1, layer, x)[0]) < 1e-5


def _sums_of_rows(rank: int, world_size: int) -> Any:
    import comparisons
    import simulated

    from zc.kernels import reduce_rows

    is_narrow = []
    cases = itertools.product((1, 2, 3), (torch.float32, torch.bfloat16), (False, True), (False, True))
    for num_rows, wire, add, keeps_rows in cases:
        before = simulated.install().side_allocations()

        def run(rows: Tensor, out: Tensor, scale: float, add: bool, *, keeps_rows: bool = keeps_rows) -> None:
            side, current = torch.Stream("sim"), torch.accelerator.current_stream()
            kept = rows.clone()
            side.wait_stream(current)
            with side:
                reduce_rows(rows, out, scale=scale, add=add, keeps_rows=keeps_rows)
            current.wait_stream(side)
            if keeps_rows:
                comparisons.assert_bits(rows, kept)

        comparisons.check_reduce(run, "sim", num_rows, 1000, wire, scale=1 / num_rows, add=add)
        if simulated.install().side_allocations() != before:
            is_narrow.append((num_rows, wire, add, keeps_rows))
    return is_narrow, _said(simulated.races())


def test_sums_of_rows_allocate_on_a_side_stream_where_they_must() -> None:
    """Where rows are narrower than the sum, or must stay. Bits are those of the kernel's own tests."""
    b16, f32 = torch.bfloat16, torch.float32
    narrow = [(n, b16, True, keeps_rows) for n in (1, 2, 3) for keeps_rows in (False, True)]
    [(allocating, races)] = run_on_device(_sums_of_rows, 1)
    assert set(allocating) == {*narrow, (2, f32, True, True), (3, f32, True, True)} and not races


def _devices(rank: int, world_size: int) -> Any:
    import simulated

    one, other = torch.ones(4, device="sim:0"), torch.full((4,), 2.0, device="sim:1")
    with simulated.late({"default": 10_000}):
        here = other.to("sim:0")
        out = one + here
        other.fill_(7.0)  # behind the copy
    with torch.accelerator.device_index(1):
        current = torch.empty(1, device="sim").device.index
    return out.cpu().tolist(), current, torch.accelerator.current_device_index(), _said(simulated.races())


def test_two_devices() -> None:
    assert run_on_device(_devices, 1) == [([3.0] * 4, 1, 0, [])]


def _collective(rank: int, world_size: int, is_waited: bool) -> Any:
    import simulated

    x = torch.full((4,), 1.0 + rank, device="sim")
    with simulated.late({"group": 30_000}):
        work = dist.all_reduce(x, async_op=True)
        is_early = not work.is_completed()
        if is_waited:
            work.wait()
        y = x + 0
        simulated.synchronize()
    waits = simulated.install().host_waits()
    return is_early, y.cpu().tolist(), _said(simulated.races()), [key[1] for key in waits if "work" in key[1]]


def test_a_collective_has_a_stream_of_its_own_that_may_be_late() -> None:
    assert run_on_device(_collective, 2, True) == [(True, [3.0] * 4, [], [])] * 2
    for rank, (is_early, value, races, _) in enumerate(run_on_device(_collective, 2, False)):
        assert is_early and value == [1.0 + rank] * 4
        assert races[0].startswith("read after write: allreduce (), aten::add (), memory"), races


def _all_collectives(rank: int, world_size: int) -> list[list[float]]:
    mine = torch.full((2,), 1.0 + rank, device="sim")
    gathered, piece = torch.empty(4, device="sim"), torch.empty(2, device="sim")
    dist.all_gather_into_tensor(gathered, mine)
    dist.reduce_scatter_tensor(piece, gathered)
    uneven = [torch.empty(1 + k, device="sim") for k in range(world_size)]
    dist.all_gather(uneven, torch.full((1 + rank,), 5.0 + rank, device="sim"))
    swapped = torch.empty(2, device="sim")
    dist.all_to_all_single(swapped, mine)
    sent = torch.full((1,), 9.0 + rank, device="sim")
    dist.broadcast(sent, src=1)
    if rank:
        dist.send(mine, dst=0)
    else:
        dist.recv(mine, src=1)
    return [t.cpu().tolist() for t in (gathered, piece, *uneven, swapped, sent, mine)]


def test_what_the_group_can_do() -> None:
    ranks = run_on_device(_all_collectives, 2)
    for rank, out in enumerate(ranks):
        piece = [2.0, 2.0] if rank == 0 else [4.0, 4.0]
        assert out == [[1.0, 1.0, 2.0, 2.0], piece, [5.0], [6.0, 6.0], [1.0, 2.0], [10.0], [2.0, 2.0]]


def _error(rank: int, world_size: int) -> str:
    import simulated

    x = torch.zeros(3, device="sim")
    x.index_add_(0, torch.tensor([7], device="sim"), torch.ones(1, device="sim"))  # the kernel looks at the index
    with pytest.raises(RuntimeError, match="a kernel failed"):
        simulated.synchronize()
    with pytest.raises(RuntimeError, match="a kernel failed") as later:
        x + 1
    return str(later.value)


def test_an_error_of_a_kernel_comes_later_and_stays() -> None:
    with pytest.raises(RanksFailed, match="a kernel failed"):
        run_on_device(_error, 1)


def _sides(rank: int, world_size: int) -> Any:
    import simulated

    with simulated.phase("side"), torch.Stream("sim"):
        torch.empty(4, device="sim")
    torch.empty(4, device="sim")
    return simulated.install().side_allocations()


def test_allocations_on_side_streams_are_counted() -> None:
    assert run_on_device(_sides, 1) == [{("side", ""): 1}]
