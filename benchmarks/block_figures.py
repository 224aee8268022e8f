"""Tables of block-sparse products, from their records."""

from __future__ import annotations

from sparse24_plans.bench.record import Record

from .random_figures import block_summary
from .table_format import ratio, table, with_range

BLOCKS_RECORD, RANDOM_BLOCKS_RECORD = "h200-blocksparse.json", "h200-blocksparse-random.json"


def fixed_blocks(record: Record) -> list[str]:
    """Products with random kept blocks over dense cuBLAS, by op, n, size of blocks and how many are kept."""
    found = [row for row in record["records"][BLOCKS_RECORD]["products"] if row["pattern"] == "random"]
    densities = sorted({row["density"] for row in found}, reverse=True)
    names = sorted(
        {(row["op"], row["n"], row["block"]) for row in found},
        key=lambda one: (("dsd", "dds", "sdd").index(one[0]), -one[1], -one[2]),
    )
    rows = []
    for name in names:
        cells = [row for row in found if (row["op"], row["n"], row["block"]) == name]
        means = [
            with_range([row["dense_us"] / row["us"] for row in cells if row["density"] == density])
            for density in densities
        ]
        rows.append((*name, *means))
    return table(("op", "n", "block", *(f"{density:.0%} kept" for density in densities)), rows)


def random_blocks(record: Record) -> list[str]:
    """Random block-sparse products over dense cuBLAS; none without a record."""
    found = record["records"].get(RANDOM_BLOCKS_RECORD)
    rows = [
        (
            *(row[name] for name in ("block", "tokens", "pattern", "cells")),
            *(ratio(row[name]) for name in ("mean", "aligned")),
            f"{row['worst']:.2f} ({row['at']})",
        )
        for row in (block_summary(found) if found else ())
    ]
    return table(("block", "N", "rows", "cells", "over dense", "aligned", "worst cell"), rows) if rows else []


def patterned_blocks(record: Record) -> list[str]:
    """Products of blocks that are 2:4 over whole ones, and over dense cuBLAS; none without a record."""
    found = record["records"][BLOCKS_RECORD].get("sparse24", [])
    densities = sorted({row["density"] for row in found}, reverse=True)
    rows = []
    names = {(row["op"], row["block"]) for row in found}
    for op, block in sorted(names, key=lambda one: (-one[1], one[0])):
        cells = [row for row in found if (row["op"], row["block"]) == (op, block)]
        for label, peer in (("whole blocks", "blocks_us"), ("dense", "dense_us")):
            means = [
                with_range([row[peer] / row["us"] for row in cells if row["density"] == density])
                for density in densities
            ]
            rows.append((op, block, label, *means))
    if not rows:
        return []
    return table(("op", "block", "over", *(f"{density:.0%} kept" for density in densities)), rows)
