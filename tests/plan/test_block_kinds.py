"""Kinds of blocks, and the buckets that follow them, in literal names and numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zc.config import Config
from zc.planning import packing as planning
from zc.planning.blocks import find_kinds, find_singles, matrices_around
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import ALONE, BlockKind, Plan, split_name


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, bias=False)


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(8, 4), nn.ModuleList(blocks), nn.Linear(4, 8)


def names(*numbers: int, prefix: str = "blocks") -> tuple[str, ...]:
    return tuple(f"{prefix}.{number}" for number in numbers)


def test_equal_children_of_a_container_are_a_kind() -> None:
    assert find_kinds(Net([Block() for _ in range(5)])) == (BlockKind("Block", names(0, 1, 2, 3, 4)),)
    assert find_kinds(nn.Sequential(*(Block() for _ in range(4)))) == (BlockKind("Block", ("0", "1", "2", "3")),)


def test_two_kinds_that_alternate_are_told_apart() -> None:
    kinds = find_kinds(Net([Block(4 if k % 2 else 2) for k in range(8)]))
    assert kinds == (BlockKind("Block", names(0, 2, 4, 6)), BlockKind("Block", names(1, 3, 5, 7)))


def test_blocks_in_nested_lists_and_the_outermost_of_nested_blocks() -> None:
    stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(4)) for _ in range(2))
    assert find_kinds(stages) == (
        BlockKind("Block", names(0, 1, 2, 3, prefix="0")), BlockKind("Block", names(0, 1, 2, 3, prefix="1")),
    )  # fmt: skip
    outer = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(4))) for _ in range(4)))
    assert find_kinds(outer) == (BlockKind("Sequential", ("0", "1", "2", "3")),)


def frozen(block: Block) -> Block:
    block.linear.weight.requires_grad_(False)
    return block


def test_lora_in_every_block_is_a_kind_and_a_block_frozen_otherwise_is_not_of_it() -> None:
    assert find_kinds(Net([frozen(Block()) for _ in range(4)])) == (BlockKind("Block", names(0, 1, 2, 3)),)
    blocks = [frozen(Block()) if k == 2 else Block() for k in range(5)]
    assert find_kinds(Net(blocks)) == (BlockKind("Block", names(0, 1, 3, 4)),)


def test_what_is_no_block() -> None:
    one = Block()
    tied = Net([Block() for _ in range(5)])
    tied.head.weight = nn.Parameter(torch.zeros(4, 4))
    tied.blocks[1].linear.weight = tied.head.weight
    assert find_kinds(tied) == (BlockKind("Block", names(0, 2, 3, 4)),), "it shares a parameter with the head"
    assert find_kinds(Net([Block() for _ in range(3)])) == (), "too few"
    assert find_kinds(Net([one] * 6)) == (), "one block, called six times"
    assert find_kinds(Net([nn.Linear(4, 4) for _ in range(6)])) == (), "leaves"
    assert find_kinds(Net([nn.Sequential(nn.LayerNorm(4), nn.GELU()) for _ in range(6)])) == (), "no matrix"
    assert find_kinds(Net([nn.Sequential(nn.GELU(), nn.Tanh()) for _ in range(6)])) == (), "no parameter"


def test_the_matrices_around_blocks_are_those_that_more_than_embeddings_have() -> None:
    net = Net([Block() for _ in range(4)])
    assert matrices_around(net, find_kinds(net)) == {"head.weight"}
    assert matrices_around(net, ()) == frozenset(), "no blocks"
    net.tokens.weight = net.head.weight = nn.Parameter(torch.zeros(8, 4))
    assert matrices_around(net, find_kinds(net)) == {"tokens.weight"}, "the first of its two names"


def test_modules_outside_of_blocks_that_have_parameters_are_compiled_one_by_one() -> None:
    net = Net([Block() for _ in range(4)])
    net.final = nn.Sequential(nn.LayerNorm(4), nn.Tanh())
    net.act, net.tied = nn.Tanh(), net.head
    singles = (("Embedding", "tokens"), ("Linear", "head"), ("Sequential", "final"))
    assert find_singles(net, find_kinds(net)) == [BlockKind(kind, (name,)) for kind, name in singles]
    assert find_singles(net, ()) == [], "one graph"


def test_tied_parameters_inside_of_every_block() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)]
    for block in blocks:
        block[1].weight = block[0].weight
    assert find_kinds(Net(blocks)) == (BlockKind("Sequential", names(0, 1, 2, 3)),)
    blocks[3][1].weight = nn.Parameter(torch.zeros(4, 4))
    assert find_kinds(Net(blocks)) == (), "three and one"


def test_a_name_is_split_at_its_block() -> None:
    members = {"layers.1": (0, 0), "layers.11": (0, 1)}
    assert split_name("layers.11.linear.weight", members) == ("layers.11", "linear.weight")
    assert split_name("layers.1.w", members) == ("layers.1", "w")
    assert split_name("layers.2.w", members) is None and split_name("head", members) is None


# --- buckets: blocks of 32 + 64 bytes between an embedding of 64 and a head of 128 ---


def packed(nbytes: int | None, num_blocks: int = 5) -> list[list[str]]:
    sizes = {"tokens": 16, **{f"blocks.{k}.{name}": n for k in range(num_blocks) for name, n in (("a", 8), ("b", 16))}}
    specs = [ParamSpec(name, (n,), torch.float32, torch.device("cpu")) for name, n in (sizes | {"head": 32}).items()]
    return [[slot.name for slot in bucket.slots] for bucket in plan_of(specs, nbytes, num_blocks).buckets]


def plan_of(specs: list[ParamSpec], nbytes: int | None, num_blocks: int) -> Plan:
    kinds = (BlockKind("Block", names(*range(num_blocks))),)
    return make_plan(specs, Config(bucket_nbytes=nbytes), ALONE, kinds=kinds)


def blocks(*numbers: int) -> list[str]:
    return [f"blocks.{k}.{name}" for k in numbers for name in ("b", "a")]


def test_a_bucket_holds_one_block() -> None:
    one_each = [["head"], *([f"blocks.{k}.b", f"blocks.{k}.a"] for k in (4, 3, 2, 1, 0)), ["tokens"]]
    assert packed(96) == packed(140) == packed(191) == one_each


def test_a_bucket_holds_as_many_whole_blocks_as_fit() -> None:
    assert packed(200) == [blocks(4, 3), blocks(2, 1), blocks(0), ["head", "tokens"]]
    assert packed(300) == [blocks(4, 3, 2), blocks(1, 0), ["head", "tokens"]]


def test_a_bucket_holds_the_same_part_of_each_block() -> None:
    parts = [[f"blocks.{k}.{name}"] for k in (4, 3, 2, 1, 0) for name in ("b", "a")]
    assert packed(64) == [["head"], *parts, ["tokens"]]


@pytest.mark.parametrize(("default", "counts"), [(96 * 4, [2] * 5), (96 * 4 + 1, [8, 2])])
def test_by_default_a_block_of_a_quarter_of_the_size_has_a_bucket_of_its_own(
    monkeypatch: pytest.MonkeyPatch, default: int, counts: list[int]
) -> None:
    monkeypatch.setattr(planning, "default_nbytes", lambda sizes, least: default)
    assert [len(names) for names in packed(None) if names[0].startswith("blocks")] == counts
