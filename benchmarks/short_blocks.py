"""Compares short blocks with long ones on a GPU: ``python -m benchmarks.short_blocks``.

Products that take less than ``steady.SHORT_US`` microseconds are timed in shorter blocks, which is right as
long as the ratio of dense to sparse is the same in both. Takes about a minute.
"""

from __future__ import annotations

from sparse24_plans.bench.gemm import SELECTED, Cell, matrix_of
from sparse24_plans.bench.scope import LLAMA_8B
from sparse24_plans.bench.steady import BLOCK_US, SHORT_BLOCK_US, time_alone
from sparse24_plans.vocab import ElementKind

TOKENS = (1, 16, 64, 128)


def main() -> None:
    print("M x K, N: microseconds and dense's; dense over sparse in short blocks, in long ones, short / long")
    for m, k in LLAMA_8B[:2]:
        for n in TOKENS:
            cell = Cell(matrix_of(m, k, ElementKind.BF16), n)
            cell.enter("auto", SELECTED["auto"])
            contenders = [*cell.dense(), cell.contenders["auto"]]
            short, long = (
                time_alone(contenders, short_block_us=length) for length in (SHORT_BLOCK_US, BLOCK_US)
            )
            few, many = (one["dense"].us / one["auto"].us for one in (short, long))
            times = f"{long['auto'].us:7.2f} {long['dense'].us:7.2f}"
            print(f"{m}x{k}, {n:4}: {times}; {few:.3f} {many:.3f} {few / many:.3f}", flush=True)


if __name__ == "__main__":
    main()
