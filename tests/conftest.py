"""Shared by all tests: where the helpers lie, and the end of the rank processes.

Nothing here starts a process: the pool of ranks (tests/distributed/harness.py) comes up with the first test that
asks for ranks and is shut down here.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FunctionType

import pytest

# Before torch is imported: the ranks share two cores, and a thread pool a process makes timings and sums depend on
# luck.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The rank processes import tests' modules by name, and tests import the helpers beside them.
HERE = Path(__file__).parent
for folder in (HERE, *(HERE / name for name in ("cuda", "distributed", "engine", "proof"))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from crashed_workers import pytest_xdist_make_scheduler  # noqa: E402, F401  (a hook of pytest's)
from harness import compiled_code, keep_kernels, kept_kernels  # noqa: E402
from progress_lines import ProgressLines  # noqa: E402
from rank_process import leave_out_guard_timing  # noqa: E402
from tiers import FULL, full_only  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Compiled code of this run, for all of its processes: xdist's workers are started later, with this environment."""
    if not hasattr(config, "workerinput"):
        folder = Path(tempfile.mkdtemp(prefix="zc-compiled-"))
        os.environ["ZC_TEST_COMPILED"] = str(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_code(folder))  # the user's has graphs of other checkouts
        config.pluginmanager.register(ProgressLines(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # what is still frozen at the end is a leak to nanobind, which prints it
    if not hasattr(config, "workerinput"):
        folder = Path(os.environ.pop("ZC_TEST_COMPILED"))
        keep_kernels(folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end, so no collector of garbage need walk them, now (1 CPU s) or later (0.7 s each
    time)."""
    gc.disable()
    try:
        return (yield)
    finally:
        if "torch._dynamo.guards" in sys.modules:
            leave_out_guard_timing()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(obj: object) -> Generator[None, object, object]:
    """Skips what `tiers.full_cases` names. All cases of a test come here, whichever were asked for."""
    items = yield
    marks = getattr(obj, "pytestmark", ()) if isinstance(obj, FunctionType) and not FULL else ()
    for mark in marks:
        if mark.name == "full_cases":
            cases = {item.callspec.id: item for item in items}  # type: ignore[attr-defined]
            for name in mark.args:
                cases[name].add_marker(full_only)  # KeyError: no case has this name
    return items


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Empty but for what the C++ compiler has made of like kernels before."""
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    shutil.copytree(kept_kernels(), tmp_path / "inductor")
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    keep_kernels(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _rank_processes_end_with_the_session() -> Iterator[None]:
    yield
    harness = sys.modules.get("harness")
    if harness is not None:
        harness.shutdown()
