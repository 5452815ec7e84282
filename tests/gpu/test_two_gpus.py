"""What two GPUs show and one does not: DDP's numbers over NCCL, exchanges beside compute, and a host that runs ahead.

Each test starts two ranks, a GPU each. On fewer it is skipped; tests/cuda has what recorders on a CPU can show of it.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zc

WIDTH = 256
pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(),
    reason=f"needs two CUDA devices and NCCL: ranks that exchange over it ({torch.cuda.device_count()} here)",
)


class Recurrent(nn.Module):
    """Its weights would leave their bucket for a buffer of cuDNN's, if flatten_parameters() had its way."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.unsqueeze(1))[0].squeeze(1))


def perceptron(depth: int = 4, width: int = WIDTH) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(WIDTH, width)]
    for _ in range(depth):
        layers += [nn.GELU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {"perceptron": perceptron, "lstm": Recurrent}


def on_two_gpus(job: Callable[..., Any], tmp_path: Path, *args: Any) -> list[Any]:
    """What ``job(rank, *args)`` returns on each rank, as JSON knows it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path), job, args), nprocs=2)
    return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]


def _rank(rank: int, port: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(job(rank, *args)))
    finally:
        dist.destroy_process_group()


def _batches(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(32, WIDTH, generator=generator).cuda() for _ in range(2)]


def _train(rank: int, kind: str, options: dict[str, Any] | None, on_side: bool = False) -> dict[str, Tensor]:
    """Weights after four updates of two backwards each; ``options``: of zc, None: DDP. ``on_side``: forwards are on a
    second stream, all else on the default one."""
    torch.manual_seed(0)
    model = MODELS[kind]().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    call: nn.Module = model
    if options is None:
        call = DistributedDataParallel(model, device_ids=[rank])
    else:
        zc.compile(model, optimizer, bucket_nbytes=2**19, **options)
    side = torch.cuda.Stream() if on_side else torch.cuda.current_stream()
    for step in range(4):
        for x in _batches(rank, step):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = (call(x) - x).square().mean()
            torch.cuda.current_stream().wait_stream(side)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if options is not None:
        zc.synchronize(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _against_ddp(rank: int, kind: str, options: dict[str, Any], on_side: bool) -> dict[str, float]:
    expected, trained = _train(rank, kind, None), _train(rank, kind, options, on_side)
    return {name: float((trained[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}


OPTIONS = [
    {"stage": stage, "reduce": reduce, "overlap_gather": overlap}
    for stage in (1, 2) for reduce in ("exact", "native") for overlap in (False, True)
]  # fmt: skip


@pytest.mark.parametrize("on_side", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_ddps_weights(kind: str, options: dict[str, Any], on_side: bool, tmp_path: Path) -> None:
    for difference in on_two_gpus(_against_ddp, tmp_path, kind, options, on_side):
        assert max(difference.values()) < 1e-4, difference


def _group(rank: int) -> list[Any]:
    model = perceptron().cuda()
    zc.compile(model, torch.optim.SGD(model.parameters()), backend="eager")
    data = zc.registry.sharded(model).runtime.group.data
    assert data is not None
    options = data._get_backend(torch.device("cuda")).options
    return [data is not dist.group.WORLD, options.is_high_priority_stream]


def test_exchanges_are_on_a_group_of_high_priority(tmp_path: Path) -> None:
    assert on_two_gpus(_group, tmp_path) == [[True, True]] * 2


def _trace(rank: int, stage: int) -> list[float]:
    """Seconds on the device: of exchanges, and of them while another stream computes."""
    model = perceptron(depth=8, width=4096).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    zc.compile(model, optimizer, stage=stage)
    x = torch.randn(4096, WIDTH, device="cuda")

    def step() -> None:
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name.lower()) for e in prof.events() if e.time_range]
    wire = [(a, b) for a, b, is_wire in spans if is_wire]
    compute = [(a, b) for a, b, is_wire in spans if not is_wire]
    beside = sum(any(a < d and c < b for c, d in compute) for a, b in wire)
    return [float(len(wire)), float(beside)]


@pytest.mark.parametrize("stage", [1, 2])
def test_most_reductions_are_beside_compute(stage: int, tmp_path: Path) -> None:
    for exchanges, beside in on_two_gpus(_trace, tmp_path, stage):
        assert exchanges and beside >= exchanges / 2


def _host(rank: int, stage: int) -> list[float]:
    """Medians of ten steps, seconds: until the host has issued one, and until the device is done with it."""
    model = perceptron(depth=8, width=4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zc.compile(model, optimizer, stage=stage)
    x = torch.randn(8192, WIDTH, device="cuda")
    issued, done = [], []
    for number in range(13):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        issued.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - started)
        if number == 2:
            issued.clear(), done.clear()
    return [statistics.median(issued), statistics.median(done)]


@pytest.mark.parametrize("stage", [1, 2])
def test_the_host_runs_ahead_of_the_device(stage: int, tmp_path: Path) -> None:
    """It waits for the other host at announcements and boundaries, never for a device: most of a step is left to run
    when it has issued all of it."""
    for issued, done in on_two_gpus(_host, tmp_path, stage):
        assert issued < 0.8 * done, (issued, done)
