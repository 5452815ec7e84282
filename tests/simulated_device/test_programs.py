"""Programs of the fuzzer on the device: right, and without a race; a planted fault races."""

from __future__ import annotations

import device_fuzz  # tests/fuzz lies on the path from here on
import fuzz_draw
import fuzz_ranks
import pytest
from device_ranks import needs_device
from fuzz_judge import Verdict
from tiers import FULL

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_ranks, "run_ranks", device_fuzz.run_ranks)


def _verdicts(num: int, prepare: str = "") -> dict[int, Verdict]:
    programs = [fuzz_draw.draw(seed, device_fuzz.WITHOUT) for seed in range(num)]
    programs = [program for program in programs if device_fuzz.takes(program)]
    return {programs[k].seed: verdict for k, verdict in fuzz_ranks.verdicts(programs, prepare=prepare)}


def test_programs() -> None:
    assert not {seed: v for seed, v in _verdicts(40 if FULL else 8).items() if not v.is_fine}


def test_a_planted_fault_is_a_race() -> None:
    verdicts = _verdicts(3, "device_fuzz.loses_waits").values()
    assert any(verdict.signature == "error Race" for verdict in verdicts), verdicts
