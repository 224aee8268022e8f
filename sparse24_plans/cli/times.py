"""Tables of measured times: benchmarks and searches for configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from .tables import Column, Json, shape_text, show_line, show_table, time_text


def _matrix(row: Json) -> str:
    return shape_text((row["m"], row["k"]))


def show_benchmark(record: Json) -> None:
    """Show a record's products, preparation of weights, and host times."""
    _show_products(record["gemm"])
    _show_beside_plain(record["epilogues"], "epilogue", "identity_us")
    _show_beside_plain(record["variants"], "variant", "plain_us")
    _show_preparation(record["prepare"], record.get("prepare_peers", []))
    rows = [{"call": name, "time": value} for name, value in record["host"].items()]
    columns = Column("of the host", "call"), Column("time", "time", right=True)
    show_table(columns, rows, title="host: microseconds (_us) or seconds (_s) of a call")


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


def _show_beside_plain(rows: list[Json], kind: str, plain: str) -> None:
    """Microseconds of products of a kind, beside those of the plain product."""
    columns = (
        Column(kind, kind),
        Column("element", "element"),
        Column("M x K", _matrix),
        Column("N", "n", right=True),
        Column("us", partial(_time, "us"), right=True),
        Column("plain", partial(_time, plain), right=True),
        Column("us / plain", lambda row: f"{row['us'] / row[plain]:.2f}", right=True),
    )
    show_table(columns, rows, title=f"{kind}s: microseconds, beside the plain product")


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
