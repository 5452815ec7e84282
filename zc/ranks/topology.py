"""Finds out, once and on all ranks, which ranks share a host and whether they can read each other's memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from zc.planning.topology import Topology, flat
from zc.ranks.links import Address, Links, Listener
from zc.ranks.memory import Reader, let_siblings_read
from zc.ranks.neighbours import Neighbours
from zc.ranks.process import boot_id

_TOKEN_NBYTES = 16
Gather = Callable[[Any], Sequence[Any]]  # every rank's object, by rank; all ranks call it


class _Said(NamedTuple):
    """A rank's message to the others. ``token`` is at address ``place`` of its memory."""

    host: tuple[str, str]
    listens: Address | None
    place: int
    token: bytes
    refused: str | None


@dataclass(frozen=True)
class Found:
    """``note``: the reason why ranks of one host send messages through sockets, or None."""

    topology: Topology
    neighbours: Neighbours | None = None
    note: str | None = None


def host() -> tuple[str, str]:
    """Identifies the host: equal on all of its ranks, and different for each of torchrun's nodes."""
    try:
        boot = boot_id()
    except OSError:
        boot = socket.gethostname()
    return boot, os.environ.get("GROUP_RANK", "")


def find(rank: int, world_size: int, gather: Gather, reads_memory: bool = True) -> Found:
    """Every rank calls it. ``ZC_HOST_MEMORY=0`` in one rank's environment turns reading off on all ranks. Without
    ``reads_memory``, ranks of one host still exchange small messages directly."""
    listener, refused = None, None
    token = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_NBYTES)), dtype=torch.uint8)
    try:
        if os.environ.get("ZC_HOST_MEMORY", "1") == "0":
            raise OSError("ZC_HOST_MEMORY=0")
        reader, listener = Reader(), Listener()
        if reads_memory:
            let_siblings_read()
    except (OSError, AttributeError) as error:
        refused = str(error)
    address = None if listener is None else listener.address
    said = _Said(host(), address, token.data_ptr(), bytes(token.numpy()), refused)
    try:
        told: list[_Said] = [_Said(*each) for each in gather(tuple(said))]
        topology, note = order(tuple(each.host for each in told))
        if topology.ranks_per_host == 1:
            return Found(topology, note=note)
        ranks: Neighbours | None = None
        refused = next((f"rank {r}: {each.refused}" for r, each in enumerate(told) if each.refused), None)
        if refused is None and len({each.listens for each in told}) < world_size:
            refused = "several ranks answer with one address: the group is a stand-in for others"
        if refused is None:
            assert listener is not None
            near = {r: told[r] for r in topology.neighbours(rank)}
            ranks, refused = _connect(rank, near, listener, reader, reads_memory)
            refused = next(filter(None, gather(refused)), None)
        if ranks is None or refused is not None:
            if ranks is not None:
                ranks.close()
            why = f"ranks of this host exchange messages instead of reading each other's memory: {refused}"
            return Found(topology, note=why)
        return Found(replace(topology, reads_memory=reads_memory), ranks)
    finally:
        if listener is not None:
            listener.close()


def order(hosts: Sequence[Any]) -> tuple[Topology, str | None]:
    """The topology of ranks on these hosts, and, if they are not H hosts of L ranks in order, the reason."""
    counts: dict[Any, int] = {}
    for each in hosts:
        counts[each] = counts.get(each, 0) + 1
    num_hosts, per_host = len(counts), len(hosts) // len(counts)
    if len(set(counts.values())) > 1:
        return flat(len(hosts)), f"hosts have {', '.join(map(str, counts.values()))} ranks: each rank stands for itself"
    if any(len(set(hosts[k : k + per_host])) > 1 for k in range(0, len(hosts), per_host)):
        return flat(len(hosts)), "ranks of one host don't follow each other: each rank stands for itself"
    return Topology(num_hosts, per_host), None


def _connect(
    rank: int, told: Mapping[int, _Said], listener: Listener, reader: Reader, reads_memory: bool
) -> tuple[Neighbours | None, str | None]:
    """Links to the other ranks of this host, or the reason why there are none."""
    others = {r: each.listens for r, each in told.items() if each.listens is not None}
    links = None
    try:
        links = Links(listener.connect(rank, others))
        for peer, address in others.items() if reads_memory else ():
            token = torch.zeros(_TOKEN_NBYTES, dtype=torch.uint8)
            reader.read(token, address.pid, told[peer].place)
            if bytes(token.numpy()) != told[peer].token:
                raise OSError(f"process {address.pid} is not rank {peer} (another PID namespace)")
    except OSError as error:
        if links is not None:
            with contextlib.suppress(OSError):
                links.close()
        return None, f"rank {rank}: {error}"
    return Neighbours(rank, links, {r: each.pid for r, each in others.items()}, reader), None
