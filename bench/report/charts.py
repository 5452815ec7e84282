"""PNG charts of results: step times of one case, lines over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report.rows import Row, median_of

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
    held = [median_of(own[n], "held_mb") or 0.0 for n in names]
    peak = [median_of(own[n], "peak_steady_mb") or 0.0 for n in names]
    right.barh(names, peak, color=colours, alpha=0.35, label="peak of the process")
    right.barh(names, held, color=colours, label="tensors held between steps")
    right.set_xlabel("memory of a rank, MB")
    right.legend()
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
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
