"""Checkpoints in bench/train.py: goes on from the newest one, saves every few steps, logs the losses of all ranks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import zc


class Resume:
    """``checkpoints/step_<n>`` holds the state after n steps; ``losses.jsonl`` beside them one line a step."""

    def __init__(
        self, args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler
    ) -> None:
        self.folder, self.every, self.keep = args.checkpoints, args.save_every, args.keep
        self.asynchronous = args.async_save
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.saving: zc.Saving | None = None

    def first_step(self) -> int:
        """The step to go on with. Rank 0 says which checkpoint, lest two ranks see two folders."""
        checkpoints: list[Path | None] = [zc.latest(self.folder)]
        if dist.is_initialized():
            dist.broadcast_object_list(checkpoints, src=0)
        if checkpoints[0] is None:
            return 0
        extra = zc.load(checkpoints[0], self.model, self.optimizer)
        self.scheduler.load_state_dict(extra["scheduler"])
        return int(extra["step"])

    def after_step(self, step: int, loss: float, rank: int, world_size: int) -> None:
        mean = torch.tensor(loss, dtype=torch.float64)
        if world_size > 1:
            dist.all_reduce(mean)
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            line = {"step": step, "loss": float(mean) / world_size, "world_size": world_size, "pid": os.getpid()}
            with open(self.folder / "losses.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        if self.every and (step + 1) % self.every == 0:
            extra = {"step": step + 1, "scheduler": self.scheduler.state_dict()}
            name = self.folder / f"step_{step + 1}"
            self.saving = zc.save(
                name, self.model, self.optimizer, extra=extra, asynchronous=self.asynchronous, keep=self.keep
            )

    def finish(self) -> None:
        if self.saving is not None:
            self.saving.wait()
