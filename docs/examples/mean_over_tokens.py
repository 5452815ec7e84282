"""torchrun --nproc-per-node 2 docs/examples/mean_over_tokens.py"""

import torch
import torch.distributed as dist
from torch import nn

import zc

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
PADDED = -100


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))


def microbatch(rank, number):
    """Words and targets [4, 16]; rows end after 1 to 16 words, and the rest is padding."""
    g = torch.Generator().manual_seed(10 * rank + number)
    words, targets = torch.randint(50, (2, 4, 16), generator=g)
    lengths = torch.randint(1, 17, (4, 1), generator=g) // (1 + number)
    return words, targets.masked_fill(torch.arange(16) >= lengths, PADDED)


def loss_of(model, words, targets, reduction):
    return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.flatten(), reduction=reduction)


def counted(model, words, targets):
    zc.count(model, (targets != PADDED).sum())
    loss_of(model, words, targets, "sum").backward()


def mean_of_means(model, words, targets):
    (loss_of(model, words, targets, "mean") / 2).backward()


plain = make_model()  # one process, all tokens
everything = [microbatch(r, number) for r in range(num_ranks) for number in range(2)]
sums = sum(loss_of(plain, *each, "sum") for each in everything)
(sums / sum((targets != PADDED).sum() for _, targets in everything)).backward()

for name, backward in (("mean of means", mean_of_means), ("zc.count", counted)):
    model = make_model()
    zc.compile(model, torch.optim.AdamW(model.parameters()))
    for number in range(2):
        backward(model, *microbatch(rank, number))
    grads = zc.full_grad(model)
    difference = sum((grads[n] - p.grad).square().sum() for n, p in plain.named_parameters()).sqrt()
    norm = sum(p.grad.square().sum() for p in plain.parameters()).sqrt()
    if rank == 0:
        print(f"{name}: {difference / norm:.1e} away from the gradient of all tokens")
dist.destroy_process_group()
