"""Says which committed records are stale, and which bounds they miss: ``python -m benchmarks.check``.

Records are evidence of a release, not a gate: the exit status is 0 unless a record is malformed. ``--all``
prints every bound, ``--json`` one document. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse24_plans.bench.record import GRID, Lists, Record, is_current, kernel_files
from sparse24_plans.plan.families import backends

from .bounds import BOUNDS
from .judging import Verdict, judged
from .kinds import SEEDED, kind_of

RESULTS = Path(__file__).parent / "results"
_Test = Callable[[Any], bool]


# Form ---------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _or_none(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _fields(test: _Test, names: str) -> dict[str, _Test]:
    return dict.fromkeys(names.split(), test)


_IS_TIME_OR_NONE = _or_none(_is_time)
_PRODUCT = _fields(_is_size, "m k n") | _fields(_is_text, "element")
_GEMM = {
    **_PRODUCT,
    **_fields(_is_text, "backend"),
    **_fields(_is_time, "us"),
    **_fields(_IS_TIME_OR_NONE, "dense_us cusparselt_us"),
    **_fields(_is_number, "rel_error"),
}
_QUANTIZED = {
    **_PRODUCT,
    **_fields(_is_text, "weight_element backend"),
    **_fields(_is_size, "group"),
    **_fields(_is_time, "us"),
    **_fields(_IS_TIME_OR_NONE, "dense_us int4_us"),
    **_fields(_is_number, "rel_error"),
}
_BLOCKS = (
    _PRODUCT
    | _fields(_is_text, "op backend")
    | _fields(_is_size, "block")
    | _fields(_is_time, "density us dense_us")
)
_RANDOM_BLOCKS = (
    _PRODUCT
    | _fields(_is_text, "shape op pattern backend")
    | _fields(lambda value: isinstance(value, str), "transposed")
    | _fields(lambda value: isinstance(value, bool), "packed")
    | _fields(_is_size, "block")
    | _fields(_is_time, "density us")
)
_HEAD = {
    **_fields(_is_text, "gpu driver cuda kernels_sha256"),
    **_fields(lambda value: isinstance(value, dict), "versions"),
}
FIELDS: dict[str, dict[str, dict[str, _Test]]] = {
    "grid": {
        "gemm": _GEMM,
        "epilogues": _PRODUCT | _fields(_is_text, "epilogue") | _fields(_is_time, "us identity_us"),
        "variants": _PRODUCT | _fields(_is_text, "variant") | _fields(_is_time, "us plain_us"),
        "prepare": _fields(_is_text, "op element")
        | _fields(_is_size, "m k")
        | _fields(_is_time, "us copy_us"),
        "prepare_peers": _fields(_is_text, "op element peer")
        | _fields(_is_size, "m k")
        | _fields(_is_time, "us"),
    },
    "random": {
        "gemm": {**_GEMM, **_fields(_is_text, "shape row"), **_fields(_IS_TIME_OR_NONE, "best_us")},
    },
    "quantized": dict.fromkeys(("gemm", "random"), _QUANTIZED),
    "grouped": {
        "products": _fields(_is_text, "model spread element")
        | _fields(_is_size, "groups active_experts m k tokens")
        | _fields(_is_time, "us")
        | _fields(_IS_TIME_OR_NONE, "dense_us")
        | _fields(_is_number, "rel_error"),
    },
    "torch": {
        "decoder": {
            **_fields(_is_text, "kind weights"),
            **_fields(_is_size, "n tokens gpus"),
            **_fields(
                _is_time, "graph_dense_ms graph_sparse_ms graph_invariant_ms eager_dense_ms eager_sparse_ms"
            ),
            **_fields(_IS_TIME_OR_NONE, "compiled_dense_ms compiled_sparse_ms"),
        }
    },
    "layers": {
        "layers": _fields(_is_text, "dtype")
        | _fields(_is_size, "m k n")
        | _fields(_is_time, "linear_us quantize_us layer_us dense_us")
        | _fields(_is_number, "rel_error")
    },
    "experts": {
        "layers": _fields(_is_text, "model dense")
        | _fields(_is_size, "experts hidden features top_k tokens")
        | _fields(_is_time, "us dense_us")
        | _fields(_is_number, "rel_error")
    },
    "blocksparse": {
        "products": _BLOCKS | _fields(_is_text, "pattern") | _fields(_IS_TIME_OR_NONE, "torch_bsr_us"),
        "sparse24": _BLOCKS | _fields(_is_time, "blocks_us"),
        "attention": {
            **_fields(_is_size, "tokens heads head_size block"),
            **_fields(_is_text, "direction"),
            **_fields(_is_time, "density us dense_us tflops"),
        },
        "tables": _fields(_is_size, "tokens heads block") | _fields(_is_time, "density us"),
    },
    "blocksparse-random": {
        "products": _RANDOM_BLOCKS
        | _fields(_is_time, "dense_us")
        | _fields(_IS_TIME_OR_NONE, "torch_bsr_us"),
        **dict.fromkeys(("sweep", "pairs"), _RANDOM_BLOCKS),
        "attention": {
            **_fields(_is_size, "tokens heads head_size block"),
            **_fields(_is_text, "direction"),
            **_fields(_is_time, "density us sdpa_us tflops"),
        },
    },
    "compile": {
        "compile": _fields(_is_text, "kernel source arch op")
        | _fields(_is_size, "nbytes")
        | _fields(_is_number, "seconds cached_ms")
    },
    "export": {
        "folders": _fields(_is_text, "weights")
        | _fields(_is_size, "tokens plans cubins nbytes")
        | _fields(_IS_TIME_OR_NONE, "open_ms"),
        "calls": _fields(_is_size, "n")
        | _fields(_is_text, "kernel")
        | _fields(_is_time, "find_us run_us run_new_args_us launch_us"),
    },
    "calibration": {
        "calibration": _fields(_is_text, "method")
        | _fields(_is_size, "layers hidden ffn tokens")
        | _fields(_is_time, "seconds")
        | _fields(_IS_TIME_OR_NONE, "peak_gb"),
    },
    "tests": {},
}
"""The fields that rows must have: kind -> list -> field -> test of its values."""
_BACKENDS = {"auto", "invariant", "wgmma_sp_invariant", *backends()}
_KEYS: dict[str, Lists] = {"grid": GRID}
_TEST_COUNTS = "passed failed skipped fuzz_cases fuzz_seed fuzz_failures replayed replay_mismatches"


def faults(kind: str, record: Any) -> list[str]:
    """Faults of a record's form; its figures are not judged."""
    if kind not in FIELDS:
        return [f"expected a kind of {', '.join(FIELDS)}, got {kind}"]
    if not isinstance(record, dict):
        return ["expected an object"]
    found = list(_wrong(record, _HEAD, "record"))
    if kind == "tests":
        counts = _fields(lambda value: isinstance(value, int) and value >= 0, _TEST_COUNTS)
        return [*found, *_wrong(record, counts, "record")]
    if record.get("schema") != 1:
        found.append(f"record: schema is {record.get('schema')!r}")
    if not isinstance(record.get("kernel_files"), list):
        found.append("record: kernel_files is no list")
    if kind in SEEDED and not _is_size(record.get("seed")):
        found.append("record: seed is no number")
    for part, fields in FIELDS[kind].items():
        rows = record.get(part)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            found.append(f"{part}: expected a list of rows")
            continue
        for number, row in enumerate(rows):
            found += _wrong(row, fields, f"{part}[{number}]")
        if part == "gemm":
            found += [
                f"gemm: backend {one!r}" for one in {str(row.get("backend")) for row in rows} - _BACKENDS
            ]
        if keys := _KEYS.get(kind, {}).get(part):
            count = Counter(", ".join(str(row.get(key)) for key in keys) for row in rows)
            found += [f"{part}: {times} rows of {cell}" for cell, times in count.items() if times > 1]
    return found


def _wrong(row: Mapping[str, Any], fields: Mapping[str, _Test], where: str) -> Iterable[str]:
    for name, test in fields.items():
        if name not in row:
            yield f"{where}: {name} is missing"
        elif not test(row[name]):
            yield f"{where}: {name} is {row[name]!r}"


# Verdicts ------------------------------------------------------------------------------------


def verdicts(kind: str, record: Record) -> list[Verdict]:
    """The comparisons of a record with each bound that it has cells for."""
    found = (judged(bound, record) for bound in BOUNDS.get(kind, ()))
    return [one for one in found if one.worst is not None]


def gone_files(record: Record) -> list[str]:
    """The record's kernel files that the tree lacks. It is empty if only their code differs."""
    return sorted(set(record.get("kernel_files", ())) - set(kernel_files()))


def report(path: Path) -> dict[str, Any]:
    """The report on a record file."""
    kind = kind_of(path.name)
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        return {"file": path.name, "faults": [str(error)]}
    if found := faults(kind, record):
        return {"file": path.name, "faults": found}
    judgements = verdicts(kind, record)
    return {
        "file": path.name,
        "faults": [],
        "gpu": record["gpu"],
        "stale": not is_current(record),
        "gone": gone_files(record),
        "verdicts": judgements,
        "unmeasured": len(BOUNDS.get(kind, ())) - len(judgements),
    }


def as_json(one: dict[str, Any]) -> dict[str, Any]:
    """A report without objects of this package."""
    rows = [
        {
            "about": verdict.bound.about,
            "least": verdict.bound.least,
            "most": verdict.bound.most,
            "of": "mean" if verdict.bound.on_the_mean else "each",
            "mean": verdict.mean,
            "worst": verdict.worst,
            "at": verdict.at,
            "missed": verdict.is_missed,
        }
        for verdict in one.get("verdicts", ())
    ]
    return {**one, "verdicts": rows}


# Text ---------------------------------------------------------------------------------------------


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if 0.01 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


_COLUMNS = 80


def show_verdicts(found: Sequence[Verdict]) -> None:
    """A line for each bound, of at most 80 columns; an exclamation mark before a bound that is missed."""
    if not found:
        return
    print(f"  {'':<34}{'asked':>8} {'mean':>7} {'worst':>7}  at")
    for one in found:
        bound = one.bound
        asked = "-"
        if bound.least is not None or bound.most is not None:
            limit = bound.least if bound.least is not None else bound.most
            asked = f"{'>=' if bound.least is not None else '<='}{_text(limit)}"
        mark = "!" if one.is_missed else " "
        line = f"{mark} {bound.about:<34}{asked:>8} {_text(one.mean):>7} {_text(one.worst):>7}"
        is_short = len(line) + 2 + len(one.at or "") <= _COLUMNS
        print(f"{line}  {one.at}" if is_short else f"{line}\n{one.at:>{_COLUMNS}}")


def show(reports: Sequence[dict[str, Any]], *, every: bool) -> None:
    """Stale records and missed bounds, or every bound."""
    for one in reports:
        if one["faults"]:
            print(f"{one['file']}: MALFORMED")
            for fault in one["faults"][:20]:
                print(f"  {fault}"[:_COLUMNS])
            continue
        missed = [verdict for verdict in one["verdicts"] if verdict.is_missed]
        state = "STALE" if one["stale"] else "current"
        print(f"{one['file']} ({one['gpu']}): {state}, misses {len(missed)} of {len(one['verdicts'])} bounds")
        for name in one["gone"]:
            print(f"  {name} does not exist any more")
        if one["unmeasured"]:
            print(f"  has no cells for {one['unmeasured']} more")
        show_verdicts(one["verdicts"] if every else missed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="records; by default all in benchmarks/results")
    parser.add_argument("--all", action="store_true", help="every bound, not only those that are missed")
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    options = parser.parse_args(arguments)
    reports = [report(path) for path in options.files or sorted(RESULTS.glob("*.json"))]
    if options.json:
        print(json.dumps([as_json(one) for one in reports], indent=1))
    else:
        show(reports, every=options.all)
        if any(one.get("stale") for one in reports):
            print("STALE: the code of the kernels that the record measured has changed since.")
    return int(any(one["faults"] for one in reports))


if __name__ == "__main__":
    raise SystemExit(main())
