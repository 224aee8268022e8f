"""What a person sees of each command's document: tables and a line or two. The documents are ``--json``'s."""

from __future__ import annotations

from functools import partial
from typing import Any

from rich.text import Text

from .output import (
    Column,
    Json,
    number_text,
    plain,
    shape_text,
    show_line,
    show_table,
    size_text,
    time_text,
)


def _shape(row: Json) -> str:
    return shape_text(row["shape"])


def _number(key: str, row: Json) -> str:
    return number_text(row[key])


def _size(key: str, row: Json) -> str:
    return size_text(row[key])


def _matrix(row: Json) -> str:
    return shape_text((row["m"], row["k"]))


# The machine and problems -------------------------------------------------------------------------


def show_environment(about: Json) -> None:
    cupy = about["cupy"] or "not installed"
    versions = f"python {about['python']}, numpy {about['numpy']}, cupy {cupy}"
    show_line(f"sparse24_plans {about['version']} ({versions})")
    for gpu in about["devices"]:
        major, minor = gpu["compute_capability"]
        show_line(
            f"cuda:{gpu['ordinal']}: {gpu['name']}, compute capability {major}.{minor}, "
            f"{gpu['multiprocessors']} SMs, driver {gpu['driver']}, "
            f"cuBLASLt {gpu['cublaslt'] or 'not found'}, cuSPARSELt {gpu['cusparselt'] or 'not found'}"
        )
    if not about["devices"]:
        show_line(f"no GPU: {about['no_device']}")
    columns = (
        Column("kernel", "kernel"),
        Column("backend", "backend"),
        Column("tier", "tier"),
        Column("arch", "arch"),
        Column("elements", lambda row: ", ".join(row["elements"])),
        Column(
            "available here",
            lambda row: plain("yes", "green") if row["available"] else f"no: {row['reason']}",
        ),
    )
    show_table(columns, about["kernels"])


def show_explanation(answer: Json) -> None:
    desc, chosen = answer["descriptor"], answer["chosen"]
    show_line(
        f"{desc['op']}: n={desc['n']} m={desc['m']} k={desc['k']} {desc['element']}, "
        f"epilogue {desc['epilogue']}, on {answer['device']}"
    )

    def state(row: Json) -> object:
        if row["kernel"] == chosen:
            return plain("chosen", "bold green")
        return row["reason"] or "yes; a row above it was preferred"

    columns = (Column("kernel", "kernel"), Column("backend", "backend"), Column("can it serve?", state))
    show_table(columns, answer["rows"])
    if chosen is None:
        show_line("no kernel can serve this problem", "bold red")
        return
    size = f"{'' if answer['workspace_is_exact'] else 'at least '}{answer['workspace_size']} bytes"
    facts = {
        **{name: _yes_or_no(value) for name, value in answer["guarantee"].items()},
        "error bound c": number_text(answer["error_bound"]),
        "workspace": size,
    }
    if answer["details"]:
        facts["details"] = answer["details"]
    rows = [{"name": name, "value": value} for name, value in facts.items()]
    show_table((Column("guarantee", "name"), Column(chosen, "value")), rows)


def _yes_or_no(value: object) -> object:
    return ("no", "yes")[value] if isinstance(value, bool) else value


# Checkpoints --------------------------------------------------------------------------------------

_BEFORE = Column("before", partial(_size, "bytes_before"), right=True)
_AFTER = Column("after", partial(_size, "bytes_after"), right=True)
_COPIED = (
    Column("copied", "name"),
    Column("shape", _shape),
    Column("element", "element"),
    Column("why", lambda row: row["reason"] or "no weight of the format"),
    Column("size", partial(_size, "bytes_before"), right=True),
)


def show_compression(document: Json) -> None:
    done = _of(document, "compressed")
    columns = (
        Column("compressed", "name"),
        Column("shape", _shape),
        Column("element", "element"),
        Column("kept energy", lambda row: f"{row['kept_energy']:.2%}", right=True),
        _BEFORE,
        _AFTER,
    )
    before, after = (size_text(sum(row[f"bytes_{when}"] for row in done)) for when in ("before", "after"))
    show_table(columns, done, total=(f"total of {len(done)}", "", "", "", before, after))
    _show_rest(document, "compressed")


def show_conversion(document: Json) -> None:
    columns = (
        Column("converted", "name"),
        Column("shape", _shape),
        Column("element", "element"),
        _BEFORE,
        _AFTER,
    )
    show_table(columns, _of(document, "converted"))
    _show_rest(document, "converted")


def show_verification(found: Json) -> None:
    columns = (
        Column("layer", "name"),
        Column("shape", _shape),
        Column("element", "element"),
        Column("kernel", lambda row: row["kernel"] or "-"),
        Column("max |error|", partial(_number, "max_abs_error"), right=True),
        Column("relative error", partial(_number, "relative_error"), right=True),
        Column("bound c", partial(_number, "error_bound"), right=True),
        Column("error / allowed", partial(_number, "worst_ratio"), right=True),
        Column("result", _result),
    )
    show_table(columns, found["layers"])
    if found["layers"]:
        show_line("|y - exact| is allowed up to c * sum|x||w| plus the rounding of y, elementwise.", "dim")
    for problem in found["problems"]:
        show_line(f"FAIL {problem}", "red")
    show_line(_verdict(found), "bold green" if found["passed"] else "bold red")


def show_demo(document: Json) -> None:
    energies = [row["kept_energy"] for row in _of(document["compress"], "compressed")]
    kept = f", keeping {min(energies):.1%} to {max(energies):.1%} of a layer's energy" if energies else ""
    show_line(f"compressed {len(energies)} layers{kept}: {_change(document['compress'])}")
    show_verification(document["verify"])


def _of(document: Json, action: str) -> list[Json]:
    return [row for row in document["tensors"] if row["action"] == action]


def _show_rest(document: Json, action: str) -> None:
    """The tensors that were copied, and the sum of it all."""
    copied = _of(document, "copied")
    show_table(_COPIED, copied)
    show_line(f"{len(_of(document, action))} {action}, {len(copied)} copied: {_change(document)}")


def _change(document: Json) -> str:
    before, after = document["source_bytes"], document["destination_bytes"]
    return f"{size_text(before)} became {size_text(after)} ({after / before:.1%})"


def _result(layer: Json) -> Text:
    return plain("pass", "green") if layer["passed"] else plain(f"FAIL: {layer['problem']}", "bold red")


def _verdict(found: Json) -> str:
    layers = found["layers"]
    failed = sum(not layer["passed"] for layer in layers) + len(found["problems"])
    checked = f"{len(layers)} layers on {found['device']}, {found['copied']} tensors copied unchanged"
    if failed:
        return f"FAIL: {failed} problems; {checked}"
    if not layers:
        return f"PASS: nothing could be compressed; {checked}"
    worst = max(layer["worst_ratio"] or 0.0 for layer in layers)
    return f"PASS: {checked}; the worst error is {worst:.2%} of what the guarantee allows"


# Times --------------------------------------------------------------------------------------------


def show_benchmark(record: Json) -> None:
    """What the record holds: products, preparation of weights, the host's times."""
    _show_products(record["gemm"])
    _show_preparation(record["prepare"], record.get("prepare_peers", []))
    if record["host"]:
        show_line("host: " + ", ".join(f"{name} {value}" for name, value in record["host"].items()))


def _time(key: str, row: Json) -> str:
    return time_text(row.get(key))


def _show_products(rows: list[Json]) -> None:
    """Microseconds by shape and n: the peers, then every backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    cells: dict[tuple[Any, ...], Json] = {}
    for row in rows:
        names = ("element", "m", "k", "n", "dense_us", "cusparselt_us")
        about = {name: row[name] for name in names}
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
        *(Column(name, partial(_time, f"by {name}"), right=True) for name in backends),
        Column("auto / dense", ratio),
    )
    show_table(columns, cells.values())


def _show_preparation(rows: list[Json], peers: list[Json]) -> None:
    """Microseconds beside a device copy that moves the same bytes, and beside peers."""

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
        Column("of a copy's speed", lambda row: f"{row['copy_us'] / row['us']:.0%}", right=True),
        Column("peer", beside),
    )
    show_table(columns, rows)


def show_tuning(document: Json) -> None:
    columns = (
        Column("kernel", "kernel"),
        Column("n, m, k, element", lambda row: ", ".join(str(row["problem"][key]) for key in _SIZE)),
        Column("right", "right"),
        Column("not", lambda row: row["refused_or_wrong"] + len(row["fatal"])),
        Column("chosen", _configuration),
        Column("us", partial(_chosen_time, "microseconds")),
        Column("default us", partial(_chosen_time, "default_microseconds")),
        Column("self-test", _self_test),
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
