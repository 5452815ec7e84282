"""Systems that step in turn in the same processes: the arithmetic of the ratios, the gate, and one real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiers import full_only

from bench import turns
from bench.cases.models import GPT, GPTConfig
from bench.report import rows, tables

RIGHT = [5.0, 4.0, 3.0]


def records(*ranks: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Of each rank, the seconds of each provider's steps; CPU seconds are half of them, losses those of RIGHT."""
    records_of_ranks = []
    for seconds in ranks:
        seen = {n: {"losses": RIGHT, "step_s": s, "cpu_s": [v / 2 for v in s]} for n, s in seconds.items()}
        records_of_ranks.append({"seen": seen, "num_params": 10, "device": "d"})
    return records_of_ranks


def test_a_slow_spell_moves_no_ratio_and_the_slowest_rank_counts() -> None:
    # the first two settle; at the last all is four times slower
    base, other = [9.0, 9.0, 1.0, 1.0, 4.0], [5.0, 5.0, 1.2, 1.1, 4.8]
    ranks = [{"zc stage 2": base, "DDP": other}, {"zc stage 2": base, "DDP": [0.0, 0.0, 0.0, 1.2, 0.0]}]
    zc, ddp = turns.made_rows("tiny", ["zc stage 2", "DDP"], records(*ranks), RIGHT)
    assert (ddp["turns"], ddp["p50_ms"], ddp["cpu_ms"], ddp["ranks"]) == (3, "1200.00", "600.00", 2)
    assert (zc["ratio"], ddp["ratio"], ddp["base"]) == ("1.0000", "1.2000", "zc stage 2")
    assert ddp["ratio_p20"] == ddp["ratio_p80"] == "1.2000"


def test_losses_that_depart_take_the_numbers_away() -> None:
    names = ["zc stage 2", "DDP", "compiled, no communication"]
    runs = records({name: [1.0] * 5 for name in names})
    for name in ("DDP", "compiled, no communication"):
        runs[0]["seen"][name]["losses"] = [5.0, 4.5, 3.0]
    zc, ddp, floor = turns.made_rows("tiny", names, runs, RIGHT)
    assert ddp["status"] == "loss after 1 updates is 4.50000, float64 says 4.00000"
    assert "p50_ms" not in ddp and "ratio" not in ddp
    assert zc["ratio"] == floor["ratio"] == "1.0000"  # who does not communicate has its own losses
    ddp, zc, _ = turns.made_rows("tiny", ["DDP", "zc stage 2", names[2]], runs, RIGHT)
    assert (ddp["status"], zc["status"], zc["p50_ms"], zc["ratio"]) == (ddp["status"], "ok", "1000.00", "")


@full_only
def test_two_ranks_in_turn(tmp_path: Path) -> None:
    path, providers = tmp_path / "turns.csv", ["zc stage 2, eager", "DDP", "eager, no communication"]
    flags = ["--cases", "tiny", "--providers", *providers, "--turns", "5", "--csv", str(path)]
    assert turns.main(flags) == 0
    written = rows.read(path)
    assert [r["provider"] for r in written] == providers
    assert all(r["status"] == "ok" and r["turns"] == "3" and float(r["p50_ms"]) > 0 for r in written)
    assert written[0]["ratio"] == "1.0000" and float(written[1]["ratio"]) != 1.0
    lines = tables.turns(path, {"case": "tiny"}).splitlines()
    assert lines[2].startswith("| zc stage 2, eager |") and f"| {float(written[1]['ratio']):.3f} |" in lines[3]


def test_each_system_has_graphs_of_its_own() -> None:
    """Dynamo keeps graphs at the code object: a second model of a class takes those of the first."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.zeros(1, 8, dtype=torch.int64)
    for change, expected in ((lambda model: model, 1), (turns.with_own_code, 2)):
        torch.compiler.reset()
        graphs.clear()
        losses = []
        for _ in range(2):
            torch.manual_seed(0)
            model = change(GPT(GPTConfig(vocab=16, seq=8, layers=1, width=16, heads=2)))
            assert isinstance(model, GPT) and type(model).__name__ == "GPT"
            losses.append(torch.compile(model, backend=backend)(x, x).item())
        assert len(graphs) == expected and losses[0] == losses[1]
    torch.compiler.reset()
