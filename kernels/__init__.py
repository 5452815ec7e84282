"""Kernels for gradients and weights: each a torch reference (the CPU path) and a Triton kernel of the same meaning,
except where torch's own operations are as good on a device.

Every function checks its arguments first (``ValueError`` that names both values), writes into tensors that the caller
owns, keeps no state, and knows tensors only: no ranks, no plan. Where Triton kernels can't run, the references run, and
``why_reference()`` says why.
"""

from __future__ import annotations

# As `kernels`, which is found where a checkout is on sys.path, this is nothing: transformers asks for the version of a
# package of that name (PyPI has one), and must not get all of zc with the answer.
if __name__ == "zc.kernels":
    from zc.kernels._common import note_of, why_reference
    from zc.kernels.blocks import Blocks, add_blocks, encode_blocks, sum_blocks
    from zc.kernels.copy_writes import copy_writes
    from zc.kernels.reduce_rows import reduce_rows
    from zc.kernels.sums_of_squares import sums_of_squares
    from zc.kernels.write_grads import accumulate_cast, flatten_cast, matmul_into, rows_into, scatter_into

__all__ = [
    "Blocks",
    "accumulate_cast",
    "add_blocks",
    "copy_writes",
    "encode_blocks",
    "flatten_cast",
    "matmul_into",
    "note_of",
    "reduce_rows",
    "rows_into",
    "scatter_into",
    "sum_blocks",
    "sums_of_squares",
    "why_reference",
]
