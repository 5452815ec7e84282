"""Finds the ranks of one host, once and on all ranks, tries whether they can read each other's memory, connects them.

`zc.ranks.neighbours` has what they do then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zc.machine import machine_id
from zc.planning.plan import Topology, flat
from zc.ranks.control import GatherObjects
from zc.ranks.neighbours import Links, Neighbours, Reader

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_HELLO = struct.Struct("<q")  # rank
CONNECT_S = 20.0
_TOKEN_NBYTES = 16


class _Introduction(NamedTuple):
    """What a rank tells the others of itself. ``token`` is in its memory at ``token_address``. ``refusal``: why it
    can't talk to its neighbours directly, or None."""

    host: tuple[str, str]
    listens_at: Address | None
    token_address: int
    token: bytes
    refusal: str | None


def find_hosts(
    rank: int, world_size: int, gather: GatherObjects, reads_memory: bool = True
) -> tuple[Topology, Neighbours | None, str | None]:
    """The topology, this rank's neighbours, and the reason why ranks of one host send messages through sockets, if
    they do.

    Every rank calls it. ``ZC_HOST_MEMORY=0`` in one rank's environment turns reading off on all ranks. Without
    ``reads_memory``, ranks of one host still exchange small messages directly.
    """
    listener, refusal = None, None
    token = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN_NBYTES)), dtype=torch.uint8)
    try:
        if os.environ.get("ZC_HOST_MEMORY", "1") == "0":
            raise OSError("ZC_HOST_MEMORY=0")
        reader, listener = Reader(), Listener()
        if reads_memory:
            let_siblings_read()
    except (OSError, AttributeError) as error:
        refusal = str(error)
    address = None if listener is None else listener.address
    # of each of torchrun's nodes another one
    host = machine_id(), os.environ.get("GROUP_RANK", "")
    own = _Introduction(host, address, token.data_ptr(), bytes(token.numpy()), refusal)
    try:
        all_ranks = [_Introduction(*fields) for fields in gather(tuple(own))]
        topology, note = topology_of([introduction.host for introduction in all_ranks])
        if topology.ranks_per_host == 1:
            return topology, None, note
        neighbours: Neighbours | None = None
        refusal = next((f"rank {r}: {other.refusal}" for r, other in enumerate(all_ranks) if other.refusal), None)
        if refusal is None and len({other.listens_at for other in all_ranks}) < world_size:
            refusal = "several ranks answer with one address: the group is a stand-in for others"
        if refusal is None:
            assert listener is not None
            on_this_host = {r: all_ranks[r] for r in topology.neighbours(rank)}
            neighbours, refusal = _connect(rank, on_this_host, listener, reader, reads_memory)
            refusal = next(filter(None, gather(refusal)), None)
        if neighbours is None or refusal is not None:
            if neighbours is not None:
                neighbours.close()
            note = f"ranks of this host exchange messages instead of reading each other's memory: {refusal}"
            return topology, None, note
        return replace(topology, reads_memory=reads_memory), neighbours, None
    finally:
        if listener is not None:
            listener.close()


def topology_of(hosts: Sequence[Any]) -> tuple[Topology, str | None]:
    """The topology of ranks on these hosts. If they are not H hosts of L ranks in order, every rank counts as a host of
    its own, and the second item says why."""
    num_ranks = Counter(hosts)
    num_hosts, per_host = len(num_ranks), len(hosts) // len(num_ranks)
    alone = "every rank is treated as its own host"
    if len(set(num_ranks.values())) > 1:
        return flat(len(hosts)), f"hosts have {', '.join(map(str, num_ranks.values()))} ranks: {alone}"
    if any(len(set(hosts[k : k + per_host])) > 1 for k in range(0, len(hosts), per_host)):
        return flat(len(hosts)), f"ranks of one host do not have consecutive numbers: {alone}"
    return Topology(num_hosts, per_host), None


def _connect(
    rank: int, others: Mapping[int, _Introduction], listener: Listener, reader: Reader, reads_memory: bool
) -> tuple[Neighbours | None, str | None]:
    """Links to the other ranks of this host, or the reason why there are none."""
    addresses = {r: other.listens_at for r, other in others.items() if other.listens_at is not None}
    links = None
    try:
        links = Links(listener.connect(rank, addresses))
        for peer, address in addresses.items() if reads_memory else ():
            token = torch.zeros(_TOKEN_NBYTES, dtype=torch.uint8, device="cpu")
            reader.read_into(token.data_ptr(), address.pid, others[peer].token_address, token.nbytes)
            if bytes(token.numpy()) != others[peer].token:
                raise OSError(f"process {address.pid} is not rank {peer} (another PID namespace)")
    except OSError as error:
        if links is not None:
            with contextlib.suppress(OSError):
                links.close()
        return None, f"rank {rank}: {error}"
    return Neighbours(rank, links, {r: address.pid for r, address in addresses.items()}, reader), None


class Address(NamedTuple):
    """Where a rank listens, and the PID of its process."""

    name: str
    pid: int


class Listener:
    """Accepts connections from the other ranks of the host. The caller exchanges the `Address`es."""

    def __init__(self) -> None:
        self.address = Address(f"zc-{secrets.token_hex(16)}", os.getpid())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.address.name)
        self._socket.listen(1024)
        self._socket.settimeout(CONNECT_S)

    def connect(self, rank: int, addresses: Mapping[int, Address]) -> dict[int, socket.socket]:
        """A socket to each of ``addresses``, by rank: this rank connects to those below it and accepts those above.
        Raises OSError."""
        sockets: dict[int, socket.socket] = {}
        for peer, address in addresses.items():
            if peer < rank:
                sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[peer].settimeout(CONNECT_S)
                sockets[peer].connect("\0" + address.name)
                sockets[peer].sendall(_HELLO.pack(rank))
        while len(sockets) < len(addresses):
            accepted, _ = self._socket.accept()
            accepted.settimeout(CONNECT_S)
            (peer,) = _HELLO.unpack(accepted.recv(_HELLO.size))
            pid = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if peer not in addresses or pid != addresses[peer].pid:
                accepted.close()
                raise OSError(f"process {pid} has connected as rank {peer}, which it is not")
            sockets[peer] = accepted
        return sockets

    def close(self) -> None:
        self._socket.close()


def let_siblings_read() -> None:
    """Lets the launcher's other children read this process, where the kernel allows only ancestors (Yama, scope 1)."""
    with contextlib.suppress(OSError, AttributeError):
        if _YAMA.read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)
