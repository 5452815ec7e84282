"""Loops over ``mesh=`` of two dimensions: two replicas of one rank. tests/distributed/test_mesh.py has four ranks."""

from __future__ import annotations

from typing import Any

from rows import Loop, Row, add, plain
from rows_several import pair, stack
from rows_updates import declared
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def mesh() -> DeviceMesh:
    """Made in the rank."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def _over_mesh(name: str, loop: Loop = plain, refused: str = "", **fields: Any) -> None:
    options = {"mesh": mesh, **fields.pop("options", {})}
    errors = {"always": refused} if refused else {}
    add(Row(f"a mesh of two dimensions: {name}", 12, loop, options=options, refused=errors, **fields))


_over_mesh("the plain loop")
_over_mesh("microbatches declared with no_sync", declared)
_over_mesh("Muon-like in fp32, and AdamW", make=stack, optimizer=pair)
_over_mesh("offload", refused="PlanError: offload='cpu' and a mesh of two dimensions", options={"offload": "cpu"})
_over_mesh("native reduction", refused="PlanError: reduce='native' and a mesh", options={"reduce": "native"})
