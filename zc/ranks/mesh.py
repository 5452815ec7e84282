"""The ranks of ``mesh=``. With one dimension it is a group. With two, (replicate, shard), the ranks of a row together
have one copy of the state, and the ranks of a column have the same shard::

    replicate \\ shard    0   1   2   3
        0                 0   1   2   3      each row is a copy of the optimizer state
        1                 4   5   6   7      rank 6 has the same shard as rank 2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zc.errors import PlanError
from zc.ranks.control import NO_PARTS, Parts
from zc.ranks.group import Group


def ranks_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, parts: Parts = NO_PARTS, *, reads_memory: bool = True
) -> Group:
    """The ranks that train one model. Every rank calls it. Raises PlanError or RankMismatchError.

    ``reads_memory``: the model is on a CPU, so ranks of one host may read each other's memory.
    """
    rows: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
        if group is not None:
            raise PlanError("both group and mesh were given: leave one of them out")
        check_mesh(mesh)
        if mesh.ndim == 1:
            group = mesh.get_group()
        elif mesh.shape[0] > 1:
            rows = mesh.get_group(1), mesh.get_group(0)
    ranks = Group(group, parts, reads_memory=reads_memory)
    shape = "none" if mesh is None else f"({_describe(mesh)}) of the ranks {mesh.mesh.tolist()}"
    # before more groups are made: ranks with different meshes would make different groups, and wait for each other
    ranks.same_everywhere("what zc.compile was given as mesh", [shape], "Give all ranks the same one")
    if rows is not None:
        ranks.split(*rows)
    return ranks


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
