"""What is launched compiles for GPUs that are not here: 128-bit global accesses in the aligned path, no spills.

Compiled are the launches of the kernels' own code (driver_stand_in.py), of tensors laid out as zc.planning.layout packs
them: with their dtypes, their numbers of rows, and what is a multiple of 16.

Stack and local memory are read from the finished binary: cuobjdump (bundled with Triton) for NVIDIA, the metadata in
the assembly for AMD. Where there is a stack, ptxas says what of it is spills (the rest: the frame of a call).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from zc.kernels import Blocks
from zc.kernels._common import triton
from zc.kernels._slots import TILE_J, TILE_M
from zc.kernels.blocks import decode_blocks_triton, encode_blocks_triton
from zc.kernels.copy_writes import copy_writes_triton
from zc.kernels.reduce_rows import GROUP, MOST_UNROLLED, reduce_rows_triton
from zc.kernels.sums_of_squares import sums_of_squares_triton
from zc.kernels.write_grads import accumulate_cast_triton

if triton is None:
    pytest.skip("no triton: nothing to compile", allow_module_level=True)
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
import comparisons as c
from driver_stand_in import TARGETS, compiled_on
from tiers import FULL

DTYPES = (c.F32, c.B16, c.F16)
S = 4096  # elements of a shard: two blocks and nothing else is known of it, but that it is a multiple of 16


def reduced(num_rows: int, dtype: torch.dtype, add: bool = True, numel: int = S, shift: int = 0) -> None:
    rows = torch.empty(num_rows * numel + shift, dtype=dtype)[shift:].view(num_rows, numel)
    reduce_rows_triton(rows, torch.empty(numel + shift)[shift:], 1 / num_rows, add)


def far_apart() -> None:
    """Rows whose stride is no int32; the second is never read."""
    rows = torch.empty(16, dtype=c.B16).as_strided((1, 16), (2**31, 1))
    reduce_rows_triton(rows, torch.empty(16), 1.0, False)


def packed(dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    grads = [torch.empty(100, 64, dtype=each) for each in dtypes]
    offsets, numel = c.aligned(grads)
    accumulate_cast_triton(torch.empty(numel), grads, offsets)


def written(dtype: torch.dtype, has_before: bool) -> None:
    weights = [torch.empty(100, dtype=dtype)]
    copy_writes_triton([torch.empty(100)], weights, weights if has_before else None)


def squared(dtypes: Sequence[torch.dtype]) -> None:
    sums_of_squares_triton([torch.empty(100, dtype=dtype) for dtype in dtypes])


def one_kernel(launch: Callable[[], None], target: str) -> Any:
    with compiled_on(target) as binaries:
        launch()
    return binaries[0]


def num_wide(num_rows: int, dtype: torch.dtype, add: bool = True) -> tuple[int, int]:
    """Loads and stores of sum_rows, 16 elements a thread: in the whole block's branch, and in the masked one, which has
    them too where sizes are multiples of 16."""
    return 2 * (num_rows * dtype.itemsize + 4 * add), 2 * 4


def blocks_of(bits: int) -> tuple[Blocks, int]:
    """32 blocks, the first two exact; bytes of a row."""
    nbytes = 2048 + 30 * 32 * bits
    return Blocks([(0, 2, 0, -1), (2, 30, 2048, nbytes // 4)], bits), nbytes + 128


def encoded(bits: int, dtype: torch.dtype, base: torch.dtype | None = None) -> None:
    blocks, nbytes = blocks_of(bits)
    x, wire = torch.empty(32 * 256, dtype=dtype), torch.empty(nbytes, dtype=torch.uint8)
    encode_blocks_triton(x, wire, blocks, None if base is None else torch.empty(32 * 256, dtype=base))


def decoded(bits: int, num_rows: int, add: bool, update: torch.dtype | None = None) -> None:
    blocks, nbytes = blocks_of(bits)
    rows, out = torch.empty(num_rows, nbytes, dtype=torch.uint8), torch.empty(32 * 256, dtype=update or c.F32)
    decode_blocks_triton(rows, out, blocks, 0.5, add, update is not None)


Case = tuple[Callable[[], None], int, int]  # launch, 128-bit loads and stores of its first kernel


def of_rows(num_rows: int, dtype: torch.dtype, add: bool = True) -> Case:
    written = num_rows if num_rows <= MOST_UNROLLED else 1 + GROUP + 1
    return lambda: reduced(num_rows, dtype, add), *num_wide(written, dtype, add)


CASES: dict[str, Case] = {
    "accumulate_cast": (packed, 40, 24),
    "rows: 2 bf16": of_rows(2, c.B16),
    "rows: 8 bf16": of_rows(8, c.B16),
    "rows: 16 bf16": of_rows(16, c.B16),
    "rows: 17 bf16": of_rows(17, c.B16),
    "sums_of_squares": (lambda: squared(DTYPES), 16, 0),
    "gradients in 8 bits": (lambda: encoded(8, c.F32), 4, 4),
    "a sum of 8 bits": (lambda: decoded(8, 2, True), 12, 4),
    "differences in 4 bits": (lambda: encoded(4, c.F32, c.F32), 8, 4),
}
ON_ONE_TARGET: dict[str, Case] = {
    "differences in 8 bits": (lambda: encoded(8, c.F32, c.B16), 6, 4),
    "weights and 8 bits": (lambda: decoded(8, 1, True, c.B16), 10, 2),
    "weights and 4 bits": (lambda: decoded(4, 1, True, c.F32), 12, 4),
    "rows: not added": of_rows(2, c.B16, add=False),
    **{f"rows: {w} {d}": of_rows(w, d) for w in (2, 8, 16, 17) for d in (c.F16, c.F32)},
}
IN_FULL: dict[str, Case] = {f"rows: all, {w} {d}": of_rows(w, d) for w in range(2, 17) for d in DTYPES} if FULL else {}
ALWAYS = TARGETS if FULL else ("sm_90", "gfx942")
LAUNCHES = {(target, name): case for target in ALWAYS for name, case in CASES.items()}
LAUNCHES |= {("sm_90", name): case for name, case in (ON_ONE_TARGET | IN_FULL if FULL else {}).items()}


def wide_accesses(binary: Any) -> tuple[int, int]:
    """Global loads and stores of 128 bits in the PTX or the AMD assembly."""
    if "ptx" in binary.asm:
        text, pattern = binary.asm["ptx"], r"\b(ld|st)\.global[\w.:]*\.v(?:4\.b32|2\.b64)"
    else:
        text, pattern = binary.asm["amdgcn"], r"\b(?:global|buffer)_(load|store)_dwordx4"
    kinds = [kind[0] for kind in re.findall(pattern, text)]
    return kinds.count("l"), kinds.count("s")  # ld, load; st, store


def spilled(binary: Any, target: str, folder: Path) -> dict[str, int]:
    """What of the binary is not zero and means a spill."""
    if "amdgcn" in binary.asm:
        pattern = r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
        matches = re.findall(pattern, binary.asm["amdgcn"])
    else:
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        nvidia = triton.knobs.nvidia
        usage = run(nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)).stdout
        matches = re.findall(r"\b(STACK|LOCAL):(\d+)", usage)
        if any(int(value) for _, value in matches):
            ptx = folder / "kernel.ptx"
            ptx.write_text(binary.asm["ptx"])
            ptxas = nvidia.ptxas_blackwell if int(target[3:]) >= 100 else nvidia.ptxas
            said = run(ptxas.path, "-v", f"--gpu-name={target}", str(ptx), "-o", str(folder / "again.cubin")).stderr
            matches = [(name, value) for value, name in re.findall(r"(\d+) bytes (spill \w+)", said)]
    assert len(matches) >= 2, "no resource usage found"
    return {name: int(value) for name, value in matches if int(value)}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("target", "case"), LAUNCHES)
def test_compiles_with_wide_accesses_and_no_spills(target: str, case: str, tmp_path: Path) -> None:
    launch, num_loads, num_stores = LAUNCHES[target, case]
    binary = one_kernel(launch, target)
    loads, stores = wide_accesses(binary)
    # AMD's wavefront has 64 lanes: 256 threads instead of 128 share a block, so half the accesses
    if target == "gfx942":  # reads of a table count too
        assert loads >= num_loads // 2
        assert stores >= num_stores // 2
    else:  # no more either: they would be in a path where an address is not known to be aligned
        assert (loads, stores) == (num_loads, num_stores)
    assert spilled(binary, target, tmp_path) == {}
    if "ptx" in binary.asm:  # a product is rounded before it is added: the same bits as the reference
        assert not re.search(r"\bfma\.rn\.f32", binary.asm["ptx"])
        assert ".ftz" not in binary.asm["ptx"]


@pytest.mark.parametrize("target", ALWAYS)
def test_the_end_of_sums_of_squares_compiles(target: str, tmp_path: Path) -> None:
    with compiled_on(target) as binaries:
        CASES["sums_of_squares"][0]()
    assert len(binaries) == 2 and spilled(binaries[1], target, tmp_path) == {}


def test_a_tile_is_read_along_one_dimension_and_written_along_the_other() -> None:
    """Neighbouring threads have neighbouring addresses: the order in which a layout deals a tile's elements to them."""
    text = one_kernel(CASES["accumulate_cast"][0], "sm_90").asm["ttgir"]
    orders = dict(re.findall(r"^#(\w+) = #ttg.blocked<.*order = (\[[\d, ]+\])", text, re.MULTILINE))
    tile = rf"tensor<{TILE_M}x{TILE_J}x!tt\.ptr<\w+>, #(\w+)>"
    loads, stores = (re.findall(rf"tt\.{kind} .*{tile}", text) for kind in ("load", "store"))
    assert [orders[layout] for layout in loads] == ["[1, 0]", "[0, 1]"] * len(DTYPES), "a gradient, and its sum"
    assert [orders[layout] for layout in stores] == ["[0, 1]"] * len(DTYPES)


# what the interpreter hides: a type that a branch can't take, and an argument of 1, which Triton makes a constant
VARIANTS: dict[str, Callable[[], None]] = {
    "rows of one element": lambda: reduced(3, c.B16, numel=1),
    "rows far apart": far_apart,
    "one tensor": lambda: squared([c.F32]),
    **{f"writes to {d}, {b}": partial(written, d, b) for d in (c.B16, c.F16) for b in (False, True)},
    "one gradient": lambda: packed([c.F32]),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_for_arguments_of_one_and_past_int32(variant: str) -> None:
    assert one_kernel(VARIANTS[variant], "sm_90").asm["cubin"]


def test_the_count_sees_narrow_accesses() -> None:
    """The same kernel where neither a size nor an address is a multiple of 16."""
    assert wide_accesses(one_kernel(lambda: reduced(8, c.B16, numel=S + 1, shift=1), "sm_90")) == (0, 0)


COUNTED: dict[str, Callable[[int], None]] = {
    "gradients": lambda n: packed([c.F32] * n),
    "tensors": lambda n: squared([c.F32] * n),
    "weights": lambda n: copy_writes_triton([torch.empty(9)] * n, [torch.empty(9, dtype=c.B16)] * n, None),
    "rows": lambda n: reduced(n + 16, c.B16),
}


@pytest.mark.parametrize("what", COUNTED)
def test_a_count_compiles_nothing_anew(what: str) -> None:
    """1, 2 and 16 are three kinds of number to Triton: 1 a constant, 16 a multiple of 16."""
    with compiled_on("sm_90") as binaries:
        for number in (1, 2, 16):
            COUNTED[what](number)
    assert len({id(kernel) for kernel in binaries}) == len(binaries) // 3


def test_every_launch_says_whether_products_and_sums_are_fused() -> None:
    """The default differs between versions of Triton."""
    root, launches = Path(__file__).parents[2], 0
    for path in (*(root / "kernels").glob("*.py"), *(root / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and any(k.arg == "num_warps" for k in node.keywords):
                launches += 1
                assert any(k.arg == "enable_fp_fusion" for k in node.keywords), f"{path.name}:{node.lineno}"
    assert launches >= 6
