"""A line a minute on how far a run of the tests is: in a log that nobody watches, dots have no time."""

from __future__ import annotations

import time

import pytest

EVERY_S = 60.0


class ProgressLines:
    """Counts finished tests; of xdist's processes the first alone gets all reports and has a terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._started = config, time.monotonic()
        self._next_s = EVERY_S
        self._num_done = self._num_failed = 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._num_failed += report.failed
        self._num_done += report.when == "teardown"
        if (seconds := time.monotonic() - self._started) >= self._next_s:
            self._next_s = seconds + EVERY_S
            self._write(seconds)

    def _write(self, seconds: float) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            of = f"{self._num_done} of {self._session.testscollected} tests"  # xdist counts them there, too
            reporter.write_line(f"\n{seconds / 60:.0f} min: {of}, {self._num_failed} failed")
