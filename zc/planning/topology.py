"""Which ranks share a host: part of the plan, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Topology:
    """H = ``num_hosts`` hosts of L = ``ranks_per_host`` ranks each; rank r is number r % L on host r // L.

    ``reads_memory``: ranks of one host read each other's memory instead of sending messages. If hosts are unknown or
    have different numbers of ranks, every rank counts as its own host.
    """

    num_hosts: int = 1
    ranks_per_host: int = 1
    reads_memory: bool = False

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def has_levels(self) -> bool:
        """Whether exchanges have two levels: inside a host, and between ranks with the same number on all hosts."""
        return self.num_hosts > 1 and self.ranks_per_host > 1

    def of_host(self, rank: int) -> tuple[int, ...]:
        """The ranks of its host, this one included, ascending."""
        first = self.host_of(rank) * self.ranks_per_host
        return tuple(range(first, first + self.ranks_per_host))

    def across(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same number on each host, this one included, in the order of hosts."""
        return tuple(h * self.ranks_per_host + rank % self.ranks_per_host for h in range(self.num_hosts))

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The other ranks of its host, ascending."""
        return tuple(r for r in self.of_host(rank) if r != rank)

    def __str__(self) -> str:
        hosts = f"{self.num_hosts} host{'s' * (self.num_hosts > 1)} of {self.ranks_per_host}"
        return f"{hosts}, which read each other's memory" if self.reads_memory else hosts


ALONE = Topology()


def flat(world_size: int) -> Topology:
    """Each rank as its own host."""
    return Topology(world_size, 1)


def usable(topology: Topology, reduce: str, device_types: set[str]) -> Topology:
    """The topology that exchanges can use: only CPUs read memory, and two levels also need the exact reduction."""
    if device_types != {"cpu"}:
        topology = replace(topology, reads_memory=False)
    is_one_host = topology.num_hosts == 1
    return topology if is_one_host or (topology.has_levels and reduce == "exact") else flat(topology.world_size)
