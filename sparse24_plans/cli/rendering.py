"""The command line's tables and its JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoints.compress import TensorReport
from ..checkpoints.convert import ConversionReport
from ..checkpoints.verify import LayerResult, Verification
from ..gemm.tuned import TuningTable
from ..tuning.search import Trials

Json = dict[str, Any]

_WIDTH_OF_A_PIPE = 200


def console(*, stderr: bool = False) -> Console:
    """A console on today's stdout or stderr. Into a file or a pipe, tables get room for long names."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH_OF_A_PIPE)


def print_json(document: Json) -> None:
    """One document on stdout. NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


# Cells --------------------------------------------------------------------------------------------


def _text(value: object, style: str = "") -> Text:
    """Plain text: names from a file can hold neither markup nor control characters for the terminal."""
    text = str(value)
    return Text(text if text.isprintable() else ascii(text), style)


def _size(nbytes: int) -> str:
    amount, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(cell if isinstance(cell, Text) else _text(cell) for cell in cells))


def _line(text: str, style: str = "") -> None:
    console().print(Text(text, style), soft_wrap=True)


# Documents ----------------------------------------------------------------------------------------


def show_environment(about: Json) -> None:
    cupy = about["cupy"] or "not installed"
    versions = f"python {about['python']}, numpy {about['numpy']}, cupy {cupy}"
    _line(f"sparse24_plans {about['version']} ({versions})")
    for gpu in about["devices"]:
        major, minor = gpu["compute_capability"]
        _line(
            f"cuda:{gpu['ordinal']}: {gpu['name']}, compute capability {major}.{minor}, "
            f"{gpu['multiprocessors']} SMs, driver {gpu['driver']}, "
            f"cuBLASLt {gpu['cublaslt'] or 'not found'}, cuSPARSELt {gpu['cusparselt'] or 'not found'}"
        )
    if not about["devices"]:
        _line(f"no GPU: {about['no_device']}")
    table = _table("kernel", "backend", "tier", "arch", "elements", "available here")
    for row in about["kernels"]:
        state = _text("yes", "green") if row["available"] else _text(f"no: {row['reason']}")
        _add(
            table, row["kernel"], row["backend"], row["tier"], row["arch"], ", ".join(row["elements"]), state
        )
    console().print(table)


def show_compression(reports: list[TensorReport], source_bytes: int, out_bytes: int) -> None:
    compressed = [report for report in reports if report.action == "compressed"]
    copied = [report for report in reports if report.action == "copied"]
    if compressed:
        table = _table(
            "compressed", "shape", "element", "kept energy", "before", "after",
            right=("kept energy", "before", "after"),
        )  # fmt: skip
        for report in compressed:
            _add(
                table,
                report.name,
                _shape(report.shape),
                report.element,
                f"{report.kept_energy:.2%}",
                _size(report.bytes_before),
                _size(report.bytes_after),
            )
        before, after = (sum(getattr(r, f"bytes_{when}") for r in compressed) for when in ("before", "after"))
        table.add_section()
        _add(table, f"total of {len(compressed)}", "", "", "", _size(before), _size(after))
        console().print(table)
    _show_copied(copied)
    _line(f"{len(compressed)} compressed, {len(copied)} copied: {_change(source_bytes, out_bytes)}")


def show_conversion(reports: list[ConversionReport], source_bytes: int, out_bytes: int) -> None:
    converted = [report for report in reports if report.action == "converted"]
    copied = [report for report in reports if report.action == "copied"]
    if converted:
        table = _table("converted", "shape", "element", "before", "after", right=("before", "after"))
        for report in converted:
            sizes = (_size(report.bytes_before), _size(report.bytes_after))
            _add(table, report.name, _shape(report.shape), report.element, *sizes)
        console().print(table)
    _show_copied(copied)
    _line(f"{len(converted)} converted, {len(copied)} copied: {_change(source_bytes, out_bytes)}")


def _show_copied(reports: Sequence[TensorReport | ConversionReport]) -> None:
    if reports:
        table = _table("copied", "shape", "element", "why", "size", right=("size",))
        for report in reports:
            reason = report.reason or "no weight of the format"
            _add(table, report.name, _shape(report.shape), report.element, reason, _size(report.bytes_before))
        console().print(table)


def show_verification(found: Verification) -> None:
    table = _table(
        "layer", "shape", "element", "kernel", "max |error|", "relative error", "bound c", "error / allowed",
        "result", right=("max |error|", "relative error", "bound c", "error / allowed"),
    )  # fmt: skip
    for layer in found.layers:
        _add(
            table,
            layer.name,
            _shape(layer.shape),
            layer.element,
            layer.kernel or "-",
            _number(layer.max_abs_error),
            _number(layer.relative_error),
            _number(layer.error_bound),
            _number(layer.worst_ratio),
            _result(layer),
        )
    if found.layers:
        console().print(table)
        _line("|y - exact| is allowed up to c * sum|x||w| plus the rounding of y, elementwise.", "dim")
    for problem in found.problems:
        console().print(_text(f"FAIL {problem}", "red"), soft_wrap=True)
    _line(_verdict(found), "bold green" if found.passed else "bold red")


def show_demo(reports: list[TensorReport], found: Verification, source_bytes: int, out_bytes: int) -> None:
    energies = [report.kept_energy for report in reports if report.kept_energy is not None]
    kept = f", keeping {min(energies):.1%} to {max(energies):.1%} of a layer's energy" if energies else ""
    _line(f"compressed {len(energies)} layers{kept}: {_change(source_bytes, out_bytes)}")
    show_verification(found)


def show_explanation(answer: Json) -> None:
    desc = answer["descriptor"]
    _line(
        f"{desc['op']}: n={desc['n']} m={desc['m']} k={desc['k']} {desc['element']}, "
        f"epilogue {desc['epilogue']}, on {answer['device']}"
    )
    table = _table("kernel", "backend", "can it serve?")
    for row in answer["rows"]:
        if row["kernel"] == answer["chosen"]:
            state = _text("chosen", "bold green")
        else:
            state = _text(row["reason"] or "yes; a row above it was preferred")
        _add(table, row["kernel"], row["backend"], state)
    console().print(table)
    if answer["chosen"] is None:
        _line("no kernel can serve this problem", "bold red")
        return
    table = _table("guarantee", answer["chosen"])
    for name, value in answer["guarantee"].items():
        _add(table, name, {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value)
    _add(table, "error bound c", _number(answer["error_bound"]))
    size = answer["workspace_size"]
    _add(table, "workspace", f"{'' if answer['workspace_is_exact'] else 'at least '}{size} bytes")
    if answer["details"]:
        _add(table, "details", answer["details"])
    console().print(table)


def show_benchmark(record: Json) -> None:
    """What the record holds: products, preparation of weights, the host's times."""
    if record["gemm"]:
        _show_products(record["gemm"])
    if record["prepare"]:
        _show_preparation(record["prepare"], record.get("prepare_peers", []))
    if record["host"]:
        _line("host: " + ", ".join(f"{name} {value}" for name, value in record["host"].items()))


def _show_products(rows: list[Json]) -> None:
    """Microseconds by shape and n: the peers, then every backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    table = _table(
        "element",
        "M x K",
        "N",
        "dense",
        "cuSPARSELt",
        *backends,
        "auto / dense",
        right=("N", "dense", "cuSPARSELt", *backends),
    )
    cells: dict[tuple[Any, ...], Json] = {}
    for row in rows:
        key = (row["element"], row["m"], row["k"], row["n"], row["dense_us"], row["cusparselt_us"])
        cells.setdefault(key, {})[row["backend"]] = row["us"]
    for (element, m, k, n, dense, peer), times in cells.items():
        shown = ["-" if us is None else f"{us:.2f}" for us in (dense, peer, *map(times.get, backends))]
        ratio = f"{dense / times['auto']:.2f}x" if dense and "auto" in times else "-"
        _add(table, element, _shape((m, k)), n, *shown, ratio)
    console().print(table)


def _show_preparation(rows: list[Json], peers: list[Json]) -> None:
    """Microseconds beside a device copy that moves the same bytes, and beside peers."""
    table = _table(
        "op", "element", "M x K", "us", "copy", "of a copy's speed", "peer",
        right=("us", "copy", "of a copy's speed"),
    )  # fmt: skip
    where = ("op", "m", "k", "element")
    for row in rows:
        others = [peer for peer in peers if all(peer[name] == row[name] for name in where)]
        beside = ", ".join(f"{p['us']:.2f} us, {p['us'] / row['us']:.2f}x: {p['peer']}" for p in others)
        _add(
            table,
            row["op"],
            row["element"],
            _shape((row["m"], row["k"])),
            f"{row['us']:.2f}",
            f"{row['copy_us']:.2f}",
            f"{row['copy_us'] / row['us']:.0%}",
            beside or "-",
        )
    console().print(table)


def _result(layer: LayerResult) -> Text:
    return _text("pass", "green") if layer.passed else _text(f"FAIL: {layer.problem}", "bold red")


def _change(before: int, after: int) -> str:
    return f"{_size(before)} became {_size(after)} ({after / before:.1%})"


def _verdict(found: Verification) -> str:
    failed = sum(not layer.passed for layer in found.layers) + len(found.problems)
    checked = f"{len(found.layers)} layers on {found.device}, {found.copied} tensors copied unchanged"
    if failed:
        return f"FAIL: {failed} problems; {checked}"
    worst = max(layer.worst_ratio or 0.0 for layer in found.layers)
    return f"PASS: {checked}; the worst error is {worst:.2%} of what the guarantee allows"


def tuning_document(table: TuningTable, trials: Sequence[Trials]) -> Json:
    return {
        "gpu": table.gpu,
        "driver": table.driver,
        "results": [
            {
                "kernel": one.kernel,
                "problem": one.problem.model_dump(mode="json"),
                "right": one.right,
                "refused_or_wrong": one.refused_or_wrong,
                "fatal": one.fatal,
                "chosen": None if one.chosen is None else one.chosen.model_dump(mode="json"),
            }
            for one in trials
        ],
    }


def show_tuning(document: Json, path: Path) -> None:
    table = _table("kernel", "n, m, k, element", "right", "not", "chosen", "us", "default us", "self-test")
    for row in document["results"]:
        problem, chosen = row["problem"], row["chosen"]
        size = f"{problem['n']}, {problem['m']}, {problem['k']}, {problem['element']}"
        counts = (str(row["right"]), str(row["refused_or_wrong"] + len(row["fatal"])))
        if chosen is None:
            _add(table, row["kernel"], size, *counts, "none is right", "", "", "")
            continue
        settings = ", ".join(f"{name} {value}" for name, value in chosen["configuration"].items())
        _add(
            table,
            row["kernel"],
            size,
            *counts,
            settings or "the default",
            f"{chosen['microseconds']:.2f}",
            f"{chosen['default_microseconds']:.2f}",
            "passed" if chosen["promises"] else "failed",
        )
    console().print(table)
    fatal = {
        f"{row['kernel']} {problem['element']} {one}"
        for row in document["results"]
        for problem in [row["problem"]]
        for one in row["fatal"]
    }
    for line in sorted(fatal):
        _line(f"left out, it ended the CUDA context: {line}")
    _line(f"{document['gpu']}, driver {document['driver']}: written to {path}")
