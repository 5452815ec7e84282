"""What zc.explain says is what happened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zc


class Net(nn.Module):
    """Two layers, and one that takes part in no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def explained(**options: object) -> object:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, bucket_nbytes=16 * 17 * 4, **options)
    for _ in range(2):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zc.explain(model)


def test_every_parameter_and_every_bucket_is_listed() -> None:
    report = explained(backend="aot_eager")
    buckets = report.sections["buckets"]
    for name in ("first.weight", "first.bias", "second.weight", "second.bias", "unused.weight", "unused.bias"):
        assert name in buckets
    assert "inline" in buckets
    assert "unused.weight" in report.sections["not covered by a schedule"]
    schedules = [body for name, body in report.sections.items() if name.startswith("schedule backward")]
    assert len(schedules) == 1 and "run 2 times" in schedules[0] and "races 0, redundant 0" in schedules[0]
    assert "flatten_cast" in schedules[0]


def test_persistent_bytes_add_up() -> None:
    """One rank, fp32: parameters 4, accumulator 4, two moments 8 bytes an element of P, and the ring."""
    report = explained(backend="eager")
    rows = dict(line.strip().split(": ") for line in report.sections["persistent bytes"].splitlines())
    nbytes = {name: int(value.replace(",", "")) for name, value in rows.items()}
    assert nbytes["total"] == sum(n for name, n in nbytes.items() if name != "total")
    assert nbytes["acc"] == nbytes["flat_param"] and nbytes["master_shard"] == 0


def test_a_skipped_proof_is_said() -> None:
    with pytest.warns(UserWarning, match="without their proof"):
        report = explained(backend="aot_eager", verify=False)
    assert "without their proof" in report.sections["notes"]
    assert any("NOT VERIFIED" in body for body in report.sections.values())


def test_a_model_that_was_not_compiled() -> None:
    with pytest.raises(zc.PlanError, match="was not compiled"):
        zc.explain(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("param_dtype", "own_dtype", "says"),
    [(torch.bfloat16, torch.float32, True), (torch.bfloat16, torch.bfloat16, False), (None, torch.bfloat16, False)],
)
def test_frozen_parameters_of_another_dtype_are_said(
    param_dtype: torch.dtype | None, own_dtype: torch.dtype, says: bool
) -> None:
    model = Net()
    model.first.requires_grad_(False).to(own_dtype)
    zc.compile(model, torch.optim.AdamW(model.parameters()), param_dtype=param_dtype, backend="eager")
    notes = zc.explain(model).sections["notes"]
    assert ("Frozen ones stay in torch.float32: first.weight, first.bias." in notes) == says
    zc.close(model)
