"""Draws records: ``python -m benchmarks.plot benchmarks/results/h200.json .../h100.json docs/speedups.svg``.

Speed-up over dense cuBLAS against the number of tokens, the geometric mean over the shapes, a line a
contender. Several records, of one GPU each, stand beside each other. Needs matplotlib only.
"""

from __future__ import annotations

import sys
from statistics import geometric_mean
from typing import Any

import matplotlib

from sparse24_plans.bench.record import Record, load

from .figures import times

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MultipleLocator

matplotlib.rcParams["svg.hashsalt"] = "sparse24_plans"  # the same file every time

_ELEMENT = "bf16"
_SELECTED = "auto"
_CUSPARSELT = "cuSPARSELt, best of its search"
# The order of drawing: the choice of select comes last, on top.
_NAMES = {
    "inflate_cublas": "inflate_cublas: expands W, then cuBLAS",
    "mma_sp": "mma_sp: the kernel for older GPUs, by mma.sp",
    "invariant": "what select chooses for batch invariance",
    _SELECTED: "what select chooses",
}
# Bytes of a 16-bit weight, dense over packed. More is won where dense cuBLAS doesn't reach the bandwidth.
_FEWER_BYTES = 2 / 1.125
_FEWER = "1.78 times fewer bytes of W;\ndense cuBLAS reads them slower"
_LIMITS = ((1.0, "dense cuBLAS"), (_FEWER_BYTES, _FEWER))


def speedups(record: Record, backend: str, key: str = "us") -> dict[int, float]:
    """n -> geometric mean of dense_us over the time; only n for which every shape has both."""
    ours, dense = (times(record, _ELEMENT, backend, name) for name in (key, "dense_us"))
    shapes = {(m, k) for m, k, _ in dense}
    found = {}
    for n in sorted({n for _, _, n in ours}):
        cells = [(*shape, n) for shape in shapes]
        if all(cell in ours and cell in dense for cell in cells):
            found[n] = geometric_mean(dense[cell] / ours[cell] for cell in cells)
    return found


def drawn(*records: Record) -> Any:
    """The figure, of matplotlib: axes for each record, and one legend."""
    figure, row = plt.subplots(
        1,
        len(records),
        figsize=(8 + 4 * (len(records) - 1), 5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, record in zip(row[0], records, strict=True):
        _draw(axes, record)
    row[0][0].set_ylabel("speed-up over dense cuBLAS")
    handles, labels = row[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"{_ELEMENT}, geometric mean over eight Llama shapes")
    return figure


def _draw(axes: Any, record: Record) -> None:
    lines = {_CUSPARSELT: speedups(record, _SELECTED, "cusparselt_us")}
    lines |= {label: speedups(record, backend) for backend, label in _NAMES.items()}
    for number, (label, line) in enumerate(lines.items()):
        if not line:  # the record doesn't have it
            continue
        style: dict[str, Any] = {"linewidth": 1.2, "color": f"C{number}"}
        if label == _NAMES[_SELECTED]:
            style = {"linewidth": 3, "color": "black", "zorder": 3}
        axes.plot(list(line), list(line.values()), marker="o", markersize=4, label=label, **style)
    for height, text in _LIMITS:
        axes.axhline(height, color="grey", linestyle="--", linewidth=1, zorder=1)
        axes.text(0.99, height + 0.02, text, ha="right", fontsize=8, transform=axes.get_yaxis_transform())
    tokens = sorted({n for line in lines.values() for n in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.minorticks_off()
    axes.set_ylim(0, 2.1)
    axes.yaxis.set_major_locator(MultipleLocator(0.5))
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.set_xlabel("N, tokens")
    axes.set_title(record["gpu"])
    axes.grid(alpha=0.3)


def main(*paths: str) -> None:
    *records, out = paths
    figure = drawn(*map(load, records))
    figure.savefig(out, metadata={"Date": None} if out.endswith(".svg") else {})


if __name__ == "__main__":
    main(*sys.argv[1:])
