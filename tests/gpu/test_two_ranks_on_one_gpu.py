"""Two ranks on one GPU end with plain PyTorch's weights, over NCCL and over gloo.

NCCL refuses two ranks of one host on one device ("Duplicate GPU detected"). NCCL_HOSTID makes each rank a host of its
own to it, and they exchange over sockets on the loopback: slow, but communicators, streams and kernels are NCCL's own.
gloo copies through host memory. To zc both ranks are on one host in either case.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import zc

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a CUDA device and NCCL"
)
WIDTH, NUM_STEPS, CLIP = 256, 4, 0.5
LIMIT_S = 100.0  # of one test, below the runner's (first.py)
ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2", "NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def on_one_gpu(job: Callable[..., Any], backend: str, folder: Path, *args: Any) -> list[Any]:
    """What ``job(rank, *args)`` returns on each rank, as JSON knows it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = mp.spawn(_rank, args=(port, backend, str(folder), job, args), nprocs=2, join=False)
    end = time.monotonic() + LIMIT_S
    while not ranks.join(timeout=max(0.1, end - time.monotonic())):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"no end in {LIMIT_S:.0f} s")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def _rank(rank: int, port: int, backend: str, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"zc-{rank}")
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(job(rank, *args)))
    finally:
        dist.destroy_process_group()


def _sum(rank: int) -> list[float]:
    x = torch.full((1000,), 1.0 + rank, device="cuda")
    dist.all_reduce(x)
    return x.unique().tolist()


def test_nccl_takes_two_ranks_on_one_gpu(tmp_path: Path) -> None:
    assert on_one_gpu(_sum, "nccl", tmp_path) == [[3.0], [3.0]]


def _perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(4):
        layers += [nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).cuda()


def _batches(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(32, WIDTH, generator=generator).cuda() for _ in range(2)]


def _plain() -> dict[str, Tensor]:
    """The weights that plain PyTorch trains from both ranks' batches, in one process."""
    model = _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(NUM_STEPS):
        for rank in range(2):
            for x in _batches(rank, step):
                ((model(x) - x).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _differences(rank: int, options: dict[str, Any], on_side: bool) -> dict[str, float]:
    """``on_side``: forwards are on a second stream, all else on the default one."""
    expected, model = _plain(), _perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    zc.compile(model, optimizer, bucket_nbytes=2**19, **options)
    home = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if on_side else home
    for step in range(NUM_STEPS):
        for x in _batches(rank, step):
            stream.wait_stream(home)
            with torch.cuda.stream(stream):
                loss = (model(x) - x).square().mean()
            home.wait_stream(stream)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    zc.synchronize(model)
    with zc.whole_parameters(model):
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {name: float((weights[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()}


EAGER = [{"stage": stage, "backend": "eager"} for stage in (1, 2, 3)]
COMPILED = [
    *(
        {"stage": stage, "reduce": reduce, "overlap_gather": overlap}
        for stage in (1, 2)
        for reduce in ("exact", "native")
        for overlap in (False, True)
    ),
    {"stage": 2, "offload": "cpu"},
    {"stage": 3},
    {"stage": 3, "offload": "cpu"},
]


@pytest.mark.parametrize("on_side", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("options", [*EAGER, *COMPILED], ids=str)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_plain_pytorchs_weights(backend: str, options: dict[str, Any], on_side: bool, tmp_path: Path) -> None:
    for difference in on_one_gpu(_differences, backend, tmp_path, options, on_side):
        assert max(difference.values()) < 1e-4, difference
