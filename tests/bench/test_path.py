"""bench.path counts the functions that threads call while it is on, and those alone."""

from __future__ import annotations

import queue
import sys
import threading

from bench.path import Calls, folders_of


def called_before() -> None: ...
def called_here() -> None: ...
def called_there() -> None: ...
def called_after() -> None: ...


def test_calls_on_all_threads_while_it_is_on() -> None:
    tasks, done = queue.SimpleQueue(), queue.SimpleQueue()  # type: ignore[var-annotated]
    before = sys.getprofile()
    calls = Calls()
    try:

        def work() -> None:
            while (task := tasks.get()) is not None:
                task()
                done.put(None)

        thread = threading.Thread(target=work)
        thread.start()
        called_before()
        calls.is_on = True
        called_here()
        tasks.put(called_there)
        done.get()
        calls.is_on = False
        called_after()
        tasks.put(None)
        thread.join()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    own = {code.co_name for code in calls.codes if code.co_filename == __file__}
    assert own == {"called_here", "called_there"}


def test_the_folders_are_there() -> None:
    for system in ("zc, stage 2", "FSDP2"):
        assert all(folder.is_dir() for folder in folders_of(system))
