# In place of zc, under the same names: DistributedDataParallel, or one process's plain PyTorch where there is one rank.
import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class WithDdp:
    """A fuzz script calls it as it calls zc, so that one text runs with both."""

    def __init__(self):
        self.wrapped, self.options = {}, {}  # by model

    def compile(self, model, optimizer, broadcast_buffers=True, **options):
        self.options[model] = {"broadcast_buffers": broadcast_buffers, "find_unused_parameters": True}
        self.recompile(model)
        return lambda *args: self.wrapped[model](*args), optimizer

    def recompile(self, model):
        self.wrapped[model] = DistributedDataParallel(model, **self.options[model])

    def no_sync(self, model):
        return self.wrapped[model].no_sync()

    def clip_grad_norm_(self, model, max_norm):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def full_grad(self, model):
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    def synchronize(self, model):
        pass

    def whole_parameters(self, model):
        return contextlib.nullcontext()

    def save(self, path, model, optimizer):
        if dist.get_rank() == 0:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save((model.state_dict(), optimizer.state_dict()), path)
        dist.barrier()

    def load(self, path, model, optimizer):
        state, of_optimizer = torch.load(path)
        model.load_state_dict(state)
        optimizer.load_state_dict(of_optimizer)
