"""Under torch.profiler each stream, segment, reduction and gather has zc's name and bucket; without, nothing has."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

import zc

# threads that stand for streams on a CPU are not the one that the profiler was started in
ALL_THREADS: Any = torch.profiler._ExperimentalConfig(profile_all_threads=True)

HOME_2 = [
    "zc backward_0",
    "zc compute | segment segment_0",
    "zc compute | flatten_cast bucket 0 (2.bias, ...)",
    "zc compute | segment segment_1",
    "zc compute | flatten_cast bucket 1 (0.bias, ...)",
    "zc gather_0",
    "zc comm | gather bucket 1 (0.bias, ...)",
    "zc compute | publish bucket 1 (0.bias, ...)",
    "zc comm | gather bucket 0 (2.bias, ...)",
    "zc compute | publish bucket 0 (2.bias, ...)",
]
COMM_2 = [
    "zc comm | reduce bucket 0 (2.bias, ...)",
    "zc comm | reduce bucket 1 (0.bias, ...)",
]


def _trace(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[str], list[str], list[Tensor], int]:
    """The names on the thread of the caller, on the others, the weights, and how many names an unobserved step made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, bucket_nbytes=80, **options)
    names: list[str] = []
    enter = profiler.record_function.__enter__

    def counting(self: Any) -> Any:
        names.append(self.name)
        return enter(self)

    def step(number: int) -> None:
        torch.manual_seed(10 * number + rank)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        zc.synchronize(model)

    profiler.record_function.__enter__ = counting  # type: ignore[method-assign]
    try:
        step(0)
    finally:
        profiler.record_function.__enter__ = enter  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as seen:
        step(1)
    step(2)
    events = [(event.name, event.thread) for event in seen.events() if event.name.startswith("zc ")]
    home = [name for name, thread in events if thread == events[0][1]]
    other = [name for name, thread in events if thread != events[0][1]]
    ours = sum(name.startswith("zc ") for name in names)
    return home, other, [p.detach().clone() for p in model.parameters()], ours


def _weights(rank: int, world_size: int) -> list[Tensor]:
    """The same three updates under DDP, nobody looking."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(3):
        torch.manual_seed(10 * number + rank)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@cache
def by_ddp() -> list[Tensor]:
    weights: list[Tensor] = run_ranks(_weights, 2)[0]
    return weights


@pytest.mark.parametrize(
    ("options", "home", "comm"),
    [
        pytest.param({"backend": "aot_eager"}, HOME_2, COMM_2, id="stage 2"),
        pytest.param(
            {"backend": "aot_eager", "overlap_gather": True, "stage": 1},
            ["zc forward_0", "zc backward_0", "zc compute | accumulate_cast bucket 1 (0.bias, ...)", "zc publish_1"],
            ["zc comm | reduce bucket 1 (0.bias, ...)", "zc comm | gather bucket 1 (0.bias, ...)"],
            id="stage 1, overlap_gather",
        ),
        pytest.param(
            {"backend": "eager"},
            ["zc flush_bucket_0", "zc compute | flatten_cast bucket 0 (2.bias, ...)", "zc flush_bucket_1"],
            ["zc comm | reduce bucket 1 (0.bias, ...)"],
            id="hooks",
        ),
    ],
)
def test_a_trace_has_our_names(options: dict[str, Any], home: list[str], comm: list[str]) -> None:
    for found_home, found_comm, weights, unobserved in run_ranks(_trace, 2, options):
        if options == {"backend": "aot_eager"}:
            assert (found_home, found_comm) == (home, comm)
        assert [name for name in found_home if name in home] == home
        assert [name for name in found_comm if name in comm] == comm
        assert unobserved == 0, "names were made although no profiler ran"
        torch.testing.assert_close(weights, by_ddp(), rtol=1e-5, atol=1e-7)
