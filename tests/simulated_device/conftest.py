"""The ranks with the simulated device end with the session."""

from __future__ import annotations

from collections.abc import Iterator

import device_ranks
import pytest


@pytest.fixture(scope="session", autouse=True)
def _device_ranks_end_with_the_session() -> Iterator[None]:
    yield
    device_ranks.shutdown()
