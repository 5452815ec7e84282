"""The proof knows an operation by its record alone: that it touches the buffers which the record names, and no others.
Here operations run for real, each with every other buffer of the plan filled with NaN meanwhile, and put back after it:
what a record does not name is not written, and reading it would change the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from tiers import FULL
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import environment, weights

import zc
from zc.engine import streams
from zc.engine.buffers import Accumulators, Buffers
from zc.engine.operations import Operations
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import TARGETS
from zc.schedule.spec import BucketOp, Cast, Gather, WgradInto


def _tensors(b: Buffers, buffer: Buffer) -> list[Tensor]:
    """What lies behind the name of a buffer, with what goes with it: what was moved aside with an accumulator, and what
    the last update has left with the weights."""
    index, weights = buffer.index, [*b.flat_param, *b.published]
    lists = {
        "flat_grad": b.flat_grad, "scratch": b.scratch, "host_sum": b.host_sum, "acc": b.acc,
        "host": b.host, "master": b.master_shard, "update": b._update, "staging": b._staging, "param": b._param,
    }  # fmt: skip
    match buffer.kind:
        case "flat_param" | "gathered":
            return [*weights[index :: len(b.flat_param)], *b.whole]
        case "weight":
            return [b.weight_shard(index)]
        case "arena":
            return [*b.arena, *b.whole]
        case "acc":
            return [*b.acc[index : index + 1], *b.spill[index : index + 1]]
    return lists[buffer.kind][index : index + 1]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _record(kind: type[BucketOp], args: tuple[Any, ...], options: dict[str, Any]) -> BucketOp:
    """The record of a call, without the tensors that it was given."""
    given = dict(zip((f.name for f in fields(kind)), args, strict=False)) | options  # operands come last
    types = {f.name: str(f.type) for f in fields(kind)}
    named = {n: Buffer.named(v) if "Buffer" in types[n] and v is not None else v for n, v in given.items()}
    return kind(**named)


class Watched:
    """Runs operations one at a time, hides from each what its record does not name, and notes what it writes beside."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.ran: set[str] = set()
        self.hides = True

    def wrap(self, kind: type[BucketOp], function: Callable[..., Any], accs: Accumulators) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            record, buffers = _record(kind, args, options), accs.buffers
            self.ran.add(kind.__name__)
            if issubclass(kind, Cast | WgradInto):  # which would make it
                buffers.allocate(accs.plan.buckets[record.bucket])
            read = [getattr(record, field) for field in record.read_fields]
            if kind is Gather and record.bucket < len(accs.plan.buckets):  # the main stream alone writes masters
                read.append(Buffer("master", record.bucket))
            written = self._keys(buffers, [getattr(record, field) for field in record.writes])
            named = written | self._keys(buffers, read)
            everything = {_key(t): _bytes(t) for tensors in buffers.all_tensors for t in tensors if t.numel()}
            # ranks may read each other's shards at any time between two writes
            open_shards = {_key(t) for tensors in (buffers.weight, buffers.frozen) for t in tensors}
            hidden = {k: t for k, t in everything.items() if k not in named | open_shards}
            read_only = {k: t for k, t in everything.items() if k in named and k not in written}
            before = {k: t.clone() for k, t in (hidden | read_only).items()}
            for tensor in hidden.values() if self.hides else ():
                tensor.fill_(255)
            try:
                return function(*args, **options)
            finally:
                for key, tensor in (hidden | read_only).items():
                    expected = torch.full_like(tensor, 255) if self.hides and key in hidden else before[key]
                    if not torch.equal(tensor, expected):
                        self.faults.append(f"{kind.__name__} writes {self._name(buffers, key)}")
                    if key in hidden:
                        tensor.copy_(before[key])

        return run

    @staticmethod
    def _keys(buffers: Buffers, named: list[Buffer | None]) -> set[int]:
        return {_key(t) for buffer in named if buffer is not None for t in _tensors(buffers, buffer)}

    @staticmethod
    def _name(buffers: Buffers, key: int) -> str:
        for name, tensors in vars(buffers).items():
            if isinstance(tensors, list) and any(isinstance(t, Tensor) and _key(t) == key for t in tensors):
                return name
        return "another tensor"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        made = Operations.__init__

        def init(operations: Operations, accs: Accumulators, overrides: Any = None) -> None:
            made(operations, accs, overrides)
            for kind, node in TARGETS.items():
                function = getattr(operations, node.__name__, None)
                if function is not None and issubclass(kind, BucketOp):
                    setattr(operations, node.__name__, self.wrap(kind, function, accs))

        with mock.patch.object(Operations, "__init__", init), _one_thread():
            yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Every stream is the calling thread."""

    def record(self: streams.ThreadStreams, event: str, stream: str) -> None:
        self._fences[event] = (stream, streams._REACHED)

    with (
        mock.patch.object(streams.ThreadStreams, "run_on", lambda self, stream, task: task()),
        mock.patch.object(streams.ThreadStreams, "record", record),
    ):
        yield


def _train(rank: int, world_size: int, per_host: int, options: dict[str, Any]) -> dict[str, Tensor]:
    with environment(GROUP_RANK=str(rank // per_host)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 24), nn.Linear(24, 8))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mesh = {}
        if options.get("mesh"):
            mesh = {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
        model, optimizer = zc.compile(model, optimizer, backend="eager", bucket_nbytes=3000, **{**options, **mesh})
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        for _ in range(2):
            model(torch.randn(4, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    result = zc.full_state_dict(model) if options.get("stage") == 3 else weights(model)
    zc.close(model)
    return result


def _run(
    rank: int, world_size: int, per_host: int, messages: bool, options: dict[str, Any]
) -> tuple[list[str], set[str], bool]:
    """Job: what was written beside the records, which kinds ran, and whether the weights are those of a plain run."""
    with environment(**({"ZC_HOST_MEMORY": "0"} if messages else {})):
        plain = _train(rank, world_size, per_host, options)
        watched = Watched()
        with watched.watching():
            found = _train(rank, world_size, per_host, options)
    return watched.faults, watched.ran, all(torch.equal(found[name], plain[name]) for name in plain)


INT8: dict[str, Any] = {"reduce_dtype": torch.int8, "gather_dtype": torch.int8}
CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "stage 1, messages": (2, 2, True, {"stage": 1}),
    "stage 2, memory": (2, 2, False, {"stage": 2}),
    "stage 2, two levels, 8 bits": (4, 2, False, {"stage": 2, **INT8}),
    "stage 3, messages, 8 bits": (2, 1, True, {"stage": 3, **INT8}),
    "stage 2, offload": (2, 2, False, {"stage": 2, "offload": "cpu"}),
}
MORE: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "stage 1, memory": (2, 2, False, {"stage": 1}),
    "stage 2, messages": (2, 2, True, {"stage": 2}),
    "stage 2, two levels": (4, 2, False, {"stage": 2}),
    "stage 2, two levels of messages": (4, 2, True, {"stage": 2}),
    "stage 1, 8 bits": (2, 1, False, {"stage": 1, **INT8}),
    "stage 2, 8 bits": (2, 1, False, {"stage": 2, **INT8}),
    "stage 3": (2, 2, False, {"stage": 3}),
    "stage 2, replicas": (4, 4, False, {"stage": 2, "mesh": (2, 2)}),
    "stage 3, offload": (2, 2, True, {"stage": 3, "offload": "cpu"}),
}
if FULL:
    CASES |= MORE


@pytest.mark.parametrize("case", CASES)
def test_operations_touch_what_their_records_name(case: str) -> None:
    world_size, per_host, messages, options = CASES[case]
    for faults, ran, is_equal in run_ranks(_run, world_size, per_host, messages, options):
        assert not faults and is_equal, (faults, is_equal)
        assert len(ran) >= 2, ran
