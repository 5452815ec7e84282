"""For first.py: each test says when it begins and how it ended, and one that hangs ends the process.

Without the runner's environment this does nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPORT = os.environ.get("ZC_GPU_REPORT")  # a file; one line of JSON an event
LIMIT_S = float(os.environ.get("ZC_GPU_TEST_LIMIT_S", "120"))


def _say(**event: Any) -> None:
    if REPORT:
        with Path(REPORT).open("a") as report:
            report.write(json.dumps(event) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _say(test=item.nodeid, outcome="began")
    if REPORT:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        return (yield)
    finally:
        if REPORT:
            faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.outcome == "passed" else str(report.longrepr)[-3000:]
        _say(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), text=text)
