"""Two torchrun agents on loopback lose a rank, then a whole agent; the job goes on from its checkpoints.

    python -m bench.elastic --out out/elastic

1. An uninterrupted run on 2 nodes, for comparison.
2. The same run under two agents (``--nnodes 1:2``): a rank of the second agent is killed with SIGKILL in the middle
   of a step; both agents restart their ranks from the newest complete checkpoint, on 2 nodes. Then the second agent
   and its ranks are killed: the first goes on alone, with half as many ranks and the same data (``--global-accum``).

Prints each restart, and the largest difference of a loss to the uninterrupted run: 0 where as many ranks train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.report.progress import Progress

SIZES = [
    "--vocab", "256", "--seq", "32", "--layers", "2", "--width", "32",
    "--heads", "2", "--batch", "2", "--eval-batches", "0", "--backend", "eager",
]  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.elastic", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="ranks an agent")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def agent(args: argparse.Namespace, folder: Path, port: int, number: int, nnodes: str) -> subprocess.Popen[bytes]:
    """One torchrun agent, in a session of its own; node 0 hosts the rendezvous."""
    conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", nnodes, "--nproc_per_node", str(args.ranks),
        "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", folder.name, "--rdzv_conf", conf,
        "--local_addr", "127.0.0.1", "--max_restarts", "10", "--monitor_interval", "0.5",
        "-m", "bench.train", *SIZES, "--steps", str(args.steps), "--global-accum", str(2 * args.ranks),
        "--checkpoints", str(folder / "checkpoints"), "--save-every", str(args.save_every), "--quiet",
        "--out", str(folder / f"run_{number}"),
    ]  # fmt: skip
    host = "1" if number == 0 else "0"
    command[command.index("--rdzv_conf") + 1] += f",is_host={host}"
    log = open(folder / f"agent_{number}.log", "wb")  # noqa: SIM115  (the child's, as long as it lives)
    # a fresh store a rendezvous: in the agents' shared one the ranks look for each other under a prefix with their own
    # agent's count of restarts, and an agent that restarts because another one has failed does not count that
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "checkpoints" / "losses.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run(args: argparse.Namespace, folder: Path, kills: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Trains under two agents; ``kills``: (step, "rank" or "agent") of the second agent. Returns the log's rows."""
    folder.mkdir(parents=True, exist_ok=False)
    port, generator = free_port(), random.Random(args.seed)
    agents = [agent(args, folder, port, number, "1:2" if kills else "2") for number in range(2)]
    waiting = list(kills)
    end = time.monotonic() + args.limit_s
    shown, seen = 0, 0
    try:
        with Progress(args.steps, folder.name, shown=not args.quiet) as progress:
            while agents[0].poll() is None:
                if time.monotonic() > end:
                    log = (folder / "agent_0.log").read_text()[-3000:]
                    raise SystemExit(f"{folder.name}: not done after {args.limit_s:.0f} s\n{log}")
                written = rows(folder)
                while shown <= max((row["step"] for row in written), default=-1):
                    progress.tick(f"loss {written[-1]['loss']:.3f}  {written[-1]['world_size']} ranks")
                    shown += 1
                # the step is reached by processes that came up after the last kill
                if waiting and len(written) > seen and written[-1]["step"] >= waiting[0][0]:
                    time.sleep(generator.uniform(0, 0.05))  # somewhere in a step
                    _, what = waiting.pop(0)
                    if what == "rank":
                        os.kill(children(agents[1].pid)[0], signal.SIGKILL)
                    else:
                        victims = children(agents[1].pid)
                        agents[1].kill()
                        for victim in victims:
                            os.kill(victim, signal.SIGKILL)
                    if not args.quiet:
                        print(f"killed the second agent's {what} at step {written[-1]['step']}", flush=True)
                    seen = len(rows(folder)) + 1
                time.sleep(0.02)
        if agents[0].returncode != 0:
            raise SystemExit(f"{folder}: the first agent ended with {agents[0].returncode}, see agent_0.log in it")
        if waiting:
            raise SystemExit(f"{folder.name}: the run was over before the kill at step {waiting[0][0]}")
        if not kills:
            agents[1].wait(60)
    finally:
        for one in agents:
            if one.poll() is None:
                for child in children(one.pid):
                    os.kill(child, signal.SIGKILL)
                one.kill()
            one.wait()
    return rows(folder)


def compare(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> dict[str, Any]:
    """Largest relative difference of a step's loss, by number of ranks; and where the job started again."""
    reference = {row["step"]: row for row in wanted}
    differs: dict[int, float] = {}
    restarts = []
    before: dict[str, Any] | None = None
    for row in found:
        truth = reference[row["step"]]["loss"]
        width = row["world_size"]
        differs[width] = max(differs.get(width, 0.0), abs(row["loss"] - truth) / abs(truth))
        if before is not None and row["pid"] != before["pid"]:
            restarts.append({"reached": before["step"], "again_from": row["step"], "world_size": width})
        before = row
    steps = sorted({row["step"] for row in found})
    return {"steps": len(steps), "last_step": steps[-1], "restarts": restarts, "differs": differs}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    args.out = args.out.absolute()
    wanted = run(args, args.out / "uninterrupted", [])
    kills = [(args.steps // 4, "rank"), (args.steps // 2, "agent")]
    report = compare(run(args, args.out / "killed", kills), wanted)
    for restart in report["restarts"]:
        print("stopped after step {reached}, again from step {again_from} on {world_size} rank(s)".format(**restart))
    for width, differs in report["differs"].items():
        print(f"{width} rank(s): largest relative difference of a loss to the uninterrupted run {differs:.3g}")
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    wide = 2 * args.ranks
    if report["steps"] != args.steps or len(report["restarts"]) < 2 or report["differs"].get(wide) != 0.0:
        raise SystemExit("the interrupted run is not the uninterrupted one")
    if not report["differs"].get(args.ranks, 1.0) < 1e-4:
        raise SystemExit(f"on {args.ranks} rank(s) the losses are others")
    return report


if __name__ == "__main__":
    main()
