"""Programs without zc: transformers reads the exported weights, a plain AdamW goes on, plain states come in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import CASES, mlp
from save_and_load import Job, joined, parts
from test_reshard import assert_same
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_runs import adamw, message_of

import zc

SIZES = {"vocab_size": 101, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def hub_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **ENDS))


def _train_gpt2(rank: int, world_size: int, folder: Path) -> tuple[list[str], Tensor] | None:
    model = hub_gpt2()
    model, optimizer = zc.compile(model, adamw(model), backend="eager", bucket_nbytes=2048)
    ids = torch.arange(16).reshape(2, 8) % 101
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zc.save(folder / "checkpoint", model, optimizer)
    if rank != 0:
        return None
    files = zc.export(folder / "whole", folder / "checkpoint")
    files += zc.export(folder / "split", folder / "checkpoint", shard_nbytes=4000)
    for name in ("whole", "split"):
        model.config.save_pretrained(folder / name)
    model.eval()
    with torch.no_grad():
        return [file.name for file in files], model(ids).logits


READER = """
import sys, torch, transformers
for folder in sys.argv[1:]:
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.save(model(torch.arange(16).reshape(2, 8) % 101).logits, folder + "/logits.pt")
assert "zc" not in sys.modules
"""


def test_from_pretrained_reads_the_export(tmp_path: Path) -> None:
    """In a process without zc: the same logits, from one file and from several with an index."""
    results = run_ranks(_train_gpt2, 2, tmp_path)[0]
    assert results is not None
    names, wanted = results
    assert names[0] == "model.safetensors" and names[1].startswith("model-00001-of-")
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names[1:])
    assert "lm_head.weight" not in index["weight_map"], "a tied weight stands once"
    # transformers imports a package "kernels" where it finds one: not this repository's folder
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    folders = [str(tmp_path / name) for name in ("whole", "split")]
    subprocess.run([sys.executable, "-c", READER, *folders], check=True, cwd=tmp_path, env=env)
    for name in ("whole", "split"):
        assert torch.equal(torch.load(tmp_path / name / "logits.pt", weights_only=True), wanted)
    with pytest.raises(zc.CheckpointError, match=r"model\.safetensors exists already"):
        zc.export(tmp_path / "whole", tmp_path / "checkpoint")


class Breaks(nn.Linear):
    """Its weights are whole after a forward in stage 3, until the next update."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_pretrained_weights_come_into_a_model_that_has_run(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    model, wanted = Breaks(8, 4), nn.Linear(8, 4).state_dict()
    zc.compile(model, adamw(model), stage=3, backend="aot_eager")
    with torch.no_grad():
        model(torch.ones(2, 8))
    save_file(wanted, tmp_path / "model.safetensors")
    zc.load_pretrained(model, tmp_path)
    whole = zc.full_state_dict(model)
    zc.close(model)
    assert all(torch.equal(whole[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("case", ["frozen", "batch_norm"])
def test_export_casts(tmp_path: Path, case: str) -> None:
    """Floating point alone: batch_norm counts its batches."""
    safetensors = pytest.importorskip("safetensors.torch")
    job = Job(case)
    model, optimizer = job.compiled()
    zc.save(tmp_path / "a", model, optimizer)
    zc.export(tmp_path / "out", tmp_path / "a", dtype=torch.bfloat16)
    exported = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        wanted = value.bfloat16() if value.is_floating_point() else value
        assert exported[name].dtype == wanted.dtype and torch.equal(exported[name], wanted), name


def _out(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    job = Job("gpt_tied")
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 3)
    state = zc.full_optimizer_state(model, optimizer)
    assert (state is None) == (rank != 0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    losses = job.steps(model, optimizer, 3, 6)
    return {"state": state, "weights": weights, "losses": losses, "end": parts(model, optimizer)}


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, case: str, first: int, stop: int) -> list[float]:
    losses = []
    for step in range(first, stop):
        loss = CASES[case].loss(model, CASES[case].batch(0, step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plain_adamw_goes_on(tmp_path: Path, world_size: int) -> None:
    results = run_ranks(_out, world_size, tmp_path)
    model = CASES["gpt_tied"].model(9)
    model.load_state_dict(results[0]["weights"])
    optimizer = adamw(model)
    optimizer.load_state_dict(results[0]["state"])
    losses = plain_steps(model, optimizer, "gpt_tied", 3, 6)
    torch.testing.assert_close(losses, results[0]["losses"], rtol=1e-6, atol=0)
    ends = joined([rank["end"] for rank in results])
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach().reshape(-1), ends[name], rtol=1e-4, atol=1e-6)


def _from_ddp(rank: int, world_size: int, case: str) -> dict[str, Any]:
    """DDP trains 3 steps; zc takes its two plain states over."""
    plain = DistributedDataParallel(CASES[case].model(0))
    its = adamw(plain)
    plain_steps(plain, its, case, 0, 3)
    state = {"model": plain.state_dict(), "optimizer": its.state_dict()}
    job = Job(case, seed=8)
    model, optimizer = job.compiled()
    zc.load_state_dict(model, optimizer, state)
    wanted = {}
    for name, param in plain.module.named_parameters():
        wanted[name] = param.detach().reshape(-1).clone()
        for key, value in its.state[param].items():
            whole = value.shape == param.shape
            wanted[f"{name}/{key}"] = value.reshape(-1).clone() if whole else value.reshape(-1).double()
    saved = parts(model, optimizer)
    refused = message_of(lambda: zc.load_state_dict(model, optimizer, {"model": {"foreign": torch.zeros(1)}}))
    losses = plain_steps(plain, its, case, 3, 6), job.steps(model, optimizer, 3, 6)
    return {"taken": saved, "wanted": wanted, "losses": losses, "refused": refused}


def test_from_ddp(tmp_path: Path) -> None:
    results = run_ranks(_from_ddp, 2, "gpt_tied")
    assert_same(joined([rank["taken"] for rank in results]), results[0]["wanted"])
    for rank in results:
        torch.testing.assert_close(rank["losses"][1], rank["losses"][0], rtol=1e-6, atol=0)
        assert rank["refused"][0] == "CheckpointError" and "extra (foreign)" in rank["refused"][1]


@pytest.mark.parametrize(
    ("saved", "here", "master"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_states_get_the_dtype_of_the_masters(saved: torch.dtype, here: torch.dtype, master: torch.dtype) -> None:
    """As torch's load_state_dict casts them: the next step raised an error of torch's about another dtype."""
    plain, model = mlp().to(saved), mlp().to(here)
    of_plain, optimizer = adamw(plain), adamw(model)
    plain(torch.ones(2, 16, dtype=saved)).sum().backward()
    of_plain.step()
    zc.compile(model, optimizer, backend="eager")
    zc.load_state_dict(model, optimizer, {"model": plain.state_dict(), "optimizer": of_plain.state_dict()})
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        wanted = of_plain.state[theirs]["exp_avg"].to(master)
        loaded = optimizer.state[ours]["exp_avg"]
        assert loaded.dtype == master and torch.equal(loaded, wanted)
    model(torch.ones(2, 16, dtype=here)).sum().backward()
    optimizer.step()
