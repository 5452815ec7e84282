"""What a program's numbers should be: float64, plain PyTorch, one process that knows no ranks but as a list.

The rule is DDP's with find_unused_parameters: a gradient is the mean over ranks of the sum over backward calls; a
parameter that no rank has used since its gradient became None keeps None, and the optimizer leaves it alone. Nothing
of zc is imported here, and nothing of torch.distributed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import fuzz_models
import fuzz_optimizers
import torch
import torch.nn.functional as F
from fuzz_program import FULL_CLEARS, PART, ZEROS, Launch, Op, Program, suffix
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Wanted:
    """``notes[rank][operation]``, the weights after the loop, and how far each has travelled: the sum of the norms of
    its changes, which is the scale of an error in it. ``loose``: (operation, rank) that DDP leaves to chance."""

    notes: list[dict[int, Any]]
    weights: dict[str, Tensor]
    travelled: dict[str, float] = field(default_factory=dict)
    loose: set[tuple[int, int]] = field(default_factory=set)


def run(program: Program) -> Wanted:
    """Of all its models, each by itself: they share nothing but the ranks."""
    most = max(which.world_size for which in program.launches)
    wanted = Wanted([{} for _ in range(most)], {})
    for number, part in enumerate(program.parts):
        outcome, first = _Reference(part, most).run(), PART * number
        for notes, more in zip(wanted.notes, outcome.notes, strict=True):
            notes.update({first + k: value for k, value in more.items()})
        wanted.weights.update({suffix(number) + name: value for name, value in outcome.weights.items()})
        wanted.travelled.update({suffix(number) + name: value for name, value in outcome.travelled.items()})
        wanted.loose |= {(first + k, rank) for k, rank in outcome.loose}
    return wanted


class _Reference:
    def __init__(self, program: Program, most: int) -> None:
        self.program = program
        self.wanted = Wanted([{} for _ in range(most)], {})
        self.start(program.launches[0])
        self.wanted.travelled = dict.fromkeys(self.params, 0.0)

    def start(self, launch: Launch) -> None:
        self.world_size = launch.world_size
        self.broadcasts = launch.options.get("broadcast_buffers", True)
        names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint}
        names.update(DTYPE=torch.float64, WIDE=torch.float64)
        text = fuzz_models.text({**self.program.model, "frozen": launch.frozen})
        text += "\n\n" + fuzz_optimizers.classes(self.program.optimizer)
        exec(compile(text, "<reference>", "exec"), names)
        torch.manual_seed(0)
        self.model = names["Net"]().double()
        self.loss = names["loss"]
        self.params = dict(self.model.named_parameters())
        # a module a rank, for its buffers; the parameters are everyone's
        self.models = [self.model] + [_sharing(self.model) for _ in range(self.world_size - 1)]
        self.optimizer = eval(self.program.optimizer, {**names, "params": list(self.model.parameters())})
        self.grads: dict[str, Tensor | None] = dict.fromkeys(self.params)
        self.hooked = dict.fromkeys(self.params, 1.0)
        self.losses: dict[int, list[Tensor]] = {}
        self.syncs_buffers = True  # DDP: unless the forward before was under no_sync or no_grad
        self.kept: Any = None
        self.saved: Any = None

    def run(self) -> Wanted:
        for k, (kind, args) in enumerate(self.program.ops):
            before = {name: p.detach().clone() for name, p in self.params.items()}
            getattr(self, f"do_{kind}")(k, args)
            for name, p in self.params.items():
                self.wanted.travelled[name] += torch.linalg.vector_norm(p.detach() - before[name]).item()
        self.wanted.weights = {name: p.detach().clone() for name, p in self.params.items()}
        return self.wanted

    def note(self, k: int, values: list[Any]) -> None:
        """One value a rank."""
        for notes, value in zip(self.wanted.notes[: self.world_size], values, strict=True):
            notes[k] = copied(value)

    # --- forwards and backwards ---

    def forward(self, rank: int, args: dict[str, Any], more: int = 0) -> Tensor:
        total: Tensor = self.loss(self.models[rank], rank, args["seed"] + more, args["rows"], args["use"])
        total = total * args.get("scale", 1.0)
        for p in self.params.values() if args.get("penalty") else ():
            total = total + args["penalty"] * p.square().sum()
        return total

    def sync_buffers(self, *, next_time: bool) -> None:
        if self.syncs_buffers and self.broadcasts:
            for model in self.models[1:]:
                for mine, first in zip(model.buffers(), self.model.buffers(), strict=True):
                    mine.copy_(first)
        self.syncs_buffers = next_time

    def add(self, loss: Tensor, retain: bool = False) -> None:
        """One rank's backward."""
        for p in self.params.values():
            p.grad = None
        loss.backward(retain_graph=retain)
        for name, p in self.params.items():
            if p.grad is not None:
                part = p.grad * (self.hooked[name] / self.world_size)
                before = self.grads[name]
                self.grads[name] = part if before is None else before + part
            p.grad = None

    def total(self, args: dict[str, Any]) -> list[Tensor]:
        return [torch.stack([self.losses[j][rank] for j in args["of"]]).sum() for rank in range(self.world_size)]

    def do_forward(self, k: int, args: dict[str, Any]) -> None:
        self.sync_buffers(next_time=not args["quiet"])
        self.losses[k] = [self.forward(rank, args) for rank in range(self.world_size)]
        self.note(k, self.losses[k])

    def do_backward(self, k: int, args: dict[str, Any]) -> None:
        for loss in self.total(args):
            self.add(loss, args["retain"])

    def do_micro(self, k: int, args: dict[str, Any]) -> None:
        self.sync_buffers(next_time=not args["quiet"])
        for rank, count in enumerate(args["reps"]):
            for m in range(count):
                self.add(self.forward(rank, args, m))

    def do_raise(self, k: int, args: dict[str, Any]) -> None:
        """What it has left is cleared by the next operation."""

    def do_collective(self, k: int, args: dict[str, Any]) -> None:
        self.note(k, [torch.stack(self.total(args)).sum()] * self.world_size)

    def do_peek(self, k: int, args: dict[str, Any]) -> None:
        param = self.params[args["name"]]
        grads = [torch.autograd.grad(t, param, retain_graph=True, allow_unused=True)[0] for t in self.total(args)]
        self.note(k, [None if g is None else g * self.hooked[args["name"]] for g in grads])

    def do_evaluate(self, k: int, args: dict[str, Any]) -> None:
        self.sync_buffers(next_time=False)
        for model in self.models:
            model.eval()
        with torch.no_grad():
            self.note(k, [self.forward(rank, args) for rank in range(self.world_size)])
        for model in self.models:
            model.train()
        self.leave_to_chance(k)

    def leave_to_chance(self, k: int) -> None:
        """Ranks whose buffers will be rank 0's, and are not yet."""
        for rank, model in enumerate(self.models):
            pairs = zip(model.buffers(), self.model.buffers(), strict=True)
            if self.broadcasts and any(not torch.equal(mine, first) for mine, first in pairs):
                self.wanted.loose.add((k, rank))

    # --- gradients ---

    def do_zero(self, k: int, args: dict[str, Any]) -> None:
        how = args["how"]
        chosen = self.params.items()
        if how == "one":
            chosen = {args["name"]: self.params[args["name"]]}.items()
        elif how == "part":
            part = {id(p) for p in getattr(self.model, f"b{args['block']}").parameters()}
            chosen = {name: p for name, p in self.params.items() if id(p) in part}.items()
        for name, p in chosen:
            if how in ZEROS and self.grads[name] is not None:
                self.grads[name] = torch.zeros_like(p)
            elif how not in ZEROS:
                self.grads[name] = None
        assert how in (*FULL_CLEARS, *ZEROS, "one", "part"), how

    def do_clip(self, k: int, args: dict[str, Any]) -> None:
        there = {name: g for name, g in self.grads.items() if g is not None}
        order = float("inf") if args["how"] == "stock_inf" else 2.0
        norm = torch.linalg.vector_norm(
            torch.cat([g.flatten() for g in there.values()]) if there else torch.zeros(1), order
        )
        self.note(k, [norm] * self.world_size)
        factor = min(1.0, args["max_norm"] / (norm.item() + 1e-6))
        self.grads.update({name: g * factor for name, g in there.items()})

    def do_grads(self, k: int, args: dict[str, Any]) -> None:
        self.note(k, [self.grads] * self.world_size)

    def do_norms(self, k: int, args: dict[str, Any]) -> None:
        norms = [None if g is None else torch.linalg.vector_norm(g) for g in self.grads.values()]
        self.note(k, [norms] * self.world_size)

    def do_weights(self, k: int, args: dict[str, Any]) -> None:
        self.note(k, [self.params] * self.world_size)

    def do_buffers(self, k: int, args: dict[str, Any]) -> None:
        self.note(k, [dict(model.named_buffers()) for model in self.models])
        self.leave_to_chance(k)

    def do_step(self, k: int, args: dict[str, Any]) -> None:
        for name, p in self.params.items():
            grad = self.grads[name]
            p.grad = None if grad is None else grad.clone()
        self.optimizer.step()
        for p in self.params.values():
            p.grad = None

    # --- the rest ---

    def do_lr(self, k: int, args: dict[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def do_hook(self, k: int, args: dict[str, Any]) -> None:
        self.hooked[args["name"]] *= 0.5

    @torch.no_grad()
    def do_write(self, k: int, args: dict[str, Any]) -> None:
        if args["what"] == "fill":
            self.params[args["name"]].fill_(0.125)
            return
        for p in self.params.values():  # those of the optimizer's groups are the same ones
            p.copy_(p.clamp(-0.25, 0.25) if args["what"] == "clamp" else p * 0.5)

    def do_by_hand(self, k: int, args: dict[str, Any]) -> None:
        change = {
            "clamp": lambda g: g.clamp(-0.05, 0.05), "zeros": torch.zeros_like, "add": lambda g: g + 0.01,
        }.get(args["how"], lambda g: 0.5 * g)  # fmt: skip
        self.grads.update({name: change(g) for name, g in self.grads.items() if g is not None})

    def do_reset(self, k: int, args: dict[str, Any]) -> None:
        if args["how"] in ("pop", "empty"):
            self.optimizer.state.pop(self.params[args["name"]], None)
        elif args["how"] == "clear":
            self.optimizer.state.clear()
        for state in self.optimizer.state.values() if args["how"] == "zeros" else ():
            state.update({key: 0 * value if isinstance(value, Tensor) else value for key, value in state.items()})

    def do_leave(self, k: int, args: dict[str, Any]) -> None:
        self.note(k, [list(self.params.values())] * self.world_size)

    @torch.no_grad()
    def do_buffers_written(self, k: int, args: dict[str, Any]) -> None:
        for rank, model in enumerate(self.models):
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer += 0.125 * rank

    def do_replace(self, k: int, args: dict[str, Any]) -> None:
        name = f"b{args['block']}"
        torch.manual_seed(args["seed"])
        new = nn.Linear(args["dim"], args["dim"]).double()
        for model in self.models:
            setattr(model, name, new)
        self.params = dict(self.model.named_parameters())
        self.hooked.update({each: 1.0 for each in self.params if each.startswith(f"{name}.")})
        self.optimizer.add_param_group({"params": list(new.parameters())})

    def do_snapshot(self, k: int, args: dict[str, Any]) -> None:
        self.kept = [copy.deepcopy(model.state_dict()) for model in self.models]

    def do_restore(self, k: int, args: dict[str, Any]) -> None:
        for model, state in zip(self.models, self.kept, strict=True):
            model.load_state_dict(state)

    def do_save(self, k: int, args: dict[str, Any]) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def do_load(self, k: int, args: dict[str, Any]) -> None:
        """Buffers are rank 0's, also where each rank had its own."""
        state, of_optimizer = copy.deepcopy(self.saved)
        for model in self.models:
            model.load_state_dict(state)
        self.optimizer.load_state_dict(of_optimizer)

    def do_relaunch(self, k: int, args: dict[str, Any]) -> None:
        self.do_save(k, args)
        saved = self.saved
        self.start(next(launch for launch in self.program.launches if launch.start == k + 1))
        self.saved = saved
        self.do_load(k, args)
        self.saved = None

    def do_freeze(self, k: int, args: dict[str, Any], on: bool = False) -> None:
        for model in self.models:
            getattr(model, f"b{args['block']}").requires_grad_(on)

    def do_thaw(self, k: int, args: dict[str, Any]) -> None:
        self.do_freeze(k, args, on=True)


def _sharing(model: nn.Module) -> nn.Module:
    """Another module with the same parameters, and buffers of its own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def copied(value: Any) -> Any:
    """``value`` with its tensors in float64, detached, as they are now."""
    if isinstance(value, Tensor):
        return value.detach().double().clone()
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if isinstance(value, list) else value


__all__ = ["Op", "Wanted", "copied", "run"]
