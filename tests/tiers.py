"""What of the tests runs: `make check` takes those marked ``check``, `make test` all of them with samples, and
`make test-full` (``ZC_TESTS=full``) every case of every sample and the tests that take minutes."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("ZC_TESTS") == "full"
full_only = pytest.mark.skipif(not FULL, reason="takes minutes: make test-full, or ZC_TESTS=full, runs it")
