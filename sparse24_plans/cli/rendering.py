"""What a person sees of each command's document. The documents are ``--json``'s.

Of many tensors only what matters is shown: the worst few, and everything that failed; all on request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from rich.text import Text

from .tables import (
    Column,
    Json,
    counted,
    number_text,
    plain,
    printable,
    shape_text,
    share_text,
    show_line,
    show_table,
    size_text,
)

_FEW = 5
"""Rows of a table of which not all are shown."""
_NAMES = 3
"""Names of tensors that are listed beside what they have in common."""


def _shape(row: Json) -> str:
    return shape_text(row["shape"])


def _number(key: str, row: Json) -> str:
    return number_text(row[key])


def _size(key: str, row: Json) -> str:
    return size_text(row[key])


def _grouped(rows: Iterable[Json], key: str) -> dict[Any, list[Json]]:
    """Rows by what they have in common, in the order of the first of each."""
    groups: dict[Any, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


# The machine --------------------------------------------------------------------------------------


def show_environment(about: Json) -> None:
    cupy = about["cupy"] or "not installed"
    numba = f"numba {about['numba']}" if about["numba"] else about["no_numba"]
    versions = f"python {about['python']}, numpy {about['numpy']}, cupy {cupy}, {numba}"
    show_line(f"sparse24_plans {about['version']} ({versions})")
    for gpu in about["devices"]:
        major, minor = gpu["compute_capability"]
        show_line(
            f"cuda:{gpu['ordinal']}: {gpu['name']}, compute capability {major}.{minor}, "
            f"{gpu['multiprocessors']} SMs, driver {gpu['driver']}, "
            f"cuBLASLt {gpu['cublaslt'] or 'not found'}, cuSPARSELt {gpu['cusparselt'] or 'not found'}"
        )
    reasons = dict.fromkeys(row["reason"] for row in about["kernels"] if row["reason"] is not None)
    notes = {reason: number for number, reason in enumerate(reasons, 1)}
    if not about["devices"]:
        show_line(f"no GPU ({notes[about['no_device']]})")

    def here(row: Json) -> object:
        return plain("yes", "green") if row["available"] else f"no ({notes[row['reason']]})"

    columns = (
        Column("kernel", "kernel"),
        Column("tier", "tier"),
        Column("arch", "arch"),
        Column("here", here),
        Column("elements", lambda row: ", ".join(row["elements"]), prose=True),
    )
    show_line()
    show_table(columns, about["kernels"])
    for reason, number in notes.items():
        show_line(f"({number}) {reason}")


# Problems -----------------------------------------------------------------------------------------


def show_explanation(answer: Json) -> None:
    show_line(problem_text(answer["descriptor"]))
    show_line(f"device: {answer['device']}")
    chosen = next((row for row in answer["rows"] if row["kernel"] == answer["chosen"]), None)
    if chosen is None:
        show_line("no kernel can serve this problem", "bold red")
    else:
        show_line(f"chosen: {chosen['kernel']} (backend {chosen['backend']})", "bold green")
        show_line()
        show_table((Column("guarantee", "name"), Column("value", "value", prose=True)), _facts(answer))
    others = [row for row in answer["rows"] if row is not chosen]
    willing = [row["kernel"] for row in others if row["reason"] is None]
    show_line()
    if willing:
        show_line(f"these can serve it too, in order of preference: {', '.join(willing)}")
    refused = [
        {"reason": reason, "kernels": ", ".join(row["kernel"] for row in rows)}
        for reason, rows in _grouped(others, "reason").items()
        if reason is not None
    ]
    if refused:
        show_line("these can't:")
    for row in refused:
        show_line(f"{row['kernels']}: {row['reason']}", indent=2)


def problem_text(desc: Json) -> str:
    """The problem in words, without what is at its default."""
    words = [
        f"{desc['op']}: n={desc['n']} m={desc['m']} k={desc['k']}",
        f"{desc['element']} to {desc['out_element']}",
        f"epilogue {desc['epilogue']}",
    ]
    if desc["epilogue"] != "identity":
        words[-1] += f" (bias {desc['bias_element']})"
    for name, default in (("alpha", 1), ("x_order", "row"), ("y_order", "row")):
        if desc[name] != default:
            words.append(f"{name} {desc[name]}")
    words += [f"{name} {desc[name]}" for name in ("scale_x", "scale_w") if desc[name] != "none"]
    return ", ".join(words)


_SHOWN_APART = ("unit_roundoff", "terms_per_k", "promoted_every", "product_roundoff")


def _facts(answer: Json) -> list[Json]:
    """What the chosen kernel promises and needs, as people read it."""
    guarantee = answer["guarantee"]
    facts = {name: _words(value) for name, value in guarantee.items() if name not in _SHOWN_APART}
    facts["arithmetic"] = guarantee["arithmetic"] or "has no name"
    if answer["error_bound"] == 0:
        facts["error"] = "none but rounding y: the sum is exact"
    else:
        facts["error bound c"] = f"{answer['error_bound']:.2e}: |y - exact| <= c * sum|x||w|, and rounding y"
        facts["rounding errors"] = _steps(guarantee)
    more = "" if answer["workspace_is_exact"] else " or more: the plan on the GPU itself says"
    facts["workspace"] = f"{answer['workspace_size']} bytes{more}"
    if answer["details"]:
        facts["details"] = answer["details"]
    return [{"name": name, "value": value} for name, value in facts.items()]


def _steps(guarantee: Json) -> str:
    often = f"{guarantee['terms_per_k']:g} for each column of K"
    if guarantee["promoted_every"]:
        often += f"; every {guarantee['promoted_every']} columns are added up in float32"
    if guarantee["product_roundoff"]:
        often += f"; of {power_of_two(guarantee['product_roundoff'])}, once a product"
    return f"of {power_of_two(guarantee['unit_roundoff'])}, {often}"


def power_of_two(value: float) -> str:
    """``2^-24``; a number that is no power of two in three digits."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{value:.3g}"


def _words(value: object) -> object:
    return ("no", "yes")[value] if isinstance(value, bool) else value


# Models rewritten ---------------------------------------------------------------------------------

_BEFORE = Column("before", partial(_size, "bytes_before"), right=True)
_AFTER = Column("after", partial(_size, "bytes_after"), right=True)
_SHAPE = Column("shape", _shape, optional=True)
_ELEMENT = Column("element", "element", optional=True)
_NAME = Column("tensor", "name")


def show_compression(document: Json, *, everything: bool = False) -> None:
    done = _of(document, "compressed")
    columns: tuple[Column, ...] = (_BEFORE, _AFTER, _SHAPE, _ELEMENT, _NAME)
    if document.get("dry_run"):
        shown, title = _selected(done, _largest(done), "to compress; the {few} largest", everything)
    else:
        worst = sorted(done, key=_energy)[:_FEW]
        shown, title = _selected(done, worst, "compressed; the {few} that keep the least energy", everything)
        columns = (Column("kept", lambda row: share_text(row["kept_energy"]), right=True), *columns)
    show_table(columns, shown, title=title)
    _show_rest(document, "compressed", everything)


def _energy(row: Json) -> float:
    kept: float = row["kept_energy"]
    return kept if math.isfinite(kept) else -1.0


def _largest(rows: list[Json]) -> list[Json]:
    return sorted(rows, key=lambda row: -row["bytes_before"])[:_FEW]


def show_conversion(document: Json, *, everything: bool = False) -> None:
    done = _of(document, "converted")
    shown, title = _selected(done, _largest(done), "converted; the {few} largest", everything)
    show_table((_BEFORE, _AFTER, _SHAPE, _ELEMENT, _NAME), shown, title=title)
    _show_rest(document, "converted", everything)


def _selected(rows: list[Json], few: list[Json], words: str, everything: bool) -> tuple[list[Json], str]:
    """The rows to show, and what stands above them."""
    total = counted(len(rows), "tensor")
    if everything or len(few) == len(rows):
        return rows, f"{total} {words.partition(';')[0]}:"
    return few, f"{total} {words.format(few=len(few))} (--all shows the others):"


def _of(document: Json, action: str) -> list[Json]:
    return [row for row in document["tensors"] if row["action"] == action]


def _show_rest(document: Json, action: str, everything: bool) -> None:
    """The tensors that were copied, by the reason, and the sum of it all."""
    copied = _of(document, "copied")
    why = Column("why", lambda row: row["reason"] or "no weight of the format", prose=True)
    size = Column("size", partial(_size, "bytes_before"), right=True)
    title = f"{counted(len(copied), 'tensor')} copied:"
    if everything:
        show_table((size, _SHAPE, _ELEMENT, why, _NAME), copied, title=title)
    else:
        groups = [
            {
                "reason": f"{reason or 'no weight of the format'}: {_some_names(rows)}",
                "bytes_before": sum(row["bytes_before"] for row in rows),
                "count": len(rows),
            }
            for reason, rows in _grouped(copied, "reason").items()
        ]
        show_table((Column("count", "count", right=True), size, why), groups, title=title)
    done = _of(document, action)
    none = "" if done else "nothing to do: "
    dry = "dry run, nothing was written: " if document.get("dry_run") else ""
    show_line(f"{dry}{none}{len(done)} {action}, {len(copied)} copied: {_change(document)}", "bold")


def _some_names(rows: list[Json]) -> str:
    names = [printable(row["name"]) for row in rows[:_NAMES]]
    more = f" and {len(rows) - len(names)} more" if len(rows) > len(names) else ""
    return ", ".join(names) + more


def _change(document: Json) -> str:
    before, after = document["source_bytes"], document["destination_bytes"]
    became = "would become about" if document.get("dry_run") else "became"
    return f"{size_text(before)} {became} {size_text(after)} ({after / before:.1%})"


# Models verified ----------------------------------------------------------------------------------


def show_verification(found: Json, *, everything: bool = False) -> None:
    passed = [layer for layer in found["layers"] if layer["passed"]]
    worst = sorted(passed, key=lambda layer: -_ratio(layer))[:_FEW]
    layers = counted(len(found["layers"]), "layer")
    if everything or len(worst) == len(found["layers"]):
        shown, which = found["layers"], layers
    else:
        shown, which = worst, f"the worst {len(worst)} of {layers} (--all shows the others)"
    columns = (
        Column("share", _share, right=True),
        Column("max error", partial(_number, "max_abs_error"), right=True),
        Column("relative", partial(_number, "relative_error"), right=True, optional=True),
        Column("bound c", partial(_number, "error_bound"), right=True, optional=True),
        Column("shape", _shape, optional=True),
        Column("element", "element", optional=True),
        Column("kernel", lambda row: row["kernel"] or "-", optional=True),
        Column("layer", "name"),
    )
    show_table(columns, shown, title=f"errors, and their share of what the kernel guarantees: {which}")
    _show_failures(found)
    show_line(_verdict(found), "bold green" if found["passed"] else "bold red")


def _ratio(layer: Json) -> float:
    return layer["worst_ratio"] or 0.0


def _share(layer: Json) -> Text:
    return plain(share_text(layer["worst_ratio"])) if layer["passed"] else plain("FAIL", "bold red")


def _show_failures(found: Json) -> None:
    failures = [
        f"{printable(layer['name'])}: {layer['problem']}" for layer in found["layers"] if not layer["passed"]
    ]
    failures += found["problems"]
    if failures:
        show_line(f"{counted(len(failures), 'problem')}:", "red")
    for failure in failures:
        show_line(failure, "red", indent=2)


def _verdict(found: Json) -> str:
    layers = found["layers"]
    failed = [printable(layer["name"]) for layer in layers if not layer["passed"]]
    others = f"{counted(found['copied'], 'tensor')} copied unchanged"
    checked = f"{counted(len(layers), 'layer')} on {found['device']}, {others}"
    if not found["passed"]:
        what = []
        if failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            what.append(f"{len(failed)} of {counted(len(layers), 'layer')}: {failed[0]}{more}")
        if found["problems"]:
            what.append(counted(len(found["problems"]), "problem") + " with other tensors" * bool(failed))
        return f"FAIL: {'; '.join(what)}; on {found['device']}, {others}"
    if not layers:
        return f"PASS: nothing could be compressed; {checked}"
    worst = max(layers, key=_ratio)
    share = share_text(_ratio(worst))
    return f"PASS: {checked}; the worst error is {share} of what the guarantee allows"


def show_demo(document: Json, *, everything: bool = False) -> None:
    done = _of(document["compress"], "compressed")
    energies = [row["kept_energy"] for row in done]
    kept = f", keeping {min(energies):.1%} to {max(energies):.1%} of a layer's energy" if energies else ""
    show_line(f"compressed {counted(len(done), 'layer')}{kept}: {_change(document['compress'])}")
    show_verification(document["verify"], everything=everything)
