"""Makes the ranks that train one model of what zc.compile is given: a group, or a mesh.

The ranks of ``mesh=``: with one dimension it is a group; with two, (replicate, shard), it has replicas. The ranks of a
row together have one copy of the state, and those of a column have the same shard::

    replicate \\ shard    0   1   2   3
        0                 0   1   2   3      each row is a copy of the optimizer state
        1                 4   5   6   7      rank 6 has the same shard as rank 2

A reduction ends with a hop between the ranks of a column. Weights need none: each row gathers its own copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zc.errors import PlanError
from zc.planning.plan import flat
from zc.ranks.control import NO_PARTS, Parts
from zc.ranks.group import Group


def ranks_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, parts: Parts = NO_PARTS, *, reads_memory: bool = True
) -> Group:
    """The ranks that train one model. Every rank calls it. Raises PlanError or RankMismatchError.

    ``reads_memory``: the model is on a CPU, so ranks of one host may read each other's memory.
    """
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
        if group is not None:
            raise PlanError("both group and mesh were given: leave one of them out")
        check_mesh(mesh)
        group = mesh.get_group() if mesh.ndim == 1 else None
    ranks = Group(group, parts, reads_memory=reads_memory)
    shape = "none" if mesh is None else f"({_describe(mesh)}) of the ranks {mesh.mesh.tolist()}"
    # before more groups are made: ranks with different meshes would make different groups, and wait for each other
    ranks.same_everywhere("what zc.compile was given as mesh", [shape], "Give all ranks the same one")
    if mesh is not None and has_replicas(mesh):
        ranks._shard, ranks.replicas = ranks._row_and_column = _split(ranks, mesh)
    return ranks


def _split(ranks: Group, mesh: DeviceMesh) -> tuple[Group, Group]:
    """This rank's row and column of a mesh. Every rank calls it."""
    shard = Group(mesh.get_group(1), ranks.parts, reads_memory=ranks.may_read_memory, everyone=ranks)
    replicas = Group(mesh.get_group(0), everyone=ranks)  # which send messages, wherever they are
    replicas._between = ", between replicas"
    # otherwise it follows exchanges of `shard` on another stream, and one journal has no order of the two
    replicas._keeps_journal = shard.world_size == 1
    topologies = ranks.gather_objects(str(shard.topology))
    # all ranks need one plan, and all replicas one order of summation
    hosts = f"the ranks of `shard` lie on {' or '.join(dict.fromkeys(topologies))}"
    if len(set(topologies)) > 1:
        alone = flat(shard.world_size)
        shard.send_messages(alone, f"every rank is treated as its own host, because {hosts}")
    elif shard.topology.num_hosts > 1 and shard.topology.reads_memory:
        topology = replace(shard.topology, reads_memory=False)
        shard.send_messages(topology, f"ranks of one host exchange messages, because {hosts}")
    return shard, replicas


def has_replicas(mesh: DeviceMesh) -> bool:
    return mesh.ndim == 2 and mesh.shape[0] > 1


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises PlanError for a mesh that does not fit; the error names its shape and the reason."""
    world_size, ranks, described = dist.get_world_size(), mesh.mesh, f"mesh ({_describe(mesh)})"
    if mesh.ndim > 2:
        raise PlanError(
            f"{described} has {mesh.ndim} dimensions, and zc takes one, of the ranks that share the state, or two "
            f"(replicate, shard), of all {world_size} ranks: give the part of it that data parallelism has, or a mesh "
            f"of shape (replicas, {world_size} / replicas)"
        )
    if mesh.ndim == 2 and ranks.numel() != world_size:
        raise PlanError(
            f"{described} has {ranks.numel()} ranks, and the default group has {world_size}: a mesh of two dimensions "
            f"(replicate, shard) is one of all ranks, of shape (replicas, {world_size} / replicas). For some ranks "
            "give a mesh of one dimension"
        )
    if mesh.get_coordinate() is None:
        raise PlanError(
            f"rank {dist.get_rank()} of {world_size} is not in {described} of the ranks {ranks.tolist()}: only its "
            "ranks call zc.compile"
        )
    names = mesh.mesh_dim_names
    if mesh.ndim == 2 and names is not None and ("shard" in names[0] or "replicate" in names[1]):
        raise PlanError(
            f"{described}: its dimensions are taken as (replicate, shard), in this order, as FSDP2 takes them"
        )
    if mesh.ndim == 2 and any(bool((torch.diff(ranks, dim=d) <= 0).any()) for d in (0, 1)):
        raise PlanError(
            f"{described} of the ranks {ranks.tolist()}: ranks must ascend along each dimension, as "
            "torch.distributed.device_mesh.init_device_mesh numbers them"
        )


def _describe(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or "?" * mesh.ndim
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
