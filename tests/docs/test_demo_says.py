"""The first minutes of make demo: what it says while Inductor compiles, and what it names to try next."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import zc
from bench import demo
from bench.report import progress
from bench.report.progress import Progress

ROOT = Path(__file__).resolve().parents[2]


def until(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Whatever was printed up to a line with ``what``; fails after 10 s."""
    text, deadline = "", time.monotonic() + 10.0
    while what not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
        text += capsys.readouterr().out
    return text


def test_the_first_step_is_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "TICK_S", 0.02)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    log = logging.getLogger("zc")
    before = log.level, list(log.handlers)
    with Progress(3, "demo", shown=True) as shown:
        shown.say("reads")
        assert re.search(r"demo: step 1/3  \d+ s: reads", until("reads", capsys))
        log.info("Inductor compiles segment %d", 7)
        until("Inductor compiles segment 7", capsys)
        shown.tick("loss 1")
        assert (log.level, list(log.handlers)) == before
        capsys.readouterr()
        log.warning("behind the first step")
        time.sleep(0.1)
        assert "step 1/3" not in capsys.readouterr().out
        shown.say("takes the held-out loss")
        assert "demo: takes the held-out loss" in capsys.readouterr().out
    assert shown._thread is None


def test_zc_says_what_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model, _ = zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, logger="zc"):
        model(torch.ones(2, 4)).sum().backward()
    said = [record.getMessage() for record in caplog.records if record.name == "zc"]
    assert re.fullmatch(r"Inductor compiles a forward graph of \d+ operations", said[0])
    assert re.fullmatch(r"Inductor compiles segment 0, of \d+ operations \(backward\)", said[1])


def test_what_to_try_next_is_there() -> None:
    named = re.findall(r"(?<= )docs/[\w./]+", demo.next_steps("python"))
    assert len(named) == 4 and [path for path in named if not (ROOT / path).is_file()] == []
