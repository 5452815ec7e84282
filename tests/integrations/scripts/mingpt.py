"""In the manner of pytorch/examples' minGPT-ddp: a Trainer class around the loop, and snapshots that it takes up by
itself where it finds one. zc: the lines marked so."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import zc


class CharModel(nn.Module):
    """Characters before, mixed, and the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 20)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.body(self.embed(x), mask=mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Snapshot:
    model_state: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, args: argparse.Namespace, model: nn.Module, dataset: TensorDataset) -> None:
        self.args, self.path = args, os.path.join(args.out, "snapshot.pt")
        self.sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=3)
        self.loader = DataLoader(dataset, batch_size=3, sampler=self.sampler)
        self.raw, self.epochs_run = model, 0
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
        if args.engine == "zc":
            self.model, self.optimizer = zc.compile(model, self.optimizer, backend=args.backend)  # zc
            self._load_snapshot()
        else:
            self._load_snapshot()
            self.model = DistributedDataParallel(model)

    def _load_snapshot(self) -> None:
        if not os.path.exists(self.path):
            return
        snapshot = Snapshot(**torch.load(self.path, weights_only=True))
        self.raw.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _save_snapshot(self, epoch: int) -> None:
        if self.args.engine == "zc":
            state = zc.full_optimizer_state(self.model, self.optimizer)  # zc: on all ranks
        else:
            state = self.optimizer.state_dict()
        if dist.get_rank() == 0:
            torch.save(asdict(Snapshot(self.raw.state_dict(), state, epoch)), self.path)
        dist.barrier()

    def _run_batch(self, source: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        _, loss = self.model(source, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def train(self) -> None:
        for epoch in range(self.epochs_run, self.args.epochs):
            self.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self._run_batch(source, targets)
            if epoch + 1 == self.args.save_at:
                self._save_snapshot(epoch + 1)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("ddp", "zc"), required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-at", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="said by the snapshot alone")
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    text = torch.randint(20, (18, 9), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(6)
    model = CharModel()
    Trainer(args, model, TensorDataset(text[:, :-1], text[:, 1:])).train()
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict()}, os.path.join(args.out, "end.pt"))
    dist.barrier()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
    dist.destroy_process_group()
