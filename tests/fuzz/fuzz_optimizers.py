"""The optimizers of programs: torch's, and classes of users' own, which zc knows nothing of. A program has the call as
text, whose parameters are the list ``params``; the classes are text too, for the reference and the ranks to execute.
"""

from __future__ import annotations

import random

TORCHS = (
    "torch.optim.SGD({params}, lr=0.1)",
    "torch.optim.SGD({params}, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "torch.optim.SGD({params}, lr=0.05, momentum=0.9, nesterov=True, maximize=True)",
    "torch.optim.AdamW({params}, lr=0.05, eps=0.1, weight_decay=0.1)",
    "torch.optim.Adam({params}, lr=0.05, eps=0.1, amsgrad=True)",
    "torch.optim.Adagrad({params}, lr=0.05, eps=0.1)",
    "torch.optim.RMSprop({params}, lr=0.02, eps=0.1, momentum=0.5)",
    "torch.optim.Adadelta({params}, lr=0.5, eps=0.1)",
)
OWN = (
    "Stacked({params}, lr=0.05, skips_empty=True)",
    "Stacked({params}, lr=0.05, skips_empty=True, by_shape=True)",
    "Stacked({params}, lr=0.05, by_shape=True)",
    "Bounded({params}, lr=0.05)",
)
PLAINEST = "torch.optim.SGD(params, lr=0.1)"
TWO_GROUPS = '[{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]'

CLASSES = {
    "Stacked": '''class Stacked(torch.optim.Optimizer):
    """SGD with one momentum for all parameters of a group, or all of one shape, stored under the first of them."""

    def __init__(self, params, lr, skips_empty=False, by_shape=False):
        super().__init__(params, {"lr": lr})
        self.skips_empty, self.by_shape = skips_empty, by_shape

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.requires_grad]
            if not params and self.skips_empty:
                continue
            stacks = [params]
            if params and self.by_shape:
                stacks = [[p for p in params if p.shape == shape] for shape in sorted({p.shape for p in params})]
            for stack in stacks:
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in stack]
                total = torch.stack(grads) if self.by_shape else torch.cat([grad.flatten() for grad in grads])
                state = self.state[stack[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(total)
                momentum = state["momentum"].mul_(0.9).add_(total)
                parts = momentum.unbind() if self.by_shape else momentum.split([p.numel() for p in stack])
                for p, part in zip(stack, parts, strict=True):
                    if p.grad is not None:
                        p.sub_(part.view(p.shape), alpha=group["lr"])
''',
    "Bounded": '''class Bounded(torch.optim.Optimizer):
    """SGD with momentum, and with a bound on each parameter's own update; one more state has another shape."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["size"], state["step"] = torch.zeros_like(p), p.new_zeros(1), 0
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                state["size"].lerp_(p.grad.square().sum(), 0.5)
                p.sub_(state["momentum"] / (1 + state["size"].sqrt().squeeze()), alpha=group["lr"])
''',
}


def draw(rng: random.Random, without: frozenset[str]) -> str:
    call = rng.choice(OWN if "own optimizer" not in without and rng.random() < 0.2 else TORCHS)
    two = "groups" not in without and rng.random() < 0.15
    two = two and (not is_stacked(call) or "skips_empty" in call)  # a model of one parameter has an empty second group
    return call.format(params=TWO_GROUPS if two else "params")


def reads_whole(optimizer: str) -> bool:
    """Whether zc gives it whole parameters: it knows nothing of users' own classes."""
    return not optimizer.startswith("torch.")


def is_stacked(optimizer: str) -> bool:
    """Whether one state belongs to several parameters."""
    return optimizer.startswith("Stacked")


def classes(*optimizers: str) -> str:
    """The text of the classes that they use."""
    used = [text for name, text in CLASSES.items() if any(call.startswith(name) for call in optimizers)]
    return "\n\n".join(used)
