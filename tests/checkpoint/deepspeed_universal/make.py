"""How ``zero/`` beside this file was made, by DeepSpeed 0.19.8 on two ranks (CPU, gloo, ZeRO-2, torch 2.13):

torchrun --nproc_per_node 2 make.py OUT
python -m deepspeed.checkpoint.ds_to_universal --input_folder OUT/t --output_folder . --inject_missing_state
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def main() -> None:
    import deepspeed

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    engine.save_checkpoint(sys.argv[1], tag="t")


if __name__ == "__main__":
    main()
