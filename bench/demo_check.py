"""What the demo checks at its end: its model, data and optimizer, and what its loop does with a batch.

    python -m zc check bench.demo_check:make_bf16 --stage 1 --updates 1
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from bench import demo
from bench.cases import data
from bench.systems import AdamW
from bench.train import model_of, options_of, parse

MICROBATCHES, BATCH = 2, 2  # of a rank; one process runs those of all ranks three times


def make(dtype: str) -> dict[str, Any]:
    """The arguments of `zc.check`: the model as the demo begins, and this rank's first batches."""
    args = parse(f"{demo.MODEL} {demo.DTYPES[dtype]} --out unused".split())
    corpus = data.load(vocab=args.vocab)
    rank, microbatches = int(os.environ["RANK"]), range(MICROBATCHES)
    model = model_of(args, torch.device("cpu"))
    sizes = {"batch": BATCH, "seq": args.seq, "seed": args.seed}
    return {
        "step": step, "model": model, "optimizer": AdamW(args.lr, args.weight_decay).make(model),
        "batches": [data.train_batch(corpus.train, **sizes, step=k, rank=rank) for k in microbatches],
        "update": update, "updates": 1, "microbatches": MICROBATCHES,
        "param_dtype": options_of(args).compute_dtype,
    }  # fmt: skip


def make_bf16() -> dict[str, Any]:
    return make("bf16")


def make_fp32() -> dict[str, Any]:
    return make("fp32")


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
