"""What of the tests runs: `make check` takes those marked ``check``, `make test` all of them with samples, and
`make test-full` (``ZC_TESTS=full``) every case of every sample and the tests that take minutes.

To compile takes ten times as long as to run. So a case whose point is not in a graph runs op by op by default
(`COMPILED`), and compiled in the full tier. docs/design.md says what runs where."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("ZC_TESTS") == "full"
COMPILED = "aot_eager" if FULL else "eager"  # the backend of cases that differ in what stands around a graph

def full_cases(*names: str) -> pytest.MarkDecorator:
    """For a test with parameters: cases of these names, as pytest shows them in brackets, run in the full tier alone.
    Each line and branch of zc that they run, three other tests run as well, or all others that do."""
    return pytest.mark.full_cases(*names)


full_only = pytest.mark.skipif(not FULL, reason="takes minutes: make test-full, or ZC_TESTS=full, runs it")
