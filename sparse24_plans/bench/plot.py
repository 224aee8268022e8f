"""Draws the record: ``python -m benchmarks.plot benchmarks/results/h200.json docs/h200.svg``.

Speed-up over dense cuBLAS against the number of tokens, the geometric mean over the shapes, a line a
contender. Needs matplotlib only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

NAMES = {
    "auto": "ours: what select chooses",
    "wgmma_sp": "wgmma_sp",
    "wgmma_sp_invariant": "wgmma_sp, batch-invariant",
    "mma_sp": "mma_sp, batch-invariant",
    "inflate_cublas": "inflate_cublas",
}
# Bytes of a 16-bit weight, dense over packed: what the memory allows where weights are all that moves.
BANDWIDTH_LIMIT = 2 / 1.125


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedups(rows: list[dict[str, Any]], key: str) -> dict[int, float]:
    """n -> geometric mean of dense_us / row[key]; only n for which every row has the figure."""
    by_n: dict[int, list[float]] = {}
    for row in rows:
        by_n.setdefault(row["n"], []).append(row["dense_us"] / row[key] if row[key] else math.nan)
    return {n: geometric_mean(found) for n, found in sorted(by_n.items()) if not any(map(math.isnan, found))}


def main(record_path: str, out: str) -> None:
    record = json.loads(Path(record_path).read_text())
    record["gemm"] = [row for row in record["gemm"] if row["element"] == "bf16"]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    lines = {
        label: speedups([row for row in record["gemm"] if row["backend"] == backend], "us")
        for backend, label in NAMES.items()
    }
    peers = [row for row in record["gemm"] if row["backend"] == "auto"]
    lines["cuSPARSELt, best of its search"] = speedups(peers, "cusparselt_us")
    for label, line in lines.items():
        width = 3 if label == NAMES["auto"] else 1.2
        axes.plot(list(line), list(line.values()), marker="o", markersize=4, linewidth=width, label=label)
    axes.axhline(1, color="black", linewidth=1, label="dense cuBLAS")
    axes.axhline(BANDWIDTH_LIMIT, color="grey", linestyle="--", label="what memory allows at small N")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("N, tokens")
    axes.set_ylabel("speed-up over dense cuBLAS")
    axes.set_title(f"{record['gpu']}, {peers[0]['element']}, geometric mean over eight Llama shapes")
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.3g"))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
