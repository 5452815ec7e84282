"""Small parameters that lie side by side are one to torch's elementwise classes, and nobody sees it: the same bits as
plain PyTorch's, which updates each by itself, whatever the loop does to states and groups in between."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_cases
from torch import Tensor, nn
from torch.optim import Optimizer

import zc
from zc.optim.flat_slices import FlatSlices, are_same

SIZES = ((64,), (128,), (2, 64), (64,), (192,), (64,), (4, 48), (64,), (128,))  # two equal halves, cut between two
ODD = ((64,), (100,), (64,), (3,), (1, 64), (64,), (40,), ())
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam, AMSGrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
}  # fmt: skip


class Small(nn.Module):
    def __init__(self, sizes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.params = nn.ParameterList(nn.Parameter(torch.randn(size, generator=generator)) for size in sizes)
        self.unused: tuple[int, ...] = ()

    def forward(self) -> Tensor:
        used = [p for k, p in enumerate(self.params) if k not in self.unused]
        return torch.stack([((p + 1.5) ** 2).sum() + p.sin().sum() for p in used]).sum()


class Loop:
    """One model's steps, and the edits between them. `seen`: numbers that the loop has read of what it keeps."""

    def __init__(self, sizes: tuple[tuple[int, ...], ...], make: Callable[[Any], Optimizer], compiles: bool) -> None:
        self.model = Small(sizes)
        first, *rest = self.model.params
        self.optimizer = make([{"params": rest}, {"params": [first], "lr": 0.05}])
        if compiles:
            zc.compile(self.model, self.optimizer, backend="eager")
        self.compiles, self.kept = compiles, dict[Any, Any]()
        self.seen: list[Any] = []

    def steps(self, num: int) -> None:
        for _ in range(num):
            self.model().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> list[dict[str, Tensor]]:
        """Of each parameter, the tensors of its state."""
        state = self.optimizer.state
        return [{k: v for k, v in state.get(p, {}).items() if isinstance(v, Tensor)} for p in self.model.params]

    def take_turns(self) -> None:
        state, (one, two, *_) = self.optimizer.state, [p for p in self.model.params[1:] if p.shape == (64,)]
        if one in state:
            state[one], state[two] = state[two], state[one]
        self.steps(1)
        for unused in ((1,), (), (2, 3), (), (5,), (5,), (), (0, 1)):
            self.model.unused = unused
            self.steps(1)
        self.model.unused = ()

    def write_state(self) -> None:
        self.kept |= {k: self.tensors()[k] for k in (1, 2, 4)}
        self.steps(2)
        now = [value for k in self.kept for value in self.tensors()[k].values()]
        self.seen += [dist.get_world_size() > 1 or are_same(now, [v for i in self.kept.values() for v in i.values()])]
        for items in self.kept.values():
            for key, value in items.items():
                value.add_(3) if key == "step" else value.mul_(0.5)  # held since two steps
        self.steps(2)
        # a rank that owns nothing of a parameter shows numbers that it makes when it is asked
        tensors = [v for items in self.kept.values() for v in items.values() if v.dim() or dist.get_world_size() == 1]
        self.seen += [float(value.max()) for value in tensors]
        for k, p in enumerate(self.model.params):
            for key in [*self.optimizer.state.get(p, {})] if k in (2, 3, 6) else ():
                if isinstance(self.optimizer.state[p][key], Tensor):
                    self.optimizer.state[p][key] = torch.full_like(self.optimizer.state[p][key], 2.0)
        self.steps(2)

    def keep_more(self) -> None:
        """States of the loop's own: those of two that lie side by side differ, except for the last one's."""
        params, state = self.model.params, self.optimizer.state
        for k in (1, 2):
            state[params[k]]["mine"] = torch.full((3,), float(k))
        state[params[3]]["mine"] = torch.full_like(params[3], 3.0)
        for k, dtype in ((4, torch.float32), (5, torch.int64), (-1, torch.float32)):
            state[params[k]]["mine"] = torch.ones((), dtype=dtype)
        state[params[6]]["mine"] = state[params[7]]["mine"] = 1
        self.steps(2)
        if dist.get_world_size() == 1:
            self.seen += [str(state[params[k]]["mine"]) for k in (1, 2, 3, 4, 5, 6, -1)]

    def forget_state(self) -> None:
        for k in (1, 4):
            self.optimizer.state.pop(self.model.params[k], None)
        self.steps(2)
        self.seen.append([str(items.get("step")) for items in self.tensors()])
        self.optimizer.state.clear()
        self.steps(1)
        self.seen.append([str(items.get("step")) for items in self.tensors()])
        self.steps(1)

    def move_params(self) -> None:
        rest, other = self.optimizer.param_groups
        other["params"].append(rest["params"].pop(2))
        self.steps(1)
        rest["lr"] = rest["lr"] / 2
        rest["params"].reverse()
        self.steps(1)

    def load(self) -> None:
        state = self.optimizer.state_dict()
        before = copy.deepcopy(state)
        self.steps(2)
        self.optimizer.load_state_dict(before)
        self.steps(2)
        self.seen.append({str(item.get("step")) for item in state["state"].values()})  # of the tensors of before
        own = {k: {n: copy.deepcopy(v) for n, v in items.items()} for k, items in before["state"].items()}
        self.optimizer.load_state_dict({**before, "state": own})  # each tensor alone in its memory
        del own
        self.steps(2)
        for items in self.optimizer.state_dict()["state"].values() if self.compiles else ():
            items.update(dict.fromkeys(items, torch.tensor(99.0)))  # dicts of the caller's

    def interrupt(self) -> None:
        """Ctrl-C as the class's step begins; then the loop looks at states and goes on."""
        self.model().backward()
        if self.compiles:
            with pytest.MonkeyPatch.context() as patch:
                enter = FlatSlices.enter

                def interrupted(flat: FlatSlices, groups: Any) -> None:
                    enter(flat, groups)
                    raise KeyboardInterrupt

                patch.setattr(FlatSlices, "enter", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    self.optimizer.step()
        self.seen.append([sorted(items) for items in self.tensors()])
        self.seen.append(sorted({key for items in self.optimizer.state_dict()["state"].values() for key in items}))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps(1)

    EDITS = (interrupt, take_turns, write_state, keep_more, forget_state, move_params, load)


def differences(
    rank: int, world_size: int, name: str, sizes: tuple[tuple[int, ...], ...]
) -> tuple[list[str], dict[str, list[bool]]]:
    """Job: what differs from a plain loop, whose data all ranks have; of each edit, which steps took flat slices."""
    wrong: list[str] = []
    is_flat: dict[str, list[bool]] = {edit.__name__: [] for edit in Loop.EDITS}
    find = FlatSlices.find
    try:
        for edit in Loop.EDITS:
            record = is_flat[edit.__name__].append

            def recorded(self: FlatSlices, lists: Any, record: Any = record) -> bool:
                record(found := find(self, lists))
                return found

            FlatSlices.find = recorded  # type: ignore[method-assign, assignment]
            both = plain, compiled = [Loop(sizes, OPTIMIZERS[name], compiles) for compiles in (False, True)]
            for loop in both:
                loop.steps(2)
                edit(loop)
                loop.steps(1)
            wrong += [f"{edit.__name__}: {text}" for text in compared(plain, compiled)]
            zc.close(compiled.model)
    finally:
        FlatSlices.find = find  # type: ignore[method-assign]
    return wrong, is_flat


def compared(plain: Loop, compiled: Loop) -> list[str]:
    pairs = zip(plain.model.params, compiled.model.params, strict=True)
    wrong = [f"weight {k}" for k, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    wrong += [f"seen {plain.seen} {compiled.seen}"] if plain.seen != compiled.seen else []
    full = zc.full_optimizer_state(compiled.model, compiled.optimizer)
    expected = plain.optimizer.state_dict()["state"]
    if full is None:  # another rank than 0
        return wrong
    full = full["state"]
    wrong += [f"state of {sorted(full.keys() ^ expected.keys())}"] if full.keys() != expected.keys() else []
    for k in full.keys() & expected.keys():
        for key, value in expected[k].items():
            other = full[k][key]
            is_same = torch.equal(other, value) if isinstance(value, Tensor) else other == value
            wrong += [] if is_same else [f"{key} of {k}: {value} {other}"]
    return wrong


def check(world_size: int, cases: list[Any]) -> None:
    for case, ranks in run_cases(differences, world_size, cases):
        for wrong, is_flat in ranks:
            assert not wrong, (case, wrong)
            # a load gives new tensors, which may be moved; else those of before are views that follow each other
            steady = ["load", "move_params"]
            steady += ["write_state", "forget_state", "keep_more"] if world_size == 1 and case[1] is SIZES else []
            assert all(all(is_flat[name]) for name in steady) and any(is_flat["take_turns"]), (case, is_flat)


def test_whoever_asks_for_the_state_of_the_class_is_noticed() -> None:
    """Flat slices compare it only where `ShardedOptimizer.state_of_class` was asked for it."""
    product = Path(zc.__file__).parent
    reads = {path.name: len(re.findall(r"\blocal\.state\b", path.read_text())) for path in product.rglob("*.py")}
    assert {name: num for name, num in reads.items() if num and name != "flat_slices.py"} == {"optimizer.py": 2}


def test_classes() -> None:
    check(1, [(name, sizes) for name in OPTIMIZERS for sizes in (SIZES, ODD)])


def test_shards() -> None:
    check(2, [(name, SIZES) for name in ("SGD, Nesterov", "AdamW, fused", "NAdam")])
