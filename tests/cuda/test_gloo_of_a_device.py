"""gloo with tensors of a device, and groups of backends that nobody knows: on which stream copies are queued, and which
device is current where a group is made."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from zc.prepare import RANKS
from zc.ranks.group import Group

DEVICE = torch.device("cuda", 1)


class Stream:
    """``torch.Stream``: current in one thread at a time."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __enter__(self) -> None:
        self.threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self.threads.pop()


class Lambda:
    """What gloo gives for a reduce-scatter of a device's tensors: its wait copies, on the current stream, without a
    time limit."""

    def __init__(self, out: torch.Tensor, work: Any, stream: Stream) -> None:
        self.out, self.work, self.stream = out, work, stream
        self.is_ordered: list[bool] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.work.wait()
        self.is_ordered.append(threading.get_ident() in self.stream.threads)
        self.out.mul_(2)
        return True


def opened(rank: int) -> Group:
    """On gloo, whose tensors are said to be a device's."""
    ranks = Group(None, RANKS, reads_memory=False)
    ranks.open_data(torch.device("cpu"))
    ranks._device, ranks._by_pairs, ranks._by_memory, ranks._waits_on_stream = DEVICE, False, False, False
    return ranks


def _reduced(rank: int, world_size: int) -> tuple[list[bool], bool, list[float]]:
    """Job: a wait for a reduce-scatter, by another thread than the one that issued it."""
    with pytest.MonkeyPatch.context() as patch:
        comm, works = Stream(), list[Lambda]()
        patch.setattr(torch.accelerator, "current_stream", lambda device=None: comm if device == DEVICE else None)
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        plain = getattr(dist, name)

        def issue(out: torch.Tensor, *args: Any, **kwargs: Any) -> Lambda:
            works.append(Lambda(out, plain(out, *args, **kwargs), comm))
            return works[-1]

        patch.setattr(dist, name, issue)
        ranks = opened(rank)
        out = torch.zeros(2)
        work = ranks.reduce_scatter(out, torch.arange(4.0), 0)
        assert not comm.threads
        assert ranks.journal is not None, "with a watch, a wait has a time limit"
        work.wait()
        ranks.close()
        return works[0].is_ordered, bool(comm.threads), out.tolist()


def test_what_a_wait_queues_is_on_the_stream_that_issued_the_exchange() -> None:
    for rank, result in enumerate(run_ranks(_reduced, 2)):
        assert result == ([True], False, [4.0 * (2 * rank), 4.0 * (2 * rank + 1)])


def _rows(rank: int, world_size: int, lengths: list[int]) -> list[float]:
    """Job: each rank's row, of another length, which all ranks get."""
    ranks = opened(rank)
    ranks._device = torch.device("cpu")  # where it makes the tensor of a rank that sends or gets nothing
    whole = torch.zeros(sum(lengths))
    rows = list(whole.split(lengths))
    rows[rank].fill_(rank + 1.0)
    ranks.gather_rows(rows, "gather weights", 0).wait()
    ranks.close()
    return whole.tolist()


@pytest.mark.parametrize("lengths", [[3, 3], [1, 4], [0, 2], [2, 0]])
def test_rows_of_any_length_are_gathered(lengths: list[int]) -> None:
    assert run_ranks(_rows, 2, lengths) == [[1.0] * lengths[0] + [2.0] * lengths[1]] * 2


def _made(rank: int, world_size: int) -> list[tuple[Any, bool]]:
    """Job: the device that is current where a group for its tensors is made, by a thread of its own."""
    with pytest.MonkeyPatch.context() as patch:
        current: list[tuple[Any, bool]] = []
        home = threading.get_ident()
        patch.setattr(
            torch.accelerator,
            "set_device_index",
            lambda device: current.append((str(device), threading.get_ident() == home)),
        )
        ranks = Group(None, RANKS, reads_memory=False)
        ranks.new_group("gloo", device=DEVICE)
        ranks.close()
        return current


def test_a_group_is_made_where_the_device_of_its_tensors_is_current() -> None:
    assert run_ranks(_made, 2) == [[("cuda:1", False)]] * 2
