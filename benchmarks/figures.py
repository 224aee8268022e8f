"""Writes the tables of figures in README.md and docs/ from the records in benchmarks/results/.

From a checkout's root: ``python -m benchmarks.figures`` writes them, ``--check`` only says which
differ. A table stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from sparse24_plans.bench.additions import ADDITIONS, ELEMENTS
from sparse24_plans.bench.additions import TOKENS as ADDED_TOKENS
from sparse24_plans.bench.record import Record, load
from sparse24_plans.bench.scope import PREPARE_SHAPES, TOKENS
from sparse24_plans.weights.quantized_weight import STORED

from .block_figures import fixed_blocks, patterned_blocks, random_blocks
from .guarantee_table import guarantee_table
from .judging import FEW, MANY, MIDDLE, Row, chosen, expert_ratios
from .random_figures import random_summary, with_worst
from .table_format import mean, ratio, table, with_range

RECORD = "benchmarks/results/h200.json"
GRID_RECORDS = "h200.json", "h100.json"  # of the table of products, as far as they are there
COMPILE_RECORD, RANDOM_RECORD = "h200-compile.json", "h200-random.json"
TORCH_RECORD = "h200-torch.json"
GROUPED_RECORD, QUANTIZED_RECORD = "h200-grouped.json", "h100-quantized.json"
LAYERS_RECORD = "h200-layers.json"
EXPERTS_RECORD = "h200-experts.json"
EXPORT_RECORD = "-export.json"  # of any GPU, since these are times of the host
_EXPORTED_CALLS = {
    "find_us": "`s24_find`, again",
    "run_us": "`s24_run`, operands that it has seen",
    "run_new_args_us": "`s24_run`, operands at new addresses",
    "launch_us": "`cuLaunchKernelEx` alone",
}
_ENERGY_SHAPE = (8192, 8192)
_TOKENS_OF_EXPERT = ((1, 16), (16, 256), (256, 4097))
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OPS = {
    "prune": "prune",
    "compress": "compress, with its check",
    "prune_compress": "prune_compress",
    "decompress": "decompress",
    "pack": "pack",
    "tile_prune": "tile_prune, `greedy_magnitude`",
}
_CALLS = {
    "launch_us": "`launch`",
    "run_us": "`run`, arguments that it has seen",
    "run_new_args_us": "`run`, new arguments",
    "select_cached_us": "`select`, cached",
    "cusparselt_launch_us": "`launch` through cuSPARSELt",
    "cusparselt_run_us": "`run` through cuSPARSELt",
    "torch_cusparselt_us": "PyTorch's call of cuSPARSELt",
    "import_s": "`import sparse24_plans`",
    "import_all_s": "the import with every public name loaded",
}
_TORCH_CALLS = {
    "f_linear_us": "`F.linear`, dense",
    "sparse_linear_us": "`Sparse24Linear`",
    "torch_sparse_us": "PyTorch's own semi-structured tensor",
    "compiled_dense_us": "compiled, dense",
    "compiled_sparse_us": "compiled, `Sparse24Linear`",
}


# Parts of a record --------------------------------------------------------------------------------


def times(record: Record, element: str, backend: str, key: str = "us") -> dict[tuple[int, int, int], float]:
    """(m, k, n) -> microseconds of a backend, or of a peer in its rows; only cells that have it."""
    return {
        (row["m"], row["k"], row["n"]): row[key]
        for row in record["gemm"]
        if (row["element"], row["backend"]) == (element, backend) and row[key]
    }


def ratios(
    record: Record, element: str, n: int, *, peer: str = "", backend: str = "", ours: str = "auto"
) -> list[float]:
    """Ratio of the peer's time to ours for each shape; ours is select's choice or a backend."""
    own = times(record, element, ours)
    others = times(record, element, backend or ours, peer or "us")
    return [us / own[cell] for cell, us in others.items() if cell[2] == n and cell in own]


# Tables -------------------------------------------------------------------------------------------


def _products(record: Record) -> list[str]:
    """bf16 by n on each GPU: over dense cuBLAS and cuSPARSELt, and what batch invariance takes."""
    cards = [found for name in GRID_RECORDS if (found := record["records"].get(name))]
    head, rows = ["N"], {n: list[object]([n]) for n in TOKENS}
    for card in cards:
        head += [
            f"{card['gpu'].split()[1]}: over dense",
            "over cuSPARSELt",
            "batch-invariant",
        ]
        for n, row in rows.items():
            row += [
                with_range(ratios(card, "bf16", n, peer="dense_us")),
                with_range(ratios(card, "bf16", n, peer="cusparselt_us")),
                mean(ratios(card, "bf16", n, backend="invariant")),
            ]
    return table(head, list(rows.values()))


def _elements(record: Record) -> list[str]:
    """The other elements by n: the same means."""
    kinds = ("f16", "fp8_e4m3", "s8")
    head = ["N"]
    for kind in kinds:
        head += [f"{kind} over dense", "over cuSPARSELt"]
    rows = []
    for n in TOKENS:
        cells = [
            mean(ratios(record, kind, n, peer=p)) for kind in kinds for p in ("dense_us", "cusparselt_us")
        ]
        rows.append((n, *cells, mean(ratios(record, "fp8_e4m3", n, backend="invariant"))))
    return table((*head, "fp8_e4m3 batch-invariant"), rows)


def _float32(record: Record) -> list[str]:
    """Products of float32 in split terms by n: over dense float32, and the largest relative error."""
    head, kinds = ["N"], ("f32_split6", "f32_split3")
    for kind in kinds:
        head += [f"`{kind}` over dense", "relative error"]
    rows = []
    for n in TOKENS:
        cells: list[object] = [n]
        for kind in kinds:
            cells.append(with_range(ratios(record, "f32", n, peer="dense_us", ours=kind)))
            errors = [row["rel_error"] for row in record["gemm"] if (row["backend"], row["n"]) == (kind, n)]
            cells.append(f"{max(errors):.1e}" if errors else "-")
        rows.append(cells)
    return table(head, rows)


def _energy(record: Record) -> list[str]:
    """Energy of products of many tokens: ours of one shape, and each peer's over ours of all shapes."""

    def over(row: Row, peer: str) -> float:
        return float(row[f"{peer}_us"] * row[f"{peer}_watts"] / (row["us"] * row["watts"]))

    rows = []
    for element, n in itertools.product(("bf16", "fp8_e4m3", "s8"), TOKENS):
        cells = [
            row
            for row in chosen(record["gemm"], (n, n), element=element, backend="auto")
            if row.get("watts") and row["dense_watts"]
        ]
        peers = [[over(row, peer) for row in cells if row[f"{peer}_us"]] for peer in ("dense", "cusparselt")]
        own = [row for row in cells if (row["m"], row["k"]) == _ENERGY_SHAPE]
        if own:
            joules = f"{own[0]['us'] * own[0]['watts'] / 1e3:.0f} mJ"
            about = (f"{own[0]['watts']:.0f} W", f"{own[0]['sm_mhz']:.0f} MHz")
            rows.append((element, n, joules, *about, *map(with_range, peers)))
    m, k = _ENERGY_SHAPE
    head = ("element", "N", f"{m} x {k}", "power", "clock", "dense: energy", "cuSPARSELt: energy")
    return table(head, rows)


def _additions(record: Record) -> list[str]:
    """Time of a product with something added over the plain product's, by element and tokens."""
    rows = []
    for element, (part, (field, plain_us, additions)) in itertools.product(ELEMENTS, ADDITIONS.items()):
        for name in additions:
            cells = list(chosen(record[part], element=element.value, **{field: name}))
            by_n = [[row["us"] / row[plain_us] for row in cells if row["n"] == n] for n in ADDED_TOKENS]
            if cells:
                rows.append((element.value, name, *map(with_range, by_n)))
    return table(("element", "added", *(f"N {n}" for n in ADDED_TOKENS)), rows)


def _preparation(record: Record) -> list[str]:
    """bf16 by op: times, the share of a copy's speed, and PyTorch's."""
    head = ["op"]
    for m, k in PREPARE_SHAPES:
        head += [f"{m} x {k}", "of a copy's speed", "PyTorch"]
    return table(head, [(label, *_of_op(record, op)) for op, label in _OPS.items()])


def _of_op(record: Record, op: str) -> list[str]:
    cells = []
    for shape in PREPARE_SHAPES:
        rows, peers = (
            [
                row
                for row in record[part]
                if (row["op"], row["m"], row["k"], row["element"]) == (op, *shape, "bf16")
            ]
            for part in ("prepare", "prepare_peers")
        )
        cells += (
            [f"{rows[0]['us']:.0f} us", f"{rows[0]['copy_us'] / rows[0]['us']:.0%}"] if rows else ["-", "-"]
        )
        cells.append(f"{peers[0]['us']:.0f} us" if peers else "-")
    return cells


def _host(record: Record) -> list[str]:
    """Host time a call."""
    rows = [(label, _duration(name, record["host"])) for name, label in _CALLS.items()]
    return table(("call", "host time"), rows)


_MACHINE = {
    "gpu": "GPU",
    "driver": "driver",
    "cuda": "CUDA runtime",
    "system": "system",
    "nvrtc": "NVRTC",
    "cublaslt": "cuBLASLt",
    "cusparselt": "cuSPARSELt",
    "cupy": "CuPy",
    "torch": "PyTorch",
    "sparse24_plans": "sparse24_plans",
}


def _systems(record: Record) -> list[str]:
    """The system that each record was taken on."""
    records: dict[str, Record] = record.get("records", {})
    rows = [
        (label, *({**found, **found.get("versions", {})}.get(name) or "-" for found in records.values()))
        for name, label in _MACHINE.items()
    ]
    return table(("", *(f"`{name}`" for name in records)), rows)


def _compilation(record: Record) -> list[str]:
    """The compile time of one kernel for each kernel entry; empty without a record of compile times."""
    found = record.get("records", {}).get(COMPILE_RECORD)
    if found is None:
        return []
    kernels: dict[tuple[str, str], list[Record]] = {}
    for row in found["compile"]:
        kernels.setdefault((row["kernel"], row["source"]), []).append(row)
    rows = [
        (
            f"`{name}`",
            f"`{source}`",
            len(several),
            _seconds([row["seconds"] for row in several]),
            f"{median(row['cached_ms'] for row in several):.1f} ms",
            f"{median(row['nbytes'] for row in several) / 1000:.0f} kB",
        )
        for (name, source), several in kernels.items()
    ]
    return table(
        ("kernel", "source", "measured", "compiling one: median (range)", "from the cache", "size"), rows
    )


def _random(record: Record) -> list[str]:
    """Problems off the grid, by element and number of tokens: means, and the worst cell."""
    head = ("element", "N", "cells", "over dense", "worst cell, N", "batch-invariant: time", "over the best")
    rows = []
    for row in random_summary(record["records"][RANDOM_RECORD]):
        worst = f"{ratio(row['worst'])} ({row['at']})" if row["at"] else "-"
        costs = (with_worst(row, name) for name in ("invariant", "best"))
        rows.append((row["element"], row["tokens"], row["cells"], ratio(row["mean"]), worst, *costs))
    return table(head, rows)


def _torch_record(record: Record) -> Record:
    """The record of PyTorch measurements, or one without rows if there is none."""
    found: Record = record.get("records", {}).get(TORCH_RECORD, {"host": {}, "decoder": []})
    return found


def _torch_host(record: Record) -> list[str]:
    """Host time of a layer's call in PyTorch, and over the dense one's. No table where it wasn't measured."""
    host = _torch_record(record)["host"]
    rows = []
    for name, label in _TORCH_CALLS.items() if host else ():
        dense = host["compiled_dense_us" if name.startswith("compiled") else "f_linear_us"]
        us = host[name]
        rows.append((label, "-", "-") if us is None else (label, f"{us:.1f} us", f"{us / dense:.2f}"))
    return table(("call", "host time", "of dense"), rows) if rows else []


def _decoder(record: Record) -> list[str]:
    """Steps of a decoder over dense: compiled, captured, eager. No table where none was measured."""
    rows = []
    for row in _torch_record(record)["decoder"]:
        step = (f"decode, n {row['n']}", f"prefill of {row['tokens']}")[row["kind"] == "prefill"]
        times = [row[f"compiled_{who}_ms"] for who in ("dense", "sparse")]
        rows.append(
            (
                step,
                f"`{row['weights']}`",
                row["gpus"],
                *("-" if ms is None else f"{ms:.2f} ms" for ms in times),
                "-" if None in times else f"{times[0] / times[1]:.2f}",
                *(f"{row['graph_dense_ms'] / row[f'graph_{who}_ms']:.2f}" for who in ("sparse", "invariant")),
                f"{row['eager_dense_ms'] / row['eager_sparse_ms']:.2f}",
            )
        )
    head = ("step", "weights", "GPUs", "dense", "sparse", "speed-up", "captured", "batch-invariant", "eager")
    return table(head, rows) if rows else []


def _grouped(record: Record) -> list[str]:
    """Grouped products over the fastest dense way, by tokens of an active expert; none without a record."""
    found = record.get("records", {}).get(GROUPED_RECORD, {}).get("products", [])
    rows = []
    for element in sorted({row["element"] for row in found}):
        for first, last in _TOKENS_OF_EXPERT:
            cells = [
                (ratio, f"{row['model']} {row['m']}x{row['k']}, {row['spread']}")
                for row, tokens, ratio in expert_ratios(found, element)
                if first <= tokens < last
            ]
            if cells:
                worst, at = min(cells)
                overs = mean([over for over, _ in cells])
                rows.append((element, f"{first}-{last - 1}", len(cells), overs, f"{worst:.2f} ({at})"))
    return (
        table(("element", "tokens of an expert", "cells", "over dense", "worst cell"), rows) if rows else []
    )


def _quantized(record: Record) -> list[str]:
    """Quantized weights over dense cuBLAS and PyTorch's int4, by tokens; none without a record."""
    found = record.get("records", {}).get(QUANTIZED_RECORD, {}).get("gemm", [])
    own = [row for row in found if row["backend"] == "auto"]

    def over(peer: str, n: int, stored: str) -> str:
        rows = chosen(own, (n, n), weight_element=stored)
        return with_range([row[peer] / row["us"] for row in rows if row[peer]])

    head = ("N", *(f"`{stored}` over dense" for stored in STORED), "`s4` over PyTorch's int4")
    rows = [
        (n, *(over("dense_us", n, stored) for stored in STORED), over("int4_us", n, "s4"))
        for n in sorted({row["n"] for row in own})
    ]
    return table(head, rows) if rows else []


def _layers(record: Record) -> list[str]:
    """Layers of 8 bits, their parts, and the dense layer; none without a record."""
    found = record.get("records", {}).get(LAYERS_RECORD, {}).get("layers", [])
    times = ("linear_us", "quantize_us", "layer_us", "dense_us")
    rows = [
        (
            f"{row['m']} x {row['k']}",
            row["dtype"],
            row["n"],
            *(f"{row[name]:.1f} us" for name in times),
            f"{row['dense_us'] / row['layer_us']:.2f}",
        )
        for row in found
    ]
    head = ("W", "dtype", "N", "product", "quantizing X", "layer", "dense bf16", "layer over dense")
    return table(head, rows) if rows else []


def _experts(record: Record) -> list[str]:
    """Whole layers of experts over dense ones, by model and tokens; none without a record."""
    found = record.get("records", {}).get(EXPERTS_RECORD, {}).get("layers", [])
    rows = [
        (
            row["model"],
            f"{row['experts']} of {2 * row['features']} x {row['hidden']}",
            row["top_k"],
            row["tokens"],
            f"{row['us']:.1f} us",
            f"{row['dense_us']:.1f} us",
            f"{row['dense_us'] / row['us']:.2f}",
        )
        for row in found
    ]
    head = ("model", "experts, gate and up", "top k", "tokens", "layer", "dense", "over dense")
    return table(head, rows) if rows else []


def _expert_models(record: Record) -> list[str]:
    """The speed-ups by model: means over numbers of tokens, and the worst cell; none without a record."""
    found = record.get("records", {}).get(EXPERTS_RECORD, {}).get("layers", [])
    spans, rows = (FEW, MIDDLE, MANY), []
    for name in dict.fromkeys(row["model"] for row in found):
        over = [(row["dense_us"] / row["us"], row["tokens"]) for row in found if row["model"] == name]
        means = (mean([ratio for ratio, n in over if a <= n <= b]) for a, b in spans)
        rows.append((name, *means, f"{min(over)[0]:.2f}"))
    return table(("tokens", *(f"{a}-{b}" for a, b in spans), "worst"), rows) if rows else []


def _export(record: Record) -> list[str]:
    """Host times of the exported C code, and the size of its folder; none without a record."""
    names = [name for name in record.get("records", {}) if name.endswith(EXPORT_RECORD)]
    if not names:
        return []
    found = record["records"][names[-1]]
    rows: list[tuple[object, object]] = []
    for folder in found["folders"]:
        about = f"folder of {folder['weights']}'s four weights, 1 to {folder['tokens']} tokens"
        rows.append((about, f"{folder['plans']} plans, {folder['nbytes'] / 1e6:.1f} MB"))
        if folder["open_ms"] is not None:
            rows.append(("`s24_open` of it", f"{folder['open_ms']:.1f} ms"))
    for name, label in _EXPORTED_CALLS.items():
        times = sorted({f"{call[name]:.1f}" for call in found["calls"]}, key=float)
        rows.append((label, f"{' to '.join(dict.fromkeys((times[0], times[-1])))} us"))
    return table(("measured", found["gpu"]), rows)


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.1f} s ({min(values):.1f} to {max(values):.1f})"


def _duration(name: str, host: dict[str, float]) -> str:
    if name not in host:
        return "-"
    return f"{1e3 * host[name]:.1f} ms" if name.endswith("_s") else f"{host[name]:.1f} us"


TABLES: dict[str, Callable[[Record], list[str]]] = {
    "products": _products,
    "elements": _elements,
    "float32": _float32,
    "preparation": _preparation,
    "host": _host,
    "systems": _systems,
    "compilation": _compilation,
    "random": _random,
    "blocks": fixed_blocks,
    "random_blocks": random_blocks,
    "torch_host": _torch_host,
    "decoder": _decoder,
    "blocks24": patterned_blocks,
    "energy": _energy,
    "additions": _additions,
    "grouped": _grouped,
    "quantized": _quantized,
    "layers": _layers,
    "experts": _experts,
    "expert_models": _expert_models,
    "export": _export,
    "guarantees": lambda record: guarantee_table(),  # from the table of kernels
}


# Files --------------------------------------------------------------------------------------------


def everything(root: Path) -> Record:
    """The record of the benchmarks, and as its ``records`` every one there is, by the file's name."""
    paths = sorted((root / RECORD).parent.glob("*.json"))
    return {**load(root / RECORD), "records": {path.name: json.loads(path.read_text()) for path in paths}}


def _compact(line: str) -> str:
    """A row of a table without spaces beside its bars."""
    return "|".join(cell.strip() or " " for cell in line.split("|")).strip()


def rendered(text: str, record: Record) -> str:
    """``text`` with its tables as the record has them. Raises KeyError for a table that there isn't."""

    def table(found: re.Match[str]) -> str:
        return "\n".join((found[1].rstrip(), *map(_compact, TABLES[found[2]](record)), found[3]))

    return _BLOCK.sub(table, text)


def documents(root: Path) -> list[Path]:
    """The documents that have tables."""
    paths = (root / "README.md", *sorted((root / "docs").glob("*.md")), *root.glob("benchmarks/results/*.md"))
    return [path for path in paths if _BLOCK.search(path.read_text())]


def main(*arguments: str) -> int:
    if arguments not in ((), ("--check",)) or not Path(RECORD).is_file():
        raise SystemExit("usage, from a checkout's root: python -m benchmarks.figures [--check]")
    record = everything(Path())
    stale = 0
    for path in documents(Path()):
        text = path.read_text()
        new = rendered(text, record)
        if new != text:
            stale += 1
            print(f"{path}: {'differs from' if arguments else 'written from'} the records")
            if not arguments:
                path.write_text(new)
    return int(bool(arguments) and stale > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
