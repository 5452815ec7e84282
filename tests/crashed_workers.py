"""xdist hands out files so that a worker that ends costs one test. Its own scheduler (3.8) gives the test that ended a
worker to the next one, which ends as well, and then waits for ever: a new worker has one test left, runs a test only
once it knows what follows, and is told neither more nor the end."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """None: xdist's own."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        """Relies on the private names below, of xdist 3.8."""

        def _split_scope(self, nodeid: str) -> str:
            """One worker has all of a folder that needs transformers: each of its ranks imports it, 2 CPU s."""
            file = str(super()._split_scope(nodeid))
            return "integrations" if file.startswith(("tests/integrations/", "tests/models/")) else file

        def remove_node(self, node: Any) -> str | None:
            """A worker has ended. What it was running is not run again."""
            units = self.assigned_work[node]
            running = next((test for unit in units.values() for test, is_done in unit.items() if not is_done), None)
            for scope, unit in list(units.items()):
                if running in unit:
                    unit[running] = True
                if all(unit.values()):
                    del units[scope]
            super().remove_node(node)
            return running

        def _assign_work_unit(self, node: Any) -> None:
            with contextlib.suppress(OSError):  # it has ended and is not removed yet: then another gets this file
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)  # another file, or the end

    return Files(config, log)
