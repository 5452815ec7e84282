"""zc.export of a compiled model: the files of safetensors have its weights, in all stages; an error leaves none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from test_iter_weights import Net, trained

import zc

INDEX = "model.safetensors.index.json"
safetensors = pytest.importorskip("safetensors.torch")


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def exported(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> list[str]:
    """Job: what is wrong. The oracle is the plain module that zc.close leaves, and the reader is not zc's."""
    net, optimizer = trained(rank, options)
    whole = zc.export(folder / "whole", net)
    split = zc.export(folder / "split", net, shard_nbytes=1000, dtype=torch.bfloat16)
    with pytest.raises(zc.CheckpointError, match=r"model\.safetensors exists already"):
        zc.export(folder / "whole", net)
    taken = folder / "taken"
    if rank == 0:
        taken.write_text("a file, no folder")
    with pytest.raises((zc.CheckpointError, FileExistsError)):
        zc.export(taken, net)
    save_file, num_saved = safetensors.save_file, 0

    def fails_at_the_second(*args: Any, **keywords: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        if num_saved == 2:
            raise OSError("no space left on device")
        save_file(*args, **keywords)

    safetensors.save_file = fails_at_the_second
    with pytest.raises(zc.CheckpointError, match="no space left on device"):
        zc.export(folder / "full", net, shard_nbytes=3000)
    safetensors.save_file = save_file
    wrong = [f"left: {name}" for name in names_in(folder / "full")]
    net(torch.randint(0, 32, (3, 8))).backward()  # as if nothing had been
    optimizer.zero_grad()
    zc.close(net)
    wanted = {key: value.clone() for key, value in net.state_dict().items() if key != "head.weight"}
    wrong += [] if whole == [folder / "whole" / "model.safetensors"] else [f"{whole}"]
    wrong += [] if names_in(folder / "whole") == ["model.safetensors"] else ["whole has more"]
    got = safetensors.load_file(whole[0])
    wrong += list(got.keys() ^ wanted.keys())
    wrong += [name for name, value in wanted.items() if not torch.equal(got[name], value)]
    index = json.loads((folder / "split" / INDEX).read_text())
    assert len(split) > 2 and names_in(folder / "split") == sorted([*(file.name for file in split), INDEX])
    halves: dict[str, torch.Tensor] = {}
    for file in split:
        tensors = safetensors.load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 1000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        halves |= tensors
    wrong += list(halves.keys() ^ wanted.keys())
    wrong += [name for name, value in wanted.items() if not torch.equal(halves[name], value.bfloat16())]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in halves.values())
    return wrong


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 2, "overlap_gather": True}, {"stage": 3}], ids=str)
def test_the_files_have_the_weights(options: dict[str, Any], tmp_path: Path) -> None:
    assert run_ranks(exported, 2, tmp_path, options) == [[]] * 2


def loaded_again(rank: int, world_size: int, folder: Path) -> bool:
    """Job: whether a model that loads the export has the weights of the one that made it."""
    net, _ = trained(rank, {"stage": 3})
    zc.export(folder, net, shard_nbytes=3000)
    zc.close(net)
    other = Net()
    optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1)
    zc.compile(other, optimizer, backend="eager", stage=3)
    zc.load_pretrained(other, folder)
    zc.close(other)
    return all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


KINDS = {
    "c64": torch.tensor([1 + 2j, -3j], dtype=torch.complex64), "u16": torch.tensor([1, 65535], dtype=torch.uint16),
    "u32": torch.tensor([1, 2**32 - 1], dtype=torch.uint32), "u64": torch.tensor([1, 2**63 - 1], dtype=torch.uint64),
    "e4m3": torch.tensor([1.0, -2.5]).to(torch.float8_e4m3fnuz), "e5m2": torch.tensor([1.0]).to(torch.float8_e5m2fnuz),
}  # fmt: skip


def with_buffers(buffers: dict[str, torch.Tensor]) -> torch.nn.Module:
    net = torch.nn.Linear(4, 4)
    for name, value in buffers.items():
        net.register_buffer(name, value.clone())
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), backend="eager")
    return net


def test_every_dtype_that_export_writes_is_read_again(tmp_path: Path) -> None:
    net = with_buffers(KINDS)
    zc.export(tmp_path, net)
    other = with_buffers({name: torch.zeros_like(value) for name, value in KINDS.items()})
    zc.load_pretrained(other, tmp_path)
    for name, value in net.state_dict().items():
        loaded = other.state_dict()[name]
        assert loaded.dtype == value.dtype and loaded.view(torch.uint8).equal(value.view(torch.uint8)), name
    whole = with_buffers({**KINDS, "c64": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(zc.CheckpointError, match=r"c64 is torch\.complex64, the model's is torch\.int64"):
        zc.load_pretrained(whole, tmp_path)
    for each in (net, other, whole):
        zc.close(each)


def test_load_pretrained_reads_it(tmp_path: Path) -> None:
    assert run_ranks(loaded_again, 2, tmp_path / "model") == [True, True]
