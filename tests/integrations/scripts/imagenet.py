"""In the manner of pytorch/examples' imagenet: a network with BatchNorm, SGD, a step schedule, epochs over a
DistributedSampler, validation summed over ranks, the best checkpoint kept. zc: the lines marked so."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zc


def network() -> nn.Module:
    torch.manual_seed(4)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*body, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def images(num: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(num, 3, 8, 8, generator=generator)
    return TensorDataset(pictures, torch.randint(5, (num,), generator=generator))


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, number: int) -> None:
        self.sum, self.count = self.sum + value * number, self.count + number

    def all_reduce(self) -> None:
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total[0].item(), int(total[1].item())

    @property
    def average(self) -> float:
        return self.sum / self.count


def accuracy(output: Tensor, target: Tensor) -> float:
    return (output.argmax(1) == target).float().mean().item()


def train(loader: Any, model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for pictures, target in loader:
        loss = criterion(model(pictures), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader: Any, model: nn.Module) -> float:
    top1 = AverageMeter()
    model.eval()
    with torch.no_grad():
        for pictures, target in loader:
            top1.update(accuracy(model(pictures), target), len(target))
    top1.all_reduce()
    return top1.average


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ddp", "zc"), required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = network()
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    if args.engine == "zc":
        model, optimizer = zc.compile(model, optimizer, backend=args.backend)  # zc
    else:
        model = DistributedDataParallel(model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    criterion = nn.CrossEntropyLoss()
    start, best, path = 0, -1.0, os.path.join(args.out, "checkpoint.pth.tar")
    if args.resume:
        checkpoint = torch.load(path, weights_only=True)
        start, best = checkpoint["epoch"], checkpoint["best"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    training, held_out = images(26, 1), images(10, 2)
    sampler: DistributedSampler[Any] = DistributedSampler(training)
    train_loader = DataLoader(training, batch_size=4, sampler=sampler)
    val_loader = DataLoader(held_out, batch_size=4, sampler=DistributedSampler(held_out, shuffle=False, drop_last=True))
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        top1 = validate(val_loader, model)
        scheduler.step()
        is_best, best = top1 > best, max(top1, best)
        of_optimizer = optimizer.state_dict() if args.engine == "ddp" else zc.full_optimizer_state(model, optimizer)
        if dist.get_rank() == 0 and not (args.resume or epoch == args.epochs - 1):
            state = {"epoch": epoch + 1, "best": best, "state_dict": model.state_dict(), "optimizer": of_optimizer}
            torch.save({**state, "scheduler": scheduler.state_dict()}, path)
            if is_best:
                shutil.copyfile(path, os.path.join(args.out, "model_best.pth.tar"))
    if dist.get_rank() == 0:
        weights = getattr(model, "module", model).state_dict()
        torch.save({"model": weights, "best": best}, os.path.join(args.out, "end.pt"))
    dist.barrier()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
    dist.destroy_process_group()
