"""The losses that every provider must show: one process, float64, plain eager PyTorch, all ranks' data in turn.

    python -m bench.cases.reference gpt30m-fp32

No code is shared with the systems that are checked, but for the model and the data. A reference is kept in
bench/results/references.json with a digest of what it was made from: flags, ranks and the corpus (the standard library
of this interpreter). It is made anew where the digest is another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path

import torch

from bench.cases import CASES, Case, data
from bench.cases.models import GPTConfig, make_model
from bench.measure import ROOT

KEPT = ROOT / "bench" / "results" / "references.json"
NUM_LOSSES = 6  # before any update, and after each of 5


def flags_of(case: Case) -> argparse.Namespace:
    from bench.train import parse

    return parse([*case.all_flags, "--out", "unused"])


def digest_of(case: Case, args: argparse.Namespace, corpus: data.Corpus) -> str:
    """What the losses depend on, device and dtype excepted: cases that differ in those share a reference."""
    names = ("model", "vocab", "seq", "layers", "width", "heads", "batch", "accum", "lr", "warmup", "weight_decay")
    key = {n: getattr(args, n) for n in names} | {"ranks": case.ranks, "steps": args.steps, "seed": args.seed}
    if args.optimizer != "adamw":
        key["optimizer"] = args.optimizer
    text = hashlib.sha256(corpus.train.numpy().tobytes()).hexdigest()
    return hashlib.sha256(json.dumps([key, text]).encode()).hexdigest()[:16]


def compute(case: Case, args: argparse.Namespace, corpus: data.Corpus) -> list[float]:
    """Mean loss over ranks and microbatches, nats a token, of NUM_LOSSES steps."""
    sizes = GPTConfig(args.vocab, args.seq, args.layers, args.width, args.heads)
    model = make_model(args.model, sizes, args.seed).double()
    named = dict(model.named_parameters())
    muons = [p for n, p in named.items() if args.optimizer == "muon" and n.startswith("blocks.") and p.dim() == 2]
    rest = [p for p in named.values() if all(p is not m for m in muons)]
    decayed = [p for p in rest if p.dim() >= 2]
    others = [p for p in rest if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), foreach=False)
    ]
    if muons:
        decay = args.weight_decay
        optimizers.append(torch.optim.Muon(muons, lr=args.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    losses = []
    for step in range(NUM_LOSSES):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = args.lr * _factor(step, args.warmup, args.steps)
        total = 0.0
        for micro in range(args.accum):
            for rank in range(case.ranks):
                x, y = data.train_batch(
                    corpus.train,
                    batch=args.batch,
                    seq=args.seq,
                    seed=args.seed,
                    step=step * args.accum + micro,
                    rank=rank,
                )
                loss = model(x, y) / (args.accum * case.ranks)
                total += float(loss.detach())
                if step < NUM_LOSSES - 1:
                    loss.backward()
        losses.append(total)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _factor(step: int, warmup: int, steps: int) -> float:
    """Linear up over ``warmup`` steps, then a cosine from 1 to 0.1 (written again: an oracle imports nothing)."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))


def reference(case: Case, kept: Path = KEPT) -> list[float]:
    """The case's losses, computed where they are not kept yet (a minute or more for 30 M parameters)."""
    args = flags_of(case)
    corpus = data.load(vocab=args.vocab)
    digest = digest_of(case, args, corpus)
    known: dict[str, list[float]] = json.loads(kept.read_text()) if kept.exists() else {}
    if digest not in known:
        known[digest] = compute(case, args, corpus)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return known[digest]


def disagreement(losses: list[float], expected: list[float], tolerance: float, communicates: bool) -> str | None:
    """Why no time of this run may be shown, or None. Without communication only the first loss is compared."""
    if len(losses) < len(expected):
        return f"{len(losses)} losses, the reference has {len(expected)}"
    for step, right in enumerate(expected if communicates else expected[:1]):
        if not abs(losses[step] - right) <= tolerance:
            return f"loss after {step} updates is {losses[step]:.5f}, float64 says {right:.5f}"
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not finite"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.cases.reference", description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="+", choices=CASES)
    for name in parser.parse_args().cases:
        print(name, " ".join(f"{loss:.6f}" for loss in reference(CASES[name])), flush=True)


if __name__ == "__main__":
    main()
