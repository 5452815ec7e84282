"""``optimizer.state[param]`` has the same keys and counts on all ranks, also where a rank has nothing of a parameter:
loops over states, with their collectives, are the same on all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zc


class Heads(nn.Module):
    """Two heads, of which one is used in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.often, self.seldom = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, step: int) -> Tensor:
        head = self.seldom if step % 3 == 0 else self.often
        y: Tensor = head(self.trunk(x).tanh())
        return y


def _nothing(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    pass


def _reset(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    for param in params if step == 2 else ():
        optimizer.state[param] = {}


def _clear(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    if step == 2:
        optimizer.state.clear()


def _count_anew(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    for param in params if step == 2 else ():
        if param in optimizer.state:
            optimizer.state[param]["step"] = torch.tensor(0.0)


def _delete(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    for param in params[::3] if step == 2 else ():
        optimizer.state.pop(param, None)


def _swap(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    state, (one, _, other, *_) = optimizer.state, params
    if step == 2:
        state[one], state[other] = state[other], state[one]


def _take_turns(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """States of two tasks, each kept by the caller while the other is there."""
    for param in params if step in (1, 3) else ():
        others = vars(optimizer).setdefault("others", {}).get(param, {})
        optimizer.others[param], optimizer.state[param] = optimizer.state[param], others


def _take_turns_as_a_whole(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    if step in (1, 3):
        others = vars(optimizer).setdefault("others", defaultdict(dict))
        optimizer.others, optimizer.state = optimizer.state, others


def _keep_counts(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """Counts that the loop keeps go on, also from what it writes into one; what it adds to a state is in no other."""
    state = optimizer.state
    if step == 1:
        optimizer.counts = [state[param]["step"] for param in params]
        optimizer.counts[3].fill_(7.0)
        state[params[0]]["mine"] = torch.zeros(3)
    for param, count in zip(params, optimizer.counts, strict=True) if step == 4 else ():
        state[param]["count"] = torch.full_like(param, float(count))


def _write_a_count_of_before(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """The count of a state that is gone is the loop's alone."""
    state = optimizer.state
    for param in params if step == 0 else ():
        if param in state:
            vars(optimizer).setdefault("counts", []).append(state[param]["step"])
            del state[param]
    if step == 3:
        for count in optimizer.counts:
            count.fill_(50.0)


def _reset_some(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """A rank that has one of these, and nothing of the others, shows others' counts as they are."""
    for param in (params[0], params[4]) if step == 2 else ():
        optimizer.state[param] = {}


def _count_some_anew(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    for param in (params[0], params[4]) if step == 3 else ():
        optimizer.state[param]["step"] = torch.tensor(0.0)


def _zero_some_counts(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    """One is kept by the loop, the other is not."""
    if step == 3:
        optimizer.count = optimizer.state[params[0]]["step"].zero_()
        optimizer.state[params[4]]["step"].zero_()


def _keep_some(optimizer: Any, params: list[nn.Parameter], step: int) -> None:
    if step == 1:
        optimizer.state = defaultdict(dict, {param: optimizer.state[param] for param in params[:2]})


class FromTen(torch.optim.Optimizer):
    """Counts from ten, in an int."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            self.state[param]["step"] = self.state[param].get("step", 10) + 1
            param.sub_(param.grad, alpha=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),  # whole parameters, each on one rank
    "from ten": FromTen,
}


def _read(name: str, edit: Any, rank: int, *, is_zc: bool) -> list[tuple[list[str], float, float]]:
    """Of each parameter: the keys of its state, its count of steps, and the sum of what has its shape."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = OPTIMIZERS[name](model.parameters())
    net = model if is_zc else DistributedDataParallel(model, find_unused_parameters=True)
    if is_zc:
        zc.compile(model, optimizer, backend="eager", bucket_nbytes=200)
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        net(torch.randn(3, 6), step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        edit(optimizer, list(model.parameters()), step)
    seen = []
    for param in model.parameters():
        state = optimizer.state[param]
        of_shape = (v for v in state.values() if isinstance(v, Tensor) and v.shape == param.shape)
        sums = [float(value.sum()) for value in of_shape]
        seen.append((sorted(state), float(state["step"]), sum(sums)))
    return seen


def _compare(rank: int, world_size: int, name: str, edit: Any) -> tuple[Any, Any]:
    return _read(name, edit, rank, is_zc=False), _read(name, edit, rank, is_zc=True)


@pytest.mark.parametrize(
    ("name", "edit"),
    [("adamw", _nothing), ("adamw", _reset), ("adamw", _clear), ("adamw", _count_anew), ("adamw", _delete),
     ("adamw", _swap), ("adamw", _take_turns), ("adamw", _take_turns_as_a_whole), ("adamw", _keep_counts),
     ("adafactor", _nothing), ("adafactor", _take_turns), ("adafactor", _keep_counts),
     ("adafactor", _write_a_count_of_before), ("adafactor", _reset_some), ("adafactor", _count_some_anew),
     ("adafactor", _zero_some_counts), ("from ten", _nothing), ("from ten", _count_some_anew),
     ("from ten", _keep_some)],
)
def test_ranks_see_states_alike(name: str, edit: Any) -> None:
    """A rank without a slice raised KeyError, and the others waited; or it showed another parameter's count."""
    for theirs, ours in run_ranks(_compare, 2, name, edit):
        for (keys, step, total), (own_keys, own_step, own_total) in zip(theirs, ours, strict=True):
            assert own_keys == keys and own_step == step
            assert own_total == pytest.approx(total, rel=1e-3, abs=1e-5)


def _load_where_nothing_is(rank: int, world_size: int, path: Path) -> list[float]:
    """Counts after a load, and after one more update."""
    model, x = nn.Linear(4, 5, bias=False), torch.ones(2, 4)
    optimizer = torch.optim.Adafactor(model.parameters())
    zc.compile(model, optimizer, backend="eager")
    whole = {"state": {0: {"step": torch.tensor(7.0), "row_var": torch.zeros(5, 1), "col_var": torch.zeros(1, 4)}}}
    optimizer.load_state_dict({**whole, "param_groups": [{**optimizer.param_groups[0], "params": [0]}]})
    counts = [float(optimizer.state[model.weight]["step"])]
    zc.save(path, model, optimizer)
    for load in (lambda: None, lambda: zc.load(path, model, optimizer)):
        load()
        model(x).sum().backward()
        optimizer.step()
        counts.append(float(optimizer.state[model.weight]["step"]))
    return counts


def test_a_rank_that_has_nothing_takes_counts_from_a_load(tmp_path: Path) -> None:
    assert run_ranks(_load_where_nothing_is, 2, tmp_path / "a") == [[7.0, 8.0, 8.0]] * 2
