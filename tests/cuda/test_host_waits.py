"""Where the calling thread waits for other ranks on a GPU: as late as may be, and counted; for no device anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clocks import recorded
from harness import run_cases
from torch import nn

import zc
from zc.engine.announcements import Announcement
from zc.engine.operations import Operations
from zc.optim.sharded_value import Reduction


def _loop(rank: int, world_size: int, stage: int, backend: str, num_backwards: int) -> tuple[list[str], list[str], str]:
    """Job: of the last step, what the host did in order, and the device's waits; and explain's line of waits."""
    done: list[str] = []
    with recorded(with_collectives=False) as (gpu, patch):
        patch.setattr(Operations, "segment", _noting(done, "segment", Operations.segment))
        plain = Announcement.is_same

        def is_same(self: Announcement) -> bool:
            if self._work is not None:
                done.append(f"waits {self._kind}")
            return plain(self)

        patch.setattr(Announcement, "is_same", is_same)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zc.compile(model, optimizer, stage=stage, backend=backend, bucket_nbytes=300)
        for _ in range(2):
            done.clear()
            gpu.waits.clear()
            for _ in range(num_backwards):
                model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        section = zc.explain(model).sections["last step"]
    return done, gpu.waits, next(line for line in section.splitlines() if line.startswith("waits of the calling"))


def _noting(done: list[str], what: str, plain: Any) -> Any:
    def call(*args: Any) -> Any:
        done.append(what)
        return plain(*args)

    return call


def test_a_backward_is_issued_up_to_its_first_reduction_before_the_host_waits() -> None:
    for stage, ranks in run_cases(_loop, 2, [(stage, "aot_eager", 1) for stage in (1, 2)]):
        for done, device, line in ranks:
            assert done[0] == "segment" and done.count("segment") > 1 and "waits inside" in done, (stage, done)
            assert done.count("waits inside") == 1 and not device, stage
            assert "backward: 1 inside (" in line and "0 at its end" in line and "1 at the boundary (" in line, line


@pytest.mark.parametrize("reduction", [Reduction("norm"), Reduction("norm", order=1.0), Reduction("sum")])
def test_clipping_brings_nothing_to_the_device(reduction: Reduction, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor from a list comes from memory that is not pinned: the host waits for what the device does before."""
    joint = torch.tensor([[9.0], [16.0]], dtype=torch.float64)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a copy from the host")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert reduction.finish(joint, [3, 4]).shape == (2,)


def test_waits_are_counted_a_backward_and_not_a_bucket() -> None:
    for stage, ranks in run_cases(_loop, 2, [(stage, "eager", 3) for stage in (1, 2)]):
        for done, device, line in ranks:
            assert done.count("waits inside") == 3 and not device, (stage, done)
            assert "backward: 3 inside (" in line and "1 at the boundary (" in line, line
