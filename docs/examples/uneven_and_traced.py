"""torchrun --nproc-per-node 2 docs/examples/uneven_and_traced.py --out out/trace

Ranks with different numbers of batches, and a trace in which each reduction and gather has its name."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile

import zc

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo" if args.cpu else None)
rank = dist.get_rank()
device = torch.device("cpu" if args.cpu else f"cuda:{rank}")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
model, optimizer = zc.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
batches = [torch.randn(4, 8, device=device) for _ in range(3 + rank)]

# streams of a CPU are threads, which a profile leaves out unless it is told to look at all
threads = torch.profiler._ExperimentalConfig(profile_all_threads=True) if args.cpu else None
with profile(experimental_config=threads) as seen:
    for batch in zc.join(model, batches):
        if batch is not None:
            model(batch).square().mean().backward()
        zc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
Path(args.out).mkdir(parents=True, exist_ok=True)
seen.export_chrome_trace(f"{args.out}/rank{rank}.json")
dist.destroy_process_group()
