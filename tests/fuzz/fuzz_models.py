"""Random small models, as the text of a class: what the ranks run, what the reference runs, and what a script shows.

A model is data, ``{"dim", "tokens", "blocks": [[kind, block whose weight it shares or None], ...], "heads": [width or
"tied", ...], "frozen": [block, ...]}``: blocks map [rows, dim] to [rows, dim], heads end it. All functions are
smooth (but one max pooling), so that float32 and float64 don't take different branches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Model = Mapping[str, Any]
VOCAB = 11

CLAMP = "self.b{i}.weight.data.clamp_(-0.25, 0.25)\n"  # what ranks may do once or several times
# kind -> (what the block is, what it does to x); {i}: its number, {d}: dim
BLOCKS: dict[str, tuple[str, str]] = {
    "linear": ("nn.Linear({d}, {d})", "x = torch.tanh(self.b{i}(x))"),
    "residual": ("nn.Linear({d}, {d}, bias=False)", "x = x + F.gelu(self.b{i}(x))"),
    "norm": ("nn.LayerNorm({d}, eps=0.01)", "x = self.b{i}(x)"),
    "batchnorm": ("nn.BatchNorm1d({d}, eps=0.1)", "x = self.b{i}(x)"),
    "conv": ("nn.Conv1d(1, 3, 3, padding=1)", "x = torch.tanh(self.b{i}(x.unsqueeze(1))).mean(1)"),
    "conv2d": ("nn.Conv2d(1, 2, 3, padding=1)", "x = torch.tanh(self.b{i}(x.view(-1, 1, 1, {d}))).mean(1).flatten(1)"),
    "pool": ("nn.Conv1d(1, 2, 3, padding=1)", "x = F.max_pool1d(self.b{i}(x.unsqueeze(1)), 3, 1, 1).mean(1)"),
    "twice": ("nn.Linear({d}, {d})", "x = torch.tanh(self.b{i}(torch.tanh(self.b{i}(x))))"),
    "scalar": ("nn.Parameter(torch.tensor(0.75))", "x = x * self.b{i}"),
    "shift": ("nn.Parameter(torch.full((1, {d}), 0.25))", "x = x + self.b{i}"),
    "empty": ("nn.Parameter(torch.zeros(0, 3))", "x = x + self.b{i}.sum()"),
    "strided": ("nn.Parameter((0.5 * torch.randn({d}, {d})).t())", "x = torch.tanh(x @ self.b{i})"),
    "unused": ("nn.Linear(3, {d})", ""),
    "disabled": ("nn.Linear({d}, {d})", "x = self.disabled{i}(x)"),
    "break": ("nn.Linear({d}, {d})", "x = torch.tanh(self.b{i}(x))\ntorch._dynamo.graph_break()"),
    "checkpoint": ("nn.Linear({d}, {d})", "x = torch.tanh(checkpoint(self.b{i}, x, use_reentrant=False))"),
    "reentrant": ("nn.Linear({d}, {d})", "x = torch.tanh(checkpoint(self.b{i}, x, use_reentrant=True))"),
    "fault": ("", "x = self.fault{i}(x)"),
    "average": ("nn.Buffer(torch.zeros({d}))", "x = self.average{i}(x)"),
    "state": ("nn.Buffer(torch.zeros({d}))", "x = self.state{i}(x)"),
    "clamped": ("nn.Linear({d}, {d})", CLAMP + "x = torch.tanh(self.b{i}(x))"),
    "clamped apart": ("nn.Linear({d}, {d})", "x = self.clamped{i}(x)"),
    "clamped late": ("nn.Linear({d}, {d})", "x = self.late{i}(x)"),
    "keeps": ("nn.Linear({d}, {d})", "x = self.keeps{i}(x)"),
}
BARE = ("fault", "average", "state")  # kinds without a parameter
# Of one row, torch.compile (2.13) computes the average again in the backward, from the buffer that has changed by then:
# Inductor's gradients are wrong by 17 %, with and without zc (pytorch#197039). So programs give these three rows.
BUFFERED = ("batchnorm", "average", "state")
WRITING = ("clamped", "clamped apart", "clamped late")  # kinds whose passes write a weight: all ranks must run them
SHARES = ("linear", "twice", "disabled", "break", "checkpoint")  # kinds whose weight may be another one's
NARROW = (
    "batchnorm",
    "average",
    "state",
    "conv",
    "conv2d",
    "pool",
)  # kinds that a model of half precision does without
METHODS = {
    "disabled": "@torch.compiler.disable\ndef disabled{i}(self, x):\n    return torch.tanh(self.b{i}(x))",
    "average": "def average{i}(self, x):\n    if self.training:\n        with torch.no_grad():\n"
    "            self.b{i}.lerp_(x.mean(0), 0.5)\n    return x + self.b{i}",
    "state": "def state{i}(self, x):\n    y = x * (1 + self.b{i})\n    if self.training:\n"
    "        with torch.no_grad():\n            self.b{i}.lerp_(x.mean(0), 0.5)\n    return y",
    "clamped apart": f"@torch.compiler.disable\ndef clamped{{i}}(self, x):\n    {CLAMP}"
    "    return torch.tanh(self.b{i}(x))",
    "clamped late": "@torch.compiler.disable\ndef late{i}(self, x):\n    y = torch.tanh(self.b{i}(x))\n"
    "    if y.requires_grad:\n        y.register_hook(self.clamp{i})\n    return y\n\n"
    f"def clamp{{i}}(self, grad):\n    {CLAMP}",
    "keeps": "@torch.compiler.disable\ndef keeps{i}(self, x):\n    if hasattr(self, 'kept{i}'):\n"
    "        x = x + self.kept{i}.mean()\n    self.kept{i} = self.b{i}.weight.detach()\n"
    "    return torch.tanh(self.b{i}(x))",
    "fault": "@torch.compiler.disable\ndef fault{i}(self, x):\n    return Fault.apply(x)",
}
FAULT = '''class Fault(torch.autograd.Function):
    """The identity, whose backward raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fault.armed:
            raise FloatingPointError("planted")
        return grad
'''


def draw(rng: random.Random, *, narrow: bool, fault: bool, without: frozenset[str] = frozenset()) -> Model:
    """``narrow``: for parameters of half precision; ``fault``: has a block that can raise in the backward."""
    kinds = [kind for kind in BLOCKS if kind not in without and kind != "fault" and not (narrow and kind in NARROW)]
    weights = [3 if kind in ("linear", "residual", "twice") else 1 for kind in kinds]
    tokens = rng.random() < 0.25
    chosen = rng.choices(kinds, weights, k=rng.choice((1, 2, 2, 3, 3, 4)))
    if not any(kind in ("linear", "residual", "twice", "strided") for kind in chosen):
        chosen[0] = "linear"
    if fault:
        chosen.insert(rng.randrange(1, len(chosen) + 1), "fault")
    blocks: list[list[Any]] = []
    for kind in chosen:
        partners = [k for k, (other, _) in enumerate(blocks) if other in SHARES]
        shared = rng.choice(partners) if kind in SHARES and partners and rng.random() < 0.3 else None
        blocks.append([kind, shared])
    heads: list[Any] = [rng.randint(1, 3) for _ in range(rng.choice((0, 0, 1, 2, 2, 3)))]
    if tokens and rng.random() < 0.5 and "tied" not in without:
        heads.append("tied")
    frozen = []
    if not narrow and rng.random() < 0.3:
        frozen = [k for k in range(len(blocks)) if rng.random() < 0.4 and may_freeze(blocks, k)]
    model = {"dim": rng.choice((2, 3, 5, 7, 9)), "tokens": tokens, "blocks": blocks, "heads": heads, "frozen": frozen}
    if not trains(model, frozen):
        model["frozen"] = []
    if not trains(model, []):
        blocks[0][0] = "linear"
    return model


def trains(model: Model, frozen: Sequence[int]) -> bool:
    """Whether each loss has something to train, whatever heads it uses, with these blocks frozen; and each reentrant
    checkpoint an input that wants a gradient, without which eager PyTorch drops its gradients, and compiled doesn't."""
    wants = bool(model["tokens"])
    for k, (kind, _) in enumerate(model["blocks"]):
        if kind == "reentrant" and not wants:
            return False
        wants = wants or (k not in frozen and kind not in ("unused", *BARE))
    return wants


def may_freeze(blocks: Sequence[Sequence[Any]], k: int) -> bool:
    """A module whose parameters are nobody else's."""
    kind, shared = blocks[k]
    is_partner = any(other == k for _, other in blocks)
    return kind not in (*BARE, "scalar", "shift", "strided", "empty") and shared is None and not is_partner


def trainable(model: Model) -> list[str]:
    """Names of the parameters that get a gradient at some time, tied ones once; without those of frozen blocks."""
    names = ["embed.weight"] if model["tokens"] else []
    for k, (kind, shared) in enumerate(model["blocks"]):
        if k in model["frozen"] or kind in BARE:
            continue
        if BLOCKS[kind][0].startswith("nn.Parameter"):
            names.append(f"b{k}")
            continue
        names += [f"b{k}.weight"] if shared is None else []
        names += [f"b{k}.bias"] if kind != "residual" else []
    for k, width in enumerate(model["heads"]):
        names += [f"head{k}.weight", f"head{k}.bias"] if width != "tied" else []
    return names


def has(model: Model, *kinds: str) -> bool:
    return any(kind in kinds for kind, _ in model["blocks"])


def text(model: Model) -> str:
    """The class ``Net`` and the function ``loss``."""
    dim, lines, run, methods = model["dim"], [], [], []
    if model["tokens"]:
        lines.append(f"self.embed = nn.Embedding({VOCAB}, {dim})")
        run.append("x = self.embed(x)")
    for i, (kind, shared) in enumerate(model["blocks"]):
        what, does = (part.format(i=i, d=dim) for part in BLOCKS[kind])
        if what:
            lines.append(f"self.b{i} = {what}")
        if shared is not None:
            lines.append(f"self.b{i}.weight = self.b{shared}.weight")
        if i in model["frozen"]:
            lines.append(f"self.b{i}.requires_grad_(False)")
        run += does.splitlines()
        if kind in METHODS:
            methods.append(METHODS[kind].format(i=i))
    for k, width in enumerate(model["heads"]):
        lines.append(f"self.head{k} = nn.Linear({dim}, {VOCAB if width == 'tied' else width}, bias={width != 'tied'})")
        if width == "tied":
            lines.append(f"self.head{k}.weight = self.embed.weight")
    run.append("return [getattr(self, f'head{k}')(x) for k in use] or [x]" if model["heads"] else "return [x]")
    parts = [
        "def __init__(self):\n    super().__init__()\n" + _indent(lines),
        *methods,
        "def forward(self, x, use):\n" + _indent(run),
    ]
    net = "class Net(nn.Module):\n" + "\n\n".join(_indent(part.splitlines()) for part in parts) + "\n"
    drawn = f"torch.randint(0, {VOCAB}, (rows[rank],), generator=g)" if model["tokens"] else (
        f"torch.randn(rows[rank], {dim}, generator=g).bfloat16().to(DTYPE)"
    )  # fmt: skip
    return (FAULT + "\n\n" if has(model, "fault") else "") + net + LOSS.format(drawn=drawn)


LOSS = '''

def loss(net, rank, seed, rows, use):
    """A mean over ``rows[rank]`` samples for each head in ``use[rank]``, drawn from the seed and the rank."""
    g = torch.Generator().manual_seed(100 * seed + rank)
    total = 0
    for out in net({drawn}, use[rank]):
        total = total + (out.to(WIDE) - torch.randn(out.shape, generator=g).bfloat16()).square().mean()
    return total
'''


def _indent(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" if line else line for line in lines)
