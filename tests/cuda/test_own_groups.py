"""zc's exchanges of a GPU's tensors are on an NCCL group of zc's own, of high priority, with the program's timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import nccl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import zc
from zc import torch_private
from zc.errors import PlanError
from zc.prepare import RANKS
from zc.ranks import hosts
from zc.ranks.group import Group

COLLECTIVES = ("all_to_all_single", "all_reduce", "broadcast")
RENAMED = (("reduce_scatter_single", "reduce_scatter_tensor"), ("all_gather_single", "all_gather_into_tensor"))


def _exchanges(rank: int, world_size: int, members: tuple[int, ...], is_bound: bool) -> dict[str, Any]:
    """Job: what zc opens beside the program's group, and which group each exchange names."""
    with pytest.MonkeyPatch.context() as patch:
        groups = nccl.install(patch)
        default, options = dist.group.WORLD, nccl.Options()
        options.config = "max_ctas=4"
        program_group = dist.new_group(
            list(members), timeout=timedelta(minutes=3), backend="cpu:gloo,cuda:nccl", pg_options=options
        )
        if rank not in members:
            return {}
        if is_bound:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            default.bound_device_id = torch.device("cuda", 0)
        num_of_program, used, sent_from = len(groups), {}, set()
        asked: list[int] = []
        patch.setattr(hosts, "let_siblings_read", lambda: asked.append(rank))

        nothing = type("Done", (), {"wait": lambda self: None})()

        def recorder(name: str) -> Any:
            def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
                used[name] = group
                if name == "all_to_all_single":
                    sent_from.update(arg.device for arg in args if isinstance(arg, torch.Tensor))
                return nothing

            return call

        try:
            ranks = Group(program_group, RANKS, reads_memory=False)
            ranks.open_data(torch.device("cuda", 1))
            bound_after = default.bound_device_id
        finally:
            default.bound_device_id = None
        for name in (*COLLECTIVES, *(next(n for n in names if hasattr(dist, n)) for names in RENAMED)):
            patch.setattr(dist, name, recorder(name))
        patch.setattr(ranks, "_data_work", lambda work, entry: nothing)
        out, rows = torch.zeros(4), torch.ones(4)
        ranks.all_to_all(out, rows, 0)
        ranks.reduce_scatter(out[:2], rows, 0)
        ranks.all_gather(out, rows[:2], "gather weights", 0)
        ranks.exchange_pieces([(rank, out)], [(rank, rows)], "to owners", 0)
        ranks.sum_(out)
        sent_from.clear()
        patch.setattr(ranks, "_device", torch.device("meta"))
        ranks.exchange_pieces([], [], "to owners", 0)
        patch.setattr(ranks, "control", None)
        ranks.broadcast_(torch.ones(2, device="meta"))
        own = groups[num_of_program:]
        chosen = [g.chosen for g in own]
        return {
            "used": sorted(used),
            "is_own": {name: group is ranks.data and group is not program_group for name, group in used.items()},
            "options": [(o.is_high_priority_stream, o._timeout, o.split_from is not None) for o in chosen],
            "bound": str(bound_after),
            "devices": [str(g.device) for g in own],
            "config": [o.config for o in chosen],
            "of a rank without pieces": {device.type for device in sent_from},
            "note": ranks.note,
            "asked": asked,
            "reads": ranks.topology.reads_memory,
        }


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("members", [(0, 1), (0, 1, 2)])
def test_exchanges_are_on_a_group_of_zcs_own(members: tuple[int, ...], is_bound: bool) -> None:
    """A group of all ranks may be split from one that is bound to a device; one of some must not be, as the others
    would have to come, too."""
    for result in run_ranks(_exchanges, 3, members, is_bound)[: len(members)]:
        assert len(result["used"]) == 5 and all(result["is_own"].values()), result
        assert result["options"] == [(True, timedelta(minutes=3), is_bound and len(members) == 3)]
        assert result["bound"] == ("cuda:0" if is_bound else "None")
        if hasattr(dist.distributed_c10d, "_nccl2_device"):  # else the group binds itself in its first collective
            assert result["devices"] == ["cuda:1"], "the device of the parameters, not one guessed by the rank"
        assert result["config"] == ["max_ctas=4"], "NCCL's options of the program's own group"
        assert result["of a rank without pieces"] == {"meta"}, "NCCL takes no tensor of the CPU, even an empty one"
        assert (result["note"], result["asked"], result["reads"]) == (None, [], False)


def _refused(rank: int, world_size: int) -> str:
    """Job."""
    ranks = Group(dist.new_group([0, 1], backend="cpu:gloo"), RANKS)
    with pytest.raises(PlanError) as raised:
        ranks.open_data(torch.device("cuda"))
    return str(raised.value)


def test_a_group_without_a_backend_for_the_device_is_refused() -> None:
    for result in run_ranks(_refused, 2):
        assert "parameters are on cuda, for whose tensors the process group has no backend: it has cpu:gloo" in result


def _timeouts(rank: int, world_size: int) -> list[float]:
    """Job: of a program's NCCL group, made without a timeout and with one; and of a compiled model on gloo."""
    timeouts = []
    with pytest.MonkeyPatch.context() as patch:
        nccl.install(patch)
        patch.delenv("ZC_RANK_TIMEOUT", raising=False)
        model = nn.Linear(4, 4)
        zc.compile(model, torch.optim.SGD(model.parameters()), backend="eager")
        runtime = zc.registry.sharded(model).runtime
        assert runtime.group.journal.watch.store.underlying_store is not torch_private.default_store()
        assert runtime.notes == [], runtime.notes
        for timeout, backend in ((None, "nccl"), (timedelta(minutes=3), "cpu:gloo,cuda:nccl")):
            ranks = Group(dist.new_group([0, 1], timeout=timeout, backend=backend), RANKS)
            ranks.open_data(torch.device("cuda"))
            ranks.set_plan(runtime.plan)
            timeouts.append(ranks.journal.timeout)
            ranks.close()
        timeout = torch_private.timeout_of(dist.group.WORLD, "cpu")
        assert timeout is not None and runtime.group.journal.timeout == timeout.total_seconds()
    return timeouts


def test_a_group_on_nccl_has_its_timeout() -> None:
    assert run_ranks(_timeouts, 2) == [[600, 180]] * 2
