"""Programs of the fuzzer (tests/fuzz) on the device, late by a seed of their own. A race is an error of the program."""

from __future__ import annotations

import contextlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from device_ranks import run_on_device

FUZZ = Path(__file__).resolve().parents[1] / "fuzz"
if str(FUZZ) not in sys.path:
    sys.path.insert(0, str(FUZZ))

# numpy has none of the device's memory, and Inductor no code for the device
WITHOUT = frozenset(("array", "arrays", "inductor"))
JITTER = 200  # microseconds
# what programs make on the CPU: models and the layers that replace others; batches and targets
MADE = {
    r"= ((?:Net\w?\(\)|nn\.Linear\(\d+, \d+\))\.to\(\w+\))": r'= moved(\1, torch.device("sim"))',
    r"generator=g\)": r'\g<0>.to("sim")',
}


def takes(program: Any) -> bool:
    """Not what a device can't do as a CPU does: with offload a write through ``.data`` is undone (docs/offload.md), and
    in stage 3 ranks exchange messages, so that all must run the same forwards."""
    import fuzz_models

    for part in program.parts:
        offloads = any(launch.options.get("offload") for launch in part.launches)
        writes = [op.args for op in part.ops if op.kind == "write" and op.args["data"]]
        if offloads and (writes or fuzz_models.has(part.model, *fuzz_models.WRITING)):
            return False
        if part.ranks_differ and any(launch.options["stage"] == 3 for launch in part.launches):
            return False
    return True


def use() -> None:
    """From here on the fuzzer's jobs of this process have ranks with the device."""
    import fuzz_ranks

    fuzz_ranks.run_ranks = run_ranks


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    return run_on_device(run_there, world_size, fn, args, timeout=timeout)


def run_there(rank: int, world_size: int, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Job: one of the fuzzer's, whose programs run on the device."""
    import fuzz_ranks

    plain = fuzz_ranks.run_one
    fuzz_ranks.run_one = partial(run_one, plain)
    try:
        return fn(rank, world_size, *args)
    finally:
        fuzz_ranks.run_one = plain


def on_device(text: str) -> str:
    """``text`` with everything on the device that it makes."""
    for made, there in MADE.items():
        text = re.sub(made, there, text)
    return f"from scenarios import moved\n{text}"


def run_one(plain: Callable[..., Any], rank: int, world_size: int, text: str, side: str, folder: str) -> Any:
    """In place of ``plain``, the fuzzer's."""
    import simulated

    compiled = simulated.install()
    with simulated.late(jitter=JITTER, seed=zlib.crc32(text.encode())):
        outcome = plain(rank, world_size, on_device(text), side, folder)
        simulated.synchronize()
    races = [str(race) for race in simulated.races()]
    compiled.clear()
    outcome = outcome._replace(notes=_on_host(outcome.notes), weights=_on_host(outcome.weights))
    if races:
        after = "" if outcome.error is None else f"\nand then {outcome.error[0]}: {outcome.error[1]}"
        outcome = outcome._replace(error=("Race", "\n".join(races[:5]) + after, ""))
    return outcome


@contextlib.contextmanager
def loses_waits() -> Iterator[None]:
    """A planted fault: no stream of zc's waits for another."""
    from zc.engine.streams import DeviceStreams

    plain = DeviceStreams.wait
    DeviceStreams.wait = lambda streams, event, stream: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceStreams.wait = plain  # type: ignore[method-assign]


def _on_host(value: Any) -> Any:
    """Notes stay on the device until the end: a host that reads one waits, and so orders what comes after it."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    return [_on_host(entry) for entry in value] if isinstance(value, list) else value
