"""Two levels, where several hosts have several ranks each, so that sums cross hosts instead of gradients. A reduction
sums inside each host first, then over the ranks with one number on all hosts; a gather goes the other way::

    2 hosts of 2 CPU ranks            memory, inside a host                      into a host_sum
                                      messages (or encoded), between hosts       into the accumulator
    2 hosts of 2 GPUs                 messages, inside a host                    into what was sent
                                      messages (or encoded), between hosts       into the accumulator

With replicas the sum between hosts comes into a host_sum, and one more hop follows (`zc.ranks.replicas`).

Two levels are no route: the plan's hops name the level (`zc.planning.plan`), and routes ask the group for its ranks.
`zc.compile` hands this file over. Without it each rank is its own host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zc.planning.plan import Topology
from zc.ranks.exchanges import Exchanges, Levels

if TYPE_CHECKING:
    from zc.ranks.group import Group


def across(topology: Topology, rank: int) -> tuple[int, ...]:
    """The ranks with the same number on each host, this one included, in the order of hosts."""
    return tuple(range(rank % topology.ranks_per_host, topology.world_size, topology.ranks_per_host))


def open_levels(ranks: Group) -> Levels:
    """Makes the groups that carry gradients and weights. All ranks call it. gloo's messages name their receiver, so
    there one process group is enough."""
    topology = ranks.topology
    host = _part(ranks, topology.of_host(ranks.rank))
    net = _part(ranks, across(topology, ranks.rank), ", between hosts")
    net._keeps_journal = False  # each of its exchanges belongs to one inside the host
    # where reductions read memory, these are gathers of stage 3, which run on another stream than reductions, and one
    # journal has no order of the two
    host._keeps_journal = not topology.reads_memory
    return Levels(host, net)


def _part(ranks: Group, members: Sequence[int], between: str = "") -> Exchanges:
    """Some of the ranks, by their numbers in the group."""
    part = Exchanges(members.index(ranks.rank), len(members), ranks.journal, between)
    part._device, part._by_pairs, part._waits_on_stream = ranks._device, ranks._by_pairs, ranks._waits_on_stream
    part.data, part._members = ranks.data, members
    part.numbers = [ranks.numbers[member] for member in members]
    if not ranks._by_pairs:
        assert ranks._new_data is not None, "open_data has been called"
        part.data, part._members = ranks._new_data(members=members), None
    return part
