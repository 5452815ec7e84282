"""Hosts as network namespaces of this machine, joined by a shaped link: milliseconds, and the bytes that leave a host.

    python -m bench.hosts --hosts 2 --ranks 1 --rate 1gbit --cases gpt30m-fp32

Each host is a namespace with one interface, whose rate `tc` limits both ways, and with torchrun's agent for its ranks;
all of them share this machine's cores and memory, so what is shown is the network's part. Systems train in turn, as in
bench.turns. The bytes are the kernel's own count at host 0's interface, over the timed steps. Needs Linux, root, ip and
tc, and says so where it can't.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import turns
from bench.cases import CASES, PROVIDERS, version_of
from bench.cases.reference import reference
from bench.measure import ROOT, end_on_sigterm, versions
from bench.report import rows

RESULTS = ROOT / "bench" / "results" / "hosts.csv"
COLUMNS = (*turns.COLUMNS, "hosts", "ranks_per_host", "rate", "host_nbytes", "of_model")
BURST = "burst 512kb latency 100ms"  # of tc's token bucket
PORT = 29400  # in namespaces of our own: nobody else has it


def why_not() -> str | None:
    """Why this machine can't make hosts; None: it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid():
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} is not installed (iproute2)" if missing else None


@contextmanager
def network(num_hosts: int, rate: str) -> Iterator[list[tuple[str, str]]]:
    """(namespace, address) of each host, its interface named ``net``; gone at the end."""
    tag = f"zc{secrets.token_hex(2)}"
    switch, hosts = f"{tag}s", [(f"{tag}h{k}", f"10.99.0.{k + 1}") for k in range(num_hosts)]
    try:
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for k, (name, address) in enumerate(hosts):
            _run(f"ip netns add {name}")
            _run(f"ip link add net netns {name} type veth peer name port{k} netns {switch}")
            _run(f"ip -n {name} addr add {address}/24 dev net")
            _run(f"ip -n {switch} link set port{k} master bridge")
            for where, interface in ((name, "lo"), (name, "net"), (switch, f"port{k}")):
                _run(f"ip -n {where} link set {interface} up")
            for where, interface in ((name, "net"), (switch, f"port{k}")):
                _run(f"tc -n {where} qdisc replace dev {interface} root tbf rate {rate} {BURST}")
        yield hosts
    finally:
        for name in (*(name for name, _ in hosts), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def train(hosts: list[tuple[str, str]], ranks: int, flags: list[str]) -> None:
    """bench.turns on all hosts; raises RuntimeError where an agent fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net", turns.INTERFACE: "net"}
    agents = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)),
             "--node_rank", str(k), "--nproc_per_node", str(ranks), "--master_addr", hosts[0][1],
             "--master_port", str(PORT), "-m", "bench.turns", *flags],
            env=env, cwd=ROOT, **({} if k == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}),
        )
        for k, (name, _) in enumerate(hosts)
    ]  # fmt: skip
    try:
        ends = [agent.wait() for agent in agents]
        if any(ends):
            raise RuntimeError(f"the agents of the hosts ended with {ends}")
    finally:
        for agent in agents:
            agent.terminate()


def host_bytes(made: dict[str, Any], seen: list[dict[str, Any]], num_bytes: int) -> dict[str, Any]:
    """What left host 0 in a step: the median over turns, by rank 0's counting."""
    sent = statistics.median(seen[0]["seen"][made["provider"]]["sent"][turns.SETTLE :])
    return {"host_nbytes": int(sent), "of_model": f"{sent / num_bytes:.3f}"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.hosts", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--hosts", type=int, default=2)
    add("--ranks", type=int, default=1, help="of each host")
    add("--rate", default="1gbit", help="of each host's link, each way, as tc has it")
    add("--cases", nargs="+", choices=CASES, default=["gpt30m-fp32"])
    add("--providers", nargs="+", choices=PROVIDERS, default=list(turns.DEFAULT), help="ratios are to the first")
    add("--turns", type=int, default=8)
    add("--steps", type=int, default=2)
    add("--csv", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.hosts < 2 or args.ranks < 1:
        parser.error(f"--hosts must be at least 2 and --ranks at least 1, got {args.hosts} and {args.ranks}")
    return args


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args, reason = parse(arguments), why_not()
    if reason is not None:
        sys.exit(f"bench.hosts: {reason}")
    missing = [p for p in args.providers if version_of(PROVIDERS[p]) is None]
    if missing:
        sys.exit(f"not installed: what {', '.join(missing)} needs")
    end_on_sigterm()
    status, session = 0, rows.now()
    for name in args.cases:
        case, num_ranks = CASES[name], args.hosts * args.ranks
        expected = reference(case) if case.ranks == num_ranks else None  # losses are of so many ranks' batches
        with tempfile.TemporaryDirectory() as folder, network(args.hosts, args.rate) as hosts:
            out = Path(folder) / "out.json"
            flags = ["--cases", name, "--providers", *args.providers, "--turns", str(args.turns), "--steps",
                     str(args.steps), "--out", str(out)]  # fmt: skip
            train(hosts, args.ranks, flags)
            records = json.loads(out.read_text())
        about = {"session": session, "time": rows.now(), "network": "shaped link", **versions(), "hosts": args.hosts,
                 "ranks_per_host": args.ranks, "rate": args.rate,
                 "command": shlex.join(["python", "-m", "bench.hosts", *arguments])}  # fmt: skip
        for row in turns.made_rows(name, args.providers, records, expected):
            row |= host_bytes(row, records, row["num_params"] * (2 if "bf16" in name else 4))
            rows.append(args.csv, row | about, COLUMNS)
            times = f"{row['p50_ms']} ms, {row['ratio']} of {row['base']}" if row["status"] == "ok" else row["status"]
            print(f"{name}: {row['provider']}: {times}; {row['of_model']} of the model leave a host", flush=True)
            status |= row["status"] != "ok"
    return status


if __name__ == "__main__":
    sys.exit(main())
