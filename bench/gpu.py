"""`make gpu-bench`: what can be measured on one GPU today, in one call, into one CSV.

    python -m bench.gpu [--csv bench/results/gpu_kernels.csv]

So far that is the kernels (bench/gpu_kernels.py); training steps follow with the harness for peers. Needs CUDA.
"""

from __future__ import annotations

import sys

from bench import gpu_kernels


def main() -> int:
    if not any(argument.startswith("--csv") for argument in sys.argv[1:]):
        sys.argv += ["--csv", "bench/results/gpu_kernels.csv"]
    return gpu_kernels.main()


if __name__ == "__main__":
    raise SystemExit(main())
