"""PNG charts of results: step times of one case, lines over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report.rows import Ratio, Row, median_of

COLOURS = {"zc": "#d1495b", "DDP": "#30638e", "FSDP2": "#003d5b", "DeepSpeed": "#00798c"}


def colour_of(provider: str) -> str:
    return next((colour for prefix, colour in COLOURS.items() if provider.startswith(prefix)), "#9a9a9a")


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Bars of p50 step time (whiskers p20 to p80) and of memory; providers without a number are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [r for r in rows if r["status"] == "ok"]
    bad = {r["provider"] for r in rows} - {r["provider"] for r in good}
    bad |= {r["provider"] for r in rows if r["status"] != "ok"}
    names = [n for n in dict.fromkeys(r["provider"] for r in good) if n not in bad]
    if not names:
        return
    own = {n: [r for r in good if r["provider"] == n] for n in names}
    p50 = {n: median_of(own[n], "p50_ms") or 0.0 for n in names}
    names.sort(key=lambda n: -p50[n])
    low = [p50[n] - (median_of(own[n], "p20_ms") or 0.0) for n in names]
    high = [(median_of(own[n], "p80_ms") or 0.0) - p50[n] for n in names]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.4 * len(names) + 1.8), sharey=True)
    colours = [colour_of(n) for n in names]
    left.barh(names, [p50[n] for n in names], xerr=[low, high], color=colours)
    left.set_xlabel("step, ms (p50; p20 to p80)")
    held_mb = [median_of(own[n], "held_mb") or 0.0 for n in names]
    peak = [median_of(own[n], "peak_steady_mb") or 0.0 for n in names]
    right.barh(names, peak, color=colours, alpha=0.35, label="peak of the process")
    right.barh(names, held_mb, color=colours, label="tensors held between steps")
    right.set_xlabel("memory of a rank, MB")
    right.legend()
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0, 3.0, 5.0)
HISTORY = {  # provider -> what the legend calls it
    "compiled, no communication": "no communication",
    "DDP + compile": "DDP",
    "DDP + ZeroRedundancyOptimizer + compile": "DDP + ZeroRedundancyOptimizer",
    "FSDP2 + compile": "FSDP2",
    "FSDP2, reshard_after_forward + compile": "FSDP2, frees weights",
    "DeepSpeed ZeRO-2 + compile": "DeepSpeed ZeRO-2",
}


def draw_history(by_case: Mapping[str, Sequence[Ratio]], path: Path) -> None:
    """A panel per case: the compiled peers' steps relative to zc's stage 2, by commit in order of time. Above 1, zc is
    faster. Filled: in turn in the same processes; hollow: in fresh processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {case: [r for r in ratios if r.provider in HISTORY] for case, ratios in by_case.items()}
    panels = {case: ratios for case, ratios in panels.items() if len({r.commit for r in ratios}) > 1}
    figure, grid = pyplot.subplots(
        (len(panels) + 1) // 2, 2, figsize=(12, 2.8 * ((len(panels) + 1) // 2)), squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (case, ratios) in zip(grid.flat, panels.items(), strict=False):
        commits = list(dict.fromkeys(r.commit[:7] for r in ratios))
        for number, (provider, label) in enumerate(HISTORY.items()):
            own = [(commits.index(r.commit[:7]), r.value, r.in_turn) for r in ratios if r.provider == provider]
            axes.plot([x for x, *_ in own], [y for _, y, _ in own], color=f"C{number}", alpha=0.4, label=label)
            for in_turn, fill in ((True, f"C{number}"), (False, "white")):
                points = [(x, y) for x, y, measured_in_turn in own if measured_in_turn == in_turn]
                axes.scatter(*zip(*points, strict=True), color=f"C{number}", facecolor=fill) if points else None
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=case, ylabel="step / zc stage 2", yscale="log")
        low, high = axes.get_ylim()
        axes.set_yticks([y for y in TICKS if low <= y <= high], [f"{y:g}" for y in TICKS if low <= y <= high])
        axes.minorticks_off()
        axes.set_xticks(range(len(commits)), commits, rotation=45, ha="right", fontsize=7)
        axes.grid(alpha=0.3)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(HISTORY), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def lines(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, x: str, y: str, log: bool = False
) -> None:
    """One line a name through its (x, y) points; ``log``: both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
