"""Each kernel compiles for GPUs that are not here: 128-bit global accesses in the aligned path, no spills.

Stack and local memory are read from the finished binary: cuobjdump (bundled with Triton) for NVIDIA, the metadata in
the assembly for AMD. Where there is a stack, ptxas says what of it is spills (the rest: the frame of a call).
"""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from zc.kernels import _segments
from zc.kernels._triton import triton

if triton is None:
    pytest.skip("no triton: nothing to compile", allow_module_level=True)
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

reduce_rows, sums_of_squares = (
    importlib.import_module(f"zc.kernels.{name}") for name in ("reduce_rows", "sums_of_squares")
)

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120, "gfx942": "gfx942"}
ROWS = {"rows": "*bf16", "out": "*fp32", "numel": "i32", "row_stride": "i32", "num_rows": "i32", "scale": "fp32"}
SEGMENTS = {"table": "*i64", "num_segments": "i32", "scale": "fp32"}
SQUARES = {"table": "*i64", "partials": "*fp64"}
OF_A_PROGRAM = {"PER_PROGRAM": sums_of_squares.PER_PROGRAM, "COLUMNS": sums_of_squares.NUM_COLUMNS}
# name -> kernel, types of its pointers and scalars, constants, 128-bit loads and stores
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], int, int]] = {
    "flatten_cast": (_segments.move_segments, SEGMENTS | {"out": "*bf16"},
                     {"BLOCK": _segments.BLOCK, "COLUMNS": 12, "ADD": False, "SCALED": False}, 16, 12),
    "accumulate_cast": (_segments.move_segments, SEGMENTS | {"out": "*fp32"},
                        {"BLOCK": _segments.BLOCK, "COLUMNS": 12, "ADD": True, "SCALED": False}, 40, 24),
    "reduce_rows": (reduce_rows.sum_rows, ROWS, {"UNROLLED": 8, "ADD": True, "BLOCK": reduce_rows.BLOCK}, 16 + 4, 4),
    "reduce_rows, many": (reduce_rows.sum_rows, ROWS,
                          {"UNROLLED": 0, "ADD": False, "BLOCK": reduce_rows.BLOCK}, 4, 4),
    "sums_of_squares": (sums_of_squares.square_segments, SQUARES | {"num_tensors": "i32"},
                        {"BLOCK": sums_of_squares.BLOCK} | OF_A_PROGRAM, 16, 0),
    # how Triton launches it for one tensor: an argument of 1 is a constant
    "sums_of_squares, one": (sums_of_squares.square_segments, SQUARES,
                             {"BLOCK": sums_of_squares.BLOCK, "num_tensors": 1} | OF_A_PROGRAM, 16, 0),
    "sums_of_squares, end": (sums_of_squares.add_partials, SQUARES | {"sums": "*fp64"},
                             {"BLOCK": sums_of_squares.PARTIALS} | OF_A_PROGRAM, 0, 0),
}  # fmt: skip
# scalars and pointers to scalars; a known divisor of numel would also widen masked accesses, which no real size has
UNALIGNED = {"numel", "num_segments", "num_rows", "num_tensors"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], target: str, aligned: bool = True) -> Any:
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    assert {name for name in names if signature[name] == "constexpr"} == set(constants)
    hints = [name for name in types if aligned and types[name] != "fp32" and name not in UNALIGNED]
    arch = TARGETS[target]
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in hints},
        ),
        target=GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64),
        options={"num_warps": 4, "enable_fp_fusion": False},
    )


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
        found = re.findall(pattern, binary.asm["amdgcn"])
    else:
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        nvidia = triton.knobs.nvidia
        usage = run(nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)).stdout
        found = re.findall(r"\b(STACK|LOCAL):(\d+)", usage)
        if any(int(value) for _, value in found):
            ptx = folder / "kernel.ptx"
            ptx.write_text(binary.asm["ptx"])
            ptxas = nvidia.ptxas_blackwell if int(target[3:]) >= 100 else nvidia.ptxas
            said = run(ptxas.path, "-v", f"--gpu-name={target}", str(ptx), "-o", str(folder / "again.cubin")).stderr
            found = [(name, value) for value, name in re.findall(r"(\d+) bytes (spill \w+)", said)]
    assert len(found) >= 2, "no resource usage found"
    return {name: int(value) for name, value in found if int(value)}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_compiles_with_wide_accesses_and_no_spills(case: str, target: str, tmp_path: Path) -> None:
    kernel, types, constants, num_loads, num_stores = CASES[case]
    binary = compiled(kernel, types, constants, target)
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


LOW = ("*bf16", "*fp16", "*fp32")
SUM = {"UNROLLED": 3, "ADD": True, "BLOCK": reduce_rows.BLOCK}
# what the interpreter hides: a dtype that a branch can't take, and an argument of 1, which Triton makes a constant
VARIANTS = {
    **{f"rows of {r}": (reduce_rows.sum_rows, ROWS | {"rows": r}, SUM) for r in LOW},
    "rows of one element": (reduce_rows.sum_rows, {k: v for k, v in ROWS.items() if k not in ("numel", "row_stride")},
                            SUM | {"numel": 1, "row_stride": 1}),
    "rows past int32": (reduce_rows.sum_rows, ROWS | {"numel": "i64", "row_stride": "i64"}, SUM),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_for_every_dtype_and_for_arguments_of_one(variant: str) -> None:
    kernel, types, constants = VARIANTS[variant]
    assert compiled(kernel, types, constants, "sm_90", aligned=False).asm["cubin"]


def test_the_count_sees_narrow_accesses() -> None:
    """The same kernel where nothing is known of the alignment."""
    kernel, types, constants, _, _ = CASES["reduce_rows"]
    assert wide_accesses(compiled(kernel, types, constants, "sm_90", aligned=False)) == (0, 0)
