"""python -m bench.load_memory: the most memory that each of 4 ranks takes for 1.2 GB of weights: to load them, and to
hash all of them by `zc.iter_weights`.

The model is made on meta, in stage 3, and reads a folder of safetensors. Counted is the process's highest resident size
(VmHWM) beyond that of an interpreter which has imported torch, and of one which has imported Dynamo, too, as
any optimizer of torch does. Each rank compares its elements with those of the folder afterwards. Of `zc.iter_weights`
it is the highest resident size while each weight is added up, beyond that before the loop, when a rank has its shards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_LAYERS, DIM = 72, 2048
NBYTES = 4 * NUM_LAYERS * DIM * DIM
_IMPORTS = {"torch": "import torch", "torch with Dynamo": "import torch._dynamo"}
_SIZE = "; print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"


def value(layer: int) -> float:
    """All elements of a layer's weight."""
    return 1 + layer / 64


def write(folder: Path) -> None:
    """Some layers in each file, as transformers writes them."""
    import torch
    from safetensors.torch import save_file

    files = {}
    for first in range(0, NUM_LAYERS, 12):
        name = f"model-{first // 12 + 1:05d}-of-{NUM_LAYERS // 12:05d}.safetensors"
        save_file({f"{k}.weight": torch.full((DIM, DIM), value(k)) for k in range(first, first + 12)}, folder / name)
        files.update({f"{k}.weight": name for k in range(first, first + 12)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def rank(folder: Path) -> None:
    """One rank: writes its peak into the folder."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import zc
    from bench.measure import peak_rss_nbytes, reset_peak_rss
    from zc.registry import sharded

    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, device="cpu", backend="eager")
    zc.load_pretrained(model, folder)
    peak = peak_rss_nbytes()
    for name, own in zc.state_dict(model, optimizer)["model"].items():
        elements = getattr(own, "local", own)
        assert torch.equal(elements, torch.full_like(elements, value(int(name.split(".")[0])))), name
    assert reset_peak_rss(), "this kernel does not let a process reset its peak"
    before = peak_rss_nbytes()
    for name, weight in zc.iter_weights(model):
        assert weight.sum(dtype=torch.float64) == value(int(name.split(".")[0])) * DIM * DIM, name
    unit = max(bucket.nbytes for bucket in sharded(model).runtime.plan.buckets)
    seen = {"load": peak, "iterate": peak_rss_nbytes() - before, "unit": unit}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    zc.close(model)
    dist.destroy_process_group()


def measure(num_ranks: int) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Bytes of each of the interpreters, and what each rank has seen."""
    bare = {
        name: 1024 * int(subprocess.check_output([sys.executable, "-c", imports + _SIZE]))
        for name, imports in _IMPORTS.items()
    }
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        script = ["-m", "bench.load_memory", "--rank-of", name]
        subprocess.run([sys.executable, *launcher, *script], env=env, check=True, stdout=subprocess.DEVNULL)
        seen = [json.loads((Path(name) / f"{k}.json").read_text()) for k in range(num_ranks)]
    return bare, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of is not None:
        rank(args.rank_of)
        return
    bare, seen = measure(args.ranks)
    size = f"{NBYTES / 1e9:.3f} GB on {args.ranks} ranks"
    for name, nbytes in bare.items():
        most = (max(each["load"] for each in seen) - nbytes) / 1e9
        print(f"{size}: to load them at most {most:.3f} GB beyond {name}")
    most, unit = (max(each[key] for each in seen) / 1e6 for key in ("iterate", "unit"))
    print(f"{size}: to iterate over them at most {most:.1f} MB beyond the shards; a unit has {unit:.1f} MB")


if __name__ == "__main__":
    main()
