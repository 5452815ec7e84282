"""In the manner of pytorch/examples' dcgan: two networks with an optimizer each that train in turn, on real pictures,
on made ones, then the generator through the discriminator. zc: the lines marked so."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zc

NOISE = 6


def weights_init(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.1)
        nn.init.zeros_(module.bias)


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    ).apply(weights_init)


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
        nn.Sigmoid(),
    ).apply(weights_init)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ddp", "zc"), required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--save-at", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, path, first = dist.get_rank(), os.path.join(args.out, "gan.pt"), 0
    torch.manual_seed(7)
    nets: dict[str, nn.Module] = {"d": discriminator(), "g": generator()}
    optimizers = {k: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for k, net in nets.items()}
    plain = dict(nets)
    for name in nets:
        if args.engine == "zc":
            nets[name], optimizers[name] = zc.compile(nets[name], optimizers[name], backend=args.backend)  # zc
        else:
            nets[name] = DistributedDataParallel(nets[name])
    if args.resume:
        saved = torch.load(path, weights_only=True)
        first = saved["step"]
        for name in nets:
            plain[name].load_state_dict(saved[name])
            optimizers[name].load_state_dict(saved[f"optimizer_{name}"])
    criterion = nn.BCELoss()
    for step in range(first, args.steps):
        draw = torch.Generator().manual_seed(100 * step + rank)
        real = torch.randn(4, 3, 8, 8, generator=draw).tanh()
        noise = torch.randn(4, NOISE, 1, 1, generator=draw)
        # the discriminator, on real and on made pictures
        optimizers["d"].zero_grad()
        criterion(nets["d"](real), torch.ones(4)).backward()
        fake = nets["g"](noise)
        criterion(nets["d"](fake.detach()), torch.zeros(4)).backward()
        optimizers["d"].step()
        # the generator, which wants them to be taken for real
        optimizers["g"].zero_grad()
        criterion(nets["d"](fake), torch.ones(4)).backward()
        optimizers["g"].step()
        if step + 1 == args.save_at and not args.resume:
            states = {}
            for name in nets:
                if args.engine == "zc":
                    states[f"optimizer_{name}"] = zc.full_optimizer_state(nets[name], optimizers[name])  # zc
                else:
                    states[f"optimizer_{name}"] = optimizers[name].state_dict()
            if rank == 0:
                torch.save({**{k: net.state_dict() for k, net in plain.items()}, **states, "step": step + 1}, path)
    if rank == 0:
        weights = {f"{k}.{name}": value for k, net in plain.items() for name, value in net.state_dict().items()}
        torch.save({"model": weights}, os.path.join(args.out, "end.pt"))
    dist.barrier()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
    dist.destroy_process_group()
