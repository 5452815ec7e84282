"""torchrun --nproc-per-node 2 docs/examples/picture.py docs/backward.svg

Draws one step as it ran: a lane for each stream, a box for each operation, a line for each wait. The model is four
layers; each bucket is one of them. `zc.explain(model, format="html")` draws the same of any model, in a page."""

import os
import sys
from pathlib import Path

os.environ["ZC_HOST_MEMORY"] = "0"  # messages, as between hosts, also where ranks could read each other's memory

import torch
import torch.distributed as dist
from torch import nn

import zc
from zc.registry import sharded
from zc.report.html import STYLE, draw, measured

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
zc.compile(model, optimizer, backend="aot_eager", bucket_nbytes=4_198_400)  # bytes of one layer
for _ in range(4):  # zc clocks one step, once nothing is compiled any more
    model(torch.randn(512, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
runtime = sharded(model).runtime
step = runtime.streams.clock.step()
if dist.get_rank() == 0:
    tag, end, content = draw(measured(step, [*runtime.programs, *runtime.weights.programs])).partition(">")
    Path(sys.argv[1]).write_text(f"{tag}{end}<style>{STYLE}</style>{content}")  # the page has the style at its top
dist.destroy_process_group()
