"""torchrun --nproc-per-node 2 docs/examples/picture.py docs/backward.svg

Draws the schedule of one backward: a lane for each stream, a box for each operation, a line for each wait. The model is
four layers; each bucket is one of them. `zc.explain(model, format="html")` draws the same of any model, in a page."""

import os
import sys
from pathlib import Path

os.environ["ZC_HOST_MEMORY"] = "0"  # messages, as between hosts, also where ranks could read each other's memory

import torch
import torch.distributed as dist
from torch import nn

import zc
from zc.registry import sharded
from zc.report.html import WIDTH, picture
from zc.report.timeline import simulate

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
zc.compile(model, optimizer, backend="aot_eager", bucket_nbytes=4_198_400)  # bytes of one layer
model(torch.randn(64, 1024)).sum().backward()
(program,) = sharded(model).runtime.programs
drawn = picture(simulate(program.graph, program.plan))
if dist.get_rank() == 0:
    head, rest = drawn.split(">", 1)
    white = f'<rect width="{WIDTH}" height="100%" fill="#fff"/>'
    Path(sys.argv[1]).write_text(f'{head} font-family="sans-serif">\n{white}{rest}\n')
optimizer.step()
dist.destroy_process_group()
