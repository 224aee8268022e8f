"""Draws the record: ``python -m sparse24_plans.bench.plot benchmarks/results/h200.json docs/h200.svg``.

Speed-up over dense cuBLAS against the number of tokens, the geometric mean over the shapes, a line a
contender. Needs matplotlib only.
"""

from __future__ import annotations

import sys

import matplotlib

from .figures import geometric_mean, times
from .record import Record, load

matplotlib.use("svg")
import matplotlib.pyplot as plt

_ELEMENT = "bf16"
_NAMES = {
    "auto": "ours: what select chooses",
    "invariant": "ours: what it chooses for batch invariance",
    "wgmma_sp": "wgmma_sp",
    "mma_sp": "mma_sp",
    "inflate_cublas": "inflate_cublas",
}
# Bytes of a 16-bit weight, dense over packed: what the memory allows where weights are all that moves.
_BANDWIDTH_LIMIT = 2 / 1.125


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


def main(record_path: str, out: str) -> None:
    record = load(record_path)
    figure, axes = plt.subplots(figsize=(8, 4.5))
    lines = {label: speedups(record, backend) for backend, label in _NAMES.items()}
    lines["cuSPARSELt, best of its search"] = speedups(record, "auto", "cusparselt_us")
    for label, line in lines.items():
        width = 3 if label == _NAMES["auto"] else 1.2
        axes.plot(list(line), list(line.values()), marker="o", markersize=4, linewidth=width, label=label)
    axes.axhline(1, color="black", linewidth=1, label="dense cuBLAS")
    axes.axhline(_BANDWIDTH_LIMIT, color="grey", linestyle="--", label="what memory allows at small N")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("N, tokens")
    axes.set_ylabel("speed-up over dense cuBLAS")
    axes.set_title(f"{record['gpu']}, {_ELEMENT}, geometric mean over eight Llama shapes")
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
