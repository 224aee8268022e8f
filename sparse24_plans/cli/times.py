"""Tables of measured times: benchmarks and searches for configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..bench.random_figures import random_summary, with_worst
from .tables import Column, Json, shape_text, show_line, show_table, time_text


def _matrix(row: Json) -> str:
    return shape_text((row["m"], row["k"]))


def show_benchmark(record: Json) -> None:
    """Show a record's products, preparation of weights, and host times."""
    _show_products(record["gemm"])
    _show_preparation(record["prepare"], record.get("prepare_peers", []))
    rows = [{"call": name, "time": value} for name, value in record["host"].items()]
    columns = Column("of the host", "call"), Column("time", "time", right=True)
    show_table(columns, rows, title="host: microseconds (_us) or seconds (_s) of a call")


def show_random(record: Json) -> None:
    """Show means and worst cells by element and number of tokens."""
    columns = (
        Column("element", "element"),
        Column("N", "tokens"),
        Column("cells", "cells", right=True),
        Column("over dense", partial(_ratio, "mean"), right=True),
        Column("worst", partial(_ratio, "worst"), right=True),
        Column("at", lambda row: row["at"] or "-"),
        Column("invariant / auto", lambda row: with_worst(row, "invariant"), right=True),
        Column("auto / best", lambda row: with_worst(row, "best"), right=True),
    )
    show_table(columns, random_summary(record))
    show_line(f"seed {record['seed']}, {record['gpu']}")


def show_torch(record: Json) -> None:
    """Show the decoder's times beside the dense one's, and the host's time a call."""
    columns = (
        Column("", lambda row: f"{row['kind']} of {row['n'] if row['tokens'] == 1 else row['tokens']}"),
        Column("GPUs", "gpus", right=True),
        Column("dense", partial(_ms, "graph_dense_ms"), right=True),
        Column("sparse", partial(_ms, "graph_sparse_ms"), right=True),
        Column("over dense", partial(_of_dense, "graph", "sparse"), right=True),
        Column("invariant", partial(_of_dense, "graph", "invariant"), right=True),
        Column("eager", partial(_of_dense, "eager", "sparse"), right=True),
    )
    title = "Llama-3.1-8B's shapes, 16 layers: ms in a CUDA graph, and the speed over dense"
    show_table(columns, record["decoder"], title=title)
    rows = [{"call": name, "time": value} for name, value in record["host"].items()]
    if rows:
        show_table((Column("host", "call"), Column("us a call", "time", right=True)), rows)


def show_blocks(record: Json) -> None:
    """Show each product's microseconds, and its speed over dense cuBLAS and PyTorch's BSR."""

    def over(peer: str, row: Json) -> str:
        return f"{row[peer] / row['us']:.2f}x" if row[peer] else "-"

    columns = (
        Column("op", "op"),
        Column("M x K", _matrix),
        Column("N", "n", right=True),
        Column("block", "block", right=True),
        Column("kept", lambda row: f"{row['density']:.0%} {row['pattern']}"),
        Column("us", partial(_time, "us"), right=True),
        Column("over dense", partial(over, "dense_us"), right=True),
        Column("over BSR", partial(over, "torch_bsr_us"), right=True),
        Column("kernel", "backend", optional=True),
    )
    show_table(columns, record["products"], title="products of block-sparse matrices: microseconds")
    _show_blocks24(record)
    _show_attention(record)


def _show_blocks24(record: Json) -> None:
    columns = (
        Column("op", "op"),
        Column("M x K", _matrix),
        Column("N", "n", right=True),
        Column("block", "block", right=True),
        Column("kept", lambda row: f"{row['density']:.0%}"),
        Column("us", partial(_time, "us"), right=True),
        Column("over whole blocks", lambda row: f"{row['blocks_us'] / row['us']:.2f}x", right=True),
        Column("over dense", lambda row: f"{row['dense_us'] / row['us']:.2f}x", right=True),
        Column("kernel", "backend", optional=True),
    )
    show_table(columns, record["sparse24"], title="products of blocks that are 2:4: microseconds")


def _show_attention(record: Json) -> None:
    columns = (
        Column("attention", "direction"),
        Column("tokens", "tokens", right=True),
        Column("heads", lambda row: f"{row['heads']} x {row['head_size']}", right=True),
        Column("block", "block", right=True),
        Column("kept", lambda row: f"{row['density']:.0%}", right=True),
        Column("us", partial(_time, "us"), right=True),
        Column("over dense", lambda row: f"{row['dense_us'] / row['us']:.2f}x", right=True),
        Column("TFLOP/s", lambda row: f"{row['tflops']:.0f}", right=True),
    )
    show_table(columns, record["attention"], title="attention over kept blocks: microseconds")


def _ms(key: str, row: Json) -> str:
    return "-" if row[key] is None else f"{row[key]:.2f}"


def _of_dense(mode: str, name: str, row: Json) -> str:
    dense, ours = (row[f"{mode}_{one}_ms"] for one in ("dense", name))
    return "-" if dense is None or ours is None else f"{dense / ours:.2f}x"


def _ratio(key: str, row: Json) -> str:
    return "-" if row[key] is None else f"{row[key]:.2f}x"


def _time(key: str, row: Json) -> str:
    return time_text(row.get(key))


_FIRST = ("auto", "invariant")
"""Columns of selected kernels, which are always shown. A narrow terminal omits other backends."""


def _show_products(rows: list[Json]) -> None:
    """Show microseconds of the peers and of every backend, by shape and n."""
    names = dict.fromkeys(row["backend"] for row in rows)
    backends = sorted(names, key=lambda name: name not in _FIRST)
    cells: dict[tuple[Any, ...], Json] = {}
    for row in rows:
        keys = ("element", "m", "k", "n", "dense_us", "cusparselt_us")
        about = {key: row[key] for key in keys}
        cells.setdefault(tuple(about.values()), about)[f"by {row['backend']}"] = row["us"]

    def ratio(cell: Json) -> str:
        dense, ours = cell["dense_us"], cell.get("by auto")
        return f"{dense / ours:.2f}x" if dense and ours else "-"

    columns = (
        Column("element", "element"),
        Column("M x K", _matrix),
        Column("N", "n", right=True),
        Column("dense", partial(_time, "dense_us"), right=True),
        Column("cuSPARSELt", partial(_time, "cusparselt_us"), right=True),
        Column("auto / dense", ratio, right=True, optional=True),
        *(
            Column(name, partial(_time, f"by {name}"), right=True, optional=name not in _FIRST)
            for name in backends
        ),
    )
    show_table(columns, cells.values(), title="products: microseconds, and how often auto goes into dense")


def _show_preparation(rows: list[Json], peers: list[Json]) -> None:
    """Show microseconds beside a device copy of the same bytes, and beside peers."""

    def beside(row: Json) -> str:
        where = ("op", "m", "k", "element")
        others = [peer for peer in peers if all(peer[name] == row[name] for name in where)]
        texts = [f"{peer['us']:.2f} us, {peer['us'] / row['us']:.2f}x: {peer['peer']}" for peer in others]
        return ", ".join(texts) or "-"

    columns = (
        Column("op", "op"),
        Column("element", "element"),
        Column("M x K", _matrix),
        Column("us", partial(_time, "us"), right=True),
        Column("copy", partial(_time, "copy_us"), right=True),
        Column("copy / us", lambda row: f"{row['copy_us'] / row['us']:.0%}", right=True),
        Column("peer", beside, prose=True),
    )
    show_table(columns, rows, title="preparing weights: microseconds, beside a device copy of the same bytes")


def show_tuning(document: Json) -> None:
    columns = (
        Column("kernel", "kernel"),
        Column("n, m, k, element", lambda row: ", ".join(str(row["problem"][key]) for key in _SIZE)),
        Column("us", partial(_chosen_time, "microseconds"), right=True),
        Column("default", partial(_chosen_time, "default_microseconds"), right=True),
        Column("right", "right", right=True, optional=True),
        Column("not", lambda row: row["refused_or_wrong"] + len(row["fatal"]), right=True, optional=True),
        Column("self-test", _self_test, optional=True),
        Column("chosen", _configuration, prose=True),
    )
    show_table(columns, document["results"])
    fatal = {
        f"{row['kernel']} {row['problem']['element']} {one}"
        for row in document["results"]
        for one in row["fatal"]
    }
    for line in sorted(fatal):
        show_line(f"left out, it ended the CUDA context: {line}")


_SIZE = ("n", "m", "k", "element")


def _configuration(row: Json) -> str:
    if row["chosen"] is None:
        return "none is right"
    settings = row["chosen"]["configuration"].items()
    return ", ".join(f"{name} {value}" for name, value in settings) or "the default"


def _chosen_time(key: str, row: Json) -> str:
    return "" if row["chosen"] is None else time_text(row["chosen"][key])


def _self_test(row: Json) -> str:
    if row["chosen"] is None:
        return ""
    return "passed" if row["chosen"]["promises"] else "failed"
