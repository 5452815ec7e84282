"""Faults that the simulated device must find: a wait, a join, a mark, a record_stream, a hand-over or a guard of zc's
is taken out of its source, and the scenario beside it must race, train wrong numbers, or let the host wait."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scenarios import Scenario, Seen, train_all

ROOT = Path(__file__).resolve().parents[2]

STREAMS, RUNTIME, WHOLE = "zc.engine.streams", "zc.engine.runtime", "zc.weights.whole_params"
HOST, OVERLAP, ONE = {"offload": "cpu"}, {"overlap_gather": True}, {"bucket_nbytes": 100_000}
MLP_1, MLP_2, MLP_3 = (Scenario(stage, model="mlp") for stage in (1, 2, 3))
BRANCHES_2, BRANCHES_3 = (Scenario(stage, model="branches", options=ONE) for stage in (2, 3))
OFFLOAD_2, OFFLOAD_3 = (Scenario(stage, model="mlp", options=HOST, clips="", late={"side": 2000}) for stage in (2, 3))
GATHERS = Scenario(2, model="mlp", options=OVERLAP)
DROPPED = Scenario(2, model="mlp", loop="dropped", late={"group": 2000})
BY_HAND = Scenario(2, model="mlp", loop="by hand", options=HOST, clips="", late={"side": 2000})
UPDATE_ON_A_SIDE = Scenario(2, model="mlp", loop="update on a side")


class Mutant(NamedTuple):
    """``old`` stands once in the module. ``shows``: "race" (or wrong numbers), "wait" of the host, or an "error"."""

    name: str
    module: str
    old: str
    new: str
    scenario: Scenario
    world_size: int = 2
    shows: str = "race"

    @property
    def source(self) -> str:
        return (ROOT / (self.module.replace(".", "/") + ".py")).read_text()


RECORDS_ON_COMPUTE = """lines.append(f"    record({event!r}, 'compute')")"""


def _line(kind: str, condition: str, name: str, scenario: Scenario, new: str = "None") -> Mutant:
    """Schedules lack (or have otherwise) the waits or records that fulfil ``condition``; the proof has seen them."""
    line = f'lines.append(f"    {kind}({{event!r}}, {{stream!r}})")'
    return Mutant(name, "zc.schedule.codegen", line, f"{new} if {condition} else {line}", scenario)


def _no_waits(stream: str, scenario: Scenario, name: str, only: str = "") -> Mutant:
    condition = f"stream == {stream!r} and event.startswith({only!r})"
    return _line("wait", condition, f"schedules: {stream} waits for no {only or 'event'}, {name}", scenario)


MUTANTS: Sequence[Mutant] = (
    # waits and records of schedules
    _no_waits("comm", MLP_1, "stage 1"),
    _no_waits("comm", MLP_2, "stage 2"),
    _no_waits("comm", MLP_3, "stage 3"),
    _no_waits("comm", OFFLOAD_2, "offload"),
    _no_waits("compute", MLP_2, "stage 2"),
    _no_waits("compute", MLP_3, "stage 3"),
    _no_waits("compute", OFFLOAD_3, "offload, stage 3"),
    _no_waits("copy", OFFLOAD_2, "offload"),
    _no_waits("copy", OFFLOAD_3, "offload, stage 3"),
    _no_waits("compute", GATHERS, "gathers", only="done/"),
    _line("record", "stream == 'comm'", "schedules: comm records nothing", MLP_2),
    _line("record", "stream == 'compute'", "schedules: compute records nothing", MLP_1),
    _line("record", "True", "schedules: compute records all", MLP_2, new=RECORDS_ON_COMPUTE),
    # streams of the device
    Mutant("no event is recorded", STREAMS, "self._events[event].record(self._stream(stream))", "pass", MLP_2),
    Mutant("no stream waits", STREAMS, "self._stream(stream).wait_event(self._events[event])", "pass", MLP_2),
    Mutant("main joins nobody", STREAMS, 'self.wait(f"join/{name}", MAIN)', "pass", Scenario(1, loop="dropped")),
    Mutant(
        "no record_stream at a hand-over", STREAMS, "tensor.record_stream(main)  # the", "pass  # the", UPDATE_ON_A_SIDE
    ),
    Mutant("no record_stream at the end", STREAMS, "tensor.record_stream(stream)", "pass", DROPPED),
    Mutant(
        "side streams are not recorded", STREAMS, "streams = [*self._sides.values(), *(", "streams = [*(", DROPPED
    ),
    Mutant(
        "memory of a dropped model", "zc.engine.core",
        "weakref.finalize(buffers, streams.record_streams, buffers.all_tensors).atexit = False", "pass", DROPPED,
    ),
    Mutant(
        "streams of the current device", STREAMS, "main = torch.accelerator.current_stream(self._device)",
        "main = torch.accelerator.current_stream()", Scenario(2, model="mlp", is_other=True), shows="error",
    ),
    # the runtime
    Mutant(
        "gradients are dropped under way", RUNTIME,
        "        if self._phase in (Phase.OPEN, Phase.FAILED):\n            self.streams.join_main()", "        pass",
        Scenario(1, model="mlp", loop="cleared between", late={"group": 1000}),
    ),
    Mutant(
        "zero_grad hands nothing over", RUNTIME,
        "        self.streams.hand_to_main(self.buffers.gradients(buckets) if set_to_none else ())\n", "",
        UPDATE_ON_A_SIDE,
    ),
    Mutant(
        "deposits are read at once", "zc.engine.deposits",
        "self.streams.hand_to_main([d.grad for d in deposits], [d.mark for d in deposits])", "pass", BRANCHES_2,
    ),
    Mutant(
        "masters are read before they are there", "zc.engine.core", "def wait_for_host_memory(self) -> None:",
        "def wait_for_host_memory(self) -> None:\n        return\n\n    def _unused(self) -> None:",
        Scenario(2, model="mlp", options=HOST, late={"side": 2000}),
    ),
    *(
        Mutant(f"{name} while copies to host memory run", RUNTIME, old, new, BY_HAND)
        for name, old, new in (
            ("a boundary adds values", "self.wait_for_host_memory()\n        if self.acc", "pass\n        if self.acc"),
            ("one gradient goes", "forget_boundary()\n        self.wait_for_host_memory()", "forget_boundary()"),
            ("zeros come", "        if not set_to_none:\n            self.wait_for_host_memory()\n", ""),
        )
    ),
    Mutant(
        "nobody waits for a collective", "zc.ranks.exchanges",
        "            work.wait()\n            return True\n        try:",
        "            return True\n        try:", MLP_2,
    ),
    Mutant(
        "a norm of another stream", "zc.optim.grad_shards",
        "            self.runtime.streams.hand_to_main([self._number_of[key][name]])", "            pass",
        Scenario(2, model="mlp", loop="norms on two streams"),
    ),
    Mutant(
        "a mean waits for its numbers", "zc.optim.sharded_value", "pin_memory=not is_on_host", "pin_memory=False",
        Scenario(2, model="mlp", loop="norms on two streams"), shows="wait",
    ),
    # weights
    Mutant(
        "weights of another stream", "zc.weights.sharded_weights",
        "            self.core.streams.hand_to_main(params)", "            pass",
        BRANCHES_3,
    ),
    Mutant(
        "the host asks what was written", WHOLE, 'return bucket.device.type == "cpu" or', "return True or", Scenario(3),
        shows="wait",
    ),
    Mutant(
        "gathers are read at once", "zc.weights.overlapped",
        "            self._publish(bucket)([], core.streams)", "            pass", GATHERS,
    ),
)  # fmt: skip

# of `make test`; `make test-device` has all
SAMPLE = ("no stream waits", "deposits are read at once", "memory of a dropped model", "the host asks what was written")


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname)
        assert source is not None
        return compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    """Loads one module with the mutant's text."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


def train_mutated(rank: int, world_size: int, mutant: Mutant) -> Seen:
    """Job, in a process that has not used zc: what its template has imported is imported again."""
    for name in [name for name in sys.modules if name.split(".")[0] == "zc"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(mutant))
    return train_all(rank, world_size, [mutant.scenario])[0]
