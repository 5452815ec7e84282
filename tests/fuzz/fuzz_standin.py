# In place of zc, under the same names: DistributedDataParallel, or one process's plain PyTorch where there is one rank.
import copy

import torch
from torch.nn.parallel import DistributedDataParallel


class WithDdp:
    """A fuzz script calls it as it calls zc, so that one text runs with both."""

    def compile(self, model, optimizer, **options):
        self.model = model
        self.recompile(model)
        return self, optimizer

    def recompile(self, model):
        self.wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def __call__(self, *args):
        return self.wrapped(*args)

    def no_sync(self, model):
        return self.wrapped.no_sync()

    def clip_grad_norm_(self, model, max_norm):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def full_grad(self, model):
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    def synchronize(self, model):
        pass

    def save(self, path, model, optimizer):
        self.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def load(self, path, model, optimizer):
        for held, state in zip((model, optimizer), copy.deepcopy(self.saved), strict=True):
            held.load_state_dict(state)
