"""Two ranks on one GPU end with plain PyTorch's weights, over NCCL and over gloo (see two_ranks.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_ranks import TwoRanks

import zc

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a CUDA device and NCCL"
)
WIDTH, NUM_STEPS, CLIP = 256, 4, 0.5
LIMIT_S = 100.0  # of one test, below the runner's (first.py)


@pytest.fixture(scope="module")
def on_one_gpu() -> Iterator[Callable[..., list[Any]]]:
    """``on_one_gpu(backend, job, *args)``: what ``job(rank, *args)`` returns on each rank."""
    pairs = {backend: TwoRanks(backend, LIMIT_S) for backend in ("nccl", "gloo")}
    yield lambda backend, job, *args: pairs[backend].run(job, *args)
    for pair in pairs.values():
        pair.close()


def _sum(rank: int) -> list[float]:
    x = torch.full((1000,), 1.0 + rank, device="cuda")
    dist.all_reduce(x)
    return x.unique().tolist()


def test_nccl_takes_two_ranks_on_one_gpu(on_one_gpu: Callable[..., list[Any]]) -> None:
    assert on_one_gpu("nccl", _sum) == [[3.0], [3.0]]


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
def test_plain_pytorchs_weights(
    backend: str, options: dict[str, Any], on_side: bool, on_one_gpu: Callable[..., list[Any]]
) -> None:
    for difference in on_one_gpu(backend, _differences, options, on_side):
        assert max(difference.values()) < 1e-4, difference
