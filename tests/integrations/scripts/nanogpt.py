"""In the manner of nanoGPT's train.py: one flat script, tokens from one array, a learning rate set by hand,
microbatches, clipping, a checkpoint of plain torch.save. zc: the lines marked so."""

from __future__ import annotations

import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import zc

BLOCK, WIDTH, VOCABULARY = 8, 16, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(batch, time, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, -1))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.ln = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        other = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ddp", "zc"), required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", required=True)
    parser.add_argument("--max-iters", type=int, default=6)
    parser.add_argument("--save-at", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, microbatches, grad_clip = dist.get_rank(), 2, 1.0
    torch.manual_seed(1337)
    data = torch.randint(VOCABULARY, (4096,), generator=torch.Generator().manual_seed(2))
    raw_model = GPT()
    checkpoint, iteration = None, 0
    path = os.path.join(args.out, "ckpt.pt")
    if args.resume:
        checkpoint = torch.load(path, weights_only=True)
        raw_model.load_state_dict(checkpoint["model"])
        iteration = checkpoint["iter_num"]
    optimizer = raw_model.configure_optimizers()
    model: nn.Module
    if args.engine == "zc":
        model, optimizer = zc.compile(raw_model, optimizer, stage=1, backend=args.backend)  # zc
    else:
        model = DistributedDataParallel(raw_model)
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ctx = torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=False)

    def get_batch(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * number + rank)
        at = torch.randint(len(data) - BLOCK - 1, (3,), generator=generator)
        return tuple(torch.stack([data[i + s : i + s + BLOCK] for i in at]) for s in (0, 1))  # type: ignore[return-value]

    while iteration < args.max_iters:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * iteration / args.max_iters))
        if iteration == args.save_at and not args.resume:
            state = raw_model.state_dict()
            of_optimizer = optimizer.state_dict() if args.engine == "ddp" else zc.full_optimizer_state(model, optimizer)
            if rank == 0:
                torch.save({"model": state, "optimizer": of_optimizer, "iter_num": iteration}, path)
        for micro in range(microbatches):
            is_last = micro == microbatches - 1
            no_sync = zc.no_sync if args.engine == "zc" else DistributedDataParallel.no_sync  # zc
            with contextlib.nullcontext() if is_last else no_sync(model), ctx:  # type: ignore[arg-type]
                _, loss = model(*get_batch(microbatches * iteration + micro))
                scaler.scale(loss / microbatches).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iteration += 1
    if rank == 0:
        torch.save({"model": raw_model.state_dict()}, os.path.join(args.out, "end.pt"))
    dist.barrier()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
    dist.destroy_process_group()
